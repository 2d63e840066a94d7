"""A stand-in for `cuda.bindings.driver`: records calls, keeps device memory in NumPy, fails on request."""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import numpy as np


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class _Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Rectangle:
    """CUDA_MEMCPY2D."""


class Launching:
    """CUlaunchConfig and what it is made of."""


class FakeDriver:
    """One device of compute capability 9.0. ``fail[name] = status`` makes the next call of it fail."""

    CUresult = CUresult
    CUdevice_attribute = CUfunction_attribute = CUstream_flags = CUevent_flags = CUmemorytype = _Names()
    CUevent_record_flags = CUstreamCaptureMode = CUstreamCaptureStatus = CUpointer_attribute = _Names()
    CUDA_MEMCPY2D = Rectangle
    CUlaunchAttributeID = _Names()
    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = Launching
    CUstream = int

    @staticmethod
    def CUcontext(handle: Any) -> Any:
        return handle

    class CUstreamUpdateCaptureDependencies_flags(enum.IntEnum):
        CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, CUresult] = {}
        self.fail_at = 0
        """The number of the call that fails, from 1 on."""
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.capturing = False
        self.breaks_in_capture = False
        self.streams, self.count = 0, 1

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if len(self.calls) == self.fail_at:
                return (CUresult.CUDA_ERROR_INVALID_VALUE, None)
            if name in self.fail:
                return (self.fail.pop(name), None)
            answer = getattr(self, f"_{name}", None)
            values = answer(*arguments) if answer else ()
            return (CUresult.CUDA_SUCCESS, *(values if isinstance(values, tuple) else (values,)))

        return call

    def _cuGetErrorName(self, status: CUresult) -> bytes:
        return CUresult(status).name.encode()

    def _cuGetErrorString(self, status: CUresult) -> bytes:
        return b"words"

    def _cuDeviceGetCount(self) -> int:
        return self.count

    def _cuDeviceCanAccessPeer(self, one: int, other: int) -> int:
        return 1

    def _cuMemcpyPeerAsync(
        self, to: int, there: str, at: int, here: str, nbytes: int, stream: int
    ) -> tuple[()]:
        return self._copy(to, at, nbytes, stream)

    def _cuDriverGetVersion(self) -> int:
        return 13010

    def _cuPointerGetAttribute(self, attribute: str, address: int) -> int:
        return 1

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake GPU" + b"\0" * 8

    def _cuDeviceGetAttribute(self, attribute: str, device: int) -> int:
        answers = {"MAJOR": self.capability[0], "MINOR": self.capability[1], "OPTIN": 227 << 10}
        return next((value for key, value in answers.items() if attribute.endswith(key)), 132)

    def _cuDeviceTotalMem(self, device: int) -> int:
        return 1 << 37

    def _cuDevicePrimaryCtxRetain(self, device: int) -> str:
        return f"context {device}"

    def _cuStreamCreate(self, flags: str) -> int:
        self.streams += 1
        return 1000 + self.streams

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return 1 << 36, 1 << 37

    def _allocate(self, nbytes: int) -> int:
        block = np.zeros(nbytes + 256, np.uint8)
        address = int(block.ctypes.data)
        address += -address % 256
        self.memory[address] = block
        return address

    def _cuMemAlloc(self, nbytes: int) -> int:
        return self._allocate(nbytes)

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        return self._allocate(nbytes)

    def _cuMemFree(self, address: int) -> tuple[()]:
        del self.memory[address]
        return ()

    _cuMemFreeHost = _cuMemFree

    def _copy(self, to: int, at: int, nbytes: int, stream: int) -> tuple[()]:
        if not self.capturing:
            ctypes.memmove(to, at, nbytes)
        return ()

    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _copy

    def _cuMemcpy2DAsync(self, rectangle: Any, stream: int) -> tuple[()]:
        at = getattr(rectangle, "srcHost", None) or rectangle.srcDevice
        to = getattr(rectangle, "dstHost", None) or rectangle.dstDevice
        for row in range(rectangle.Height):
            ctypes.memmove(
                to + row * rectangle.dstPitch, at + row * rectangle.srcPitch, rectangle.WidthInBytes
            )
        return ()

    def _cuMemsetD8Async(self, at: int, value: int, count: int, stream: int) -> tuple[()]:
        ctypes.memset(at, value, count)
        return ()

    def _set(self, at: int, values: Any) -> tuple[()]:
        ctypes.memmove(at, values.ctypes.data, values.nbytes)
        return ()

    def _cuMemsetD16Async(self, at: int, value: int, count: int, stream: int) -> tuple[()]:
        return self._set(at, np.full(count, value, np.uint16))

    def _cuMemsetD32Async(self, at: int, value: int, count: int, stream: int) -> tuple[()]:
        return self._set(at, np.full(count, value, np.uint32))

    def _cuMemsetD2D32Async(
        self, at: int, pitch: int, value: int, width: int, height: int, stream: int
    ) -> tuple[()]:
        for row in range(height):
            self._set(at + row * pitch, np.full(width, value, np.uint32))
        return ()

    def _cuEventCreate(self, flags: str) -> str:
        return "event"

    def _cuEventElapsedTime(self, begin: str, end: str) -> float:
        return 1.0

    def _cuModuleLoadData(self, image: bytes) -> str:
        return f"module of {len(image)} bytes"

    def _cuModuleGetFunction(self, module: str, symbol: bytes) -> str:
        return f"function {symbol.decode()}"

    def _cuStreamBeginCapture(self, stream: int, mode: str) -> tuple[()]:
        self.capturing = True
        return ()

    def _cuStreamEndCapture(self, stream: int) -> int:
        self.capturing = False
        return 77

    def _cuStreamIsCapturing(self, stream: int) -> str:
        return "CU_STREAM_CAPTURE_STATUS_" + ("INVALIDATED" if self.breaks_in_capture else "NONE")

    def _cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        if not self.capturing:
            return "CU_STREAM_CAPTURE_STATUS_NONE", 0, None, None, None, 0
        return "CU_STREAM_CAPTURE_STATUS_ACTIVE", 1, 77, ["last node", "?"], ["edge", "?"], 1

    def _cuGraphAddEmptyNode(self, graph: int, nodes: list[Any], count: int) -> str:
        return "empty node"

    def _cuGraphGetNodes(self, graph: int, count: int) -> tuple[list[int], int]:
        return [], 3

    def _cuGraphInstantiate(self, graph: int, flags: int) -> str:
        return "executable"


class FakeNative:
    """The fake driver as `runtime.cuda.native` calls it."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def initialise(self) -> bool:
        return not self._driver.cuInit(0)[0]

    def retain_context(self, ordinal: int) -> Any:
        status, context = self._driver.cuDevicePrimaryCtxRetain(ordinal)
        return None if status else context

    def enter(self, context: Any) -> bool:
        return not self._driver.cuCtxSetCurrent(context)[0]

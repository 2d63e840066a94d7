"""Host memory to the device near the bus limit: pinned buffers filled by threads while others are sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..host import bytes_at
from .driver import check

_SMALL = 1 << 20
"""Up to here the driver's own staging is as fast."""
_CHUNK = 16 << 20
_BUFFERS = 4
_THREADS = 8


class Staging:
    """A ring of pinned buffers on one stream; made by the first large upload."""

    def __init__(self, cu: Any, stream: Any) -> None:
        self._cu, self._stream = cu, stream
        self._buffers: list[int] = []
        self._events: list[Any] = []

    def upload(self, address: int, data: memoryview) -> None:
        """Copy all bytes to the device, and wait. ``data`` is contiguous; it may be a read-only mapping."""
        flat = np.frombuffer(data, np.uint8)
        if not flat.nbytes:
            return
        if flat.nbytes <= _SMALL:
            doing = f"upload {flat.nbytes} bytes"
            check(self._cu.cuMemcpyHtoDAsync(address, flat.ctypes.data, flat.nbytes, self._stream), doing)
        else:
            self._stream_chunks(address, flat)
        check(self._cu.cuStreamSynchronize(self._stream), f"upload {flat.nbytes} bytes")

    def _stream_chunks(self, address: int, flat: np.ndarray[Any, Any]) -> None:
        from concurrent.futures import (
            ThreadPoolExecutor,
        )  # takes longer to import than a small model to upload

        cu, total = self._cu, flat.nbytes
        self._prepare(-(-total // _CHUNK))
        pieces = _CHUNK // _THREADS
        with ThreadPoolExecutor(_THREADS) as pool:
            for index, start in enumerate(range(0, total, _CHUNK)):
                slot, nbytes = index % len(self._buffers), min(_CHUNK, total - start)
                if index >= len(self._buffers):
                    check(cu.cuEventSynchronize(self._events[slot]), "wait for an upload")
                buffer, chunk = self._buffers[slot], flat[start : start + nbytes]
                pinned = np.frombuffer(bytes_at(buffer, nbytes), np.uint8)
                # NumPy lets other threads run while it copies; `ctypes.memmove` does not.
                done = [
                    pool.submit(np.copyto, pinned[at : at + pieces], chunk[at : at + pieces])
                    for at in range(0, nbytes, pieces)
                ]
                for future in done:
                    future.result()
                check(
                    cu.cuMemcpyHtoDAsync(address + start, buffer, nbytes, self._stream),
                    f"upload {nbytes} bytes",
                )
                check(cu.cuEventRecord(self._events[slot], self._stream), "record an upload")

    def _prepare(self, chunks: int) -> None:
        cu = self._cu
        while len(self._buffers) < min(_BUFFERS, chunks):
            self._buffers.append(
                int(check(cu.cuMemHostAlloc(_CHUNK, 0), f"pin {_CHUNK} bytes of host memory"))
            )
            flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._events.append(check(cu.cuEventCreate(flags), "make an event"))

    def release(self) -> None:
        """Give the pinned buffers back; the next large upload makes them again."""
        for buffer in self._buffers:
            self._cu.cuMemFreeHost(buffer)
        for event in self._events:
            self._cu.cuEventDestroy(event)
        self._buffers, self._events = [], []

    close = release

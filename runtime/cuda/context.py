"""One GPU of this machine: its primary context, one stream, memory, and the order against other streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from ..errors import DeviceError, ExecutionError, UsageError
from ..program import Device
from . import warm
from .driver import check, device_info, initialise
from .ledger import current, noted
from .staging import Staging


class GpuContext:
    """A GPU with a stream to enqueue on. Every method may be called from any thread.

    Steps are run, and the stream is waited for, by one thread at a time, which the program sees to. Tensors
    of the program may be copied by others meanwhile: what they enqueue must not end up in a graph that is
    being recorded on the stream, so that both hold ``lock``.

    Args:
        device: the program's device slot.
        ordinal: which GPU of this machine serves it; no other GPU gets a context.
        stream: enqueue on this stream (a handle, or anything with ``__cuda_stream__``) instead of an own one.

    Raises:
        DeviceError: no driver, no such GPU.
    """

    def __init__(self, device: Device, ordinal: int = 0, *, stream: object | None = None) -> None:
        self.lock = threading.RLock()
        """Held while a graph is recorded, and by copies that are made now."""
        self._cu = cu = initialise()
        self._device, self.ordinal = device, ordinal
        count = int(check(cu.cuDeviceGetCount(), "count GPUs"))
        if not 0 <= ordinal < count:
            hint = "`devplan doctor` lists this machine's GPUs"
            raise DeviceError(f"there is no GPU {ordinal}", why=f"this machine has {count}", hint=hint)
        self.info = device_info(cu, ordinal)
        self._handle = check(cu.cuDeviceGet(ordinal), f"find GPU {ordinal}")
        begun = warm.take_context(ordinal)
        self.context: Any = None if begun is None else cu.CUcontext(begun)
        if self.context is None:
            self.context = check(cu.cuDevicePrimaryCtxRetain(self._handle), f"start GPU {ordinal}")
        self._own_stream = self._new_stream()
        self._stream: Any = self._own_stream
        self._staging: Staging | None = None
        self._peers: dict[Device, GpuContext] = {}
        if stream is not None:
            self.use_stream(stream)

    def _new_stream(self) -> Any:
        self.enter()
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        with noted("streams"):
            return check(self._cu.cuStreamCreate(flags), f"make a stream on GPU {self.ordinal}")

    @property
    def device(self) -> Device:
        """The program's device slot that this backend serves."""
        return self._device

    @property
    def label(self) -> str:
        """The GPU's name."""
        return self.info.name

    @property
    def stream(self) -> int:
        """The handle of the stream that work is enqueued on."""
        return int(self._stream)

    @property
    def stream_object(self) -> Any:
        """The same stream as cuda-python's object, which its calls take fastest."""
        return self._stream

    @property
    def driver(self) -> Any:
        """The module `cuda.bindings.driver`."""
        return self._cu

    def use_stream(self, stream: object | None) -> None:
        """Enqueue on the caller's stream from now on; None goes back to the own one. Waits for neither."""
        if stream is None:
            self._stream = self._own_stream
            return
        ask: Any = getattr(stream, "__cuda_stream__", None)
        if ask is not None:
            answer: Any = ask() if callable(ask) else ask
            stream = int(answer[1])
        if not isinstance(stream, int) or isinstance(stream, bool):
            raise UsageError(
                f"`{stream!r}` is no CUDA stream", hint="pass a handle or an object with `__cuda_stream__`"
            )
        self._stream = self._cu.CUstream(stream)

    def enter(self) -> None:
        """Make this GPU's context current on the calling thread."""
        result = self._cu.cuCtxSetCurrent(self.context)
        if result[0]:
            check(result, f"enter GPU {self.ordinal}")

    def aside(self, release: Any, what: Any, doing: str) -> None:
        """Release something in this GPU's context, and put the thread's context back as it was.

        Tensors and graphs are released by the garbage collector too, amid whatever the thread is doing, which
        may be binding or launching on another GPU.
        """
        check(self._cu.cuCtxPushCurrent(self.context), f"enter GPU {self.ordinal}")
        try:
            check(release(what), doing)
        finally:
            self._cu.cuCtxPopCurrent()

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory, 256-aligned; 0 bytes reserve one."""
        self.enter()
        with noted("blocks"):
            block = self._cu.cuMemAlloc(max(nbytes, 1))
        address = int(check(block, f"reserve {nbytes} bytes on {self.label}"))
        if (ledger := current()) is not None:
            ledger.allocated(address, nbytes)
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        with noted("blocks"):
            self.aside(self._cu.cuMemFree, address, f"free memory on {self.label}")
        if (ledger := current()) is not None:
            ledger.freed(address)

    def allocate_host(self, nbytes: int) -> int:
        """Reserve pinned host memory."""
        self.enter()
        with noted("streams"):
            block = self._cu.cuMemHostAlloc(max(nbytes, 1), 0)
        return int(check(block, f"pin {nbytes} bytes of host memory"))

    def free_host(self, address: int) -> None:
        """Give pinned memory back."""
        with noted("streams"):
            self.aside(self._cu.cuMemFreeHost, address, "free pinned host memory")

    @cached_property
    def _pinned_query(self) -> tuple[Any, Any]:
        """What is asked about host memory, and the answer for pinned memory; kept, since calls ask for it."""
        attribute, kind = self._cu.CUpointer_attribute, self._cu.CUmemorytype
        return attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kind.CU_MEMORYTYPE_HOST

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether host memory was reserved or registered through CUDA, by whomever in this process."""
        kind, host = self._pinned_query
        for at in (address, address + nbytes - 1):
            result = self._cu.cuPointerGetAttribute(kind, at)
            if result[0] or result[1] != host:
                return False
        return True

    def upload(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device, now: large ones through pinned staging, overlapped."""
        self.upload_all([(address, data)], data.nbytes)

    def upload_all(self, pieces: Iterable[tuple[int, memoryview]], total: int) -> None:
        """Copy pieces of one block of memory, of ``total`` bytes, in the order of their addresses, now."""
        with self.lock, noted("streams"):  # the staging memory is one
            self.enter()
            if self._staging is None:
                self._staging = Staging(self._cu, self._own_stream)
            self._staging.upload_all(pieces, total)

    def download(self, address: int, out: memoryview) -> None:
        """Copy device bytes to writable host memory, now, after all enqueued work."""
        if not out.nbytes:
            return
        target = ctypes.addressof(ctypes.c_char.from_buffer(out.cast("B")))
        with self.lock:
            self.enter()
            check(
                self._cu.cuMemcpyDtoHAsync(target, address, out.nbytes, self._stream),
                f"download {out.nbytes} bytes",
            )
            self.synchronize()

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte, now."""
        if not nbytes:
            return
        with self.lock:
            self.enter()
            check(self._cu.cuMemsetD8Async(address, byte, nbytes, self._stream), f"fill {nbytes} bytes")
            self.synchronize()

    def free_nbytes(self) -> int:
        """Bytes that the driver reports as free on this GPU; the thread's context stays as it was."""
        check(self._cu.cuCtxPushCurrent(self.context), f"enter GPU {self.ordinal}")
        try:
            return int(check(self._cu.cuMemGetInfo(), "ask for free memory")[0])
        finally:
            self._cu.cuCtxPopCurrent()

    def follow(self, stream: int) -> None:
        """Let this stream's coming work wait for what another stream of the process holds."""
        with self.lock:
            if stream != self.stream:
                self._order(stream, self._stream)

    def lead(self, stream: int) -> None:
        """Let another stream's coming work wait for what this one holds."""
        with self.lock:
            if stream != self.stream:
                self._order(self._stream, stream)

    def _order(self, first: Any, second: Any) -> None:
        cu = self._cu
        self.enter()
        event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING), "make an event")
        try:
            check(cu.cuEventRecord(event, first), "record an event")
            check(cu.cuStreamWaitEvent(second, event, 0), "wait for an event")
        finally:
            cu.cuEventDestroy(event)

    def connect(self, other: GpuContext) -> None:
        """Let D2D copies and captured graphs span this GPU and another. Symmetric, idempotent."""
        for one, two in ((self, other), (other, self)):
            if two.device in one._peers or one.ordinal == two.ordinal:
                one._peers[two.device] = two
                continue
            one.enter()
            if check(one._cu.cuDeviceCanAccessPeer(one._handle, two._handle), "ask for peer access"):
                status = one._cu.cuCtxEnablePeerAccess(two.context, 0)[0]
                if status and status != one._cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                    check((status,), f"give GPU {one.ordinal} access to GPU {two.ordinal}")
            one._peers[two.device] = two
        self.enter()

    def peer(self, device: Device) -> GpuContext:
        """The backend of a device slot, this one or a connected one; ExecutionError for another."""
        if device == self.device:
            return self
        if device not in self._peers:
            raise ExecutionError(
                f"no backend is connected for `{device}`", why=f"{self.device} was asked to copy there"
            )
        return self._peers[device]

    def wait_for(self, other: GpuContext) -> None:
        """Let this stream go on only after what is enqueued on the other backend's stream."""
        cu = self._cu
        other.enter()
        event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING), "make an event")
        try:
            check(cu.cuEventRecord(event, other._stream), "record an event")
            self.enter()
            check(cu.cuStreamWaitEvent(self._stream, event, 0), "wait for an event")
        finally:
            cu.cuEventDestroy(event)

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; raises what went wrong in it."""
        result = self._cu.cuStreamSynchronize(self._stream)
        if result[0]:
            self.enter()
            check(self._cu.cuStreamSynchronize(self._stream), f"finish the work on {self.label}")

    def release(self) -> None:
        """Give back staging memory, the own stream and the context, and be no one's peer. Never raises."""
        for peer in self._peers.values():
            peer._peers = {device: other for device, other in peer._peers.items() if other is not self}
        if self._staging is not None:
            self._staging.close()
        self._cu.cuStreamDestroy(self._own_stream)
        self._cu.cuDevicePrimaryCtxRelease(self._handle)


@contextmanager
def all_locked(contexts: Iterable[GpuContext]) -> Generator[None]:
    """Hold the locks of several, always in one order, so that no two threads wait for each other."""
    with ExitStack() as stack:
        for context in sorted(set(contexts), key=lambda context: (context.ordinal, id(context))):
            stack.enter_context(context.lock)
        yield

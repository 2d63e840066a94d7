"""The CUDA backend: one GPU, its primary context, one stream, and instructions bound to addresses."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..errors import DeviceError, DevplanError, ExecutionError
from ..expr import evaluate
from ..program import Copy, Device, HostCall, Kernel, KernelCode, Launch, LibraryCall
from . import graph, warm
from .code import choose_code, load_function
from .copies import bind_copy, bind_fill
from .driver import check, device_info, initialise
from .launch import ArgumentArray
from .staging import Staging

if TYPE_CHECKING:
    from ..tensor import DeviceTensor

_WARP = 32

_LIBRARIES = {"matmul": "cublaslt", "convolution": "cudnn", "attention": "cudnn"}
"""Which library serves a function of `runtime.library`; `fill` needs none."""


class CudaBackend:
    """One GPU as an execution device. Every method may be called from any thread, one at a time.

    Args:
        device: the program's device slot.
        ordinal: which GPU of this machine serves it; no other GPU gets a context.
        stream: enqueue on this stream (a handle, or anything with ``__cuda_stream__``) instead of an own one.

    Raises:
        DeviceError: no driver, no such GPU.
    """

    def __init__(self, device: Device, ordinal: int = 0, *, stream: object | None = None) -> None:
        self._cu = cu = initialise()
        self._device, self.ordinal = device, ordinal
        self._closed = False
        count = int(check(cu.cuDeviceGetCount(), "count GPUs"))
        if not 0 <= ordinal < count:
            hint = "`devplan doctor` lists this machine's GPUs"
            raise DeviceError(f"there is no GPU {ordinal}", why=f"this machine has {count}", hint=hint)
        self.info = device_info(cu, ordinal)
        self._handle = check(cu.cuDeviceGet(ordinal), f"find GPU {ordinal}")
        self.context = warm.take_context(ordinal)
        if self.context is None:
            self.context = check(cu.cuDevicePrimaryCtxRetain(self._handle), f"start GPU {ordinal}")
        self.enter()
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._own_stream = check(cu.cuStreamCreate(flags), f"make a stream on GPU {ordinal}")
        self._stream: Any = self._own_stream
        if stream is not None:
            self.use_stream(stream)
        self._kernels: dict[str, tuple[Kernel, KernelCode]] = {}
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._owner: CudaBackend | None = None
        self._graphs: weakref.WeakSet[GraphOnStream] = weakref.WeakSet()
        self._peers: dict[Device, CudaBackend] = {}
        self._libraries: dict[str, Any] = {}
        self._staging: Staging | None = None
        self.tuning: Mapping[str, int] = {}
        """Which of a library's algorithms to take, by the call's key; see `cublaslt.matmul_key`."""

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

    @property
    def uses_ptx(self) -> tuple[str, ...]:
        """Names of loaded kernels that the driver compiles from PTX, for want of a cubin for this GPU."""
        return tuple(name for name, (_, code) in self._kernels.items() if code.form == "ptx")

    def use_stream(self, stream: object | None) -> None:
        """Enqueue on the caller's stream from now on; None goes back to the own one. Waits for neither."""
        if stream is None:
            self._stream = self._own_stream
            return
        ask: Any = getattr(stream, "__cuda_stream__", None)
        if ask is not None:
            answer: Any = ask() if callable(ask) else ask
            stream = int(answer[1])
        if not isinstance(stream, int):
            raise ExecutionError(
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

    # --- memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory, 256-aligned; 0 bytes reserve one."""
        self.enter()
        return int(check(self._cu.cuMemAlloc(max(nbytes, 1)), f"reserve {nbytes} bytes on {self.label}"))

    def free(self, address: int) -> None:
        """Give memory back."""
        self.aside(self._cu.cuMemFree, address, f"free memory on {self.label}")

    def allocate_host(self, nbytes: int) -> int:
        """Reserve pinned host memory."""
        self.enter()
        return int(check(self._cu.cuMemHostAlloc(max(nbytes, 1), 0), f"pin {nbytes} bytes of host memory"))

    def free_host(self, address: int) -> None:
        """Give pinned memory back."""
        self.aside(self._cu.cuMemFreeHost, address, "free pinned host memory")

    def upload(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device, now: large ones through pinned staging, overlapped."""
        self.enter()
        if self._staging is None:
            self._staging = Staging(self._cu, self._own_stream)
        self._staging.upload(address, data)

    def download(self, address: int, out: memoryview) -> None:
        """Copy device bytes to writable host memory, now, after all enqueued work."""
        if not out.nbytes:
            return
        self.enter()
        target = ctypes.addressof(ctypes.c_char.from_buffer(out.cast("B")))
        check(
            self._cu.cuMemcpyDtoHAsync(target, address, out.nbytes, self._stream),
            f"download {out.nbytes} bytes",
        )
        self.synchronize()

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte, now."""
        if not nbytes:
            return
        self.enter()
        check(self._cu.cuMemsetD8Async(address, byte, nbytes, self._stream), f"fill {nbytes} bytes")
        self.synchronize()

    def memory_info(self) -> tuple[int, int]:
        """Bytes that the driver reports as (free, total) on this GPU."""
        self.enter()
        free, total = check(self._cu.cuMemGetInfo(), "ask for free memory")
        return int(free), int(total)

    # --- code -----------------------------------------------------------------------------------------

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Choose each kernel's code for this GPU; it is handed to the driver when a launch first needs it."""
        chosen = {kernel.name: (kernel, choose_code(kernel, self.info.capability)) for kernel in kernels}
        self._kernels.update(chosen)

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            if name not in self._kernels:
                raise ExecutionError(f"kernel `{name}` was not loaded")
            module, function = load_function(self._cu, self._kernels[name][1], name)
            (self._owner or self)._modules.append(module)
            self._functions[name] = function
        return self._functions[name]

    # --- instructions ---------------------------------------------------------------------------------

    def bind(
        self,
        instruction: Launch | LibraryCall | HostCall | Copy,
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> Step:
        """Tie an instruction to addresses. ``operands`` by value name, ``bindings`` by symbol."""
        self.enter()
        try:
            if isinstance(instruction, Launch):
                return self._bind_launch(instruction, operands, bindings)
            if isinstance(instruction, Copy):
                return bind_copy(self, operands[instruction.source], operands[instruction.destination])
            if isinstance(instruction, LibraryCall):
                return self._bind_library_call(instruction, operands)
        except DevplanError as error:
            if str(instruction.origin):
                error.why = "; ".join(part for part in (error.why, f"for {instruction.origin}") if part)
            raise
        raise ExecutionError(f"`{instruction.target}` runs on the host", why=f"it was bound to {self.device}")

    def _bind_launch(
        self, instruction: Launch, operands: Mapping[str, Operand], bindings: Mapping[str, int]
    ) -> Step:
        function = self._function(instruction.kernel)
        kernel, code = self._kernels[instruction.kernel]
        arguments = ArgumentArray(kernel.parameters, instruction.arguments, operands, bindings)
        grid = tuple(evaluate(size, bindings) for size in instruction.grid)
        if 0 in grid:
            return _nothing
        name, launch, enter = kernel.name, self._cu.cuLaunchKernel, self.enter
        threads, shared, address = code.num_warps * _WARP, code.shared_nbytes, arguments.address

        def step(_alive: ArgumentArray = arguments) -> None:
            enter()
            result = launch(function, *grid, threads, 1, 1, shared, self._stream, address, 0)
            if result[0]:
                check(result, f"launch kernel `{name}`")

        return step

    def _bind_library_call(self, call: LibraryCall, operands: Mapping[str, Operand]) -> Step:
        if call.function == "fill":
            return bind_fill(self, operands[call.writes[0]], call.attribute("value"))
        library = _LIBRARIES.get(call.function)
        if library is not None:
            step: Step = self.library(library).bind(call, operands)
            return step
        raise DeviceError(
            f"library function `{call.function}` is not served on CUDA",
            hint="export again with `--no-library-calls`",
        )

    def library(self, name: str) -> Any:
        """``cublaslt`` or ``cudnn``, loaded by the first call that needs it: each costs a cold start much."""
        if name not in self._libraries:
            if name == "cublaslt":
                from .cublaslt import CublasLt

                self._libraries[name] = CublasLt(self)
            else:
                from .cudnn import Cudnn

                self._libraries[name] = Cudnn(self)
        return self._libraries[name]

    # --- the caller's tensors and clones ---------------------------------------------------------------

    @property
    def no_graph_reason(self) -> str:
        """Empty: `capture` makes graphs here."""
        return ""

    def wrap(self, operand: Operand, release: Step) -> DeviceTensor:
        """A tensor of the caller's over device memory; ``release`` is called once, when it is dropped."""
        from ..tensor import DeviceTensor

        return DeviceTensor(operand, self, release)

    def describe(self, tensor: object) -> Operand:
        """Where a caller's device tensor is, its writes ordered before this stream's coming work.

        Takes a `DeviceTensor` and whatever offers ``__cuda_array_interface__`` or ``__dlpack__``.

        Raises:
            UsageError: it is no device tensor, or lives on another GPU.
        """
        from ..tensor import DeviceTensor

        return DeviceTensor.of(tensor, self).operand

    def copy(self, source: Operand, destination: Operand) -> None:
        """Copy between two operands on this GPU, strides free, now."""
        bind_copy(self, source, destination)()
        self.synchronize()

    def send(self, source: Operand, receiver: CudaBackend, destination: Operand) -> None:
        """Copy a dense operand to another GPU, now."""
        self.connect(receiver)
        bind_copy(self, source, destination)()
        receiver.synchronize()

    def follow(self, stream: int) -> None:
        """Let this stream's coming work wait for what another stream of the process holds."""
        if stream != self.stream:
            self._order(stream, self._stream)

    def lead(self, stream: int) -> None:
        """Let another stream's coming work wait for what this one holds."""
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

    def fork(self) -> CudaBackend:
        """The same GPU, memory and loaded code with a stream of its own. Close it before this one."""
        made = CudaBackend(self.device, self.ordinal)
        made._kernels, made._functions, made._owner = self._kernels, self._functions, self._owner or self
        made.tuning = self.tuning
        return made

    # --- several GPUs ---------------------------------------------------------------------------------

    def connect(self, other: CudaBackend) -> None:
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

    def peer(self, device: Device) -> CudaBackend:
        """The backend of a device slot, this one or a connected one; ExecutionError for another."""
        if device == self.device:
            return self
        if device not in self._peers:
            raise ExecutionError(
                f"no backend is connected for `{device}`", why=f"{self.device} was asked to copy there"
            )
        return self._peers[device]

    def wait_for(self, other: CudaBackend) -> None:
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

    # --- running --------------------------------------------------------------------------------------

    def capture(self, steps: Sequence[Step]) -> GraphOnStream:
        """Record the steps into one CUDA graph and give a step that replays it. Executes nothing.

        Raises:
            ExecutionError: something cannot be recorded; the backend stays usable and the steps runnable.
        """
        self.enter()
        free_before = self.memory_info()[0]
        original, is_callers = self._stream, self._stream is not self._own_stream
        self._stream = self._own_stream
        try:
            executable, nodes = graph.capture(self._cu, self._own_stream, steps, self._join_peers)
        except BaseException:
            self._replace_stream_if_broken()
            raise
        finally:
            self._stream = original if is_callers else self._own_stream
        step = GraphOnStream(self, executable, nodes)
        self._graphs.add(step)
        check(self._cu.cuGraphUpload(executable, self._own_stream), "upload a CUDA graph")
        check(self._cu.cuStreamSynchronize(self._own_stream), "upload a CUDA graph")
        step.nbytes = max(free_before - self.memory_info()[0], 0)
        return step

    def timeline(self, groups: Sequence[Sequence[Step]], repeat: int) -> list[list[float]]:
        """Run the groups of steps in order, ``repeat`` times; seconds on the device, by run and group.

        All of it is one graph with events between the groups, so that the host's pace does not count.
        """
        self.enter()
        cu = self._cu
        events = [check(cu.cuEventCreate(0), "make an event") for _ in range(len(groups) + 1)]
        # As nodes of the graph: an ordinary record would only say what depends on what.
        external = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL

        def record(event: Any) -> Step:
            doing = "record an event"
            return lambda: check(cu.cuEventRecordWithFlags(event, self._stream, external), doing)

        steps = [record(events[0])]
        for group, event in zip(groups, events[1:], strict=True):
            steps += [*group, record(event)]
        replay = self.capture(steps)
        times: list[list[float]] = []
        try:
            for _ in range(repeat):
                replay()
                self.synchronize()
                pairs = itertools.pairwise(events)
                elapsed = [check(cu.cuEventElapsedTime(a, b), "read the time") for a, b in pairs]
                times.append([milliseconds * 1e-3 for milliseconds in elapsed])
        finally:
            replay.close()
            for event in events:
                cu.cuEventDestroy(event)
        return times

    def _join_peers(self, begins: bool) -> None:
        for peer in self._peers.values():
            if peer is not self:
                (peer.wait_for(self) if begins else self.wait_for(peer))
        self.enter()

    def _replace_stream_if_broken(self) -> None:
        """After a failed capture: a stream that still thinks it is captured is given up for a new one."""
        cu = self._cu
        result = cu.cuStreamIsCapturing(self._own_stream)
        if not result[0] and result[1] == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return
        broken, flags = self._own_stream, cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._own_stream = check(cu.cuStreamCreate(flags), f"make a stream on GPU {self.ordinal}")
        self._staging = None
        cu.cuStreamDestroy(broken)

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; raises what went wrong in it."""
        result = self._cu.cuStreamSynchronize(self._stream)
        if result[0]:
            self.enter()
            check(self._cu.cuStreamSynchronize(self._stream), f"finish the work on {self.label}")

    def close(self) -> None:
        """Release graphs, libraries, code, the own stream and the context. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        cu = self._cu
        # After a failed kernel every call here fails again with its error, reported when it happened.
        with contextlib.suppress(DevplanError):
            self.enter()
        for step in list(self._graphs):
            with contextlib.suppress(DevplanError):
                step.close()
        for library in self._libraries.values():
            library.close()
        if self._staging is not None:
            self._staging.close()
        for module in self._modules:
            cu.cuModuleUnload(module)
        cu.cuStreamDestroy(self._own_stream)
        cu.cuDevicePrimaryCtxRelease(self._handle)


class GraphOnStream(graph.GraphStep):
    """A graph that goes to whatever stream its backend uses at the time."""

    def __init__(self, backend: CudaBackend, executable: Any, nodes: int) -> None:
        super().__init__(backend.driver, executable, nodes, backend.enter, backend.aside)
        self._backend = backend

    def __call__(self) -> None:
        """Enqueue the graph."""
        self.launch(self._backend.stream_object)


_shared: dict[int, CudaBackend] = {}


def shared_backend(ordinal: int) -> CudaBackend:
    """The process's own backend of a GPU, for tensors that belong to no program. Never closed."""
    if ordinal not in _shared:
        _shared[ordinal] = CudaBackend(Device("cuda", ordinal), ordinal)
    return _shared[ordinal]


def _nothing() -> None:
    """A launch of an empty grid."""

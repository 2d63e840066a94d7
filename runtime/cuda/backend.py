"""The CUDA backend: instructions bound to addresses on one GPU, and graphs of them."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..errors import DeviceError, DevplanError, ExecutionError
from ..expr import evaluate
from ..program import Copy, Device, HostCall, Kernel, KernelCode, Launch, LibraryCall
from . import graph
from .code import choose_code, load_function, verify_image
from .context import GpuContext, all_locked
from .copies import bind_copy, bind_fill, bind_moving_copy
from .driver import check
from .launch import ArgumentArray, early_config
from .ledger import noted

if TYPE_CHECKING:
    from ..calls.host_io import HostEnd
    from ..tensors.tensor import DeviceTensor
    from .nvidia_library import WorkspaceUse

_WARP = 32

_LIBRARIES = {"matmul": "cublaslt", "convolution": "cudnn", "attention": "cudnn"}
"""Which library serves a function of `runtime.library`; `fill` needs none."""


class CudaBackend(GpuContext):
    """One GPU as an execution device: binds instructions to addresses, and captures graphs of them.

    Takes what `GpuContext` takes.
    """

    direct_read_nbytes = 2048
    """Bytes up to which a kernel reads pinned host memory in place of a copy: hardly slower than one byte."""
    direct_write_nbytes = 32768
    """The same for writing, which waits for nothing: of 64 KB on an H200 the copy takes 6 us more."""

    def __init__(self, device: Device, ordinal: int = 0, *, stream: object | None = None) -> None:
        super().__init__(device, ordinal, stream=stream)
        self._closed = False
        self._kernels: dict[str, tuple[Kernel, KernelCode]] = {}
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._owner: CudaBackend | None = None
        self._graphs: weakref.WeakSet[graph.GraphStep] = weakref.WeakSet()
        self._libraries: dict[str, Any] = {}
        self._moving: list[graph.MovingNode] = []
        self._scratch: int | None = None
        self.workspaces: dict[str, WorkspaceUse] = {}
        """By the key of a library's call, for all that were bound."""
        self.tuning: Mapping[str, int] = {}
        """Which of a library's algorithms to take, by the call's key; see `runtime.measure.tune`."""
        self.launches_early = os.environ.get("DEVPLAN_EARLY_LAUNCH", "1") != "0"
        """Whether a kernel that waits by itself is launched while the one before it ends."""

    @property
    def uses_ptx(self) -> tuple[str, ...]:
        """Names of loaded kernels that the driver compiles from PTX, for want of a cubin for this GPU."""
        return tuple(name for name, (_, code) in self._kernels.items() if code.form == "ptx")

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Choose each kernel's code for this GPU; it is handed to the driver when a launch first needs it.

        Raises:
            DeviceError: a kernel has no code for this GPU.
            ArtifactError: code is not what it says.
        """
        here, shared = self.info.capability, self.info.shared_nbytes
        chosen = {kernel.name: (kernel, choose_code(kernel, here, shared)) for kernel in kernels}
        for name, (_, code) in chosen.items():
            verify_image(code, name)
        self._kernels.update(chosen)

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            if name not in self._kernels:
                raise ExecutionError(f"kernel `{name}` was not loaded")
            code = self._kernels[name][1]
            with noted("code"):
                module, function = load_function(self._cu, code, name)
            (self._owner or self)._modules.append(module)
            self._functions[name] = function
        return self._functions[name]

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
        if code.waits and self.launches_early and not self._peers:
            return self._bind_early_launch(kernel.name, function, code, grid, arguments)
        name, launch, enter = kernel.name, self._cu.cuLaunchKernel, self.enter
        threads, shared, address = code.num_warps * _WARP, code.shared_nbytes, arguments.address

        def step(_alive: ArgumentArray = arguments) -> None:
            enter()
            result = launch(function, *grid, threads, 1, 1, shared, self._stream, address, 0)
            if result[0]:
                check(result, f"launch kernel `{name}`")

        return step

    def _bind_early_launch(
        self, name: str, function: Any, code: KernelCode, grid: tuple[int, ...], arguments: ArgumentArray
    ) -> Step:
        """A launch that may begin while the one before it ends; the code waits where it must."""
        config = early_config(self._cu, grid, code.num_warps * _WARP, code.shared_nbytes)
        launch, enter, address = self._cu.cuLaunchKernelEx, self.enter, arguments.address

        def step(_alive: ArgumentArray = arguments) -> None:
            enter()
            config.hStream = self._stream
            result = launch(config, function, address, 0)
            if result[0]:
                check(result, f"launch kernel `{name}`")

        return step

    def _bind_library_call(self, call: LibraryCall, operands: Mapping[str, Operand]) -> Step:
        if call.function == "fill":
            return bind_fill(self, operands[call.writes[0]], call.attribute("value"))
        library = _LIBRARIES.get(call.function)
        if library is not None:
            with noted("code"):
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

    def library_version(self, name: str) -> int:
        """The version of ``cublaslt`` or ``cudnn``, which is loaded for that, but not begun on this GPU.

        Raises:
            DeviceError: it is not installed.
        """
        if name in self._libraries:
            return int(self._libraries[name].version)
        if name == "cublaslt":
            from .cublaslt import load_cublaslt

            return load_cublaslt()[2]
        if name == "cudnn":
            from .cudnn import load_cudnn

            return load_cudnn()[1]
        raise DeviceError(f"there is no library `{name}`")

    @property
    def no_graph_reason(self) -> str:
        """Empty: `capture` makes graphs here."""
        return ""

    def wrap(self, operand: Operand, release: Step, check: Step | None = None) -> DeviceTensor:
        """A tensor of the caller's over device memory; ``release`` is called once, when it is dropped.

        ``check`` raises when the memory may not be used any more.
        """
        from ..tensors.tensor import DeviceTensor
        from ..tensors.tensor_backend import Memory

        return DeviceTensor(operand, self, Memory(release, check))

    def describe(self, tensor: object) -> Operand:
        """Where a caller's device tensor is, its writes ordered before this stream's coming work.

        Takes a `DeviceTensor` and whatever offers ``__cuda_array_interface__`` or ``__dlpack__``.

        Raises:
            UsageError: it is no device tensor, or lives on another GPU.
        """
        from ..tensors.tensor import DeviceTensor

        return DeviceTensor.of(tensor, self).operand

    def copy(self, source: Operand, destination: Operand) -> None:
        """Copy between two operands on this GPU, strides free, now."""
        with self.lock:
            bind_copy(self, source, destination)()
            self.synchronize()

    def send(self, source: Operand, receiver: CudaBackend, destination: Operand) -> None:
        """Copy a dense operand to another GPU, now."""
        with all_locked((self, receiver)):
            self.connect(receiver)
            bind_copy(self, source, destination)()
            receiver.synchronize()

    def fork(self) -> CudaBackend:
        """The same GPU, memory and loaded code with a stream of its own. Close it before this one."""
        made = CudaBackend(self.device, self.ordinal)
        made._kernels, made._functions, made._owner = self._kernels, self._functions, self._owner or self
        made.tuning = self.tuning
        return made

    def capture(self, steps: Sequence[Step]) -> graph.GraphStep:
        """Record the steps into one CUDA graph and give a step that replays it. Executes nothing.

        Raises:
            ExecutionError: something cannot be recorded; the backend stays usable and the steps runnable.
        """
        # Peers' streams may be recorded, too.
        with all_locked((self, *self._peers.values())), noted("graph"):
            return self._captured(steps)

    def _captured(self, steps: Sequence[Step]) -> graph.GraphStep:
        self.enter()
        free_before = self.free_nbytes()
        callers = None if self._stream is self._own_stream else self._stream
        self._stream = self._own_stream
        try:
            self._moving = []
            recorded = graph.capture(self._cu, self._own_stream, steps, self._join_peers)
        except BaseException:
            if not graph.is_out_of_capture(self._cu, self._own_stream):
                self._cu.cuStreamDestroy(self._own_stream)
                self._own_stream = self._new_stream()
                self._staging = None
            raise
        finally:
            self._stream = self._own_stream if callers is None else callers
        step = graph.GraphStep(self, recorded, self._moving)
        self._graphs.add(step)
        check(self._cu.cuGraphUpload(recorded.executable, self._own_stream), "upload a CUDA graph")
        check(self._cu.cuStreamSynchronize(self._own_stream), "upload a CUDA graph")
        step.nbytes = max(free_before - self.free_nbytes(), 0)
        return step

    def bind_moving(self, copy: Copy, source: Operand, destination: Operand, end: HostEnd) -> Step:
        """A step that copies from or to wherever ``end`` is when it runs, in a graph too."""
        return bind_moving_copy(self, source, destination, end)

    def note_moving(self, end: HostEnd, uploads: bool) -> None:
        """Remember the copy that was recorded last, if a graph is being recorded."""
        node = graph.last_node(self._cu, self._stream)
        if node is not None:
            self._moving.append(graph.MovingNode(node, end, uploads))

    def separate(self) -> None:
        """Let the next kernel begin only after all before it, even one that asks to begin earlier.

        For libraries whose kernels ask for it and read too early.
        """
        if graph.separate(self._cu, self._stream):
            return
        if self._scratch is None:
            self._scratch = self.allocate(4)
        check(self._cu.cuMemsetD32Async(self._scratch, 0, 1, self._stream), "separate two kernels")

    def timeline(
        self, groups: Sequence[Sequence[Step]], repeat: int, before: Step | None = None
    ) -> list[list[float]]:
        """Run the groups of steps in order, ``repeat`` times; seconds on the device, by run and group.

        All of it is one graph with events between the groups, so that the host's pace does not count.
        ``before`` runs on the host ahead of each.
        """
        return graph.timeline(self, groups, repeat, before)

    def _join_peers(self, begins: bool) -> None:
        for peer in self._peers.values():
            if peer is not self:
                (peer.wait_for(self) if begins else self.wait_for(peer))
        self.enter()

    def close(self) -> None:
        """Release graphs, libraries, code, the own stream and the context. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        # After a failed kernel every call here fails again with its error, reported when it happened.
        with contextlib.suppress(DevplanError):
            self.enter()
        for step in list(self._graphs):
            with contextlib.suppress(DevplanError):
                step.close()
        for library in self._libraries.values():
            library.close()
        for module in self._modules:
            self._cu.cuModuleUnload(module)
        if self._scratch is not None:
            self._cu.cuMemFree(self._scratch)
        self.release()


_shared: dict[int, CudaBackend] = {}


def shared_backend(ordinal: int) -> CudaBackend:
    """The process's own backend of a GPU, for tensors that belong to no program. Never closed."""
    if ordinal not in _shared:
        _shared[ordinal] = CudaBackend(Device("cuda", ordinal), ordinal)
    return _shared[ordinal]


def _nothing() -> None:
    """A launch of an empty grid."""

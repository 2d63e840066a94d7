"""The host as an execution device: memory, local copies, and host operators through `runtime.cpu.aten`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backend import DeviceArray, Operand, Step, in_a_row
from ..errors import DeviceError, ExecutionError, UsageError
from ..program import CPU, Copy, CopyKind, Device, HostCall, Kernel, Launch, LibraryCall
from ..tensors.host import array_at
from .blocks import Blocks, copy_in, copy_out, set_bytes
from .own import NAMESPACE, bind_own


class CpuBackend:
    """Serves the slot ``cpu``. ATen operators need torch, and `allow_torch_ops`.

    Args:
        allow_torch_ops: whether host operators may run through torch; refused at bind otherwise.
    """

    def __init__(self, allow_torch_ops: bool = True) -> None:
        self._blocks, self._allow_torch_ops = Blocks("the host"), allow_torch_ops

    @property
    def device(self) -> Device:
        """``cpu``."""
        return CPU

    @property
    def label(self) -> str:
        """Its name for people."""
        return "cpu"

    @property
    def no_graph_reason(self) -> str:
        """Why there are no graphs."""
        return "the host has no graphs"

    def allocate(self, nbytes: int) -> int:
        """Reserve host memory."""
        return self._blocks.allocate(nbytes)

    def free(self, address: int) -> None:
        """Give it back."""
        self._blocks.free(address)

    allocate_host, free_host = allocate, free

    def upload(self, address: int, data: memoryview) -> None:
        """Copy bytes to an address."""
        copy_in(address, data)

    def download(self, address: int, out: memoryview) -> None:
        """Copy bytes from an address."""
        copy_out(address, out)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes."""
        set_bytes(address, nbytes, byte)

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Nothing: generated kernels run on accelerators."""

    def bind(
        self,
        instruction: Launch | LibraryCall | HostCall | Copy,
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> Step:
        """A local copy, or a host operator with tensors made once; UsageError when torch is not allowed."""
        if isinstance(instruction, Copy) and instruction.kind is CopyKind.LOCAL:
            return local_copy(operands[instruction.source], operands[instruction.destination])
        if not isinstance(instruction, HostCall):
            raise DeviceError(
                f"the host cannot run {type(instruction).__name__}", why=str(instruction.origin)
            )
        if instruction.target.startswith(NAMESPACE):
            return bind_own(instruction, operands, bindings)
        if not self._allow_torch_ops:
            raise UsageError(
                f"`{instruction.target}` runs on the host through torch",
                why=str(instruction.origin),
                hint="allow it with `--allow-torch-ops`",
            )
        from .aten import bind_operator  # lazy: the only module that knows torch

        return bind_operator(instruction, operands, bindings)

    def capture(self, steps: Sequence[Step]) -> Step:
        """A loop."""
        return in_a_row(steps)

    def wrap(self, operand: Operand, release: Step, check: Step | None = None) -> DeviceArray:
        """Host memory is handed out as arrays; this is never asked."""
        raise ExecutionError("host memory is not a device tensor")

    def describe(self, tensor: object) -> Operand:
        """Host memory is passed in as arrays; this is never asked."""
        raise UsageError("host memory is not a device tensor")

    def fork(self) -> CpuBackend:
        """The host again."""
        return CpuBackend(self._allow_torch_ops)

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Drop all memory."""
        self._blocks.clear()


def local_copy(source: Operand, destination: Operand) -> Step:
    """Copies element by element between strided host memory."""
    to = array_at(destination.address, destination.dtype, destination.shape, destination.strides)
    of = array_at(source.address, source.dtype, source.shape, source.strides)

    def step() -> None:
        to[...] = of

    return step

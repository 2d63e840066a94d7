"""A fake device that writes down what it is asked to do, and fails where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .backend import DeviceArray, Operand, Step, in_a_row
from .cpu.blocks import Blocks, copy_in, copy_out, set_bytes
from .errors import DeviceError, ExecutionError, UsageError
from .expr import evaluate
from .program import Copy, CopyKind, Device, HostCall, Kernel, Launch, LibraryCall, Ref
from .tensors.host import Array, HostValue, array_at, bytes_at, host_value

Work = Callable[[Mapping[str, Operand]], None]
"""What a kernel, library function or host operator does, given all operands by value name."""


def operand_view(operand: Operand) -> Array:
    """The memory of an operand, in place."""
    return array_at(operand.address, operand.dtype, operand.shape, operand.strides)


def elementwise(function: Callable[..., Any], *names: str) -> Work:
    """Work in which the last named value becomes the function of the others."""

    def work(operands: Mapping[str, Operand]) -> None:
        *given, out = [operand_view(operands[name]) for name in names]
        out[...] = function(*given)

    return work


class RecordingTensor:
    """Device memory of a `RecordingBackend` as a caller holds it."""

    def __init__(self, operand: Operand, release: Step, check: Step | None = None) -> None:
        self._operand, self._release, self._check = operand, release, check

    @property
    def operand(self) -> Operand:
        """Where it is; raises when the memory was only lent."""
        if self._check is not None:
            self._check()
        return self._operand

    def numpy(self) -> HostValue:
        """A copy on the host."""
        o = self.operand
        return host_value(array_at(o.address, o.dtype, o.shape, o.strides).copy(), o.dtype)

    def __del__(self) -> None:
        self._release()


class RecordingBackend:
    """Records a line per request in ``trace``; memory is host memory, so that copies and work are real.

    Args:
        device: the slot it serves.
        work: what kernels (by name), library functions and ATen operators do; nothing for the others.
        trace: the list that lines are appended to (shared between devices to see their order).
        fail: a predicate over lines; a request whose line it accepts raises `ExecutionError`.
    """

    def __init__(
        self,
        device: Device,
        work: Mapping[str, Work] | None = None,
        trace: list[str] | None = None,
        fail: Callable[[str], bool] = lambda line: False,
        parent: RecordingBackend | None = None,
    ) -> None:
        self._device, self._work, self.fail = device, work or {}, fail
        self.trace: list[str] = [] if trace is None else trace
        self.blocks: Blocks = parent.blocks if parent else Blocks(f"the fake {device}")
        self._parent, self._kernels = parent, set[str]()
        self.closed = False

    @property
    def device(self) -> Device:
        """The slot."""
        return self._device

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"recording {self._device}"

    @property
    def no_graph_reason(self) -> str:
        """Captures count as graphs here."""
        return ""

    def _note(self, line: str) -> None:
        self.trace.append(line)
        if self.fail(line):
            raise ExecutionError(f"{line}: failed on purpose")

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory."""
        self._note(f"allocate {self._device} {nbytes}")
        return self.blocks.allocate(nbytes)

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._note(f"free {self._device}")
        self.blocks.free(address)

    def allocate_host(self, nbytes: int) -> int:
        """Reserve host memory."""
        self._note(f"allocate host {nbytes}")
        return self.blocks.allocate(nbytes)

    def free_host(self, address: int) -> None:
        """Give host memory back."""
        self._note("free host")
        self.blocks.free(address)

    def upload(self, address: int, data: memoryview) -> None:
        """Copy to the device now."""
        self._note(f"upload {data.nbytes}")
        copy_in(address, data)

    def download(self, address: int, out: memoryview) -> None:
        """Copy from the device now."""
        self._note(f"download {out.nbytes}")
        copy_out(address, out)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes now."""
        self._note(f"fill {nbytes} {byte}")
        set_bytes(address, nbytes, byte)

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Remember the kernels."""
        self._kernels |= {kernel.name for kernel in kernels}

    def bind(
        self,
        instruction: Launch | LibraryCall | HostCall | Copy,
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> Step:
        """A step that records itself and does the work that was given for it."""
        line, name = self._line(instruction, bindings)
        if isinstance(instruction, Launch) and name not in self._kernels:
            raise DeviceError(f"there is no kernel `{name}`")
        self._note(f"bind {line}")
        work = self._copy(instruction) if isinstance(instruction, Copy) else self._work.get(name)

        def step() -> None:
            self._note(line)
            if work is not None:
                work(operands)

        return step

    def _line(
        self, instruction: Launch | LibraryCall | HostCall | Copy, bindings: Mapping[str, int]
    ) -> tuple[str, str]:
        if isinstance(instruction, Copy):
            return f"{instruction.kind.value} {instruction.source} -> {instruction.destination}", ""
        results = ", ".join(instruction.writes)
        if isinstance(instruction, Launch):
            grid = ",".join(str(evaluate(size, bindings)) for size in instruction.grid)
            arguments = ", ".join(str(a) if isinstance(a, Ref) else repr(a) for a in instruction.arguments)
            return f"launch {instruction.kernel}[{grid}]({arguments}) -> {results}", instruction.kernel
        name = instruction.function if isinstance(instruction, LibraryCall) else instruction.target
        return f"{name}({', '.join(instruction.reads)}) -> {results}", name

    @staticmethod
    def _copy(copy: Copy) -> Work:
        def work(operands: Mapping[str, Operand]) -> None:
            source, destination = operands[copy.source], operands[copy.destination]
            if copy.kind is CopyKind.LOCAL:
                view = array_at(
                    destination.address, destination.dtype, destination.shape, destination.strides
                )
                view[...] = array_at(source.address, source.dtype, source.shape, source.strides)
            else:
                copy_in(destination.address, bytes_at(source.address, source.span_nbytes))

        return work

    def capture(self, steps: Sequence[Step]) -> Step:
        """One step that replays the given ones."""
        self._note(f"capture {len(steps)}")
        return in_a_row(steps)

    def wrap(self, operand: Operand, release: Step, check: Step | None = None) -> DeviceArray:
        """A caller's tensor."""
        return RecordingTensor(operand, release, check)

    def describe(self, tensor: object) -> Operand:
        """Where a caller's tensor is."""
        if not isinstance(tensor, RecordingTensor) or tensor.operand.device != self._device:
            raise UsageError(f"a `{type(tensor).__name__}` is not in the memory of `{self._device}`")
        return tensor.operand

    def fork(self) -> RecordingBackend:
        """Another stream on the same memory."""
        twin = RecordingBackend(self._device, self._work, self.trace, self.fail, self)
        twin._kernels = self._kernels
        return twin

    def synchronize(self) -> None:
        """Nothing is pending, but it may be told to fail."""
        self._note(f"synchronize {self._device}")

    def close(self) -> None:
        """Forget everything."""
        self.closed = True

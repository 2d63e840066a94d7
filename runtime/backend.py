"""What the engine asks of an execution device; CUDA, the emulator, the cpu and a recording fake answer.

The engine resolves a method's values to addresses and asks the backend to *bind* each instruction to them
once. A bound instruction is a closure without arguments; a call is the closures in order, or, on CUDA, one
graph captured from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .dtypes import DType
from .program import Copy, Device, HostCall, Kernel, Launch, LibraryCall

Step = Callable[[], None]
"""A bound instruction: does its work (or enqueues it on the backend's stream) when called."""


def in_a_row(steps: Sequence[Step]) -> Step:
    """The steps as one that does them in order, for devices without graphs."""
    held = tuple(steps)

    def run() -> None:
        for step in held:
            step()

    return run


@dataclass(frozen=True, slots=True)
class Operand:
    """A value with its address: where its first element is, and its concrete shape (strides in elements)."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device

    @property
    def numel(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first element to the end of the last one, gaps included; 0 when there is none."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


class DeviceArray(Protocol):
    """A tensor in device memory as the caller holds it (`DeviceTensor` on CUDA)."""

    @property
    def operand(self) -> Operand:
        """Address, element type, shape, strides and the program's device slot."""
        ...

    def numpy(self) -> Any:
        """A copy on the host: a NumPy array, or a `HostTensor` for types that NumPy lacks."""
        ...


class Backend(Protocol):
    """One execution device. Addresses are plain integers; every failure raises a `DevplanError`."""

    @property
    def device(self) -> Device:
        """The program's device slot that this backend serves."""
        ...

    @property
    def label(self) -> str:
        """What a person calls it: ``NVIDIA H200``, ``emulator``, ``cpu``."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory, 256-aligned; 0 bytes gives a valid, unusable address."""
        ...

    def free(self, address: int) -> None:
        """Give memory back."""
        ...

    def allocate_host(self, nbytes: int) -> int:
        """Reserve host memory that this device copies from and to at full speed (pinned on CUDA)."""
        ...

    def free_host(self, address: int) -> None:
        """Give host memory back."""
        ...

    def upload(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device, now."""
        ...

    def download(self, address: int, out: memoryview) -> None:
        """Copy device bytes to writable host memory, now."""
        ...

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte, now."""
        ...

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Make kernels launchable; DeviceError when one has no code for this device."""
        ...

    def bind(
        self,
        instruction: Launch | LibraryCall | HostCall | Copy,
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> Step:
        """Tie an instruction to addresses. ``operands`` by value name, ``bindings`` by symbol."""
        ...

    def capture(self, steps: Sequence[Step]) -> Step:
        """One step that does what the given ones do, in order (a CUDA graph; elsewhere a loop)."""
        ...

    @property
    def no_graph_reason(self) -> str:
        """Why `capture` makes no device graph here (``the emulator has no graphs``); empty when it does."""
        ...

    def wrap(self, operand: Operand, release: Step, check: Step | None = None) -> DeviceArray:
        """A tensor of the caller's over device memory; ``release`` is called once, when it is dropped.

        ``check`` is called whenever its memory is asked for, and raises when that is somebody else's by now.
        """
        ...

    def describe(self, tensor: object) -> Operand:
        """Where a caller's device tensor is; UsageError when it is none or lives on another device.

        Takes what `wrap` made and whatever offers ``__cuda_array_interface__`` or ``__dlpack__``. Makes
        sure that work enqueued on this backend from now on sees what the producer wrote.
        """
        ...

    def fork(self) -> Backend:
        """The same device, memory and loaded kernels with a stream of its own: for a clone of a program.

        An address of one is good on the other. Closed on its own, before the one it was made from.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all enqueued work is done; raises what went wrong in it."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

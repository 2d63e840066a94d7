"""A device made of host memory: the backend that runs a CUDA program's very plan on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..backend import DeviceArray, Operand, Step, in_a_row
from ..calls.binding import CopyTally
from ..calls.host_io import HostEnd
from ..cpu.backend import local_copy
from ..cpu.blocks import Blocks, copy_in, copy_out, set_bytes
from ..dtypes import DType
from ..errors import DeviceError, ExecutionError, UsageError
from ..program import CPU, Copy, CopyKind, Device, HostCall, Kernel, Launch, LibraryCall
from ..tensors.host import HostValue, array_at, bytes_at, host_value
from .kernels import bind_launch, kernel_function
from .library import bind_library_call
from .tensor import Memory


class Machine:
    """The memory of all emulated devices of a program, so that each can tell a foreign address."""

    def __init__(self) -> None:
        self.blocks: dict[Device, Blocks] = {}

    def owner(self, address: int) -> Device | None:
        """The emulated device that an address belongs to; None for the host's."""
        return next((device for device, blocks in self.blocks.items() if blocks.bounds(address)), None)


class EmulatedTensor:
    """A tensor in an emulated device's memory, as the caller holds it."""

    def __init__(self, operand: Operand, release: Step, check: Step | None = None) -> None:
        self._operand, self._release, self._check = operand, release, check

    @property
    def operand(self) -> Operand:
        """Address, element type, shape, strides and device; raises when the memory was only lent."""
        if self._check is not None:
            self._check()
        return self._operand

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._operand.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._operand.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._operand.strides

    @property
    def device(self) -> Device:
        """The emulated device."""
        return self._operand.device

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._operand.numel * self._operand.dtype.itemsize

    def numpy(self) -> HostValue:
        """A copy on the host."""
        at = self.operand
        return host_value(array_at(at.address, at.dtype, at.shape, at.strides).copy(), at.dtype)

    def __del__(self) -> None:
        self._release()


class EmulatorBackend:
    """Serves one device slot with host memory of its own.

    Every operand of every instruction is checked when it is bound: a device operand must lie within one
    block of this device, a host operand outside of all of them.

    Args:
        device: the slot.
        machine: shared by the emulated devices of one program.
        by_triton: run generated kernels through Triton's own interpreter instead of ours.
    """

    def __init__(self, device: Device, machine: Machine | None = None, *, by_triton: bool = False) -> None:
        self._device, self._machine, self._by_triton = device, machine or Machine(), by_triton
        self._blocks = self._machine.blocks.setdefault(device, Blocks(f"the emulated {device}"))
        self._host = Blocks("the host")
        self._kernels: dict[str, Kernel] = {}
        self._memories: dict[int, Memory] = {}
        self.copies = CopyTally()
        """Copies that ran on this device, counted where they ran."""

    @property
    def device(self) -> Device:
        """The slot."""
        return self._device

    @property
    def label(self) -> str:
        """Its name for people."""
        return "emulator:triton" if self._by_triton else "emulator"

    @property
    def no_graph_reason(self) -> str:
        """Why there are no graphs."""
        return "the emulator has no graphs"

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory; it holds 0xFF, as nothing may rely on what is there."""
        address = self._blocks.allocate(nbytes)
        set_bytes(address, nbytes, 0xFF)
        return address

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._memories.pop(address, None)
        self._blocks.free(address)

    def allocate_host(self, nbytes: int) -> int:
        """Reserve host memory."""
        return self._host.allocate(nbytes)

    def free_host(self, address: int) -> None:
        """Give host memory back."""
        self._host.free(address)

    def upload(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device."""
        self._check_device(address, data.nbytes, "an upload")
        copy_in(address, data)

    def download(self, address: int, out: memoryview) -> None:
        """Copy device bytes to the host."""
        self._check_device(address, out.nbytes, "a download")
        copy_out(address, out)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte, on the device or in host memory that was reserved here."""
        if not self._host.holds(address, nbytes):
            self._check_device(address, nbytes, "a fill")
        set_bytes(address, nbytes, byte)

    def _check_device(self, address: int, nbytes: int, what: str) -> None:
        if nbytes and not self._blocks.holds(address, nbytes):
            owner = self._machine.owner(address)
            where = f"it belongs to `{owner}`" if owner else "it is a host address"
            if owner == self._device:
                where = "it reaches beyond its block"
            raise ExecutionError(f"{what} on `{self._device}` uses address {address:#x}", why=where)

    def _check(self, name: str, operand: Operand) -> None:
        """ExecutionError unless the operand lies where it says it lies."""
        if not operand.span_nbytes:
            return
        if operand.device == CPU:
            owner = self._machine.owner(operand.address)
            if owner is not None:
                raise ExecutionError(f"host value `{name}` has an address of `{owner}`")
        elif operand.device == self._device:
            self._check_device(operand.address, operand.span_nbytes, f"value `{name}`")
        elif self._machine.owner(operand.address) != operand.device:
            raise ExecutionError(f"value `{name}` of `{operand.device}` has an address of another device")

    def _bounds(self, operand: Operand) -> tuple[int, int] | None:
        """First and one past the last address of the block an operand lies in; None when it is empty."""
        if operand.device != self._device:
            raise ExecutionError(f"a kernel on `{self._device}` is given memory of `{operand.device}`")
        bounds = self._blocks.bounds(operand.address)
        if bounds is None and operand.span_nbytes:
            self._check_device(operand.address, operand.span_nbytes, "a kernel")
        return bounds

    def _memory(self, operand: Operand) -> tuple[Memory, int]:
        """The block an operand lies in, and its offset there in bytes."""
        bounds = self._bounds(operand)
        if bounds is None:
            return Memory(np.empty(0, np.uint8)), 0
        begin, end = bounds
        if begin not in self._memories or self._memories[begin].nbytes != end - begin:
            self._memories[begin] = Memory(np.frombuffer(bytes_at(begin, end - begin), np.uint8))
        return self._memories[begin], operand.address - begin

    # --- instructions -----------------------------------------------------------------------------

    def load(self, kernels: Sequence[Kernel]) -> None:
        """Keep the kernels; their sources are checked when they are first bound."""
        self._kernels |= {kernel.name: kernel for kernel in kernels}

    def bind(
        self,
        instruction: Launch | LibraryCall | HostCall | Copy,
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> Step:
        """A step that does the work at once."""
        if isinstance(instruction, HostCall):
            raise DeviceError(f"`{instruction.target}` runs on the host, not on `{self._device}`")
        for name in (*instruction.reads, *instruction.writes):
            self._check(name, operands[name])
        if isinstance(instruction, Copy):
            return self._copy(instruction, operands[instruction.source], operands[instruction.destination])
        if isinstance(instruction, LibraryCall):
            return bind_library_call(instruction, operands, self._device)
        if instruction.kernel not in self._kernels:
            raise DeviceError(f"there is no kernel `{instruction.kernel}`")
        kernel = self._kernels[instruction.kernel]
        if self._by_triton:
            from . import triton_interpreter  # lazy: brings in torch and triton

            return triton_interpreter.bind_launch(kernel, instruction, operands, bindings, self._bounds)
        kernel_function(kernel)
        return bind_launch(kernel, instruction, operands, bindings, self._memory)

    def _copy(self, copy: Copy, source: Operand, destination: Operand) -> Step:
        wanted = {
            CopyKind.H2D: (source.device == CPU, destination.device == self._device),
            CopyKind.D2H: (source.device == self._device, destination.device == CPU),
            CopyKind.LOCAL: (source.device == self._device, destination.device == self._device),
            CopyKind.D2D: (
                source.device not in (CPU, destination.device),
                destination.device == self._device,
            ),
        }[copy.kind]
        if not all(wanted) or source.shape != destination.shape or source.dtype != destination.dtype:
            raise ExecutionError(
                f"a `{copy.kind.value}` copy from `{source.device}` to `{destination.device}` does not fit",
                why=f"`{copy.source}` is {source.dtype}{source.shape}, "
                f"`{copy.destination}` is {destination.dtype}{destination.shape}",
            )
        step, nbytes = local_copy(source, destination), source.numel * source.dtype.itemsize

        def run() -> None:
            step()
            self.copies.add(copy.kind, nbytes)

        return run

    def bind_moving(self, copy: Copy, source: Operand, destination: Operand, end: HostEnd) -> Step:
        """A step that copies from or to wherever ``end`` is when it runs."""

        def run() -> None:
            ends = [
                replace(operand, address=end.address) if operand.device == CPU else operand
                for operand in (source, destination)
            ]
            self.bind(copy, {copy.source: ends[0], copy.destination: ends[1]}, {})()

        return run

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether host memory was reserved here."""
        return self._host.holds(address, nbytes)

    def capture(self, steps: Sequence[Step]) -> Step:
        """A loop."""
        return in_a_row(steps)

    # --- the caller's tensors ---------------------------------------------------------------------

    def wrap(self, operand: Operand, release: Step, check: Step | None = None) -> DeviceArray:
        """A caller's tensor."""
        return EmulatedTensor(operand, release, check)

    def describe(self, tensor: object) -> Operand:
        """Where a caller's tensor is; UsageError for anything but a tensor of this emulated device."""
        operand = getattr(tensor, "operand", None)
        if not isinstance(operand, Operand) or operand.device != self._device:
            raise UsageError(
                f"a `{type(tensor).__name__}` is not in the memory of the emulated `{self._device}`"
            )
        if operand.span_nbytes and not self._blocks.holds(operand.address, operand.span_nbytes):
            why = "each program has an emulated device of its own"
            raise UsageError("the tensor is another program's", why=why, hint="pass its `numpy()`")
        return operand

    def fork(self) -> EmulatorBackend:
        """The same memory and kernels, with counters of its own."""
        twin = EmulatorBackend(self._device, self._machine, by_triton=self._by_triton)
        twin._kernels = self._kernels
        return twin

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Forget what was looked up. Memory goes with those who reserved it."""
        self._memories.clear()

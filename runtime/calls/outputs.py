"""What a call hands back: the caller's own copies, or views that raise once they are stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..backend import Backend, DeviceArray, Operand, Step
from ..dtypes import DType
from ..errors import ExecutionError
from ..memory.shared import Shared
from ..program import CPU, Copy, CopyKind, Device
from ..tensors.host import (
    Array,
    HostTensor,
    HostValue,
    address_of,
    array_at,
    contiguous_strides,
    host_value,
    is_native,
    numpy_dtype,
)


class BorrowedTensor:
    """An output in the program's own memory, valid until the program's next call.

    Every access raises `ExecutionError` once a later call (or `close`) has overwritten it. An array that
    `numpy` has returned before shares that memory and cannot raise: use it at once, or copy it.
    """

    __slots__ = ("_backend", "_current", "_generation", "_operand")

    def __init__(self, operand: Operand, backend: Backend | None, current: Callable[[], int]) -> None:
        self._operand, self._backend, self._current = operand, backend, current
        self._generation = current()

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._operand.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._operand.dtype

    @property
    def operand(self) -> Operand:
        """Address, type and device; raises when stale."""
        self._check()
        return self._operand

    def _check(self) -> None:
        if self._current() != self._generation:
            raise ExecutionError(
                "a borrowed output is used too late",
                why="a later call, or a change of state, has overwritten it, or the program was closed",
                hint="copy it first, or call without `borrow`",
            )

    def numpy(self) -> HostValue:
        """A read-only view of host memory, or a copy of device memory; raises when stale."""
        operand = self.operand
        if self._backend is not None:
            value: HostValue = self._backend.wrap(operand, _nothing).numpy()
            return value
        view = array_at(operand.address, operand.dtype, operand.shape, operand.strides)
        view.flags.writeable = False
        return host_value(view, operand.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.numpy()
        is_view = self._backend is None and not isinstance(value, HostTensor)
        array = value.float32() if isinstance(value, HostTensor) else value
        if dtype is not None and array.dtype != dtype:
            array, is_view = array.astype(dtype), False
        if copy is False and not is_view:
            raise ValueError("this borrowed output turns into an array by a copy only")
        return array.copy() if copy and is_view else array  # `numpy.array` leaves the copy to this

    def device_array(self) -> DeviceArray:
        """The device memory as a tensor, which raises when stale as this does; or raises on the host."""
        if self._backend is None:
            raise ExecutionError("a borrowed output lives on the host", hint="use `numpy`")
        return self._backend.wrap(self.operand, _nothing, self._check)


def _nothing() -> None:
    """The release of memory that somebody else owns."""


Fetch = Callable[[], Any]
"""Gives a NumPy array, `HostTensor`, `DeviceArray`, `BorrowedTensor`, or a burnt-in scalar."""


def host_fetch(operand: Operand) -> Fetch:
    """Makes the caller's own copy of a host output. Hot: a call runs it per output."""
    view = array_at(operand.address, operand.dtype, operand.shape, operand.strides)
    if is_native(operand.dtype):
        return view.copy
    return lambda: host_value(view.copy(), operand.dtype)


def copy_fetch(operand: Operand, backends: Mapping[Device, Backend], shared: Shared) -> Fetch:
    """Makes the caller's own copy of an output, on the device where it is."""
    if operand.device == CPU:
        return host_fetch(operand)
    strides = contiguous_strides(operand.shape)
    backend = backends[operand.device]

    def fetch() -> DeviceArray:
        block = output_block(operand.device, operand.numel * operand.dtype.itemsize, shared)
        try:
            own = Operand(block.address, operand.dtype, operand.shape, strides, operand.device)
            if operand.numel:
                copy = Copy(CopyKind.LOCAL, "source", "destination", "output handed to the caller")
                backend.bind(copy, {"source": operand, "destination": own}, {})()
                backend.synchronize()
            tensor: DeviceArray = block.tensor(own)
            return tensor
        finally:
            block.drop()

    return fetch


def borrow_fetch(operand: Operand, backends: Mapping[Device, Backend], current: Callable[[], int]) -> Fetch:
    """Makes a view that checks the program's generation."""
    backend = None if operand.device == CPU else backends[operand.device]
    return lambda: BorrowedTensor(operand, backend, current)


class OutputBlock:
    """Memory of the caller's for one output storage, shared by the tensors over it."""

    def __init__(self, address: int, release: Step, wrap: Callable[[Operand, Step], Any]) -> None:
        self.address, self._release, self._wrap, self._count = address, release, wrap, 1

    def tensor(self, operand: Operand) -> Any:
        """A tensor over the block, which lives as long as any of them."""
        self._count += 1
        return self._wrap(operand, self.drop)

    def drop(self) -> None:
        """Let go; the last one gives the memory back."""
        self._count -= 1
        if self._count == 0:
            self._release()


def output_block(device: Device, nbytes: int, shared: Shared) -> OutputBlock:
    """A fresh block for an output on a device (from the pool) or on the host."""
    if device != CPU:
        address, release = shared.take(device, nbytes)
        return OutputBlock(address, release, shared.backends[device].wrap)
    memory = np.empty(nbytes + 64, np.uint8)
    base = address_of(memory)

    def view(operand: Operand, release: Step) -> HostValue:
        release()
        kind = numpy_dtype(operand.dtype)
        strides = tuple(step * kind.itemsize for step in operand.strides)
        array: Array = np.ndarray(operand.shape, kind, memory.data, operand.address - base, strides)
        return host_value(array, operand.dtype)

    return OutputBlock(base + -base % 64, _nothing, view)

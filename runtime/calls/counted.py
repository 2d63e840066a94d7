"""Sizes that are known when a call ends: declared bounds are checked, and outputs cut to what is real."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..backend import Operand
from ..errors import ExecutionError
from ..program import Count, Method, Port
from ..tensors.host import HostTensor, array_at, host_value


class Counts:
    """A method's sizes that depend on data, where one binding has them: read after each call."""

    def __init__(self, method: Method, operands: Mapping[str, Operand]) -> None:
        self._method = method.name
        self._found = {
            count.name: (ctypes.c_int64.from_address(operands[count.value].address), count)
            for count in method.counts
        }

    def check(self) -> None:
        """ExecutionError when a size is not within its declared bounds: results are wrong then."""
        for place, count in self._found.values():
            if not count.lower <= place.value <= count.upper:
                raise _outside(self._method, count, place.value)

    def cut(self, port: Port, operand: Operand) -> Operand:
        """An output as large as it really is, in the same place."""
        size = self.size(port, operand.shape)
        return replace(operand, shape=(*operand.shape[: port.axis], size, *operand.shape[port.axis + 1 :]))

    def cut_host(self, port: Port, value: Any) -> Any:
        """The caller's own output as large as it really is, in one run."""
        raw = value.raw if isinstance(value, HostTensor) else value
        part = raw[(*(slice(None) for _ in range(port.axis)), slice(self.size(port, raw.shape)))]
        part = part if part.flags.c_contiguous else part.copy()
        return HostTensor(part, value.dtype) if isinstance(value, HostTensor) else part

    def size(self, port: Port, shape: tuple[int, ...]) -> int:
        """How much of an output's counted dimension is real; never more than there is."""
        place, count = self._found[port.count]
        if not 0 <= place.value <= shape[port.axis]:
            raise _outside(self._method, replace(count, lower=0, upper=shape[port.axis]), place.value)
        return place.value

    def host_fetch(self, port: Port, operand: Operand) -> Callable[[], Any]:
        """Makes the caller's own copy of what is real of a host output."""
        view = array_at(operand.address, operand.dtype, operand.shape, operand.strides)
        before = tuple(slice(None) for _ in range(port.axis))

        def fetch() -> Any:
            part = view[(*before, slice(self.size(port, operand.shape)))]
            return host_value(part.copy(), operand.dtype)

        return fetch


def _outside(method: str, count: Count, found: int) -> ExecutionError:
    if count.is_difference:
        return ExecutionError(
            f"two sizes of method `{method}` that depend on data differ by {found}",
            why=f"{count.origin} needs them equal",
            hint="eager PyTorch fails likewise; let the model ask before it computes",
        )
    is_above = found > count.upper
    bound = f"declared is at most {count.upper}" if is_above else f"the model needs at least {count.lower}"
    return ExecutionError(
        f"a size of method `{method}` that depends on data is {found}, {bound}",
        why=f"size `{count.name}` of {count.origin}" if str(count.origin) else f"size `{count.name}`",
        hint="declare a larger bound with `torch._check(n <= bound)` in the model, and export again"
        if is_above
        else "eager PyTorch fails likewise; let the model ask before it computes",
    )

"""Host operators in the form that portable ET12 kernels take: dense tensors, one dimension order a call.

ATen takes any strides, portable kernels refuse most. Where a permuted view is all that stands in the way, the
program table says the same thing otherwise: the operand appears with its dimensions in memory order, which
makes it contiguous, and the operator becomes one that permutes. devplan's own runtime never reads this form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..expr import evaluate
from ..program import Argument, Copy, CopyKind, HostCall, Method, Ref
from .views import TensorView, is_dense

COPIES = {
    CopyKind.H2D: "et_copy::_h2d_copy.out",
    CopyKind.D2H: "et_copy::_d2h_copy.out",
    CopyKind.D2D: "devplan::_d2d_copy.out",
    CopyKind.LOCAL: "devplan::_local_copy.out",
}
CLONE = "aten::clone.out"


@dataclass(frozen=True, slots=True)
class InMemoryOrder:
    """A value's bytes as the contiguous tensor that they are, its dimensions permuted."""

    name: str


@dataclass(frozen=True, slots=True)
class KernelForm:
    """An operator and its arguments, without results."""

    operator: str
    arguments: tuple[Argument | InMemoryOrder, ...]


def in_memory_order(view: TensorView) -> TensorView:
    """The same bytes with sizes in memory order."""
    return replace(
        view, sizes=tuple(view.sizes[dim] for dim in view.dim_order), dim_order=tuple(range(len(view.sizes)))
    )


class PortableForms:
    """The forms of one method's host calls and copies."""

    def __init__(self, method: Method, views: Mapping[str, TensorView]) -> None:
        self._values = {value.name: value for value in method.values}
        self._bounds = {symbol.name: symbol.upper for symbol in method.symbols}
        self._views = views

    def form(self, item: HostCall | Copy) -> KernelForm:
        """The portable form where there is one, else the instruction's own."""
        if isinstance(item, Copy):
            if item.kind is CopyKind.LOCAL:
                return self._clone(item.source, item.destination, None, COPIES[item.kind])
            return KernelForm(COPIES[item.kind], (Ref(item.source),))
        match item.target, item.arguments:
            case "aten::clone.out", (Ref(name=source), memory_format):
                return self._clone(source, item.writes[0], memory_format, item.target)
            case "aten::addmm.out", (Ref() as bias, Ref() as left, Ref(name=right), 1, 1) if (
                self._is_transposed(right)
                and self._is_row_major(left.name)
                and len(self._views[bias.name].sizes) == 1
            ):
                return KernelForm("aten::linear.out", (left, InMemoryOrder(right), bias))
            case "aten::mm.out", (Ref() as left, Ref(name=right)) if self._is_transposed(
                right
            ) and self._is_row_major(left.name):
                return KernelForm("aten::linear.out", (left, InMemoryOrder(right), None))
            case _:
                return KernelForm(item.target, item.arguments)

    def _clone(self, source: str, result: str, memory_format: Argument, otherwise: str) -> KernelForm:
        if self._is_row_major(source) and self._is_row_major(result):
            return KernelForm(CLONE, (Ref(source), memory_format))
        if self._is_expressible(source) and self._is_row_major(result):
            order = self._views[source].dim_order
            permutation = tuple(order.index(dim) for dim in range(len(order)))
            return KernelForm("aten::permute_copy.out", (InMemoryOrder(source), permutation))
        own: tuple[Argument, ...] = () if otherwise == COPIES[CopyKind.LOCAL] else (memory_format,)
        return KernelForm(otherwise, (Ref(source), *own))

    def _is_expressible(self, name: str) -> bool:
        """Whether sizes and dimension order say all there is to say of the layout."""
        view, value = self._views[name], self._values[name]
        return is_dense(
            view.sizes, [evaluate(stride, self._bounds) for stride in value.strides], view.dim_order
        )

    def _is_row_major(self, name: str) -> bool:
        order = self._views[name].dim_order
        return order == tuple(range(len(order))) and self._is_expressible(name)

    def _is_transposed(self, name: str) -> bool:
        return self._views[name].dim_order == (1, 0) and self._is_expressible(name)

"""Products of a graph whose weight can be packed: linear layers, in either orientation, and experts.

A linear layer is ``aten.linear``, or ``aten.addmm`` with a weight that is stored [K, outputs] (the `Conv1D`
of transformers). Experts are matrices [E, outputs, K] or [E, K, outputs]: of groups of rows (`_grouped_mm`),
of rows that chose one each (a product with the indexed weight), or of as many batches of rows (`bmm`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..exported.control_flow import all_nodes
from ..exported.method import ExportedMethod
from ..exported.nodes import rank
from .experts import MOST

aten = torch.ops.aten
LINEAR = aten.linear.default
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_BATCHED = (aten.bmm.default, aten.matmul.default)
_FLIPS = (aten.transpose.int, aten.permute.default)


class Kind(Enum):
    """How rows come to their matrix."""

    LINEAR = "there is one"
    GROUPS = "by where groups end"
    CHOICE = "by an index each"
    BATCHES = "by their batch"


@dataclass(frozen=True)
class Product:
    """A product and how it reads its weight."""

    node: torch.fx.Node
    kind: Kind
    x_at: int
    """Which operand of ``node`` the rows are."""
    weight: Any
    """A placeholder of the method where ``node`` reads a constant."""
    is_flipped: bool = False
    """Whether the weight is stored with its outputs last."""
    bias_at: int | None = None
    which: Any = None
    """Ends of groups, or indices."""
    way: tuple[torch.fx.Node, ...] = ()
    """From the weight to the product, which comes last."""
    obstacle: str = ""
    """Why no kernel computes it."""

    @property
    def x(self) -> Any:
        """The rows, which another product may have given meanwhile."""
        return self.node.args[self.x_at]

    @property
    def bias(self) -> Any:
        """One value for each output, or None."""
        has_bias = self.bias_at is not None and self.bias_at < len(self.node.args)
        return self.node.args[self.bias_at or 0] if has_bias else None


def products(method: ExportedMethod) -> Iterator[Product]:
    """Every product whose weight is, or could be, a constant, in order."""
    for node in list(all_nodes(method.graph)):
        if node.op != "call_function":
            continue
        if node.target is LINEAR:
            yield Product(node, Kind.LINEAR, 0, node.args[1], bias_at=2, way=(node,))
        elif node.graph is method.graph.graph:
            found = _addmm(node) or _grouped(node) or _batched(node)
            if found is not None and found.weight.name in method.contents:
                yield found


def _addmm(node: torch.fx.Node) -> Product | None:
    if node.target is not aten.addmm.default or not isinstance(node.args[2], torch.fx.Node):
        return None
    factors = {float(node.kwargs.get(name, 1)) for name in ("alpha", "beta")}  # type: ignore[arg-type]
    obstacle = "" if factors == {1.0} and rank(node.args[0]) == 1 else "it is more than a product and a bias"
    return Product(node, Kind.LINEAR, 1, node.args[2], True, 0, way=(node,), obstacle=obstacle)


def _grouped(node: torch.fx.Node) -> Product | None:
    if str(node.target) not in _GROUPED or rank(node.args[1]) != 3 or len(node.args) < 3:
        return None
    found = _origin(node.args[1], is_flipped=True)
    if found is None or found.which is not None:
        return None
    more = [value for value in (*node.args[3:], *node.kwargs.values()) if value is not None]
    obstacle = "its product has a bias or a type of its own" if more else _obstacle(found, node)
    weight, is_flipped, way = found.weight, found.is_flipped, (*found.way, node)
    return Product(node, Kind.GROUPS, 0, weight, is_flipped, None, node.args[2], way, obstacle)


def _batched(node: torch.fx.Node) -> Product | None:
    if node.target not in _BATCHED or [rank(a) for a in node.args[:2]] != [3, 3]:
        return None
    for is_left in (False, True):
        weight, x = node.args[0 if is_left else 1], node.args[1 if is_left else 0]
        found = _origin(weight, is_flipped=not is_left)
        if found is None or (is_left and found.which is None):
            continue
        kind = Kind.BATCHES if found.which is None else Kind.CHOICE
        rows = _shape(x)[2 if is_left else 1]
        obstacle = _obstacle(found, node)
        if kind is Kind.CHOICE and rows != 1:
            obstacle = "a matrix is chosen for several rows"
        elif kind is Kind.BATCHES and not (isinstance(rows, int) and _shape(x)[0] == _shape(found.weight)[0]):
            obstacle = "its number of rows is known late"
        weight, is_flipped, way = found.weight, found.is_flipped, (*found.way, node)
        return Product(node, kind, int(is_left), weight, is_flipped, None, found.which, way, obstacle)
    return None


def _obstacle(found: _Origin, node: torch.fx.Node) -> str:
    value = found.weight.meta["val"]
    if value.shape[0] > MOST:
        return f"it has more than {MOST} matrices"
    return "" if value.dtype == node.meta["val"].dtype else "rows have another type than its weight"


@dataclass(frozen=True)
class _Origin:
    """Where an operand comes from: a weight, transposed and indexed on the way."""

    weight: torch.fx.Node
    is_flipped: bool
    which: torch.fx.Node | None = None
    way: tuple[torch.fx.Node, ...] = ()


def _origin(operand: Any, *, is_flipped: bool) -> _Origin | None:
    """``is_flipped``: whether the operand has its outputs last; None where no 3-D constant is there."""
    which: torch.fx.Node | None = None
    way: list[torch.fx.Node] = []
    while isinstance(operand, torch.fx.Node) and operand.op == "call_function":
        index = _index_of(operand)
        if _is_flip(operand):
            is_flipped = not is_flipped
        elif index is not None and which is None:
            which = index
        else:
            return None
        way.insert(0, operand)
        operand = operand.args[0]
    if not isinstance(operand, torch.fx.Node) or rank(operand) != 3:
        return None
    return _Origin(operand, is_flipped, which, tuple(way))


def _is_flip(node: torch.fx.Node) -> bool:
    """Whether a node swaps the last two of three dimensions."""
    if node.target not in _FLIPS or rank(node) != 3:
        return False
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return [int(d) % 3 for d in order] == [0, 2, 1]
    return {int(d) % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[arg-type]


def _index_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The list of indices by which a node takes matrices, if that is what it does."""
    index: Any = None
    if node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        index = indices[0] if len(indices) == 1 else None
    elif node.target is aten.index_select.default and node.args[1] == 0:
        index = node.args[2]
    is_list = isinstance(index, torch.fx.Node) and rank(index) == 1 and not _dtype(index).is_floating_point
    return index if is_list and _dtype(index) is not torch.bool else None


def _dtype(node: torch.fx.Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)

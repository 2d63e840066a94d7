"""Masks whose values follow from places alone, and which show all keys or the past.

Positions are counted (`arange`) and compared at every call, as `transformers` does in each model. Elements of
such tensors are linear in their indices, so what a comparison says of all of them is known at export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..exported.nodes import as_node, rank
from .spelled_attention import Number

aten = torch.ops.aten


class Shown(Enum):
    """Which keys a mask shows to each query."""

    ALL = "all"
    PAST = "those up to the query's own place"


@dataclass(frozen=True)
class Line:
    """Integers that are ``offset`` plus a step for each index; dimensions are counted from the last, -1."""

    offset: int
    steps: Mapping[int, int] = field(default_factory=dict[int, int])

    def plus(self, other: Line, factor: int = 1) -> Line:
        """This and ``factor`` times another, broadcast."""
        steps = {
            d: self.steps.get(d, 0) + factor * other.steps.get(d, 0) for d in {*self.steps, *other.steps}
        }
        return Line(self.offset + factor * other.offset, {d: step for d, step in steps.items() if step})

    def moved(self, place: Callable[[int], int]) -> Line:
        """The same with other dimensions."""
        return Line(self.offset, {place(dimension): step for dimension, step in self.steps.items()})


@dataclass(frozen=True)
class Where:
    """Booleans that are true where all of these lines are at least 0."""

    lines: tuple[Line, ...] = ()

    def moved(self, place: Callable[[int], int]) -> Where:
        """The same with other dimensions."""
        return Where(tuple(line.moved(place) for line in self.lines))


Known = Line | Where
_LOWEST = -1e30
"""Added to a score, this or less leaves it no weight beside any other; so does the lowest float16."""


def shown(mask: torch.fx.Node, number: Number) -> Shown | None:
    """What an attention mask shows, where that follows from places alone; None where it does not.

    ``number`` reads constants of one element.
    """
    value, is_added = _known(mask), False
    if value is None:
        condition = _added_where(mask, number)
        value, is_added = (_known(condition) if condition is not None else None), True
    if not isinstance(value, Where) or not (is_added or mask.meta["val"].dtype == torch.bool):
        return None
    sizes = mask.meta["val"].shape
    lines = [line for line in value.lines if _least(line, sizes) < 0]
    if not lines:
        return Shown.ALL
    return Shown.PAST if lines == [Line(0, {-2: 1, -1: -1})] else None


def _least(line: Line, sizes: tuple[Any, ...]) -> float:
    """The least element, or less where a size has no bound."""
    least: float = line.offset
    for dimension, step in line.steps.items():
        size = sizes[dimension] if -dimension <= len(sizes) else 1
        if step < 0:
            least += step * (size - 1) if isinstance(size, int) else -math.inf
    return least


def _added_where(mask: torch.fx.Node, number: Number) -> torch.fx.Node | None:
    """The condition of a mask that adds 0 where it holds and hides where it does not."""
    if mask.op != "call_function":
        return None
    if mask.target in _SAME:
        source = as_node(mask.args[0])
        return _added_where(source, number) if source is not None else None
    if mask.target not in _CHOICES:
        return None
    condition, kept, hidden = mask.args[0], *(_number(value, number) for value in mask.args[1:3])
    dtype = mask.meta["val"].dtype
    lowest = max(_LOWEST, torch.finfo(dtype).min) if dtype.is_floating_point else 0.0
    hides = kept == 0 and hidden is not None and hidden <= lowest < 0
    return as_node(condition) if hides else None


def _number(value: Any, number: Number) -> float | None:
    """A number, or the one that all elements of a tensor are."""
    if isinstance(value, int | float):
        return float(value)
    node = as_node(value)
    if node is None or node.op != "call_function" or node.target not in _FILLED:
        return number(node) if node is not None else None
    fill = _FILLED[node.target](node)
    return float(fill) if isinstance(fill, int | float) else None


def _known(node: torch.fx.Node) -> Known | None:
    """What a node's elements are by their places; None for what depends on anything else."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    if value.dtype != torch.bool and value.dtype not in (torch.int32, torch.int64):
        return None
    known, sizes = _of_operator(node), value.shape
    # The only element of a dimension has index 0, whatever it is broadcast to later.
    if isinstance(known, Line):
        return _without_single(known, sizes)
    return Where(tuple(_without_single(line, sizes) for line in known.lines)) if known is not None else None


def _without_single(line: Line, sizes: tuple[Any, ...]) -> Line:
    return Line(line.offset, {d: step for d, step in line.steps.items() if str(sizes[d]) != "1"})


def _of_operator(node: torch.fx.Node) -> Known | None:
    if node.target in _FILLED:
        return _filled(_FILLED[node.target](node), node.meta["val"].dtype)
    if node.target in _COUNTING:
        return _counted(node)
    if node.target in _COMPARISONS or node.target in _EQUAL:
        return _compared(node)
    if node.target in _BOTH:
        first, second = (_operand(argument) for argument in node.args)
        is_known = isinstance(first, Where) and isinstance(second, Where)
        return Where(first.lines + second.lines) if is_known else None  # type: ignore[union-attr]
    if node.target in _SUMS:
        return _summed(node, _SUMS[node.target])
    if node.target in _MOVES:
        source = as_node(node.args[0])
        known = _known(source) if source is not None else None
        return _MOVES[node.target](node, known) if known is not None else None
    return None


def _operand(argument: Any) -> Known | None:
    if isinstance(argument, bool | int):
        return _filled(argument, torch.bool if isinstance(argument, bool) else torch.int64)
    node = as_node(argument)
    return _known(node) if node is not None else None


def _filled(fill: Any, dtype: torch.dtype) -> Known | None:
    if not isinstance(fill, bool | int):
        return None
    if dtype == torch.bool:
        return _ALWAYS if fill else _NEVER
    return Line(int(fill))


def _counted(node: torch.fx.Node) -> Line | None:
    start, step = _COUNTING[node.target](node)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return Line(start, {-1: step})


def _compared(node: torch.fx.Node) -> Where | None:
    first, second = (_operand(argument) for argument in node.args)
    if not isinstance(first, Line) or not isinstance(second, Line):
        return None
    difference = first.plus(second, -1)
    if node.target in _EQUAL:
        holds = (difference.offset == 0) == _EQUAL[node.target]
        return None if difference.steps else _ALWAYS if holds else _NEVER
    sign, margin = _COMPARISONS[node.target]
    signed = Line(0).plus(difference, sign)
    return Where((Line(signed.offset - margin, signed.steps),))


def _summed(node: torch.fx.Node, factor: int) -> Line | None:
    first, second = (_operand(argument) for argument in node.args)
    if not isinstance(first, Line) or not isinstance(second, Line) or node.kwargs.get("alpha", 1) != 1:
        return None
    return first.plus(second, factor)


def _unsqueezed(node: torch.fx.Node, known: Known) -> Known:
    size, place = rank(node), int(str(node.args[1]))
    behind = (place if place < 0 else place - size) + 1
    return known.moved(lambda dimension: dimension if dimension >= behind else dimension - 1)


def _transposed(node: torch.fx.Node, known: Known) -> Known:
    size = rank(node)
    pair = [place if place < 0 else place - size for place in map(int, map(str, node.args[1:3]))]
    swapped = {pair[0]: pair[1], pair[1]: pair[0]}
    return known.moved(lambda dimension: swapped.get(dimension, dimension))


def _arguments(node: torch.fx.Node, *defaults: Any) -> tuple[Any, ...]:
    return (*node.args, *defaults[len(node.args) :])


def _sliced(node: torch.fx.Node, known: Known) -> Known | None:
    _, _, start, _, step = _arguments(node, None, 0, None, None, 1)
    is_whole = start in (None, 0) and step == 1
    return known if is_whole else None


def _indexed(node: torch.fx.Node, known: Known) -> Line | None:
    """Elements at counted places: linear in what is linear."""
    source, places = node.args
    size = rank(source)
    if not isinstance(known, Line) or not isinstance(places, list | tuple) or len(places) != size:
        return None
    result = Line(known.offset)
    for dimension, place in zip(range(-size, 0), places, strict=True):
        index = _operand(place)
        if not isinstance(index, Line) or _least(index, place.meta["val"].shape) < 0:  # from the end
            return None
        result = result.plus(index, known.steps.get(dimension, 0))
    return result


def _differences(node: torch.fx.Node, known: Known) -> Line | None:
    """From each element to the next, where what is put in front continues the line."""
    _, order, dimension, before, after = _arguments(node, None, 1, -1, None, None)
    first = _operand(before)
    if not isinstance(known, Line) or not isinstance(first, Line) or after is not None:
        return None
    if order != 1 or dimension not in (-1, rank(node) - 1) or before.meta["val"].shape[-1] != 1:
        return None
    step = known.steps.get(-1, 0)
    begin = Line(known.offset, {d: s for d, s in known.steps.items() if d != -1})
    return Line(step) if begin.plus(first, -1) == Line(step) else None


def _summed_up(node: torch.fx.Node, known: Known) -> Line | None:
    return Line(0) if known in (_NEVER, Line(0)) else None


_ALWAYS, _NEVER = Where(), Where((Line(-1),))
_SAME = (
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default, aten.contiguous.default,
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_FILLED: dict[Any, Callable[[torch.fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten.ones.default: lambda node: 1,
    aten.zeros.default: lambda node: 0,
    aten.new_ones.default: lambda node: 1,
    aten.new_zeros.default: lambda node: 0,
    aten.full_like.default: lambda node: node.args[1],
    aten.ones_like.default: lambda node: 1,
    aten.zeros_like.default: lambda node: 0,
}
"""What each fills a tensor with."""
_COUNTING: dict[Any, Callable[[torch.fx.Node], tuple[Any, Any]]] = {
    aten.arange.default: lambda node: (0, 1),
    aten.arange.start: lambda node: (node.args[0], 1),
    aten.arange.start_step: lambda node: (node.args[0], node.args[2] if len(node.args) > 2 else 1),
}
"""(first, step) of each."""
_COMPARISONS: dict[Any, tuple[int, int]] = {
    aten.ge.Tensor: (1, 0), aten.ge.Scalar: (1, 0), aten.gt.Tensor: (1, 1), aten.gt.Scalar: (1, 1),
    aten.le.Tensor: (-1, 0), aten.le.Scalar: (-1, 0), aten.lt.Tensor: (-1, 1), aten.lt.Scalar: (-1, 1),
}  # fmt: skip
"""(sign, margin): ``sign * (first - second) - margin >= 0``."""
_EQUAL = {aten.eq.Tensor: True, aten.eq.Scalar: True, aten.ne.Tensor: False, aten.ne.Scalar: False}
"""Whether each holds where its operands are equal."""
_BOTH = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
_SUMS = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_MOVES: dict[Any, Callable[[torch.fx.Node, Known], Known | None]] = {
    **dict.fromkeys(_SAME, lambda node, known: known),
    aten.unsqueeze.default: _unsqueezed,
    aten.transpose.int: _transposed,
    aten.slice.Tensor: _sliced,
    aten.index.Tensor: _indexed,
    aten.diff.default: _differences,
    aten.cumsum.default: _summed_up,
}
"""Operators of one tensor of places: most leave elements as they are. With the last three, `transformers`
finds out whether positions begin anew within a row."""

"""Tensors whose size is a number read from data: `x[:n]`, `arange(n)`, `repeat_interleave`. See `ragged`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..inductor.interfaces import pytree
from .ragged_rules import Call, Ragged, bounded, bounds_of, ragged_axes, tensors

FACTORIES = {
    "zeros": 0, "ones": 0, "full": 0, "empty": 0, "expand": 1,
    "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1,
}  # fmt: skip
"""Operators that are told a shape, and which argument it is."""


def count_of(call: Call) -> Any:
    """The number among an operator's arguments that is the size of its result; None where there is none."""
    value = tensors(call.node)[0]
    axes = ragged_axes(value)
    if len(axes) != 1:
        return None
    extent: Any = value.shape[axes[0]]
    wanted = extent.node.expr
    raw: list[Any] = pytree.tree_leaves((list(call.node.args), dict(call.node.kwargs)))
    given: list[Any] = pytree.tree_leaves((list(call.args), call.kwargs))
    for before, now in zip(raw, given, strict=True):
        number = before.meta.get("val") if isinstance(before, torch.fx.Node) else None
        if isinstance(number, torch.SymInt) and number.node.expr == wanted:
            return now
    return None


def by_size(call: Call, count: Any) -> Ragged:
    """The operator at the bound of the size that it is told."""
    value = tensors(call.node)[0]
    (axis,) = ragged_axes(value)
    extent = bounded(call.node)
    if call.name in FACTORIES:
        args = list(call.args)
        args[FACTORIES[call.name]] = [*value.shape[:axis], extent, *value.shape[value.dim() + axis + 1 :]]
        data = call.target(*args, **call.kwargs)
    elif call.name == "arange" and _from_zero(call):
        data = torch.arange(extent, dtype=value.dtype, device=value.device)
    elif call.name == "slice":
        data = _front(call, value.dim() + axis, extent)
    else:
        raise call.refuse()
    return Ragged(data, count, axis)


def _from_zero(call: Call) -> bool:
    numbers: list[Any] = [each for each in call.node.args if not isinstance(each, torch.fx.Node)]
    return numbers in ([], [0], [0, 1])


def _front(call: Call, dim: int, extent: int) -> Tensor:
    x, *rest = call.args
    start, step = (rest[1] if len(rest) > 1 else None), (rest[3] if len(rest) > 3 else 1)
    at = int(rest[0]) % x.dim() if rest else 0
    if not isinstance(x, Tensor) or start not in (None, 0) or step != 1 or at != dim:
        raise call.refuse()
    if isinstance(x.size(dim), torch.SymInt) or x.size(dim) < extent:
        raise call.refuse()
    return x.narrow(dim, 0, extent)


def repeat_interleave(call: Call) -> Ragged:
    """Each element along a dimension so often as ``repeats`` says, which is one number for each or for all.

    The element at a place is the first whose running total of repeats passes that place.
    """
    if call.overload == "Tensor":
        found, count = _repeated(call, call.args[0])
        return Ragged(found, count, -1)
    x, repeats, *rest = call.args
    if not isinstance(x, Tensor) or call.overload != "self_Tensor" or call.ragged():
        raise call.refuse()
    dim = rest[0] if rest else None
    x, dim = (x.flatten(), 0) if dim is None else (x, int(dim) % x.dim())
    found, count = _repeated(call, repeats.flatten().expand(x.size(dim)))
    return Ragged(x.index_select(dim, found), count, dim - x.dim())


def _repeated(call: Call, repeats: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(repeats, Tensor):
        raise call.refuse()
    ends = repeats.to(torch.int64).cumsum(0)
    places = torch.arange(bounded(call.node), device=repeats.device)
    found = torch.searchsorted(ends, places, right=True).clamp(max=repeats.size(0) - 1)
    return found, ends[-1]


def join(call: Call) -> Ragged:
    """Tensors one behind the other along a size that depends on data: each begins where the last one ends."""
    axis = call.ragged()[0].axis
    given = [p if isinstance(p, Ragged) else Ragged(p, p.size(axis), axis) for p in call.args[0]]
    rooms: list[Any] = [piece.data.size(axis) for piece in given]
    if not all(isinstance(room, int) for room in rooms):
        raise call.refuse()
    if len(given) == 1:
        return given[0]
    device = given[0].data.device
    ends: list[Any] = list(accumulate(piece.count for piece in given))
    places = torch.arange(sum(rooms), device=device)
    shift: Any = 0  # by how much what lies behind a piece moves up
    for end, room in zip(ends[:-1], accumulate(rooms), strict=False):
        shift = torch.where(places >= end, room - end, shift)
    both = torch.cat([piece.data for piece in given], axis)
    source = (places + shift).clamp(max=sum(rooms) - 1)
    return Ragged(both.index_select(axis, source), ends[-1], axis, sum(rooms))


def split(call: Call) -> list[Ragged]:
    """Pieces of the given sizes, one behind the other along a size that depends on data."""
    x, sizes, *rest = call.args
    dim = int(rest[0]) if rest else 0
    if not isinstance(x, Ragged) or (dim - x.data.dim() if dim >= 0 else dim) != x.axis:
        raise call.refuse()
    start: Any = 0
    made: list[Ragged] = []
    for size, value in zip(sizes, tensors(call.node), strict=True):
        extent = x.data.size(x.axis)
        upper = bounds_of(value.shape[x.axis])[1]
        room = extent if upper is None else min(upper, extent)
        rows = (start + torch.arange(room, device=x.data.device)).clamp(max=extent - 1)
        is_whole = len(sizes) == 1
        data = x.data if is_whole else x.data.index_select(x.axis + x.data.dim(), rows)
        made.append(Ragged(data, x.count if is_whole else size, x.axis, extent if is_whole else room))
        start = start + size
    return made


def cut(call: Call) -> Ragged:
    """A slice along a size that depends on data, from and to constants: ``x[:k]``, ``x[1:]``, ``x[-k:]``."""
    x, *rest = call.args
    start, end, step = (rest[i] if len(rest) > i else None for i in (1, 2, 3))
    extent: Any = x.data.size(x.axis)
    if step not in (None, 1) or not isinstance(extent, int):
        raise call.refuse()
    begin, stop = start or 0, extent if end is None else end
    if not (isinstance(begin, int) and isinstance(stop, int)):
        raise call.refuse()
    first, last = _place(x.count, begin), _place(x.count, stop)
    count = (last - first).clamp(min=0)
    if begin >= 0:
        room = max(min(stop if stop >= 0 else extent + stop, extent) - begin, 0)
        data = x.data.narrow(x.axis, min(begin, extent), room)
    else:
        room = max(min(-begin, extent) + min(stop, 0), 0)
        rows = first + torch.arange(room, device=x.data.device)
        data = x.data.index_select(x.axis + x.data.dim(), rows.clamp(max=max(extent - 1, 0)))
    return Ragged(data, count, x.axis, room)


def _place(count: Tensor, at: int) -> Tensor:
    """Where a slice begins or ends among ``count`` elements."""
    return count.clamp(max=at) if at >= 0 else (count + at).clamp(min=0)

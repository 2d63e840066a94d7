"""Sorting along a size that depends on data: what is behind the count stays behind it. See `ragged`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..inductor.overloads import arguments
from .ragged_rules import Call, Ragged, bounded

aten = torch.ops.aten


def sort(call: Call) -> list[Any]:
    """Values and places, in order."""
    x, dim, descending = _asked(call)
    if dim != x.axis:
        return [Ragged(part, x.count, x.axis, x.most) for part in call.run()]
    return [Ragged(part, x.count, x.axis, x.most) for part in in_order(x, descending)]


def argsort(call: Call) -> Ragged:
    """The places alone."""
    x, dim, descending = _asked(call)
    if dim != x.axis:
        raise call.refuse()
    return Ragged(in_order(x, descending)[1], x.count, x.axis, x.most)


def topk(call: Call) -> list[Any]:
    """The k largest or smallest, the front of what is sorted; torch asserts that there are so many."""
    x, k, *rest = call.args
    dim, largest = (rest[0] if rest else -1), (rest[1] if len(rest) > 1 else True)
    if not isinstance(x, Ragged) or not isinstance(k, int | Tensor):
        raise call.refuse()
    if dim % x.data.dim() - x.data.dim() != x.axis:
        return [Ragged(part, x.count, x.axis, x.most) for part in call.run()]
    if any(isinstance(extent, torch.SymInt) for extent in x.data.shape) or (
        isinstance(k, int) and x.data.size(x.axis) < k
    ):
        raise call.refuse()
    if isinstance(k, int):
        return [part.narrow(x.axis, 0, k) for part in in_order(x, largest)]
    room = min(bounded(call.node), x.data.size(x.axis))
    return [Ragged(part.narrow(x.axis, 0, room), k, x.axis, room) for part in in_order(x, largest)]


def _asked(call: Call) -> tuple[Ragged, int, bool]:
    """The tensor, the dimension from the right, and whether the largest come first."""
    names = [argument.name for argument in arguments(call.target)]
    given = {**call.kwargs, **dict(zip(names, call.args, strict=False))}
    x = given["self"]
    if not isinstance(x, Ragged) or ("dim" in given and given["dim"] is None):
        raise call.refuse()
    rank = x.data.dim()
    return x, int(given.get("dim", -1)) % rank - rank, bool(given.get("descending", False))


def in_order(x: Ragged, descending: bool) -> tuple[Tensor, Tensor]:
    """Stable, so that what is real comes before what is filled in and equal to it. NaN is the largest."""
    filled = x.filled(_last(x.data, descending))
    values, places = aten.sort.stable(filled, stable=True, dim=x.axis, descending=descending)
    return values, places


def _last(x: Tensor, descending: bool) -> float | bool:
    if x.dtype == torch.bool:
        return not descending
    if x.is_floating_point():
        return float("-inf") if descending else float("nan")
    limits = torch.iinfo(x.dtype)
    return int(limits.min if descending else limits.max)

"""Different elements, as many as data has: `unique`, `unique_consecutive`. See `ragged`.

What is sorted is cut into groups where an element differs from the one in front of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ragged_rules import Call, Ragged, found_by

_MOST_COLUMNS = 32
"""Elements of a slice that is compared as a whole: each is a sort."""


def unique(call: Call) -> list[Any]:
    """As ``aten._unique2``: of all elements, in order."""
    x = _given(call)
    values, order = _stable_sort(x.flatten())
    return _groups(call, _differ(values), order, values, 0, x.shape, call.args[2:4])


def unique_dim(call: Call) -> list[Any]:
    """As ``aten.unique_dim``: slices along a dimension, in the order of their elements."""
    x = _given(call)
    dim = int(call.args[1]) % x.dim()
    rows = x.movedim(dim, 0).flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    columns: int | torch.SymInt = rows.size(1)
    if not isinstance(columns, int) or columns > _MOST_COLUMNS:
        raise call.refuse()
    order = torch.arange(rows.size(0), device=x.device)
    for column in reversed(rows.unbind(1)):
        order = order.gather(0, _stable_sort(column.gather(0, order))[1])
    is_first = _differ(rows.index_select(0, order))
    values = x.index_select(dim, order)
    return _groups(call, is_first, order, values, dim, (x.size(dim),), call.args[3:5])


def unique_consecutive(call: Call) -> list[Any]:
    """As ``aten.unique_consecutive``: of all elements or of slices along a dimension, as they come."""
    x = _given(call)
    wanted, dim = call.args[1:3], call.args[3] if len(call.args) > 3 else call.kwargs.get("dim")
    if dim is None:
        flat = x.flatten()
        return _groups(call, _differ(flat), None, flat, 0, x.shape, wanted)
    dim = int(dim) % x.dim()
    is_first = _differ(x.movedim(dim, 0))
    return _groups(call, is_first, None, x, dim, (x.size(dim),), wanted)


def _given(call: Call) -> Tensor:
    x = call.args[0]
    if not isinstance(x, Tensor) or x.numel() == 0:
        raise call.refuse()
    return x


def _stable_sort(x: Tensor) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = torch.ops.aten.sort.stable(x, stable=True, dim=0)
    return made


def _differ(rows: Tensor) -> Tensor:
    """Whether each differs from the one in front of it; the first does."""
    is_new = rows != rows.roll(1, 0)
    is_new = is_new.flatten(1).any(1) if rows.dim() > 1 else is_new
    return is_new | (torch.arange(rows.size(0), device=rows.device) == 0)


def _groups(
    call: Call,
    is_first: Tensor,
    order: Tensor | None,
    values: Tensor,
    dim: int,
    shape: Any,
    wanted: Any,
) -> list[Any]:
    """The first of each group along ``dim``, the group of each element, and how many each has.

    ``order`` says where sorted elements were; ``wanted`` whether the latter two are asked for.
    """
    with_inverse, with_counts = (*(bool(each) for each in wanted), False, False)[:2]
    found = found_by(is_first, call.bound())
    places = found.data[:, 0]
    inverse = counts = is_first.new_zeros(0, dtype=torch.int64)
    if with_inverse:
        inverse = is_first.to(torch.int64).cumsum(0) - 1
        inverse = inverse if order is None else torch.zeros_like(inverse).scatter(0, order, inverse)
        inverse = inverse.reshape(shape)
    made = Ragged(values.index_select(dim, places), found.count, dim - values.dim(), found.most)
    if not with_counts:
        return [made, inverse, counts]
    is_last = torch.arange(places.size(0), device=places.device) == found.count - 1
    ends = torch.where(is_last, is_first.size(0), places.roll(-1, 0))
    return [made, inverse, Ragged(ends - places, found.count, -1, found.most)]

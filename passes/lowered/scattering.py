"""Scattering: sums by atomic additions, as Inductor has them; for what those cannot, each result looks.

Element types narrower than 32 bits are added as `int32`, which wraps around to the same, and half precision
is summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import masked_put

_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)
_HALF = (torch.float16, torch.bfloat16)
_ATOMIC = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32)
"""What Inductor scatters by itself."""


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """As ``aten.index_put`` for masks, and for sums of narrow integers; else NotImplemented."""
    made = masked_put.index_put(x, indices, values, accumulate)
    if made is not NotImplemented or not accumulate or x.dtype not in _NARROW:
        return made
    return _put(x.to(torch.int32), indices, values.to(torch.int32), accumulate=True).to(x.dtype)


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *, accumulate: bool) -> Tensor:
    """The operator itself, which is taken apart again."""
    made: Tensor = torch.ops.aten.index_put.default(x, indices, values, accumulate)
    return made


def _scattered(x: Tensor, dim: int, index: Tensor, source: Tensor, *, accumulate: bool) -> Tensor:
    """Elements of the source at the index along one dimension, at their own places along the others."""
    if 0 in (x.dim(), index.dim()):
        rows = (x.reshape(-1), 0, index.reshape(-1), source.reshape(-1))
        return _scattered(*rows, accumulate=accumulate).reshape(x.shape)
    places: list[Tensor] = []
    for d, extent in enumerate(index.shape):
        along = [1] * index.dim()
        along[d] = -1
        places.append(index if d == dim % x.dim() else torch.arange(extent, device=x.device).view(along))
    return _put(x, places, source[tuple(slice(0, e) for e in index.shape)], accumulate=accumulate)


def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """As ``aten.scatter.src`` for element types that Inductor hands to a library; else NotImplemented."""
    return NotImplemented if x.dtype in _ATOMIC else _scattered(x, dim, index, source, accumulate=False)


def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Any:
    """As ``aten.scatter.value``, likewise."""
    return scatter(x, dim, index, torch.full_like(index, value, dtype=x.dtype))


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """As ``aten.scatter_add``, likewise."""
    return NotImplemented if x.dtype in _ATOMIC else _scattered(x, dim, index, source, accumulate=True)


def scatter_with(x: Tensor, dim: int, index: Tensor, source: Tensor, *, reduce: str) -> Tensor:
    """As ``aten.scatter.reduce``, which knows `add` and `multiply`."""
    return scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


def scatter_value_with(x: Tensor, dim: int, index: Tensor, value: float, *, reduce: str) -> Tensor:
    """As ``aten.scatter.value_reduce``."""
    return scatter_with(x, dim, index, torch.full_like(index, value, dtype=x.dtype), reduce=reduce)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As ``aten.scatter_reduce.two``."""
    if 0 in (x.dim(), index.dim()):
        rows = (x.reshape(-1), 0, index.reshape(-1), source.reshape(-1))
        return scatter_reduce(*rows, reduce, include_self=include_self).reshape(x.shape)
    if reduce in ("sum", "mean"):
        return _summed(x, dim, index, source, is_mean=reduce == "mean", include_self=include_self)
    return _looked_for(x, dim, index, source, reduce, include_self=include_self)


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As ``aten.index_reduce``: whole slices go where the index says."""
    if x.dim() == 0:
        given = (index.reshape(1), source.reshape(1), reduce)
        return index_reduce(x.reshape(1), 0, *given, include_self=include_self).reshape(())
    along = [1] * x.dim()
    along[dim] = -1
    places = index.view(along).expand(source.shape)
    return scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


def _summed(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, is_mean: bool, include_self: bool
) -> Tensor:
    kind = torch.float32 if x.dtype in _HALF else x.dtype
    counts = torch.zeros_like(x, dtype=torch.int32)
    counts = counts.scatter_add(dim, index, torch.ones_like(index, dtype=torch.int32))
    start = x if include_self else torch.where(counts > 0, 0, x)
    total = start.to(kind).scatter_add(dim, index, source.to(kind))
    if is_mean:
        share = (counts + int(include_self)).clamp(min=1)
        total = total / share if x.is_floating_point() else total.div(share, rounding_mode="floor")
    return total.to(x.dtype)


def _looked_for(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool
) -> Tensor:
    """Products and extremes: each result looks through all sources along the dimension."""
    source = source[tuple(slice(0, extent) for extent in index.shape)]
    area = tuple(slice(None) if d == dim % x.dim() else slice(0, e) for d, e in enumerate(index.shape))
    old, places = x[area].movedim(dim, -1), torch.arange(x.size(dim), device=x.device)
    hit = index.movedim(dim, -1).unsqueeze(-2) == places[:, None]
    given = source.movedim(dim, -1).unsqueeze(-2)
    start = {"amax": _least(x), "amin": _most(x), "prod": 1}[reduce]
    chosen = torch.where(hit, given, torch.full((), start, dtype=x.dtype, device=x.device))
    is_hit = hit.any(-1)
    first = old if include_self else torch.where(is_hit, torch.full_like(old, start), old)
    if reduce == "prod":
        new = first * chosen.prod(-1)
    else:
        pick = torch.maximum if reduce == "amax" else torch.minimum
        new = pick(first, chosen.amax(-1) if reduce == "amax" else chosen.amin(-1))
    return _put_in_front(x, torch.where(is_hit, new.to(x.dtype), old).movedim(-1, dim), 0)


def _put_in_front(x: Tensor, values: Tensor, dim: int) -> Tensor:
    """x with values at the begin of all its dimensions from ``dim`` on; nothing is written in place."""
    if x.shape[dim:] == values.shape[dim:]:
        return values
    inner = _put_in_front(x.narrow(dim, 0, values.size(dim)), values, dim + 1)
    return torch.slice_scatter(x, inner, dim, 0, values.size(dim))


def _least(x: Tensor) -> float:
    return float("-inf") if x.is_floating_point() else _whole(x)[0]


def _most(x: Tensor) -> float:
    return float("inf") if x.is_floating_point() else _whole(x)[1]


def _whole(x: Tensor) -> tuple[int, int]:
    """The range of an integer type, of which bool is the least."""
    if x.dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(x.dtype)
    return info.min, info.max

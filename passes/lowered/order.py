"""Sorting and what follows from it, where no single kernel sorts: rows longer than Triton's sort takes.

A long row is sorted in pieces, and the pieces are merged two by two: an element's place in the merged run
is its place in its own piece and the number of elements of the other that come before it, found by
bisection. The largest few of a long row are found among those of its pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..exported.sizes import bound_of

aten = torch.ops.aten

SHORT = 512
"""Elements that a generated kernel sorts by itself."""


def sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """As ``aten.sort.stable``, for long rows; NotImplemented for short ones."""
    if x.dim() == 0 or most_of(x.size(dim)) <= SHORT:
        return NotImplemented
    rows = x.movedim(dim, -1).contiguous()
    keys = _keys(rows, descending)
    places = _merged(keys.reshape(-1, rows.size(-1))).reshape(rows.shape)
    return rows.gather(-1, places).movedim(-1, dim), places.movedim(-1, dim)


def most_of(extent: int | torch.SymInt) -> int:
    """An extent, or the bound of a dynamic one: rows of dynamic length are sorted at their bound."""
    most = extent if isinstance(extent, int) else bound_of(None, extent)[1]
    if most is None:
        raise NotImplementedError("rows without a bound on their length are not sorted")
    return most


def _keys(rows: Tensor, descending: bool) -> Tensor:
    """Integers in the order of the elements: for floats by their bits, with NaN as the largest."""
    if rows.dtype == torch.bool or rows.dtype == torch.uint8:
        keys = rows.to(torch.int32)
    elif not rows.is_floating_point():
        keys = rows if rows.dtype == torch.int64 else rows.to(torch.int32)
    else:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        word = torch.int64 if wide == torch.float64 else torch.int32
        bits = (rows.to(wide) + 0.0).view(word)  # -0.0 equals 0.0
        keys = torch.where(bits < 0, bits ^ torch.iinfo(word).max, bits)
        keys = torch.where(rows.isnan(), torch.iinfo(word).max, keys)
    return ~keys if descending else keys


def _merged(keys: Tensor) -> Tensor:
    """Where the elements of sorted rows come from; ``keys`` are [rows, length]."""
    rows, length = keys.shape
    most, runs = most_of(length), 1
    while -(-most // runs) > SHORT:
        runs *= 2
    piece = -(-most // runs)
    keys, places = stable_sort(_padded(keys, runs * piece).reshape(rows * runs, piece), -1)
    start = torch.arange(runs, device=keys.device) * piece
    places = places.reshape(rows, runs, piece) + start[:, None]  # equal elements stand before the padding
    while runs > 1:
        runs, piece = runs // 2, piece * 2
        keys, places = _merge(keys.reshape(rows * runs, 2, -1), places.reshape(rows * runs, 2, -1))
    return places.reshape(rows, piece)[:, :length]


def _padded(keys: Tensor, length: int) -> Tensor:
    """Rows with the largest key behind them; `torch.nn.functional.pad` would take that through float64."""
    given = keys.size(-1)
    missing = length - given if isinstance(given, int) else length  # a dynamic number might be none
    most = keys.new_full((*keys.shape[:-1], missing), torch.iinfo(keys.dtype).max)
    return torch.cat([keys, most], -1)[..., :length]


def _merge(keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Two sorted runs [count, 2, half] each as one; of equals those of the first come first."""
    first, second = keys[:, 0].contiguous(), keys[:, 1].contiguous()
    own = torch.arange(first.size(-1), device=keys.device)
    to_first = own + torch.searchsorted(second, first, right=False)
    to_second = own + torch.searchsorted(first, second, right=True)
    to = torch.cat([to_first, to_second], -1)
    flat = torch.cat([first, second], -1)
    return (
        torch.zeros_like(flat).scatter(-1, to, flat),
        torch.zeros_like(to).scatter(-1, to, places.flatten(-2)),
    )


def searchsorted(sequence: Tensor, values: Tensor, *, sorter: Tensor | None = None, **rest: Any) -> Any:
    """As ``aten.searchsorted.Tensor`` in a part of a tensor; NotImplemented for whole ones.

    Inductor of torch 2.11 searches from the beginning of what the part is of.
    """
    if _begins(sequence) and (sorter is None or _begins(sorter)):
        return NotImplemented
    sorter = None if sorter is None else _whole(sorter)
    return aten.searchsorted.Tensor(_whole(sequence), values, sorter=sorter, **rest)


def bucketize(values: Tensor, boundaries: Tensor, **rest: Any) -> Any:
    """As ``aten.bucketize.Tensor``, likewise."""
    if _begins(boundaries):
        return NotImplemented
    return aten.bucketize.Tensor(values, _whole(boundaries), **rest)


def _whole(x: Tensor) -> Tensor:
    """A copy; Inductor would take a clone for what it is of."""
    return torch.maximum(x, x)


def _begins(x: Tensor) -> bool:
    offset: Any = x.storage_offset()
    return isinstance(offset, int) and offset == 0


def sort_default(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.sort.default``."""
    return stable_sort(x, dim, descending)


def stable_sort(x: Tensor, dim: int, descending: bool = False) -> tuple[Tensor, Tensor]:
    """The operator itself, for Inductor or for `sort`."""
    made: tuple[Tensor, Tensor] = aten.sort.stable(x, stable=True, dim=dim, descending=descending)
    return made


def argsort(x: Tensor, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Tensor:
    """As ``aten.argsort.stable``."""
    return stable_sort(x, dim, descending)[1]


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """As ``aten.topk``; equal elements come in the order of their positions."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    rows = x.movedim(dim, -1)
    if most_of(rows.size(-1)) <= SHORT or k > SHORT // 2:
        values, indices = stable_sort(rows, -1, largest)
        values, indices = values[..., :k], indices[..., :k]
    else:
        indices = _smallest(_keys(rows, largest), k)
        values = rows.gather(-1, indices)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def _smallest(keys: Tensor, k: int) -> Tensor:
    """Where the ``k`` smallest of each row are, in order: those of all pieces, then those of what is left."""
    length = most_of(keys.size(-1))
    if length <= SHORT:
        return stable_sort(keys, -1)[1][..., :k]
    count = -(-length // SHORT)
    pieces = _padded(keys, count * SHORT).reshape(*keys.shape[:-1], count, SHORT)
    least, places = stable_sort(pieces, -1)
    places = places[..., :k] + torch.arange(count, device=keys.device)[:, None] * SHORT
    return places.flatten(-2).gather(-1, _smallest(least[..., :k].flatten(-2), k))


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.kthvalue``."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = stable_sort(x, dim)
    values, indices = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.median.dim``: the lower of two middle elements, NaN where there is one."""
    values, indices = kthvalue(x, (x.size(dim) + 1) // 2 if x.dim() else 1, dim, keepdim)
    if x.is_floating_point():
        values = torch.where(x.isnan().any(dim, keepdim), float("nan"), values)
    return values, indices


def median(x: Tensor) -> Tensor:
    """As ``aten.median``: of all elements."""
    return median_dim(x.flatten(), 0)[0]


def nanmedian_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.nanmedian.dim``: the lower of two middle elements of those that are numbers."""
    if x.dim() == 0 or not x.is_floating_point():
        return median_dim(x, dim, keepdim)
    values, indices = stable_sort(x, dim)
    middle = ((~x.isnan()).sum(dim, keepdim=True) - 1).clamp(min=0) // 2
    values, indices = values.gather(dim, middle), indices.gather(dim, middle)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def nanmedian(x: Tensor) -> Tensor:
    """As ``aten.nanmedian``: of all elements."""
    return nanmedian_dim(x.flatten(), 0)[0]

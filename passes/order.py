"""Sorting and what follows from it, where no single kernel sorts: rows longer than Triton's sort takes.

A long row is sorted by counting, for each element, how many come before it: quadratic work, but one fused
kernel without memory of its own. The largest few of a long row are found among those of its pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

SHORT = 512
"""Elements that a generated kernel sorts by itself."""


def sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """As ``aten.sort.stable``, for long rows; NotImplemented for short ones."""
    if x.dim() == 0 or x.size(dim) <= SHORT:
        return NotImplemented
    rows = x.movedim(dim, -1).contiguous()
    position = torch.arange(rows.size(-1), device=x.device, dtype=torch.int32)
    here, other = rows.unsqueeze(-1), rows.unsqueeze(-2)
    first, second = (here, other) if descending else (other, here)
    is_before, is_equal = first < second, here == other
    if x.is_floating_point():  # NaN counts as the largest
        is_before = is_before | (second.isnan() & ~first.isnan())
        is_equal = is_equal | (here.isnan() & other.isnan())
    is_before = is_before | (is_equal & (position[None, :] < position[:, None]))
    rank = is_before.sum(-1)
    values = torch.zeros_like(rows).scatter(-1, rank, rows)
    indices = torch.zeros_like(rank, dtype=torch.int32).scatter(-1, rank, position.expand_as(rank))
    return values.movedim(-1, dim), indices.to(torch.int64).movedim(-1, dim)


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
    if rows.size(-1) <= SHORT or k > SHORT // 2:
        values, indices = stable_sort(rows, -1, largest)
        values, indices = values[..., :k], indices[..., :k]
    else:
        values, indices = _topk_of_pieces(rows, k, largest)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def _topk_of_pieces(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    count = -(-rows.size(-1) // SHORT)
    info = torch.finfo(rows.dtype) if rows.is_floating_point() else torch.iinfo(rows.dtype)
    last = (
        float("-inf" if largest else "inf") if rows.is_floating_point() else info.min if largest else info.max
    )
    padded = torch.nn.functional.pad(rows, (0, count * SHORT - rows.size(-1)), value=last)
    pieces = padded.reshape(*padded.shape[:-1], count, SHORT)
    values, indices = stable_sort(pieces, -1, largest)
    base = torch.arange(count, device=rows.device)[:, None] * SHORT
    values, indices = values[..., :k].flatten(-2), (indices[..., :k] + base).flatten(-2)
    values, chosen = topk(values, k, -1, largest)
    return values, indices.gather(-1, chosen)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.kthvalue``."""
    values, indices = stable_sort(x, dim)
    values, indices = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.median.dim``: the lower of two middle elements, NaN where there is one."""
    values, indices = kthvalue(x, (x.size(dim) + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        values = torch.where(x.isnan().any(dim, keepdim), float("nan"), values)
    return values, indices


def median(x: Tensor) -> Tensor:
    """As ``aten.median``: of all elements."""
    return median_dim(x.flatten(), 0)[0]

"""Bags of embeddings in one kernel: a program reads the rows of one bag, some columns of them.

Written out, the sum over bags is a product with a matrix of which row is in which bag, nearly all zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tape import ExternCall, OwnLaunch
from .own_launch import own_launch
from .own_operators import own_operator

OPERATOR = "devplan.embedding_bag.default"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDICES = (torch.int32, torch.int64)


@own_operator(
    "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? factors, int mode, int padding,"
    " bool has_last) -> Tensor"
)
def _fake(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    mode: int,
    padding: int,
    has_last: bool,
) -> torch.Tensor:
    return weight.new_empty(offsets.shape[0] - int(has_last), weight.shape[1])


def is_possible(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Whether the kernel takes these operands."""
    return weight.dtype in _DTYPES and indices.dtype in _INDICES and offsets.dtype in _INDICES


def bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    mode: int,
    padding: int,
    has_last: bool,
) -> torch.Tensor:
    """Sums (mode 0), means (1) or maxima (2) of the rows that ``indices`` name, bag by bag; else 0.

    ``offsets`` say where bags begin, with ``has_last`` also where the last one ends; the row of index
    ``padding`` does not count (-1: all do).
    """
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    given = (weight, indices.contiguous(), offsets.contiguous(), factors, mode, padding, has_last)
    made: torch.Tensor = torch.ops.devplan.embedding_bag(*given)
    return made


_SOURCE = """\
@triton.jit
def embedding_bag(weight, indices, offsets, factors, output{runtime}{constants}):
    bag = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(offsets + bag).to(tl.int64)
    stop = tl.load(offsets + bag + 1, mask=bag + 1 < OFFSETS, other=INDICES).to(tl.int64)
    START = float("-inf") if MODE == 2 else 0.0
    sums = tl.full([BLOCK_R, BLOCK_C], START, tl.float32)
    counts = tl.zeros([BLOCK_R], tl.int32)
    for first in range(begin, stop, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        row = tl.load(indices + i, mask=i < stop, other=PADDING).to(tl.int64)
        is_used = (i < stop) & (row != PADDING)
        mask = is_used[:, None] & (c < COLUMNS)[None, :]
        value = tl.load(weight + row[:, None] * weight_r + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(factors + i, mask=i < stop, other=0.0).to(tl.float32)[:, None]
        if MODE == 2:
            sums = tl.maximum(sums, tl.where(mask, value, START))
        else:
            sums += value
        counts += is_used.to(tl.int32)
    count = tl.sum(counts, 0)
    if MODE == 2:
        result = tl.where(count > 0, tl.max(sums, 0), 0.0)
    else:
        result = tl.sum(sums, 0)
    if MODE == 1:
        result = result / tl.maximum(count, 1).to(tl.float32)
    tl.store(output + bag * COLUMNS + c, result.to(output.dtype.element_ty), mask=c < COLUMNS)
"""


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    weight, indices, offsets, factors, mode, padding, _ = call.operands
    output = call.outs[0]
    columns = weight.sizes[1]
    wide = 1 << (int(columns) - 1).bit_length() if isinstance(columns, int) else 128
    constants: dict[str, Any] = {
        "BLOCK_C": max(16, min(128, wide)),
        "BLOCK_R": 8,
        "MODE": int(mode),
        "PADDING": int(padding),
        "WEIGHTED": factors is not None,
    }
    sizes = {
        "INDICES": indices.sizes[0],
        "OFFSETS": offsets.sizes[0],
        "BAGS": output.sizes[0],
        "COLUMNS": columns,
        "weight_r": weight.strides[0],
    }
    windows = {
        "weight": weight,
        "indices": indices,
        "offsets": offsets,
        "factors": weight if factors is None else factors,
        "output": output,
    }
    grid = ("BAGS", "-(COLUMNS // -BLOCK_C)", "1")
    return (own_launch(_SOURCE, windows, sizes, constants, grid, (output,)),)

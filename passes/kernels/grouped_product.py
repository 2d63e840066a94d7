"""Rows in groups times their groups' matrices, in one kernel: the experts of a mixture.

Written out, either every group's matrix is multiplied by all rows, or the matrix of each row is gathered
first. Here a block of rows never crosses the end of a group, so that it needs one matrix, and each matrix
is read by the blocks of its own rows alone. Which group a program's block belongs to follows from where the
groups end, which only the device knows; there are as many programs as any such division could need, and the
last ones have no work.
"""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..tape import ExternCall, OwnLaunch
from .own_launch import own_launch
from .own_operators import own_operator

OPERATOR = "devplan.grouped_product.default"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_GROUPS = 1023


@own_operator("grouped_product(Tensor x, Tensor weight, Tensor ends) -> Tensor")
def _fake(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


def is_possible(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these operands: x [rows, k] and weight [groups, k, n] of one type."""
    return (
        x.dim() == 2
        and weight.dim() == 3
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and weight.shape[0] <= _MOST_GROUPS
    )


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows ``ends[g-1]`` to ``ends[g]`` of x times ``weight[g]``; rows behind the last end give zeros."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    made: torch.Tensor = torch.ops.devplan.grouped_product(x, weight, ends.to(torch.int32))
    return made


ROWS_OF_A_TILE = """\
    g = tl.arange(0, BLOCK_G)
    end = tl.load(ends + g, mask=g < MATRICES, other=0)
    end = tl.where(g < MATRICES, end, ROWS).to(tl.int32)
    begin = tl.load(ends + g - 1, mask=(g > 0) & (g <= MATRICES), other=0)
    blocks = tl.where(g <= MATRICES, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(blocks, 0)
    is_mine = (upto - blocks <= tile) & (tile < upto)
    group = tl.sum(tl.where(is_mine, g, 0), 0)
    first = tl.sum(tl.where(is_mine, begin + (tile - upto + blocks) * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(is_mine, end, 0), 0)
    m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
"""
"""Text of a kernel: from a program's number ``tile`` to its ``group``, its rows ``m`` and their ``stop``.

Group number MATRICES are the rows behind the last end."""

_SOURCE = (
    """\
@triton.jit
def grouped_product(x, weight, ends, output{runtime}{constants}):
    tile = tl.program_id(0)
"""
    + ROWS_OF_A_TILE
    + """\
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = m < stop
    is_column = n < COLUMNS
    depth = tl.where(group < MATRICES, DEPTH, 0)
    weight += group.to(tl.int64) * weight_g
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        is_inside = start + k < DEPTH
        left = tl.load(
            x + m[:, None] * x_m + (start + k)[None, :], mask=is_row[:, None] & is_inside[None, :], other=0.0
        )
        right = tl.load(
            weight + (start + k)[:, None] * weight_k + n[None, :] * weight_n,
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        sums += tl.dot(left, right, input_precision="ieee")
    at = output + m[:, None] * output_m + n[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
"""
)
"""The sums of rows behind the last end stay zero."""


def rows_of_a_block(rows: Size, groups: int, dtype: DType) -> int:
    """Rows that a program takes: a power of two for twice an even share of them."""
    each = rows // groups if isinstance(rows, int) else 64
    return min(128 if dtype.itemsize == 2 else 64, max(16, 1 << max(each - 1, 1).bit_length()))


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    x, weight, ends = call.operands
    output = call.outs[0]
    groups, depth, columns = weight.sizes
    rows = x.sizes[0]
    block_m = rows_of_a_block(rows, groups, x.dtype)
    constants: dict[str, Any] = {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if block_m < 128 else 128,
        "BLOCK_K": 64 if x.dtype.itemsize == 2 else 32,
        "BLOCK_G": 1 << int(groups).bit_length(),
        "MATRICES": groups,
    }
    sizes = {
        "ROWS": rows,
        "COLUMNS": columns,
        "DEPTH": depth,
        "x_m": x.strides[0],
        "weight_g": weight.strides[0],
        "weight_k": weight.strides[1],
        "weight_n": weight.strides[2],
        "output_m": output.strides[0],
    }
    launch = own_launch(
        _SOURCE,
        {"x": x, "weight": weight, "ends": ends, "output": output},
        sizes,
        constants,
        ("-(ROWS // -BLOCK_M) + MATRICES + 1", "-(COLUMNS // -BLOCK_N)", "1"),
        (output,),
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )
    return (launch,)

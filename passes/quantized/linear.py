"""Linear layers with quantised weights: an operator of ours and the kernels that it becomes.

The weight is read as it is packed (`quantized_weight`), so that a product of few rows moves a half or a
quarter of the bytes. One row, which is decoding, is summed in float32 (`quantized_row`); more rows
go through the tensor cores, with the weight dequantised in registers to the type of x. Where few rows would
leave most of a GPU idle, the columns are split among programs, and a second kernel sums their parts. For
hundreds of rows the weight is written out first (`quantized_matrix`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..kernels.own_operators import own_operator
from ..tape import Allocate, ExternCall, OwnLaunch, Window
from . import matrix as quantized_matrix
from . import row as quantized_row
from .kernels import JOIN
from .launch import launch, weight_constants, weight_windows
from .tile import Arithmetic, Tile, tile_text
from .weight import words_per_chunk

OPERATOR = "devplan.quantized_linear.default"

_PROGRAMS = 264
"""How many programs keep a GPU of 108 to 132 SMs busy: two for each."""


@own_operator(
    "quantized_linear(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int bits,"
    " int group) -> Tensor"
)
def _fake(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0])


def on_rows(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The operator on a matrix whose rows are dense: leading dimensions are one."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    made: torch.Tensor
    if quantized_matrix.is_better(rows, words.shape[0]):
        scales, zeros, bias, bits, group = rest
        weight = quantized_matrix.written_out(rows, words, scales, zeros, bits, group)
        made = torch.nn.functional.linear(rows, weight, bias)
    else:
        made = torch.ops.devplan.quantized_linear(rows, words, *rest)
    return made.reshape(*x.shape[:-1], words.shape[0])


@dataclass(frozen=True)
class Blocks:
    """How a product is cut: rows of x and of the weight per program, and parts of the columns."""

    rows: int
    columns: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    in_halves: bool = True
    """Unpack in float16 where x and the scales are of it; else in float32."""


def to_steps(call: ExternCall) -> tuple[Allocate | OwnLaunch, ...]:
    """What one call of the operator, on a matrix x [M, K], becomes."""
    x, words = call.operands[:2]
    if x.sizes[0] == 1:
        return quantized_row.to_steps(call)
    (columns, row_words), bits = words.sizes, call.operands[5]
    return tile_steps(call, blocks_of(x.sizes[0], columns, row_words, x.dtype, bits))


def blocks_of(rows: Size, columns: int, row_words: int, dtype: DType, bits: int) -> Blocks:
    """Tiles for M rows and N columns, as measured on an H200; an unknown M counts as some hundreds."""
    if dtype is DType.FLOAT32:  # no tensor cores: sums stay in registers, and few fit
        return Blocks(16, 32)
    if not isinstance(rows, int):
        return Blocks(128, 64)
    if rows > 256 and math.ceil(rows / 256) * math.ceil(columns / 128) >= _PROGRAMS // 2:
        return Blocks(256, 128, num_warps=8)
    height = next((n for n in (16, 32, 64) if rows <= n), 128)
    tiles = math.ceil(columns / 64) * math.ceil(rows / height)
    chunks = row_words // words_per_chunk(bits)
    splits = max(1, min(_PROGRAMS // tiles, chunks // (2 if height <= 32 else 8)))
    return Blocks(height, 64, math.ceil(chunks / math.ceil(chunks / splits)))


def tile_steps(call: ExternCall, blocks: Blocks) -> tuple[Allocate | OwnLaunch, ...]:
    """The product in given blocks: one kernel, or two with the parts between them."""
    x, bias, output = call.operands[0], call.operands[4], call.outs[0]
    rows, columns = x.sizes[0], call.operands[1].sizes[0]
    constants = weight_constants(call.operands) | {"BLOCK_N": blocks.columns, "BLOCK_M": blocks.rows}
    constants["PART"] = math.ceil(constants["CHUNKS"] / blocks.splits)
    grid = ("-(N // -BLOCK_N)", "-(rows // -BLOCK_M)", str(blocks.splits))
    options = (blocks.num_warps, blocks.num_stages)
    strides = {"x_m": x.strides[0]}
    windows = weight_windows(call.operands)
    arithmetic = arithmetic_of(call.operands, in_halves=blocks.in_halves)
    groups = constants["GROUP"] != 0
    source = tile_text(
        Tile(call.operands[5], constants["RUN"], groups, bool(constants["HAS_ZEROS"]), arithmetic)
    )
    if blocks.splits == 1:
        whole = windows | {"output": output}
        return (launch(source, whole, {"rows": rows}, strides, constants, grid, output, options),)
    assert isinstance(rows, int)
    sizes = (blocks.splits, rows, columns)
    window = Window(f"{output.buffer}_parts", DType.FLOAT32, sizes, (rows * columns, columns, 1))
    parts = Allocate(window, blocks.splits * rows * columns * 4)
    constants["HAS_BIAS"] = False
    partial = windows | {"output": window}
    first = launch(source, partial, {"rows": rows}, strides, constants, grid, window, options)
    joined = {"parts": window, "bias": window if bias is None else bias, "output": output}
    sums: dict[str, Any] = {
        "N": columns,
        "SPLITS": blocks.splits,
        "BLOCK": 512,
        "HAS_BIAS": bias is not None,
    }
    elements = rows * columns
    second = launch(
        JOIN, joined, {"elements": elements}, {}, sums, ("-(elements // -BLOCK)", "1", "1"), output, (4, 2)
    )
    return parts, first, second


def arithmetic_of(operands: tuple[Any, ...], *, in_halves: bool = True) -> Arithmetic:
    """What weights are unpacked in, by the types of x and of the scales."""
    x, scales, group = operands[0], operands[2], operands[6]
    if x.dtype is DType.FLOAT32:
        return Arithmetic.LOOP
    is_half = x.dtype is DType.FLOAT16 and (not group or scales.dtype is DType.FLOAT16)
    return Arithmetic.HALVES if in_halves and is_half else Arithmetic.SINGLES

"""Rows times the packed matrices that each of them chose: the experts of a mixture.

The matrices [outputs, K] lie one below the other, packed as those of linear layers are. Which one a row needs
is given by where groups of rows end (`grouped_product`), or row by row. Few rows, which is decoding, each
read their own matrix from end to end, as `quantized_row` does; many rows in groups go through the tensor
cores in blocks that never cross the end of a group.
"""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..kernels.grouped_product import rows_of_a_block
from ..kernels.own_operators import own_operator
from ..tape import ExternCall, OwnLaunch
from .launch import launch, weight_constants, weight_windows
from .linear import Blocks, arithmetic_of
from .row import ONE, row_blocks_of, row_text
from .tile import Tile, tile_text

OPERATOR = "devplan.quantized_experts.default"
MOST = 1023
"""Matrices that the kernels can tell apart."""
_FEW_ROWS = 64
"""More are multiplied in blocks, and so are more than there are matrices, since some share one then."""

_SELECT = """\
    row = tl.program_id(1)
    if ARE_ENDS:
        g = tl.arange(0, BLOCK_G)
        ends = tl.load(chosen + g, mask=g < MATRICES, other=2147483647)
        matrix = tl.sum((ends <= row).to(tl.int32), 0)
    else:
        matrix = tl.load(chosen + row).to(tl.int32)
        matrix = tl.where(matrix < 0, matrix + MATRICES, matrix)
    is_used = matrix < MATRICES
    base = tl.where(is_used, matrix, 0).to(tl.int64) * OUTPUTS
    words += base * (CHUNKS * H)
    scales += base * GROUPS
    zeros += base * GROUPS
    x += row.to(tl.int64) * x_m
    output += row.to(tl.int64) * OUTPUTS
"""
_KEPT = "    result = tl.where(is_used, result, 0.0)\n"
"""Rows behind the last end are zeros."""


@own_operator(
    "quantized_experts(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor which, int bits,"
    " int group, int matrices, bool are_ends) -> Tensor"
)
def _fake(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[0] // rest[-2])


def on_rows(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    which: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """The operator on dense rows, with indices of 32 bits."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    made: torch.Tensor = torch.ops.devplan.quantized_experts(
        x, words, scales, zeros, which.to(torch.int32).contiguous(), *rest
    )
    return made


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    x, matrices, are_ends = call.operands[0], call.operands[7], call.operands[8]
    rows = x.sizes[0]
    is_few = isinstance(rows, int) and rows <= min(_FEW_ROWS, max(4, matrices))
    if is_few or not are_ends:
        return (by_rows(call),)
    return (by_tiles(call, blocks_of(rows, matrices, x.dtype)),)


def blocks_of(rows: Size, matrices: int, dtype: DType) -> Blocks:
    """Tiles for rows in groups."""
    if dtype is DType.FLOAT32:
        return Blocks(16, 32)
    return Blocks(min(64, rows_of_a_block(rows, matrices, dtype)), 64)


def _constants(call: ExternCall) -> dict[str, Any]:
    """What is known of the weights; N are the outputs of one matrix."""
    matrices = call.operands[7]
    known = weight_constants(_as_linear(call))
    return known | {
        "N": known["N"] // matrices,
        "MATRICES": matrices,
        "BLOCK_G": 1 << int(matrices).bit_length(),
    }


def _as_linear(call: ExternCall) -> tuple[Any, ...]:
    """Operands in the order of `quantized_linear`'s, which has a bias where this has indices."""
    x, words, scales, zeros, _, bits, group = call.operands[:7]
    return x, words, scales, zeros, None, bits, group


def by_rows(call: ExternCall) -> OwnLaunch:
    """Each row reads its own matrix."""
    x, chosen, output = call.operands[0], call.operands[4], call.outs[0]
    constants = _constants(call)
    outputs, bits = constants.pop("N"), constants["BITS"]
    rows = x.sizes[0]
    blocks = row_blocks_of(
        outputs * rows if isinstance(rows, int) else outputs, call.operands[1].sizes[1], bits
    )
    constants |= {
        "OUTPUTS": outputs,
        "ROWS": blocks.columns,
        "BLOCK_N": blocks.columns,
        "BLOCK_C": blocks.chunks,
        "HAS_NORM": False,
        "EPS": 0.0,
        "HAS_ADDED": False,
        "IS_GATED": False,
        "ARE_ENDS": bool(call.operands[8]),
    }
    windows = weight_windows(_as_linear(call))
    windows |= {"norm": windows["scales"], "added": windows["scales"], "output": output, "chosen": chosen}
    source = row_text("result", _SELECT, _KEPT, name="quantized_expert_rows", more=("chosen", "rows"))
    counts = {"rows": rows, "one": ONE}
    grid = ("-(OUTPUTS // -BLOCK_N)", "rows", "1")
    options = (blocks.num_warps, 2)
    return launch(source, windows, counts, {"x_m": x.strides[0]}, constants, grid, output, options)


def by_tiles(call: ExternCall, blocks: Blocks) -> OwnLaunch:
    """Blocks of rows that have one matrix."""
    x, ends, output = call.operands[0], call.operands[4], call.outs[0]
    constants = _constants(call)
    constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns}
    has_groups, has_zeros = constants["GROUP"] != 0, constants["HAS_ZEROS"]
    arithmetic = arithmetic_of(call.operands)
    tile = Tile(constants["BITS"], constants["RUN"], has_groups, has_zeros, arithmetic, has_experts=True)
    windows = weight_windows(_as_linear(call)) | {"ends": ends, "output": output}
    sizes = {"ROWS": x.sizes[0], "x_m": x.strides[0]}
    options = (blocks.num_warps, blocks.num_stages)
    grid = ("-(N // -BLOCK_N)", "-(ROWS // -BLOCK_M) + MATRICES + 1", "1")
    return launch(tile_text(tile), windows, {}, sizes, constants, grid, output, options)

"""Products of one row with a quantised weight, and what stands before and behind them in a decoder.

As `row_product` for weights that are not packed: the norm in front, a gate, an activation and the residual
cost no launch of their own (`fuse_row_products` says which are taken along).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.own_operators import own_operator
from ..kernels.row_product import ACTIVATIONS
from ..tape import ExternCall, OwnLaunch
from .kernels import ROW
from .launch import launch, weight_constants, weight_windows
from .weight import words_per_chunk

OPERATOR = "devplan.quantized_row.default"

ONE = 0x4B000000
"""2**23 as a float32: the mantissa's last bit is 1."""
_PROGRAMS = 264
"""Two for each of the 132 multiprocessors of an H200."""


@own_operator(
    "quantized_row(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int bits, int group,"
    " Tensor? norm, float eps, Tensor? added, str activation, bool is_gated) -> Tensor"
)
def _fake(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[0] // (2 if rest[-1] else 1))


def fused(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The operator on a matrix of one row: leading dimensions are one."""
    row = x.reshape(-1, x.shape[-1])
    row = row if row.stride(-1) == 1 else row.contiguous()
    *middle, added, activation, is_gated = rest
    if added is not None:
        added = added.reshape(1, -1)
        added = added if added.stride(-1) == 1 else added.contiguous()
    made: torch.Tensor = torch.ops.devplan.quantized_row(row, words, *middle, added, activation, is_gated)
    return made.reshape(*x.shape[:-1], made.shape[-1])


@dataclass(frozen=True)
class RowBlocks:
    """How a product is cut: results per program, and chunks of the weight's rows that are read at once."""

    columns: int
    chunks: int
    num_warps: int


def row_blocks_of(outputs: int, row_words: int, bits: int, is_gated: bool = False) -> RowBlocks:
    """For N results: programs enough for a GPU, 16 bytes a thread and row of the weight, 8 rows at most."""
    height = words_per_chunk(bits)
    chunks = min(512 // height, 1 << (row_words // height - 1).bit_length())
    warps = max(1, min(4, chunks * height // 128))
    is_one_step = chunks * height >= row_words
    rows = 8 if is_one_step and outputs >= 4 * _PROGRAMS else 4
    return RowBlocks(rows // 2 if is_gated else rows, chunks, warps)


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of this operator, or of the plain one on one row."""
    words, bits, is_gated = call.operands[1], call.operands[5], call.operands[-1] is True
    outputs = words.sizes[0] // (2 if is_gated else 1)
    return row_steps(call, row_blocks_of(outputs, words.sizes[1], bits, is_gated))


def row_text(
    activated: str,
    select: str = "",
    kept: str = "",
    *,
    name: str = "quantized_row",
    more: tuple[str, ...] = (),
) -> str:
    """The kernel's source. ``select`` are lines that come first, ``kept`` those before the result is stored,
    ``more`` are parameters that these lines read; the constants read early are then found by what is not."""
    text = ROW.replace("{activated}", activated).replace("{select}", select).replace("{kept}", kept)
    if not more:
        return text
    text = text.replace("{ready}\n", "").replace("quantized_row(", f"{name}(")
    return text.replace("output, one{constants}", f"output, {', '.join(more)}, one{{runtime}}{{constants}}")


def row_steps(call: ExternCall, blocks: RowBlocks) -> tuple[OwnLaunch, ...]:
    """The same in given blocks."""
    norm, eps, added, activation, is_gated = call.operands[7:] or (None, 0.0, None, "none", False)
    output = call.outs[0]
    constants = weight_constants(call.operands) | {
        "OUTPUTS": output.sizes[1],
        "ROWS": blocks.columns * (2 if is_gated else 1),
        "BLOCK_N": blocks.columns,
        "BLOCK_C": blocks.chunks,
        "HAS_NORM": norm is not None,
        "EPS": float(eps),
        "HAS_ADDED": added is not None,
        "IS_GATED": bool(is_gated),
    }
    del constants["N"]
    windows = weight_windows(call.operands)
    windows |= {"norm": norm or windows["scales"], "added": added or windows["scales"], "output": output}
    source = row_text(ACTIVATIONS[str(activation)].format("result"))
    grid = ("-(OUTPUTS // -BLOCK_N)", "1", "1")
    options = (blocks.num_warps, 2)
    return (launch(source, windows, {"one": ONE}, {}, constants, grid, output, options),)

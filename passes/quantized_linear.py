"""Linear layers with quantised weights: an operator of ours and the kernels that it becomes.

The weight is read as it is packed (`quantized_weight`), so that a product of few rows moves a half or a
quarter of the bytes. One row, which is decoding, is summed by `quantized_kernels.ROW` in float32; more rows
go through the tensor cores, with the weight dequantised in registers to the type of x. Where few rows would
leave most of a GPU idle, the columns are split among programs, and a second kernel sums their parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.dtypes import DType
from ..runtime.expr import Size
from .attention import TYPES
from .own_operators import own_operator
from .quantized_kernels import JOIN, ROW, TILE
from .quantized_weight import CHUNK, words_per_chunk
from .tape import READY, Allocate, ExternCall, KernelSpec, LaunchArgument, OwnLaunch, Window

OPERATOR = "devplan.quantized_linear.default"

_TYPES = TYPES | {DType.INT32: "*u32"}
_ONE = 0x4B000000
"""2**23 as a float32: the mantissa's last bit is 1."""
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
    made: torch.Tensor = torch.ops.devplan.quantized_linear(rows, words, *rest)
    return made.reshape(*x.shape[:-1], words.shape[0])


@dataclass(frozen=True)
class Blocks:
    """How a product is cut: rows of x and of the weight per program, and parts of the columns."""

    rows: int
    columns: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class RowBlocks:
    """How a product of one row is cut: rows of the weight per program, and chunks of them read at once."""

    columns: int
    chunks: int
    num_warps: int


def to_steps(call: ExternCall) -> tuple[Allocate | OwnLaunch, ...]:
    """What one call of the operator, on a matrix x [M, K], becomes."""
    x, words = call.operands[:2]
    (columns, row_words), bits = words.sizes, call.operands[5]
    if x.sizes[0] == 1:
        return row_steps(call, row_blocks_of(columns, row_words, bits))
    return tile_steps(call, blocks_of(x.sizes[0], columns, row_words, x.dtype, bits))


def blocks_of(rows: Size, columns: int, row_words: int, dtype: DType, bits: int) -> Blocks:
    """Tiles for M rows and N columns; an unknown M counts as many."""
    if dtype is DType.FLOAT32:  # no tensor cores: sums stay in registers, and few fit
        return Blocks(16, 32)
    known = rows if isinstance(rows, int) else 64
    if known > 32:
        fills = isinstance(rows, int) and math.ceil(rows / 128) * math.ceil(columns / 128) >= _PROGRAMS // 3
        return Blocks(128, 128, num_warps=8, num_stages=2) if fills else Blocks(64, 64, num_stages=2)
    block = 16 if known <= 16 else 32
    chunks = row_words // words_per_chunk(bits)
    splits = max(1, min(_PROGRAMS // math.ceil(columns / 64), chunks // 2))
    return Blocks(block, 64, math.ceil(chunks / math.ceil(chunks / splits)))


def row_blocks_of(columns: int, row_words: int, bits: int) -> RowBlocks:
    """For N columns of the result: programs enough for a GPU, and 16 bytes a thread and row."""
    height = words_per_chunk(bits)
    chunks = min(512 // height, 1 << (row_words // height - 1).bit_length())
    warps = max(1, min(4, chunks * height // 128))
    is_one_step = chunks * height >= row_words
    return RowBlocks(8 if is_one_step and columns >= 4 * _PROGRAMS else 4, chunks, warps)


def row_steps(call: ExternCall, blocks: RowBlocks) -> tuple[OwnLaunch, ...]:
    """The product of one row in given blocks."""
    constants = _constants(call) | {"BLOCK_N": blocks.columns, "BLOCK_C": blocks.chunks}
    grid = ("-(N // -BLOCK_N)", "1", "1")
    options = (blocks.num_warps, 2)
    return (_launch(ROW, _windows(call), {"one": _ONE}, {}, constants, grid, call.outs[0], options),)


def tile_steps(call: ExternCall, blocks: Blocks) -> tuple[Allocate | OwnLaunch, ...]:
    """The product in given blocks: one kernel, or two with the parts between them."""
    x, bias, output = call.operands[0], call.operands[4], call.outs[0]
    rows, columns = x.sizes[0], call.operands[1].sizes[0]
    constants = _constants(call) | {"BLOCK_N": blocks.columns, "BLOCK_M": blocks.rows}
    constants["PART"] = math.ceil(constants["CHUNKS"] / blocks.splits)
    grid = ("-(N // -BLOCK_N)", "-(rows // -BLOCK_M)", str(blocks.splits))
    options = (blocks.num_warps, blocks.num_stages)
    strides = {"x_m": x.strides[0]}
    if blocks.splits == 1:
        return (_launch(TILE, _windows(call), {"rows": rows}, strides, constants, grid, output, options),)
    assert isinstance(rows, int)
    sizes = (blocks.splits, rows, columns)
    window = Window(f"{output.buffer}_parts", DType.FLOAT32, sizes, (rows * columns, columns, 1))
    parts = Allocate(window, blocks.splits * rows * columns * 4)
    windows = _windows(call) | {"output": window}
    constants["HAS_BIAS"] = False
    first = _launch(TILE, windows, {"rows": rows}, strides, constants, grid, window, options)
    joined = {"parts": window, "bias": window if bias is None else bias, "output": output}
    sums: dict[str, Any] = {
        "N": columns,
        "SPLITS": blocks.splits,
        "BLOCK": 512,
        "HAS_BIAS": bias is not None,
    }
    elements = rows * columns
    second = _launch(
        JOIN, joined, {"elements": elements}, {}, sums, ("-(elements // -BLOCK)", "1", "1"), output, (4, 2)
    )
    return parts, first, second


def _windows(call: ExternCall) -> dict[str, Window]:
    x, words, scales, zeros, bias = call.operands[:5]
    return {
        "x": x,
        "words": words,
        "scales": scales,
        "zeros": scales if zeros is None else zeros,
        "bias": scales if bias is None else bias,
        "output": call.outs[0],
    }


def _constants(call: ExternCall) -> dict[str, Any]:
    """What both kernels know of the weight. RUN: positions of a chunk that are surely in one group."""
    x, words, scales, zeros, bias, bits, group = call.operands
    height = words_per_chunk(bits)
    return {
        "CHUNKS": words.sizes[1] // height,
        "H": height,
        "N": words.sizes[0],
        "K": x.sizes[1],
        "BITS": bits,
        "RUN": math.gcd(group, CHUNK) // height if group else 32 // bits,
        "GROUP": group,
        "GROUPS": scales.sizes[1],
        "HAS_ZEROS": zeros is not None,
        "HAS_BIAS": bias is not None,
    }


def _launch(
    source: str,
    windows: Mapping[str, Window],
    sizes: Mapping[str, Size],
    strides: Mapping[str, Size],
    constants: dict[str, Any],
    grid: tuple[str, str, str],
    writes: Window,
    options: tuple[int, int],
) -> OwnLaunch:
    """One launch: strides that are known become constants, the others are passed."""
    runtime = {name: stride for name, stride in strides.items() if not isinstance(stride, int)}
    constants = constants | {name: stride for name, stride in strides.items() if isinstance(stride, int)}
    parameters = (
        *((name, _TYPES[window.dtype]) for name, window in windows.items()),
        *((name, "i32") for name in sizes),
        *((name, "i64") for name in runtime),
    )
    aligned = [name for name, window in windows.items() if window.is_aligned]
    if "rows" in sizes and isinstance(sizes["rows"], int) and sizes["rows"] % 16 == 0:
        aligned.append("rows")
    source_text = source.format(
        ready=READY,
        runtime="".join(f", {name}" for name in runtime),
        constants="".join(f", {name}: tl.constexpr" for name in constants),
    )
    spec = KernelSpec(
        name=source.split("(", 1)[0].split()[-1],
        source=source_text,
        parameters=parameters,
        constants=tuple(constants.items()),
        divisible_by_16=tuple(aligned),
        num_warps=options[0],
        num_stages=options[1],
        grid=grid,
        call_names=tuple(name for name, _ in parameters),
        read_early=("words", "scales", "zeros", "bias") if READY in source_text else (),
    )
    arguments: tuple[LaunchArgument, ...] = (*windows.values(), *sizes.values(), *runtime.values())
    return OwnLaunch(spec, arguments, (writes,))

"""How products are cut into tiles where no library does it: a cost model, or what was measured.

A tile of the result is one program. The model counts, for each shape of tile, the rounds that the GPU's
multiprocessors need for all programs, times what one program waits for: its arithmetic at the rate that such
a tile reaches, or its operands at the rate of the L2 cache, whichever is more. The rates are coarse; where
they are wrong, `devplan tune` measures, and an export that is given its file takes the tile from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..targets import Target

UNKNOWN = 256
"""What a size that is known only at run time counts as."""
_ON_TENSOR_CORES = (DType.FLOAT16, DType.BFLOAT16)
_FULL_RATE = 1024.0
"""Multiply-adds of half precision that tensor cores of one multiprocessor start in a clock."""
_PLAIN_RATE = 64.0
"""The same for float32 without them."""
_L2_BYTES = 40.0
"""Bytes that one multiprocessor gets of the L2 cache in a clock."""
_LATENCY = 700.0
"""Clocks until a step's operands are there, hidden by as many steps as are under way."""
_FIXED = 2500.0
"""Clocks that a program takes apart from its steps."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a program computes, columns of x in one step; warps and stages."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The block sizes as the kernels name them."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth}


def candidates(dtype: DType) -> Iterator[Tile]:
    """Tiles worth considering for operands of a type."""
    if dtype is DType.FLOAT32:
        for rows, columns in ((16, 32), (32, 32), (32, 64), (64, 64), (64, 32), (16, 64)):
            for depth in (16, 32):
                yield Tile(rows, columns, depth, 4, 2)
        yield Tile(128, 64, 16, 8, 2)
        return
    if dtype not in _ON_TENSOR_CORES:  # summed without `tl.dot`, in registers
        yield Tile(16, 16, 8, 4, 1)
        return
    for rows in (16, 32, 64, 128):
        for columns in (32, 64, 128):
            for depth in (32, 64, 128):
                if (rows + columns) * depth > 16384:
                    continue
                large = rows * columns >= 128 * 128
                yield Tile(rows, columns, depth, 8 if large else 4, 4 if depth < 128 else 3)
    yield Tile(128, 256, 64, 8, 3)


def choose_tile(
    rows: Size, columns: Size, depth: Size, dtype: DType, target: Target, times: Size = 1
) -> Tile:
    """The tile with the lowest cost for ``times`` products of these sizes on a GPU like the target."""
    sizes = tuple(size if isinstance(size, int) else UNKNOWN for size in (rows, columns, depth, times))
    fitting = [tile for tile in candidates(dtype) if _shared(tile, dtype) <= target.shared_per_block]
    return min(fitting, key=lambda tile: cost(tile, sizes, dtype, target))


def cost(tile: Tile, sizes: tuple[int, ...], dtype: DType, target: Target) -> float:
    """Clocks for products of (rows, columns, depth, times)."""
    rows, columns, depth, times = sizes
    programs = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) * times
    rounds = max(math.ceil(programs / target.multiprocessors), 1)
    work = tile.rows * tile.columns * tile.depth
    # Small tiles reach a part of the rate: the tensor cores wait for their operands.
    reached = min(1.0, math.sqrt(tile.rows * tile.columns) / 128)
    rate = _FULL_RATE * reached if dtype in _ON_TENSOR_CORES else _PLAIN_RATE * min(1.0, 2 * reached)
    moved = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
    busy = max(work / rate, moved / _L2_BYTES)
    # Programs that share a multiprocessor hide each other's waits.
    under_way = max(tile.num_stages - 1, 1) * min(rounds, 2)
    step = max(busy * rounds, _LATENCY / under_way)
    return math.ceil(depth / tile.depth) * step + _FIXED * math.ceil(rounds / 2)


def _shared(tile: Tile, dtype: DType) -> int:
    return (tile.rows + tile.columns) * tile.depth * dtype.itemsize * tile.num_stages

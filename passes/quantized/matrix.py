"""A packed weight written out in the type of the rows that it will be multiplied with, for many of them.

A library's product is faster than one that unpacks on the way from some hundreds of rows on, and the more so
the more rows there are, while writing the weight costs 2 * N * K bytes of memory traffic whatever their
number. On an H200 in float16 (`tests/bench/bench_quantized.py`) 512 rows times 5632 x 2048 take 27 us against
32 us packed in 8 bits and 37 us in 4, times 4096 x 4096 37 us against 34 us and 38 us; 64 rows 17 us against
10 us, and 22 us against 11 us.
"""

from __future__ import annotations

from typing import Any

import torch

from ..exported.sizes import bound_of
from ..kernels.own_operators import own_operator
from ..tape import ExternCall, OwnLaunch
from .kernels import EXPAND
from .launch import launch, weight_constants, weight_windows

OPERATOR = "devplan.quantized_matrix.default"

_MOST_NBYTES = 256 << 20
"""A larger matrix stays packed: it would have to be planned as a temporary."""
_ROWS, _ROWS_IN_FLOAT32 = 512, 32
"""From how many rows on; in float32 there are no tensor cores to unpack for."""
_DYNAMIC_ROWS = 1024
"""The same of a maximum: most calls have fewer."""


@own_operator(
    "quantized_matrix(Tensor x, Tensor words, Tensor scales, Tensor? zeros, int bits, int group) -> Tensor"
)
def _fake(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(words.shape[0], x.shape[-1])


def is_better(x: torch.Tensor, outputs: int) -> bool:
    """Whether to write the weight out for these rows [M, K]."""
    rows, columns = x.shape
    if outputs * int(columns) * x.dtype.itemsize > _MOST_NBYTES:
        return False
    if isinstance(rows, torch.SymInt):
        _, most = bound_of(None, rows)
        return most is not None and most >= _DYNAMIC_ROWS
    return rows >= (_ROWS_IN_FLOAT32 if x.dtype is torch.float32 else _ROWS)


def written_out(x: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The weight [N, K] for rows x; ``rest`` are scales, zeros, bits and group."""
    made: torch.Tensor = torch.ops.devplan.quantized_matrix(x, words, *rest)
    return made


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    x, words, scales, zeros, bits, group = call.operands[:6]
    operands = (x, words, scales, zeros, None, bits, group)
    windows = weight_windows(operands)
    read = {name: windows[name] for name in ("words", "scales", "zeros")} | {"output": call.outs[0]}
    constants = weight_constants(operands) | {"BLOCK_R": 64}
    del constants["HAS_BIAS"]
    grid = ("-(N * CHUNKS // -BLOCK_R)", "1", "1")
    return (launch(EXPAND, read, {}, {}, constants, grid, call.outs[0], (4, 2)),)

"""Helpers by which the programs of one grid work together: barriers and scans across programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArtifactError
from . import types
from .access import load, running, store
from .tensor import Divergence, Tensor, as_tensor
from .types import UINT64

WHOLE_GRID = "x_grid_barrier"
"""A kernel that calls this must run with all its programs at once."""
IN_ORDER = "exclusive_scan_decoupled_lookback"
"""A kernel that calls this must run its programs one after another."""


def x_grid_barrier(semaphore: Any) -> None:
    """Wait for all programs: they run in step, so that the stores of all of them are done here."""
    at = running()
    if len(at.programs[0]) != at.grid[0] * at.grid[1] * at.grid[2]:
        raise ArtifactError("a kernel waits for programs that have not begun", hint="run the program on CUDA")


def _scan(
    slot: Tensor, before: Tensor | None, value: Tensor, combine: Callable[[Any, Any], Tensor]
) -> Tensor:
    """Read what the programs before came to, write what it is with this one's value."""
    wide = types.BY_NAME[f"uint{value.dtype.primitive_bitwidth}"]
    prefix = Tensor(np.zeros_like(value.data), value.dtype)
    total = value
    if before is not None:
        prefix = load(before).to(wide).to(value.dtype, bitcast=True)
        total = as_tensor(combine(prefix, value)).to(value.dtype)
    store(slot, total.to(wide, bitcast=True).to(UINT64))
    return prefix


def exclusive_scan_decoupled_lookback(
    scratch_base: Tensor, block_value: Tensor, index: Any, combine_fn: Any, as_uint: Any, pack: Any
) -> Tensor:
    """The combination of the values of all programs before this one, of at most 32 bits."""
    return _in_order(scratch_base, block_value, index, combine_fn, 1, 0)


def exclusive_scan_decoupled_lookback_64(
    scratch_base: Tensor, block_value: Tensor, index: Any, combine_fn: Any
) -> Tensor:
    """The combination of the values of all programs before this one, of 64 bits."""
    return _in_order(scratch_base, block_value, index, combine_fn, 3, 2)


def _in_order(scratch: Tensor, value: Tensor, index: Any, combine: Any, stride: int, offset: int) -> Tensor:
    if len(running().programs[0]) != 1:
        raise Divergence  # one by one, in the order of the grid
    scratch = scratch.to(types.pointer_to(UINT64))
    number = int(index)
    before = scratch + (stride * (number - 1) + offset) if number > 0 else None
    return _scan(scratch + (stride * number + offset), before, value, combine)

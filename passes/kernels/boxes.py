"""Non-maximum suppression: of boxes in the order of their scores those that no better one covers.

One program walks over blocks of boxes. A block is compared with all that were kept before it, which stand in
the result already; within the block, whoever is covered by a kept one before it goes, until nothing changes.
That takes as many rounds as the longest chain of boxes in it of which each covers the next. The work is
boxes times kept ones, the memory the result's; nothing is computed for boxes behind the count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..tape import ExternCall, OwnLaunch
from .own_launch import own_launch
from .own_operators import own_operator

OPERATOR = "devplan.kept_boxes.default"


@own_operator("kept_boxes(Tensor boxes, Tensor? groups, Tensor? count, float threshold) -> Tensor")
def _fake(
    boxes: torch.Tensor, groups: torch.Tensor | None, count: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """Boxes [N, 4] as x1, y1, x2, y2, best first: places of those kept, zeros, and at N how many they are.

    ``groups`` [N] int64: only boxes of one group cover each other. ``count``: how many boxes are real.
    """
    return boxes.new_empty(boxes.shape[0] + 1, dtype=torch.int64)


def kept(
    boxes: torch.Tensor, groups: torch.Tensor | None, count: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """The operator on operands that lie as its kernels want them."""
    groups = groups if groups is None else groups.contiguous()
    made: torch.Tensor = torch.ops.devplan.kept_boxes(boxes.contiguous(), groups, count, threshold)
    return made


_SOURCE = """\
@triton.jit
def kept_boxes(boxes, groups, count, output{runtime}{constants}):
    real = (tl.load(count) if COUNTED else N + tl.program_id(0) * 0).to(tl.int32)
    found = real * 0
    for begin in range(0, real, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        is_row = row < real
        at = boxes + row.to(tl.int64) * 4
        left = tl.load(at, mask=is_row, other=0.0).to(KIND)
        top = tl.load(at + 1, mask=is_row, other=0.0).to(KIND)
        right = tl.load(at + 2, mask=is_row, other=0.0).to(KIND)
        bottom = tl.load(at + 3, mask=is_row, other=0.0).to(KIND)
        area = libdevice.mul_rn(right - left, bottom - top)
        group = tl.load(groups + row, mask=is_row, other=0) if GROUPED else row * 0
        covered = tl.zeros([BLOCK], tl.int32)
        for start in range(0, found, WIDE):
            place = start + tl.arange(0, WIDE)
            is_kept = place < found
            other = tl.load(output + place, mask=is_kept, other=0)
            spot = boxes + other * 4
            other_left = tl.load(spot, mask=is_kept, other=0.0).to(KIND)
            other_top = tl.load(spot + 1, mask=is_kept, other=0.0).to(KIND)
            other_right = tl.load(spot + 2, mask=is_kept, other=0.0).to(KIND)
            other_bottom = tl.load(spot + 3, mask=is_kept, other=0.0).to(KIND)
            other_area = libdevice.mul_rn(other_right - other_left, other_bottom - other_top)
            width = tl.minimum(right[:, None], other_right) - tl.maximum(left[:, None], other_left[None, :])
            height = tl.minimum(bottom[:, None], other_bottom) - tl.maximum(top[:, None], other_top[None, :])
            inner = libdevice.mul_rn(tl.maximum(width, 0.0), tl.maximum(height, 0.0))
            both = other_area[None, :] + area[:, None] - inner
            covers = (libdevice.div_rn(inner, both) > THRESHOLD) & is_kept[None, :]
            if GROUPED:
                other_group = tl.load(groups + other, mask=is_kept, other=0)
                covers = covers & (other_group[None, :] == group[:, None])
            covered = tl.maximum(covered, tl.max(covers.to(tl.int32), 1))
        width = tl.minimum(right[:, None], right[None, :]) - tl.maximum(left[:, None], left[None, :])
        height = tl.minimum(bottom[:, None], bottom[None, :]) - tl.maximum(top[:, None], top[None, :])
        inner = libdevice.mul_rn(tl.maximum(width, 0.0), tl.maximum(height, 0.0))
        both = area[None, :] + area[:, None] - inner
        covers = (libdevice.div_rn(inner, both) > THRESHOLD) & (row[None, :] < row[:, None])
        if GROUPED:
            covers = covers & (group[None, :] == group[:, None])
        free = is_row & (covered == 0)
        kept = free.to(tl.int32)
        changes = BLOCK
        while changes > 0:
            goes = tl.max(tl.where(covers, kept[None, :], 0), 1)
            stays = (free & (goes == 0)).to(tl.int32)
            changes = tl.sum(tl.abs(stays - kept), 0)
            kept = stays
        slot = found + tl.cumsum(kept, 0) - 1
        tl.store(output + slot, row.to(tl.int64), mask=kept > 0)
        found += tl.sum(kept, 0)
        tl.debug_barrier()
    for start in range(found, N, WIDE):
        behind = start + tl.arange(0, WIDE)
        tl.store(output + behind, behind.to(tl.int64) * 0, mask=behind < N)
    tl.store(output + N, found.to(tl.int64))
"""


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    boxes, groups, count, threshold = call.operands
    output = call.outs[0]
    is_wide = str(boxes.dtype) == "float64"
    constants: dict[str, Any] = {
        "BLOCK": 64,
        "WIDE": 128,
        "THRESHOLD": float(threshold) if is_wide else below(float(threshold)),
        "GROUPED": groups is not None,
        "COUNTED": count is not None,
    }
    windows = {
        "boxes": boxes,
        "groups": boxes if groups is None else groups,
        "count": boxes if count is None else count,
        "output": output,
    }
    sizes = {"N": boxes.sizes[0]}
    source = _SOURCE.replace("KIND", "tl.float64" if is_wide else "tl.float32")
    return (own_launch(source, windows, sizes, constants, ("1", "1", "1"), (output,), num_warps=8),)


def below(value: float) -> float:
    """The largest float32 that is no larger: what is above it in float32 is above ``value``."""
    near = np.float32(value)
    return float(near if float(near) <= value else np.nextafter(near, np.float32(-np.inf)))


def nearest(value: float) -> float:
    """A number as float32 has it."""
    return float(np.float32(value))

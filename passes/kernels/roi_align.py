"""Regions of feature maps, averaged over a grid of bins: `roi_align`, `ps_roi_align` as a kernel of ours.

Each bin is sampled at points that lie evenly in it, bilinearly (He et al., "Mask R-CNN", 2017); with
positions, each bin has channels of its own (Dai et al., "R-FCN", 2016). A program is of one region.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tape import ExternCall, OwnLaunch
from .boxes import nearest
from .own_launch import own_launch
from .own_operators import own_operator

OPERATOR = "devplan.roi_align.default"
MOST_POINTS = 4096
"""Points along a side of a bin: a region that was computed from garbage must end, too."""


@own_operator(
    "roi_align(Tensor input, Tensor rois, float scale, int rows, int columns, int ratio, bool aligned,"
    " bool by_position) -> Tensor"
)
def _fake(
    input: torch.Tensor,
    rois: torch.Tensor,
    scale: float,
    rows: int,
    columns: int,
    ratio: int,
    aligned: bool,
    by_position: bool,
) -> torch.Tensor:
    """input [N, C, H, W], rois [K, 5] as item, x1, y1, x2, y2: [K, C, rows, columns], fewer by position."""
    channels = input.shape[1] // (rows * columns) if by_position else input.shape[1]
    return input.new_empty(rois.shape[0], channels, rows, columns)


def pooled(input: torch.Tensor, rois: torch.Tensor, *how: float | int | bool) -> torch.Tensor:
    """The operator on operands that lie as its kernels want them; the feature maps may be channels-last."""
    made: torch.Tensor = torch.ops.devplan.roi_align(input, rois.contiguous(), *how)
    return made


_SOURCE = """\
@triton.jit
def roi_align(input, rois, output{runtime}{constants}):
    roi = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = i < CHANNELS * ROWS * COLUMNS
    channel = i % CHANNELS if LAST else i // (ROWS * COLUMNS)
    place = i // CHANNELS if LAST else i % (ROWS * COLUMNS)
    row = place // COLUMNS
    column = place % COLUMNS
    source = channel * (ROWS * COLUMNS) + place if BY_POSITION else channel
    at = rois + roi * 5
    item = tl.minimum(tl.maximum(tl.load(at).to(tl.int64), 0), ITEMS - 1)
    factor = tl.full([], SCALE, KIND)
    left = libdevice.mul_rn(tl.load(at + 1).to(KIND), factor) - OFFSET
    top = libdevice.mul_rn(tl.load(at + 2).to(KIND), factor) - OFFSET
    width = libdevice.mul_rn(tl.load(at + 3).to(KIND), factor) - OFFSET - left
    height = libdevice.mul_rn(tl.load(at + 4).to(KIND), factor) - OFFSET - top
    if not ALIGNED:
        width = tl.maximum(width, 1.0)
        height = tl.maximum(height, 1.0)
    wide = libdevice.div_rn(width, tl.full([], COLUMNS, KIND))
    high = libdevice.div_rn(height, tl.full([], ROWS, KIND))
    across = RATIO if RATIO > 0 else tl.minimum(libdevice.ceil(wide), MOST).to(tl.int32)
    down = RATIO if RATIO > 0 else tl.minimum(libdevice.ceil(high), MOST).to(tl.int32)
    base = input + item * input_n + source.to(tl.int64) * input_c
    total = tl.zeros([BLOCK], KIND)
    for iy in range(0, down):
        y = top + row.to(KIND) * high + (iy + 0.5) * high / down
        is_inside = is_output & (y >= -1.0) & (y <= HEIGHT)
        y = tl.maximum(y, 0.0)
        upper = tl.minimum(y.to(tl.int32), HEIGHT - 1)
        lower = tl.minimum(upper + 1, HEIGHT - 1)
        below = tl.where(upper == HEIGHT - 1, 0.0, y - upper.to(KIND))
        for ix in range(0, across):
            x = left + column.to(KIND) * wide + (ix + 0.5) * wide / across
            mask = is_inside & (x >= -1.0) & (x <= WIDTH)
            x = tl.maximum(x, 0.0)
            near = tl.minimum(x.to(tl.int32), WIDTH - 1)
            far = tl.minimum(near + 1, WIDTH - 1)
            behind = tl.where(near == WIDTH - 1, 0.0, x - near.to(KIND))
            first = base + upper * input_h
            second = base + lower * input_h
            a = tl.load(first + near * input_w, mask=mask, other=0.0).to(KIND)
            b = tl.load(first + far * input_w, mask=mask, other=0.0).to(KIND)
            c = tl.load(second + near * input_w, mask=mask, other=0.0).to(KIND)
            d = tl.load(second + far * input_w, mask=mask, other=0.0).to(KIND)
            total += (1.0 - below) * (1.0 - behind) * a + (1.0 - below) * behind * b
            total += below * (1.0 - behind) * c + below * behind * d
    points = (down * across + row * 0).to(KIND)
    if not BY_POSITION:
        points = tl.maximum(points, 1.0)
    made = (total / points).to(output.dtype.element_ty)
    tl.store(output + (roi * CHANNELS + channel) * (ROWS * COLUMNS) + place, made, mask=is_output)
"""


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator."""
    input, rois, scale, rows, columns, ratio, aligned, by_position = call.operands
    output = call.outs[0]
    is_wide = str(input.dtype) == "float64"
    constants: dict[str, Any] = {
        "BLOCK": 256,
        "ROWS": int(rows),
        "COLUMNS": int(columns),
        "RATIO": int(ratio),
        "ALIGNED": bool(aligned),
        "BY_POSITION": bool(by_position),
        "SCALE": float(scale) if is_wide else nearest(float(scale)),
        "OFFSET": 0.5 if aligned else 0.0,
        "MOST": MOST_POINTS,
        "LAST": input.strides[1] == 1 and input.strides[3] != 1,
    }
    sizes = {
        "REGIONS": rois.sizes[0],
        "ITEMS": input.sizes[0],
        "CHANNELS": output.sizes[1],
        "HEIGHT": input.sizes[2],
        "WIDTH": input.sizes[3],
        **{f"input_{name}": stride for name, stride in zip("nchw", input.strides, strict=True)},
    }
    windows = {"input": input, "rois": rois, "output": output}
    source = _SOURCE.replace("KIND", "tl.float64" if is_wide else "tl.float32")
    grid = ("REGIONS", "-(CHANNELS * ROWS * COLUMNS // -BLOCK)", "1")
    return (own_launch(source, windows, sizes, constants, grid, (output,)),)

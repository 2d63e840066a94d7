"""Host operators of our own, in NumPy: what torch has no operator for. They need no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import ArtifactError
from ..expr import Expr
from ..program import Argument, HostCall, Ref
from ..tensors.host import Array, HostTensor, array_at

NAMESPACE = "devplan::"


def bind_own(call: HostCall, operands: Mapping[str, Operand], bindings: Mapping[str, int]) -> Step:
    """One of the operators below over host memory; ArtifactError when there is none of that name."""
    function = _FUNCTIONS.get(call.target.removeprefix(NAMESPACE))
    if function is None or len(call.writes) != 1:
        raise ArtifactError(f"the host has no operator `{call.target}`", why=str(call.origin))
    out = operands[call.writes[0]]
    to = _array(out)

    def step() -> None:
        given = [_value(argument, operands, bindings) for argument in call.arguments]
        made = function(*given)
        to[...] = HostTensor.from_float32(made, out.dtype).raw if out.dtype is DType.BFLOAT16 else made

    return step


def _value(argument: Argument, operands: Mapping[str, Operand], bindings: Mapping[str, int]) -> Any:
    if isinstance(argument, Ref):
        operand = operands[argument.name]
        array = _array(operand)
        return HostTensor(array, operand.dtype).float32() if operand.dtype is DType.BFLOAT16 else array
    return argument.evaluate(bindings) if isinstance(argument, Expr) else argument


def _array(operand: Operand) -> Array:
    return array_at(operand.address, operand.dtype, operand.shape, operand.strides)


# --- operators ---------------------------------------------------------------------------------------


def kept_boxes(boxes: Array, groups: Array | None, count: Array | None, threshold: float) -> Array:
    """Places of the boxes [N, 4], best first, that no better one covers; zeros, and at N how many they are.

    A box covers another (of its group) if their intersection is more than ``threshold`` of their union.
    """
    total = len(boxes)
    real = total if count is None else int(count)
    boxes = _wide(boxes[:real])
    left, top, right, bottom = boxes.T
    areas = (right - left) * (bottom - top)
    free = np.ones(real, bool)
    kept: list[int] = []
    for row in range(real):
        if not free[row]:
            continue
        kept.append(row)
        rest = slice(row + 1, None)
        width = np.minimum(right[row], right[rest]) - np.maximum(left[row], left[rest])
        height = np.minimum(bottom[row], bottom[rest]) - np.maximum(top[row], top[rest])
        inner = np.maximum(width, 0) * np.maximum(height, 0)
        with np.errstate(all="ignore"):
            covers = (inner / (areas[row] + areas[rest] - inner)).astype(np.float64) > threshold
        free[rest] &= ~(
            covers if groups is None else covers & (groups[rest][: real - row - 1] == groups[row])
        )
    made = np.zeros(total + 1, np.int64)
    made[: len(kept)] = kept
    made[total] = len(kept)
    return made


def roi_align(
    input: Array,
    rois: Array,
    scale: float,
    rows: int,
    columns: int,
    ratio: int,
    aligned: bool,
    by_position: bool,
) -> Array:
    """Regions [K, 5] (item, x1, y1, x2, y2) of feature maps [N, C, H, W], averaged: [K, C, rows, columns].

    A mean of bilinear samples at points of a grid is a product from either side: with the sums of weights
    that the points give to rows, and to columns. With ``by_position`` each bin has channels of its own.
    """
    input, rois = _wide(input), _wide(rois)
    _, channels, height, width = input.shape
    channels = channels // (rows * columns) if by_position else channels
    made = np.zeros((len(rois), channels, rows, columns), input.dtype)
    corners = rois[:, 1:] * input.dtype.type(scale) - input.dtype.type(0.5 if aligned else 0)
    for index, (item, (x1, y1, x2, y2)) in enumerate(zip(rois[:, 0].astype(np.int64), corners, strict=True)):
        least = -np.inf if aligned else 1.0
        down, ys = _weights(y1, max(y2 - y1, least), rows, height, ratio)
        across, xs = _weights(x1, max(x2 - x1, least), columns, width, ratio)
        points = down * across if by_position else max(down * across, 1)
        maps = input[min(max(item, 0), len(input) - 1)]
        with np.errstate(all="ignore"):
            if by_position:
                maps = maps.reshape(channels, rows, columns, height, width)
                made[index] = np.einsum("rh,crqhw,qw->crq", ys, maps, xs, optimize=True) / points
            else:
                made[index] = ys @ maps @ xs.T / points
    return made


def _weights(start: Any, extent: Any, bins: int, size: int, ratio: int) -> tuple[int, Array]:
    """Points along a side of a bin, and what they weigh together [bins, size]; outside of the map nothing."""
    kind = np.dtype(start).type
    each = kind(extent) / kind(bins)
    points = ratio if ratio > 0 else int(min(np.nan_to_num(np.ceil(each)), _MOST_POINTS))
    made = np.zeros((bins, size), kind)
    if points <= 0:
        return points, made
    bin, step = np.meshgrid(np.arange(bins), np.arange(points), indexing="ij")
    at = start + bin.astype(kind) * each + (step.astype(kind) + kind(0.5)) * each / kind(points)
    inside = (at >= -1) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = at.astype(np.int64)
    part = (at - low).astype(kind)
    np.add.at(made, (bin, low), np.where(inside, 1 - part, 0))
    np.add.at(made, (bin, np.minimum(low + 1, size - 1)), np.where(inside, part, 0))
    return points, made


_MOST_POINTS = 4096
"""As in the kernel for GPUs: a region that was computed from garbage must end, too."""


def _wide(values: Array) -> Array:
    return (
        values if values.dtype == np.float64 else values.astype(np.float32)
    )  # halves are too narrow to add in


_FUNCTIONS: dict[str, Callable[..., Array]] = {"kept_boxes": kept_boxes, "roi_align": roi_align}

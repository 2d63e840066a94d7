"""torchvision's operators of detection: its own where it is installed, else the same in plain Python."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


def torchvision_operators() -> Any:
    """``torch.ops.torchvision`` with ``nms``, ``roi_align`` and ``ps_roi_align``, which eager can run."""
    if HAS_TORCHVISION:
        __import__("torchvision")
        return torch.ops.torchvision
    for schema, run, fake in (
        ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor", _nms, _fake_nms),
        (f"roi_align({_REGIONS}, bool aligned) -> Tensor", _roi_align, _fake_roi_align),
        (f"ps_roi_align({_REGIONS}) -> (Tensor, Tensor)", _ps_roi_align, _fake_ps_roi_align),
    ):
        name = f"torchvision::{schema.partition('(')[0]}"
        if not hasattr(torch.ops.torchvision, name.partition("::")[2]):
            torch.library.define(name, schema[schema.index("(") :])
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            torch.library.impl(name, "cpu", run)
            torch.library.register_fake(name, fake)
    return torch.ops.torchvision


_REGIONS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio"


def _nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    kept: list[int] = []
    for place in scores.sort(stable=True, descending=True)[1].tolist():
        rest = torch.tensor(kept, dtype=torch.int64)
        first, last = (f(dets[rest], dets[place]) for f in (torch.maximum, torch.minimum))
        inner = (last[:, 2:] - first[:, :2]).clamp(min=0).prod(1)
        if not ((inner / (areas[rest] + areas[place] - inner)).double() > iou_threshold).any():
            kept.append(place)
    return torch.tensor(kept, dtype=torch.int64)


def _fake_nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _roi_align(
    input: Tensor, rois: Tensor, scale: float, rows: int, columns: int, ratio: int, aligned: bool
) -> Tensor:
    made = input.new_zeros(len(rois), input.size(1), rows, columns)
    for k, row, column in torch.cartesian_prod(*map(torch.arange, (len(rois), rows, columns))).tolist():
        total, points = _bin(input, rois[k].tolist(), scale, (rows, columns), ratio, aligned, row, column)
        made[k, :, row, column] = total / max(points, 1)
    return made


def _ps_roi_align(
    input: Tensor, rois: Tensor, scale: float, rows: int, columns: int, ratio: int
) -> tuple[Tensor, Tensor]:
    made = input.new_zeros(len(rois), input.size(1) // (rows * columns), rows, columns)
    for k, row, column in torch.cartesian_prod(*map(torch.arange, (len(rois), rows, columns))).tolist():
        total, points = _bin(input, rois[k].tolist(), scale, (rows, columns), ratio, True, row, column)
        made[k, :, row, column] = total[row * columns + column :: rows * columns] / points
    return made, made.to(torch.int32)


def _bin(
    input: Tensor,
    roi: list[float],
    scale: float,
    bins: tuple[int, int],
    ratio: int,
    aligned: bool,
    row: int,
    column: int,
) -> tuple[Tensor, int]:
    """The sum of the samples in a bin, all channels, and their number; in Python's own numbers."""
    item, left, top, right, bottom = int(roi[0]), *(each * scale - 0.5 * aligned for each in roi[1:])
    sides = [bottom - top, right - left]
    high, wide = ((s if aligned else max(s, 1.0)) / b for s, b in zip(sides, bins, strict=True))
    down, across = (ratio if ratio > 0 else math.ceil(each) for each in (high, wide))
    total = input.new_zeros(input.size(1))
    for iy in range(down):
        for ix in range(across):
            y, x = top + high * (row + (iy + 0.5) / down), left + wide * (column + (ix + 0.5) / across)
            total = total + _sample(input[item], y, x)
    return total, down * across


def _sample(maps: Tensor, y: float, x: float) -> Tensor:
    height, width = maps.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return maps.new_zeros(maps.size(0))
    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    low, near = int(y), int(x)
    below, far = min(low + 1, height - 1), min(near + 1, width - 1)
    dy, dx = y - low, x - near
    upper = maps[:, low, near] * (1 - dx) + maps[:, low, far] * dx
    return upper * (1 - dy) + (maps[:, below, near] * (1 - dx) + maps[:, below, far] * dx) * dy


def _fake_roi_align(
    input: Tensor, rois: Tensor, scale: float, rows: int, columns: int, ratio: int, aligned: bool
) -> Tensor:
    return input.new_empty(rois.size(0), input.size(1), rows, columns)


def _fake_ps_roi_align(
    input: Tensor, rois: Tensor, scale: float, rows: int, columns: int, ratio: int
) -> tuple[Tensor, Tensor]:
    made = input.new_empty(rois.size(0), input.size(1) // (rows * columns), rows, columns)
    return made, made.to(torch.int32)

"""Sampling images and volumes at the positions of a grid.

PyTorch takes images apart, but a build for CUDA asks the driver for cuDNN on the way; volumes not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NEAREST = 1
_ZEROS, _REFLECTION = 0, 2


def grid_sampler(
    x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """As ``aten.grid_sampler``, which chooses by the rank of x."""
    aten: Any = torch.ops.aten
    sampler = aten.grid_sampler_2d if x.dim() == 4 else aten.grid_sampler_3d
    made: Tensor = sampler.default(x, grid, interpolation_mode, padding_mode, align_corners)
    return made


def grid_sampler_3d(
    x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """As ``aten.grid_sampler_3d``: x [n, c, d, h, w], grid [n, D, H, W, 3] in the order w, h, d."""
    is_nearest = interpolation_mode == _NEAREST
    wide = torch.float32 if grid.dtype in (torch.float16, torch.bfloat16) else grid.dtype
    corners = torch.arange(1 if is_nearest else 8, device=x.device)[:, None]
    index: Any = 0
    weight: Any = 1
    is_inside: Any = True
    for dim, extent in enumerate(x.shape[2:]):
        place = _place(grid[..., 2 - dim].to(wide), extent, padding_mode, align_corners).flatten(1)[:, None]
        at = place.round() if is_nearest else place.floor() + ((corners >> dim) & 1)
        weight = weight if is_nearest else weight * (1 - (place - at).abs())
        is_inside = is_inside & (at >= 0) & (at < extent)
        index = index * extent + at.clamp(0, extent - 1).to(torch.int64)
    picks = index.flatten(1)[:, None].expand(-1, x.size(1), -1)
    found = x.flatten(2).gather(2, picks).reshape(*x.shape[:2], *index.shape[1:])
    kept = torch.where(is_inside[:, None], found, 0)
    made: Tensor = (kept * (weight if is_nearest else weight[:, None])).sum(2)
    return made.to(x.dtype).reshape(*x.shape[:2], *grid.shape[1:4])


def _place(g: Tensor, extent: Any, padding_mode: int, align_corners: bool) -> Tensor:
    """From -1 to 1 over the extent's corner pixels, or its edges, to pixels; inside where padding says so."""
    at: Tensor = (g + 1) / 2 * (extent - 1) if align_corners else ((g + 1) * extent - 1) / 2
    if padding_mode == _ZEROS:
        return at
    if padding_mode == _REFLECTION:
        least, span = (0.0, extent - 1) if align_corners else (-0.5, extent)
        if span == 0:
            return torch.zeros_like(at)
        off = (at - least).abs()
        rest, turns = torch.fmod(off, span), (off / span).floor()
        at = torch.where(torch.fmod(turns, 2) == 0, rest, span - rest) + least
    return at.clamp(0, extent - 1)

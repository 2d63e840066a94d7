"""Pools with large windows, one dimension after the other.

Inductor leaves windows of more than 25 elements that overlap or leave gaps to a library that is not there.
It reads all of a window that is larger than the tensor, of ``AvgPool2d(1280, ceil_mode=True)`` say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .more_decompositions import adaptive_avg_pool

SMALL_WINDOW = 25
"""Elements of a window that Inductor sums without a loop."""


def average(dims: int) -> Callable[..., Any]:
    """``aten.avg_pool2d`` or ``aten.avg_pool3d``; NotImplemented for windows that Inductor does well."""

    def pool(
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel = _for_each(kernel_size, dims)
        steps = _for_each(stride or kernel, dims)
        pads = _for_each(padding, dims)
        axes = [
            _Axis(at - dims, *each, ceil_mode)
            for at, each in enumerate(zip(kernel, steps, pads, strict=True))
        ]
        if math.prod(kernel) <= SMALL_WINDOW or not (kernel != steps or any(a.is_wide(x) for a in axes)):
            return NotImplemented
        if ceil_mode and any(isinstance(extent, torch.SymInt) for extent in x.shape):
            return NotImplemented
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        total, count = x.to(wide), torch.ones((), dtype=wide, device=x.device)
        for axis in axes:
            count = count * axis.counts(x, count_include_pad).to(wide)
            total = axis.sums(total)
        return (total / (divisor_override or count)).to(x.dtype)

    return pool


def adaptive_average(x: Tensor, output_size: Sequence[int]) -> Any:
    """``aten._adaptive_avg_pool2d``; NotImplemented for windows that Inductor does well, and dynamic ones."""
    extents = list(zip(x.shape[-2:], output_size, strict=True))
    if any(isinstance(given, torch.SymInt) or not wanted for given, wanted in extents):
        return NotImplemented
    windows = [-(-(given + wanted - 1) // wanted) for given, wanted in extents]
    if math.prod(windows) <= SMALL_WINDOW or all(given % wanted == 0 for given, wanted in extents):
        return NotImplemented
    return adaptive_avg_pool(x, output_size)


def adaptive_maximum(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``aten.adaptive_max_pool3d``: the largest of windows with places, one dimension after the other."""
    inner = x.shape[-len(output_size) :]
    places = torch.arange(math.prod(inner), device=x.device).reshape(inner).expand(x.shape)
    for dim, wanted in zip(range(-1, -len(output_size) - 1, -1), reversed(output_size), strict=True):
        given = x.size(dim)
        cell = torch.arange(wanted, device=x.device)[:, None]
        longest = max(-(-(i + 1) * given // wanted) - i * given // wanted for i in range(wanted))
        at = cell * given // wanted + torch.arange(longest, device=x.device)
        at = torch.minimum(at, -((cell + 1) * -given // wanted) - 1)
        rows, found = x.movedim(dim, -1)[..., at], places.movedim(dim, -1)[..., at]
        best = rows.argmax(-1, keepdim=True)
        x = rows.gather(-1, best).squeeze(-1).movedim(-1, dim)
        places = found.gather(-1, best).squeeze(-1).movedim(-1, dim)
    return x, places


def _for_each(given: Sequence[int], dims: int) -> list[int]:
    return list(given) * dims if len(given) == 1 else list(given)


class _Axis:
    """One dimension that is pooled, counted from the right."""

    def __init__(self, dim: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> None:
        self._dim, self._kernel, self._stride, self._padding = dim, kernel, stride, padding
        self._ceil_mode = ceil_mode

    def is_wide(self, x: Tensor) -> bool:
        """Whether a window is larger than the padded extent, which holds for ``ceil_mode`` alone."""
        return self._ceil_mode and self._kernel > x.size(self._dim) + 2 * self._padding

    def _windows(self, extent: int) -> int:
        """How many; the last one may begin within the extent or the padding in front of it, not behind."""
        room = extent + 2 * self._padding - self._kernel
        if not self._ceil_mode:
            return room // self._stride + 1
        found = -(-room // self._stride) + 1
        return found - 1 if (found - 1) * self._stride >= extent + self._padding else found

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each window."""
        extent, count = x.size(self._dim), self._windows(x.size(self._dim))
        kernel = min(self._kernel, extent + 2 * self._padding) if self._ceil_mode else self._kernel
        behind = self._padding
        if self._ceil_mode:
            behind = max((count - 1) * self._stride + kernel - extent - self._padding, 0)
        if self._padding or behind:
            x = torch.constant_pad_nd(x, [0, 0] * (-self._dim - 1) + [self._padding, behind])
        dim = x.dim() + self._dim
        return x.unfold(dim, kernel, self._stride).narrow(dim, 0, count).sum(-1)

    def counts(self, x: Tensor, count_include_pad: bool) -> Tensor:
        """What each window's sum is divided by, to broadcast over the dimensions behind this one."""
        extent = x.size(self._dim)
        begin = torch.arange(self._windows(extent), device=x.device) * self._stride - self._padding
        end = (begin + self._kernel).clamp(max=extent + self._padding)
        if not count_include_pad:
            begin, end = begin.clamp(min=0), end.clamp(max=extent)
        return (end - begin).reshape([-1] + [1] * (-self._dim - 1))

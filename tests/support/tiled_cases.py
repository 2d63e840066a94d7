"""Products and convolutions of every kind, for tests of programs without library calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

HALVES = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Tolerances, relative to the largest element."""


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


HALF = torch.float16
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a bias and an activation": (
        lambda x, w, b: F.relu(F.linear(x, w, b)),
        (rand(37, 70), rand(50, 70), rand(50)),
    ),
    "the tanh form of gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        (rand(37, 70, dtype=HALF), rand(50, 70, dtype=HALF, scale=0.1), rand(50, dtype=HALF)),
    ),
    "a sum with factors": (
        lambda a, x, y: torch.baddbmm(a, x, y, beta=0.5, alpha=2),
        (rand(3, 40, 20), rand(3, 40, 50), rand(3, 50, 20)),
    ),
    "two products in one sum": (
        lambda a, b, c, d: a @ b + c @ d,
        (rand(33, 40), rand(40, 20), rand(33, 50), rand(50, 20)),
    ),
    "float64": (lambda x, y: x @ y, (rand(20, 30).double(), rand(30, 17).double())),
    "integers": (lambda x, y: x @ y, (rand(20, 30, scale=9).long(), rand(30, 17, scale=9).long())),
}


CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "one dimension": (
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=3),
        (rand(2, 6, 50), rand(8, 6, 5), rand(8)),
    ),
    "strides and dilation": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2),
        (rand(2, 3, 20, 21), rand(8, 3, 3, 3)),
    ),
    "steps within a tap": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (rand(1, 32, 12, 13), rand(16, 32, 3, 3), rand(16)),
    ),
    "groups": (lambda x, w: F.conv2d(x, w, padding=1, groups=3), (rand(2, 6, 12, 13), rand(9, 2, 3, 3))),
    "three dimensions": (lambda x, w: F.conv3d(x, w, padding=1), (rand(1, 4, 5, 6, 7), rand(6, 4, 3, 3, 3))),
    "a sum and an activation, channels last": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1) + x),
        (rand(2, 16, 10, 9, dtype=HALF), rand(16, 16, 3, 3, dtype=HALF, scale=0.1), rand(16, dtype=HALF)),
    ),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        (rand(2, 6, 7, 8), rand(6, 4, 3, 3), rand(8)),
    ),
    "transposed, with dilation": (
        lambda x, w: F.conv_transpose1d(x, w, stride=3, dilation=2),
        (rand(2, 6, 17), rand(6, 4, 4)),
    ),
}

"""Convolutions of patches that do not overlap, as products: how images become the tokens of a transformer.

cuDNN has no fast engine for few channels and a stride as large as the filter: the patches of DINOv2-small
(14 x 14 of 224 x 224 pixels, float16) took 36 us on an H200, where a product of that size takes 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

_FEW_CHANNELS = 8
"""From this on, tensor cores take the channels as they lie, and the library has engines made for it."""


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Of ``[N, C, *sizes]`` by ``[O, C, *patch]`` where ``stride`` is ``patch``; else NotImplemented."""
    patch, sizes = list(weight.shape[2:]), list(x.shape[2:])
    if (
        transposed
        or groups != 1
        or x.dim() != weight.dim()
        or any(padding)
        or not all(d == 1 for d in dilation)
    ):
        return NotImplemented
    if not all(isinstance(size, int) for size in (x.shape[1], *sizes, *patch)) or x.shape[1] >= _FEW_CHANNELS:
        return NotImplemented
    if list(stride) * (1 if len(stride) > 1 else len(patch)) != patch or math.prod(patch) == 1:
        return NotImplemented
    counts = [size // length for size, length in zip(sizes, patch, strict=True)]
    if 0 in counts:
        return NotImplemented
    for dimension, (count, length) in enumerate(zip(counts, patch, strict=True), 2):
        x = x.narrow(dimension, 0, count * length)  # what no whole patch covers is not read
    split = [extent for pair in zip(counts, patch, strict=True) for extent in pair]
    places = range(2, 2 + len(split), 2)
    x = x.reshape(x.shape[0], x.shape[1], *split).permute(0, *places, 1, *(place + 1 for place in places))
    rows = x.reshape(-1, weight[0].numel())
    columns = weight.reshape(weight.shape[0], -1).t()
    made = aten.mm.default(rows, columns) if bias is None else aten.addmm.default(bias, rows, columns)
    made = made.reshape(x.shape[0], *counts, weight.shape[0])
    return made.permute(0, -1, *range(1, 1 + len(counts)))

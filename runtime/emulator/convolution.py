"""Convolutions in NumPy, of any number of spatial dimensions, as matrix products over windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..errors import ArtifactError
from ..tensors.host import Array


def convolve(x: Array, weight: Array, bias: Array | None, attributes: Mapping[str, Any]) -> Array:
    """A convolution, transposed or not, with the attributes of the library call ``convolution``."""
    rank = x.ndim - 2
    stride, padding = _numbers(attributes, "stride", 1, rank), _numbers(attributes, "padding", 0, rank)
    dilation = _numbers(attributes, "dilation", 1, rank)
    groups = int(attributes.get("groups", 1))
    if attributes.get("transposed"):
        extra = _numbers(attributes, "output_padding", 0, rank)
        x, weight, padding = _as_direct(x, weight, stride, padding, dilation, extra, groups)
        made = _direct(x, weight, (1,) * rank, dilation, groups)
    else:
        made = _direct(_pad(x, [(p, p) for p in padding]), weight, stride, dilation, groups)
    return made if bias is None else made + bias.reshape(1, -1, *([1] * rank))


def _numbers(attributes: Mapping[str, Any], name: str, default: int, rank: int) -> tuple[int, ...]:
    given: Any = attributes.get(name, (default,) * rank)
    numbers = tuple(map(int, cast("Sequence[Any]", given))) if isinstance(given, tuple) else (int(given),)
    numbers = numbers * rank if len(numbers) == 1 else numbers
    if len(numbers) != rank:
        raise ArtifactError(f"a convolution's `{name}` has {len(numbers)} numbers instead of {rank}")
    return numbers


def _pad(x: Array, amounts: Sequence[tuple[int, int]]) -> Array:
    if not any(before or after for before, after in amounts):
        return x
    return np.pad(x, [(0, 0), (0, 0), *amounts])


def _as_direct(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> tuple[Array, Array, tuple[int, ...]]:
    """A transposed convolution as a direct one: the input spread out, the kernel turned round."""
    spatial = weight.shape[2:]
    spread = np.zeros(
        (*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True))), x.dtype
    )
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = x
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, spatial, padding, strict=True)]
    amounts = [(max(r, 0), max(r + e, 0)) for r, e in zip(reach, extra, strict=True)]
    spread = _pad(spread, amounts)
    cut = [
        slice(max(-r, 0), size - max(-(r + e), 0))
        for r, e, size in zip(reach, extra, spread.shape[2:], strict=True)
    ]
    spread = spread[(slice(None), slice(None), *cut)]
    inputs, outputs = weight.shape[0], weight.shape[1]
    turned = weight.reshape(groups, inputs // groups, outputs, *spatial).swapaxes(1, 2)
    turned = turned.reshape(groups * outputs, inputs // groups, *spatial)
    return spread, np.flip(turned, axis=tuple(range(2, turned.ndim))), (0,) * len(spatial)


def _direct(x: Array, weight: Array, stride: Sequence[int], dilation: Sequence[int], groups: int) -> Array:
    """A convolution without padding: windows as a strided view, multiplied group by group."""
    spatial = weight.shape[2:]
    rank, outputs = len(spatial), weight.shape[0]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, spatial, strict=True)]
    sizes = tuple((n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True))
    if any(size <= 0 for size in sizes):
        raise ArtifactError(f"a convolution's kernel {spatial} is larger than its input {x.shape[2:]}")
    steps = x.strides[2:]
    windows = np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:2], *spatial, *sizes),
        (
            *x.strides[:2],
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
        writeable=False,
    )
    made = np.empty((x.shape[0], outputs, *sizes), np.result_type(x, weight))
    inputs, share = x.shape[1] // groups, outputs // groups
    if inputs == 1 and share == 1:
        return _depthwise(windows, weight, made, rank)
    columns = int(np.prod(sizes))
    rows = inputs * int(np.prod(spatial))
    for image in range(x.shape[0]):
        for group in range(groups):
            part = windows[image, group * inputs : (group + 1) * inputs].reshape(rows, columns)
            matrix = weight[group * share : (group + 1) * share].reshape(share, rows)
            made[image, group * share : (group + 1) * share] = (matrix @ part).reshape(share, *sizes)
    return made


def _depthwise(windows: Array, weight: Array, made: Array, rank: int) -> Array:
    """One input and one output channel per group: a sum over the kernel's places."""
    made[...] = 0
    for place in np.ndindex(*weight.shape[2:]):
        factor = weight[(slice(None), 0, *place)].reshape(1, -1, *([1] * rank))
        made += windows[(slice(None), slice(None), *place)] * factor
    return made

"""How much memory a library call may be offered: what its shape can need, at most a fixed amount.

A library's choice of algorithm is known when a program is loaded, on the GPU that runs it, and its memory is
planned before. What the algorithms of cuBLASLt and cuDNN keep there is known: partial sums of a product whose
inner dimension is split, so that few tiles fill a large GPU; and for convolutions operands in another layout,
or transformed for Winograd's algorithm (Lavin and Gray, 2015). A small product needs a small part of the cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..tape import Window
from .library_calls import Call

MATMUL_LIMIT = 4 << 20
"""Most bytes offered to cuBLASLt for one product: enough for split-K of small products; the planner lets the
workspace share its space with dead activations."""
CONVOLUTION_LIMIT = 8 << 20
"""Most bytes offered to cuDNN for one convolution beside `_relaid`; engines that want more are left out."""

_SLACK = 256 << 10
"""Counters, tables of offsets and padding, in every bound."""
_GRAIN = 64 << 10
_PROCESSORS = 160
"""More than the largest GPU has; products are split until their tiles are about two for each."""
_TILE = (256, 128)
"""The largest tile: the fewer tiles, the more splits."""
_LEAST_DEPTH = 64
"""No split sums less of the inner dimension than this."""
_CHANNELS = 8
"""Channels are padded to a multiple of this in other layouts."""
_FEW_CHANNELS = 4
"""Or of this, where there are fewer."""
_WINOGRAD_IMAGE, _WINOGRAD_WEIGHT = 36 / 16, 36 / 9
"""What F(4x4, 3x3) makes of an image and of a weight."""


def workspace_of(call: Call, most: int | None = None) -> int:
    """Bytes of workspace for a library call, a fixed amount where a size is dynamic.

    ``most`` replaces `MATMUL_LIMIT` and `CONVOLUTION_LIMIT`.
    """
    needs, limit = _NEEDS[call.function]
    needed = needs(call)
    if most is None:
        most = max(limit, _rounded(_relaid(call))) if call.function == "convolution" else limit
    return most if needed is None else min(_rounded(needed), most)


def _rounded(needed: int) -> int:
    return -(-(needed + _SLACK) // _GRAIN) * _GRAIN


def _relaid(call: Call) -> int:
    """Bytes of an image of few channels with those that the tensor cores want, however large it is.

    On an H200 the first convolution of ResNet-18 took 81 us with the 12.3 MiB of 32 images of four channels,
    in place of three, and 192 us without; for one image 0.4 MiB.
    """
    x = call.reads[0]
    count, channels = _padded(x, _FEW_CHANNELS), x.sizes[1]
    if count is None or not isinstance(channels, int) or channels >= _CHANNELS or x.dtype.itemsize != 2:
        return 0
    return count * x.dtype.itemsize


def _matmul(call: Call) -> int | None:
    a, out = call.reads[0], call.out
    elements, m, n, k = _count(out), out.sizes[-2], out.sizes[-1], a.sizes[-1]
    if elements is None or not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return None
    return _partial_sums(elements // max(m * n, 1), m, n, k, out.dtype.itemsize)


def _convolution(call: Call) -> int | None:
    x, weight, out = call.reads[0], call.reads[1], call.out
    counts = [count for window in (x, weight, out) if (count := _padded(window)) is not None]
    elements, weights, features = _count(out), _count(weight), out.sizes[1]
    if len(counts) < 3 or elements is None or weights is None or not isinstance(features, int):
        return None
    image, filters, result = counts
    groups = dict(call.attributes)["groups"]
    assert isinstance(groups, int)
    itemsize, depth = max(out.dtype.itemsize, 4), weights // max(features, 1)
    rows, columns = elements // max(features, 1), features // groups
    needed = (image + filters + result) * itemsize
    needed += _partial_sums(groups, rows, columns, depth, itemsize)
    if weight.sizes[2:] == (3, 3):
        transformed = _WINOGRAD_IMAGE * (image + result) + _WINOGRAD_WEIGHT * filters
        needed = max(needed, int(transformed * itemsize))
    return needed


_NEEDS: dict[str, tuple[Callable[[Call], int | None], int]] = {
    "matmul": (_matmul, MATMUL_LIMIT),
    "convolution": (_convolution, CONVOLUTION_LIMIT),
}


def _partial_sums(batch: int, m: int, n: int, k: int, itemsize: int) -> int:
    """Bytes of the sums of a product that is split as far as it helps, in the type that it is computed in."""
    tiles = max(batch, 1) * -(-m // _TILE[0]) * -(-n // _TILE[1])
    splits = min(-(-k // _LEAST_DEPTH), max(2 * _PROCESSORS // max(tiles, 1), 1))
    return batch * m * n * max(itemsize, 4) * splits if splits > 1 else 0


def _count(window: Window) -> int | None:
    """Elements; None when a size is dynamic."""
    sizes = [size for size in window.sizes if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(window.sizes) else None


def _padded(window: Window, multiple: int = _CHANNELS) -> int | None:
    """Elements with the channels, dimension 1, padded to a multiple; None when a size is dynamic."""
    count = _count(window)
    if not count:
        return count
    channels = window.sizes[1]
    return count // channels * -(-channels // multiple) * multiple if isinstance(channels, int) else None

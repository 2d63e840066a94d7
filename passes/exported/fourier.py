"""Discrete Fourier transforms as matrix products with sines and cosines that the device makes itself.

Complex tensors are pairs (real part, imaginary part). Lengths above `DIRECT` that have a divisor are split
by it ("An Algorithm for the Machine Calculation of Complex Fourier Series", Cooley and Tukey, 1965).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]

DIRECT = 512
"""Longest transform that is made as one product."""


def _angles(rows: int, columns: int, period: int, like: Tensor) -> Tensor:
    """``2 pi (i * j mod period) / period``: reduced as integers, so that no accuracy is lost."""
    i, j = (torch.arange(count, device=like.device) for count in (rows, columns))
    turns = torch.remainder(i[:, None] * j[None, :], period)
    return turns.to(like.dtype) * (2 * math.pi / period)


def transform(x: Pair, forward: bool = True) -> Pair:
    """The unscaled transform along the last dimension."""
    re, im = x
    length = re.size(-1)
    factor = _factor(length)
    sign = -1.0 if forward else 1.0
    if factor == 1:
        angles = _angles(length, length, length, re)
        return _product((re, im), (angles.cos(), sign * angles.sin()))
    rest = length // factor
    columns = tuple(t.reshape(*t.shape[:-1], factor, rest).transpose(-1, -2) for t in (re, im))
    done = transform((columns[0], columns[1]), forward)
    angles = _angles(rest, factor, length, re)
    done = multiply(done, (angles.cos(), sign * angles.sin()))
    done = transform((done[0].transpose(-1, -2), done[1].transpose(-1, -2)), forward)
    return done[0].transpose(-1, -2).flatten(-2), done[1].transpose(-1, -2).flatten(-2)


def _factor(length: int) -> int:
    """A divisor near the square root of a long length; 1 to make the transform directly."""
    if length <= DIRECT:
        return 1
    return max(d for d in range(1, math.isqrt(length) + 1) if length % d == 0)


def _product(x: Pair, y: Pair) -> Pair:
    return (
        torch.matmul(x[0], y[0]) - torch.matmul(x[1], y[1]),
        torch.matmul(x[0], y[1]) + torch.matmul(x[1], y[0]),
    )


def multiply(x: Pair, y: Pair) -> Pair:
    """The product of two pairs."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def complex_to_complex(x: Pair, dims: Sequence[int], normalization: int, forward: bool) -> Pair:
    """As ``aten._fft_c2c``."""
    for dim in dims:
        done = transform((x[0].movedim(dim, -1), x[1].movedim(dim, -1)), forward)
        x = done[0].movedim(-1, dim), done[1].movedim(-1, dim)
    return _normalized(x, math.prod(x[0].size(d) for d in dims), normalization)


def real_to_complex(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Pair:
    """As ``aten._fft_r2c``: the last of the dimensions first, of which half is enough."""
    last = dims[-1]
    count, rows = x.size(last), x.movedim(last, -1)
    kept = count // 2 + 1 if onesided else count
    if _factor(count) == 1:
        angles = _angles(count, kept, count, x)
        done = torch.matmul(rows, angles.cos()), torch.matmul(rows, -angles.sin())
    else:
        whole = transform((rows, torch.zeros_like(rows)))
        done = whole[0][..., :kept], whole[1][..., :kept]
    done = complex_to_complex((done[0].movedim(-1, last), done[1].movedim(-1, last)), dims[:-1], 0, True)
    return _normalized(done, math.prod(x.size(d) for d in dims), normalization)


def complex_to_real(x: Pair, dims: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """As ``aten._fft_c2r``: the inverse of a onesided transform."""
    last, count = dims[-1], last_dim_size
    total = math.prod(x[0].size(d) for d in dims[:-1]) * count
    re, im = complex_to_complex(x, dims[:-1], 0, False)
    re, im = (t.movedim(last, -1)[..., : count // 2 + 1] for t in (re, im))
    mirrored = slice(1, count - count // 2)
    whole = torch.cat([re, re[..., mirrored].flip(-1)], -1), torch.cat([im, -im[..., mirrored].flip(-1)], -1)
    if _factor(count) == 1:
        angles = _angles(count, count, count, re)
        found = torch.matmul(whole[0], angles.cos()) - torch.matmul(whole[1], angles.sin())
    else:
        found = transform(whole, forward=False)[0]
    return _normalized((found.movedim(-1, last), found), total, normalization)[0]


def _normalized(x: Pair, count: int, normalization: int) -> Pair:
    """0: as it is, 1: by the root of the count, 2: by the count."""
    if normalization == 0:
        return x
    scale = 1 / math.sqrt(count) if normalization == 1 else 1 / count
    return x[0] * scale, x[1] * scale

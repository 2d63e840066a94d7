"""Special functions that NumPy lacks, in float64."""

from __future__ import annotations

import math

import numpy as np

from ..tensors.host import Array

# W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969).
_SMALL = (
    (
        1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
        3.20937758913846947e3,
    ),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)  # fmt: skip
_MIDDLE = (
    (
        2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
        2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
        1.23033935479799725e3,
    ),
    (
        1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
        3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
    ),
)  # fmt: skip
_LARGE = (
    (
        1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
        1.60837851487422766e-2, 6.58749161529837803e-4,
    ),
    (
        1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)  # fmt: skip


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    return np.asarray(np.polyval(coefficients[0], x) / np.polyval(coefficients[1], x))


def erfc_scaled(x: Array) -> Array:
    """``exp(x * x) * erfc(x)`` for x of at least 0.46875."""
    middle = _ratio(_MIDDLE, np.minimum(x, 4.0))
    inverse = 1.0 / np.maximum(x, 4.0)
    square = inverse * inverse
    large = inverse * (1.0 / math.sqrt(math.pi) - square * _ratio(_LARGE, square))
    return np.where(x <= 4.0, middle, large)


def erf(x: Array) -> Array:
    """The error function."""
    wide = np.atleast_1d(x.astype(np.float64))
    size = np.abs(wide)
    made = np.where(np.isnan(wide), wide, np.copysign(1.0, wide))  # from 6 on it is 1 to the last bit
    near, middle = size <= 0.46875, (size > 0.46875) & (size < 6.0)
    inside, bounded = wide[near], size[middle]
    made[near] = inside * _ratio(_SMALL, inside * inside)
    tail = np.exp(-bounded * bounded) * erfc_scaled(bounded)
    made[middle] = np.copysign(1.0 - tail, wide[middle])
    return made.reshape(x.shape)


def erfc(x: Array) -> Array:
    """One minus the error function, accurate where that is small."""
    wide = x.astype(np.float64)
    bounded = np.clip(wide, 0.46875, 30.0)
    tail = np.exp(-bounded * bounded) * erfc_scaled(bounded)
    return np.where(wide > 0.46875, tail, 1.0 - erf(wide))


def erfcx(x: Array) -> Array:
    """``exp(x * x) * erfc(x)``, without the product where one factor is infinite and the other zero."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.exp(wide * wide) * erfc(wide)
    return np.where(wide > 0.46875, erfc_scaled(np.maximum(wide, 0.46875)), low)


def sinpi(x: Array) -> Array:
    """``sin(pi * x)``, with the whole turns taken off first."""
    return np.sin(np.pi * np.fmod(x.astype(np.float64), 2.0))


def cospi(x: Array) -> Array:
    """``cos(pi * x)``, likewise."""
    return np.cos(np.pi * np.fmod(x.astype(np.float64), 2.0))


def erfinv(x: Array) -> Array:
    """Inverse of the error function: Winitzki's estimate (2008), then three steps of Newton."""
    wide = x.astype(np.float64)
    w = -np.log((1.0 - wide) * (1.0 + wide))
    inner = 2.0 / (math.pi * 0.147) - w / 2.0
    start = np.copysign(np.sqrt(np.sqrt(inner * inner + w / 0.147) - inner), wide)
    for _ in range(3):
        step = (erf(start) - wide) / (2.0 / math.sqrt(math.pi) * np.exp(-start * start))
        start = start - np.where(np.isfinite(step), step, 0.0)
    return np.where(
        np.abs(wide) < 1.0, start, np.where(np.abs(wide) == 1.0, np.copysign(np.inf, wide), np.nan)
    )


def bessel_i(order: int, x: Array) -> Array:
    """Modified, of the first kind: the mean of ``exp(x cos t) cos(order t)`` over a turn."""
    turns = (np.arange(512) + 0.5) * (np.pi / 512)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        total = sum(np.exp(wide * np.cos(t)) * np.cos(order * t) for t in turns)
    return np.asarray(total / 512)


_NEAR = 25.0
"""From here on Hankel's expansion is exact to the last bit."""


def bessel_j(order: int, x: Array) -> Array:
    """Of the first kind: the mean of ``cos(order t - x sin t)`` over a turn, or Hankel's expansion."""
    wide = np.abs(x.astype(np.float64))
    near = _bessel_j_near(order, np.minimum(wide, _NEAR))
    made = np.where(wide <= _NEAR, near, _hankel(order, wide, 0.0))
    return np.where((x < 0) & (order % 2 == 1), -made, made)


def _bessel_j_near(order: int, x: Array) -> Array:
    turns = (np.arange(64) + 0.5) * (np.pi / 64)
    return np.asarray(sum(np.cos(order * t - x * np.sin(t)) for t in turns) / 64)


def _hankel(order: int, x: Array, turn: float) -> Array:
    """Abramowitz and Stegun 9.2.5 for turn 0, 9.2.6 for a quarter turn."""
    far = np.maximum(x, _NEAR)
    term, parts = np.ones_like(far), [np.zeros_like(far), np.zeros_like(far)]
    for k in range(20):
        parts[k % 2] = parts[k % 2] + (-1) ** (k // 2) * term
        term = term * (4 * order * order - (2 * k + 1) ** 2) / ((k + 1) * 8 * far)
    angle = np.where(np.isinf(x), np.nan, far) - (order / 2 + 0.25) * np.pi - turn
    with np.errstate(invalid="ignore"):
        made = np.sqrt(2 / (np.pi * far)) * (parts[0] * np.cos(angle) - parts[1] * np.sin(angle))
    return np.where(np.isinf(x), 0.0, made)


def bessel_y(order: int, x: Array) -> Array:
    """Of the second kind, order 0 or 1: Neumann's series (Abramowitz and Stegun 9.1.88) or Hankel's."""
    wide = x.astype(np.float64)
    near = np.clip(wide, 1e-300, _NEAR)
    j = [_bessel_j_near(n, near) for n in range(70)]
    total = (np.log(near / 2) + np.euler_gamma - order) * j[order] - order * j[0] / near
    for k in range(1, 34):
        share = 2 / k if order == 0 else (2 * k + 1) / (k * (k + 1))
        total = total - (-1) ** k * share * j[2 * k + order]
    made = np.where(wide <= _NEAR, 2 / np.pi * total, _hankel(order, wide, np.pi / 2))
    return np.where(wide > 0, made, np.where(wide == 0, -np.inf, np.nan))


def _lgamma(x: float) -> float:
    return math.lgamma(x) if math.isfinite(x) and (x > 0 or x != math.floor(x)) else _limit(x, math.inf)


def _gamma(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    if x > 171.7:
        return math.inf
    return math.gamma(x) if math.isfinite(x) and (x > 0 or x != math.floor(x)) else _limit(x, math.nan)


def _limit(x: float, pole: float) -> float:
    return x if math.isnan(x) else math.inf if x > 0 else pole


lgamma = np.vectorize(_lgamma, otypes=[np.float64])
tgamma = np.vectorize(_gamma, otypes=[np.float64])

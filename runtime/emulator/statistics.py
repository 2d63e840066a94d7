"""Running maxima, sums of exponentials, means and variances, as generated kernels combine them."""

from __future__ import annotations

import numpy as np

from . import language as tl
from . import reductions
from .functions import unary
from .tensor import Tensor, as_tensor, binary

exp = unary(np.exp)


def larger(left: Tensor, right: Tensor) -> Tensor:
    """The larger; NaN wins."""
    return binary(np.maximum, left, right)


def largest(tensor: Tensor, dim: int) -> Tensor:
    """The largest over an axis; NaN wins."""
    return reductions.reduce_with(np.max, tensor, dim, False, tensor.dtype)


def online_softmax_reduce(
    lhs_max: Tensor, lhs_sum: Tensor, dim: int, use_fast_math: bool
) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials over an axis."""
    top = largest(lhs_max, dim)
    wide = tl.expand_dims(top, dim)
    delta = tl.where(wide == float("-inf"), 0, lhs_max - wide)
    return top, reductions.total(lhs_sum * exp(delta), dim)


def online_softmax_combine(
    lhs_max: Tensor, lhs_sum: Tensor, rhs_max: Tensor, use_fast_math: bool
) -> tuple[Tensor, Tensor]:
    """Take the next block of data into the running maximum and sum."""
    return online_softmax_combine_with_sum(lhs_max, lhs_sum, rhs_max, as_tensor(1.0), use_fast_math)


def online_softmax_combine_with_sum(
    lhs_max: Tensor, lhs_sum: Tensor, rhs_max: Tensor, rhs_sum: Tensor, use_fast_math: bool
) -> tuple[Tensor, Tensor]:
    """Join two running maxima and sums."""
    top = larger(lhs_max, rhs_max)
    empty = top == float("-inf")
    left = tl.where(empty, 1.0, exp(lhs_max - top))
    right = tl.where(empty, 1.0, exp(rhs_max - top))
    return top, lhs_sum * left + rhs_sum * right


def welford_reduce(
    value: Tensor, mean: Tensor, m2: Tensor, weight: Tensor, first_iteration: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one more value per lane into mean, sum of squared deviations, and weight (Welford)."""
    if first_iteration:
        return value, tl.zeros_like(m2), tl.full(list(weight.shape), 1, weight.dtype)
    delta = value - mean
    count = weight + 1
    mean = mean + delta / count
    return mean, m2 + delta * (value - mean), count


def welford_combine(
    mean_1: Tensor, m2_1: Tensor, weight_1: Tensor, mean_2: Tensor, m2_2: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Join two sets of values (Chan, Golub and LeVeque)."""
    delta = tl.where(mean_1 == mean_2, 0.0, mean_2 - mean_1)
    weight = weight_1 + weight_2
    share = tl.where(weight == 0.0, 0.0, weight_2 / weight)
    return mean_1 + delta * share, m2_1 + m2_2 + delta * delta * weight_1 * share, weight


def welford(mean: Tensor, m2: Tensor, weight: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Join all lanes along an axis."""
    (mean, m2), (_, weight) = tl.broadcast(mean, m2), tl.broadcast(mean, weight)
    made: tuple[Tensor, Tensor, Tensor] = reductions.reduce((mean, m2, weight), dim, welford_combine)
    return made

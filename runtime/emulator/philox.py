"""Triton's random numbers: Philox 4x32 with ten rounds (Salmon et al., 2011), and what is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..tensors.host import Array
from .tensor import Tensor, as_tensor
from .types import FLOAT32, UINT32

_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def _multiply(factor: np.uint64, value: Array) -> tuple[Array, Array]:
    product = factor * value.astype(np.uint64)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def philox_rounds(c0: Array, c1: Array, c2: Array, c3: Array, seed: Array, rounds: int) -> tuple[Array, ...]:
    """Four random words per counter."""
    k0, k1 = seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        for _ in range(rounds):
            high_a, low_a = _multiply(_ROUND_A, c0)
            high_b, low_b = _multiply(_ROUND_B, c2)
            c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
            k0, k1 = k0 + _KEY_A, k1 + _KEY_B
    return c0, c1, c2, c3


def philox(seed: Any, offset: Any, rounds: int = 10) -> tuple[Tensor, ...]:
    """``tl.randint4x``: four blocks of random 32-bit words."""
    counter = as_tensor(offset).data
    key = as_tensor(seed).data.astype(np.int64).view(np.uint64)
    key = key.reshape(key.shape[0], *([1] * (counter.ndim - key.ndim)), *key.shape[1:])
    zero = np.zeros(counter.shape, np.uint32)
    words = philox_rounds(counter.astype(np.uint32), zero, zero, zero, key, rounds)
    return tuple(
        Tensor(np.broadcast_to(word, np.broadcast_shapes(word.shape, counter.shape)), UINT32)
        for word in words
    )


def to_uniform(words: Tensor) -> Tensor:
    """Random words as numbers in [0, 1)."""
    signed = words.data.view(np.int32)
    signed = np.where(signed < 0, -signed - 1, signed)
    return Tensor((signed * np.float32(4.6566127342e-10)).astype(np.float32), FLOAT32)


def uniform4(seed: Any, offset: Any, n_rounds: int = 10) -> tuple[Tensor, ...]:
    """``tl.rand4x``."""
    return tuple(to_uniform(words) for words in philox(seed, offset, n_rounds))


def rand(seed: Any, offset: Any, n_rounds: int = 10) -> Tensor:
    """``tl.rand``: numbers in [0, 1)."""
    return to_uniform(philox(seed, offset, n_rounds)[0])


def randint(seed: Any, offset: Any, n_rounds: int = 10) -> Tensor:
    """``tl.randint``: random 32-bit words."""
    return philox(seed, offset, n_rounds)[0]


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    radius = np.sqrt(np.float32(-2) * np.log(np.maximum(first.data, np.float32(1e-7))))
    angle = np.float32(6.283185307179586) * second.data
    return Tensor(radius * np.cos(angle), FLOAT32), Tensor(radius * np.sin(angle), FLOAT32)


def normal4(seed: Any, offset: Any, n_rounds: int = 10) -> tuple[Tensor, ...]:
    """``tl.randn4x``: four blocks of normal numbers."""
    a, b, c, d = uniform4(seed, offset, n_rounds)
    return (*_box_muller(a, b), *_box_muller(c, d))


def randn(seed: Any, offset: Any, n_rounds: int = 10) -> Tensor:
    """``tl.randn``: normal numbers."""
    a, b, *_ = uniform4(seed, offset, n_rounds)
    return _box_muller(a, b)[0]

"""Constants that an artifact does not hold but says how to make from a file of weights.

An export from meta tensors never sees the weights. What it would have done to their bytes is written down as
a `Recipe` and done when the program is loaded: take tensors by name, cast them, put them one after the
other, lay them out with the wanted strides. Nothing else; whatever needs more is computed in every call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import DType


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a weights file, under the first of its names that the file has; without names, zeros."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parts one after the other along dimension 0, in an element type, with strides in elements (dense)."""

    parts: tuple[Part, ...]
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """The first name of every part that has one."""
        return tuple(part.names[0] for part in self.parts if part.names)

    @property
    def is_plain(self) -> bool:
        """Whether a file's bytes serve as they are, if their element type does."""
        return len(self.parts) == 1 and bool(self.parts[0].names) and _is_row_major(self.shape, self.strides)

    @property
    def is_sound(self) -> bool:
        """Whether the parts fill the shape, and the strides lay it out without gaps."""
        extents = [extent for part in self.parts for extent in part.shape[:1]]
        tails = {part.shape[1:] for part in self.parts}
        is_single = len(self.parts) == 1 and self.parts[0].shape == self.shape
        is_stack = len(tails) == 1 and self.shape == (sum(extents), *next(iter(tails), ()))
        order = sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], -self.shape[d]))
        laid_out = _is_row_major([self.shape[d] for d in order], [self.strides[d] for d in order])
        is_possible = bool(self.names) and min(self.shape, default=0) >= 0
        return is_possible and (is_single or is_stack) and (laid_out or not self.nbytes)

    def digest(self) -> str:
        """SHA-256 of the recipe itself, which stands for bytes that nobody has seen."""
        return hashlib.sha256(f"devplan recipe {self!r}".encode()).hexdigest()


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= max(extent, 1)
    return True

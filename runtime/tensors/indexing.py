"""Indices and shapes as people write them, for views of tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from ..errors import UsageError

_TOO_MANY = 1 << 56
"""More elements than any memory holds, whose bytes no library counts."""

Index = int | slice | EllipsisType | None
"""What may stand between the brackets of a view."""


Part = int | slice | None


def expanded(parts: tuple[Any, ...], rank: int) -> list[Part]:
    """An index with a part for each dimension; IndexError for what is none, or for too many."""
    named = sum(part is not None and part is not ... for part in parts)
    if named > rank:
        raise IndexError(f"{named} indices for {rank} dimensions")
    if sum(part is ... for part in parts) > 1:
        raise IndexError("an index has at most one `...`")
    rest: list[Part] = [slice(None)] * (rank - named)
    made: list[Part] = []
    for part in parts if any(part is ... for part in parts) else (*parts, ...):
        plain: Any = part
        if part is ...:
            made += rest
        elif part is None or isinstance(part, slice):
            made.append(plain)
        else:
            try:
                made.append(index_of(part))
            except TypeError as error:
                raise IndexError(f"`{part!r}` is no index: a view takes integers and slices") from error
    return made


def index_of(part: Any) -> int:
    """An integer of any library; TypeError for what is none, truth values included."""
    if isinstance(part, bool | np.bool_):
        raise TypeError("a truth value")
    return operator.index(part)


def whole_numbers(given: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """``(2, 3)`` of ``2, 3`` and of ``(2, 3)``; UsageError for what are no integers."""
    first: Any = given[0] if len(given) == 1 else given
    numbers: Sequence[int] = first if is_sequence(first) else (first,)
    try:
        return tuple(index_of(number) for number in numbers)
    except TypeError:
        raise UsageError(f"{list(numbers)} are no integers") from None


def extents_of(shape: Any) -> tuple[int, ...]:
    """A shape of any library, or one extent; UsageError for what is none."""
    try:
        extents = tuple(index_of(extent) for extent in (shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        extents = (-1,)
    if any(extent < 0 for extent in extents) or prod(extents) >= _TOO_MANY:
        raise UsageError(f"a tensor cannot have the shape {shape}")
    return extents


def is_sequence(value: Any) -> bool:
    """A list or tuple."""
    return isinstance(value, list | tuple)

"""Indices and shapes as people write them, for views of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

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


def numbers(given: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """``(2, 3)`` of ``2, 3`` and of ``(2, 3)``."""
    first: Any = given[0] if len(given) == 1 else given
    numbers: Sequence[int] = first if is_sequence(first) else (first,)
    return tuple(numbers)


def is_sequence(value: Any) -> bool:
    """A list or tuple."""
    return isinstance(value, list | tuple)

"""Type guards for what arrives untyped: users' Python values and TOML documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether it is a mapping."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list."""
    return isinstance(value, list)


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Whether it is a tuple."""
    return isinstance(value, tuple)


def is_sequence(value: object) -> TypeGuard[tuple[Any, ...] | list[Any]]:
    """Whether it is a tuple or a list."""
    return isinstance(value, tuple | list)

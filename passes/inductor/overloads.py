"""Operators as graphs hold them, and what their schemas say, which PyTorch keeps private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch._ops import OpOverload as Overload

# pyright: reportPrivateUsage=false

__all__ = [
    "Overload",
    "arguments",
    "can_decompose",
    "full_name",
    "is_mutable",
    "is_overload",
    "overload_name",
    "packet_name",
    "returns",
]


def is_overload(target: object) -> TypeGuard[Overload]:
    """Whether a graph node's target is an operator under one of its overloads, ``aten.add.Tensor``."""
    return isinstance(target, Overload)


def full_name(overload: Overload) -> str:
    """``aten::add`` of ``aten.add.Tensor``."""
    return str(overload._schema.name)


def packet_name(overload: Overload) -> str:
    """``add`` of ``aten.add.Tensor``; operators of other libraries keep the library before them."""
    return full_name(overload).removeprefix("aten::")


def overload_name(overload: Overload) -> str:
    """``Tensor`` of ``aten.add.Tensor``."""
    return str(overload._overloadname)


def arguments(overload: Overload) -> Sequence[Any]:
    """What it takes: each has ``name``, ``type``, ``default_value``, ``is_out`` and ``alias_info``."""
    found: Sequence[Any] = overload._schema.arguments
    return found


def returns(overload: Overload) -> Sequence[Any]:
    """What it gives: each has ``alias_info``, None for a tensor of its own."""
    found: Sequence[Any] = overload._schema.returns
    return found


def is_mutable(overload: Overload) -> bool:
    """Whether it writes to an operand."""
    return bool(overload._schema.is_mutable)


def can_decompose(overload: Overload) -> bool:
    """Whether PyTorch's own kernel is made of other operators."""
    return bool(overload._can_decompose())

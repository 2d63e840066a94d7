"""Operators of our own, which stand for a kernel or a library call while a region is traced and lowered.

They have no implementation, only a schema and the shape of their result: Inductor leaves them alone as
external calls, with operands in the layout that they were traced with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Fake = TypeVar("Fake", bound=Callable[..., torch.Tensor])

_LIBRARY: Any = torch.library.Library("devplan", "FRAGMENT")  # type: ignore[no-untyped-call]


def own_operator(schema: str) -> Callable[[Fake], Fake]:
    """Define ``devplan::NAME(...)``; the decorated function makes an empty result for fake operands."""

    def define(fake: Fake) -> Fake:
        _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
        torch.library.register_fake(f"devplan::{schema.partition('(')[0]}", fake, lib=_LIBRARY)
        return fake

    return define


def define_marker(schema: str) -> None:
    """Define ``devplan::NAME(...) -> ()``, which marks a place in an exported graph and stays where it is."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    torch.library.register_fake(f"devplan::{name}", _nothing, lib=_LIBRARY)
    torch.fx.has_side_effect(getattr(torch.ops.devplan, name).default)


def _nothing(*operands: Any) -> None:
    """What a marker computes."""

"""Attributes that a module sets on itself while it runs, ``self.steps += 1``: a later call sees none of them.

An exported method computes with what they were before its call; `torch.export` restores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

_NAMED = 3
"""Attributes that a note names."""


@contextlib.contextmanager
def watched_attributes(module: torch.nn.Module) -> Generator[list[str]]:
    """While active, attributes that a call of the module leaves changed are added to the list."""
    found: list[str] = []
    before = {id(part): dict(vars(part)) for part in module.modules()}

    def look(*_: Any) -> None:
        for place, part in module.named_modules():
            held = before.get(id(part), {})
            names = [n for n, value in vars(part).items() if n in held and _is_kept(held[n], value)]
            found.extend(f"{place}.{name}".lstrip(".") for name in names)

    hook = module.register_forward_hook(look)
    try:
        yield found
    finally:
        hook.remove()


def _is_kept(before: Any, after: Any) -> bool:
    """Whether a value is another number now, or a tensor that no hook computes anew for each call."""
    if isinstance(before, bool) or before is after:
        return False
    if isinstance(before, int | float):
        return isinstance(after, int | float) and before != after
    return isinstance(after, Tensor) and (before is None or (isinstance(before, Tensor) and before.is_leaf))


def kept_note(names: list[str]) -> str:
    """What a person should know of them; empty where there are none."""
    if not names:
        return ""
    names = list(dict.fromkeys(names))  # a method may be traced twice
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"the model sets {shown} on itself while it runs, which no later call sees; buffers are kept"

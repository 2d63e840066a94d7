"""Modules that are cast while they run, ``self.gate = self.gate.to(torch.float32)``, and copied.

Eager code rewrites the module's parameters then, which cannot be done to those that `torch.export` holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..inductor.interfaces import tensor_tables

_Cast = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def traced_casts(module: torch.nn.Module) -> Generator[None]:
    """While active, casting a part of the module casts its tensors in the graph; it gets its own back."""
    tables = [table for part in module.modules() for table in tensor_tables(part)]
    held = [(table, dict(table)) for table in tables]
    changed: list[tuple[Any, str]] = []

    def apply(part: torch.nn.Module, cast: _Cast, recurse: bool = True) -> torch.nn.Module:
        for each in part.modules() if recurse else (part,):
            for table in tensor_tables(each):
                changed.extend((each, name) for name in _cast(each, table, cast))
        return part

    with mock.patch.object(torch.nn.Module, "_apply", apply):
        try:
            yield
        finally:
            for each, name in changed:
                each.__dict__.pop(name, None)
            for table, before in held if changed else ():
                table.clear()
                table.update(before)


def computed_attributes(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """By identity, stand-ins in copies for tensors that hooks computed and left as attributes.

    `torch.nn.utils.weight_norm` does so, and such a tensor refuses to be copied.
    """
    held = (value for part in module.modules() for value in vars(part).values())
    return {id(v): v.detach().clone() for v in held if isinstance(v, torch.Tensor) and not v.is_leaf}


def _cast(part: Any, table: dict[str, Any], cast: _Cast) -> Iterator[str]:
    """The names of tensors that changed: plain attributes now, since only a leaf can be a parameter."""
    for name, tensor in [(name, tensor) for name, tensor in table.items() if tensor is not None]:
        made = cast(tensor)
        if (made.dtype, made.device) != (tensor.dtype, tensor.device):
            del table[name]
            part.__dict__[name] = made
            yield name

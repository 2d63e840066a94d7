"""``cache[:, :, position] = value`` where the position is a tensor without dimensions.

Eager code reads the number, which `torch.export` cannot know. Here such a write becomes one that a tensor of
indices directs. (Reading ``cache[:, position]`` is turned into a selection by `torch.export` itself.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@contextlib.contextmanager
def directed_writes() -> Generator[None]:
    """While active, writes at tensors without dimensions are directed by them."""
    plain: Callable[[Tensor, Any, Any], None] = Tensor.__setitem__

    def write(held: Tensor, index: Any, value: Any) -> None:
        items = list(index) if isinstance(index, tuple) else [index]  # pyright: ignore
        others = (i for i in items if not _is_position(i))
        if not any(map(_is_position, items)) or any(isinstance(i, Tensor | list | bool) for i in others):
            plain(held, index, value)
            return
        view: Tensor = held[tuple(slice(None) if _is_position(i) else i for i in items)]
        torch.ops.aten.index_put_(view, _positions(items, held.dim()), _fitted(value, view, items))

    with mock.patch.object(Tensor, "__setitem__", write):
        yield


def _is_position(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in _INTEGERS


def _positions(items: list[Any], rank: int) -> list[Tensor | None]:
    """For each dimension of the view the tensor that directs it; a number leaves none, ``None`` makes one."""
    found: list[Tensor | None] = []
    named = sum(item is not None and item is not Ellipsis for item in items)
    for item in items:
        if item is Ellipsis:
            found += [None] * (rank - named)
        elif _is_position(item):
            found.append(item.long())
        elif item is None or isinstance(item, slice):
            found.append(None)
    return found


def _fitted(value: Any, view: Tensor, items: list[Any]) -> Tensor:
    """The value as a tensor that broadcasts; leading dimensions of one that are too many are left out."""
    made = value if isinstance(value, Tensor) else torch.full((), value, dtype=view.dtype, device=view.device)
    rank = view.dim() - sum(map(_is_position, items))
    while made.dim() > rank and made.shape[0] == 1:
        made = made[0]
    return made.to(view.dtype)

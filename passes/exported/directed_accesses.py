"""``cache[:, :, position] = value`` and ``table[step]`` where the index is a tensor without dimensions.

Eager code reads the number, which an exported program cannot know. Here such an access becomes one that a
tensor of indices directs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..inductor.interfaces import known_value

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@contextlib.contextmanager
def directed_accesses() -> Generator[None]:
    """While active, reads and writes at tensors without dimensions are directed by them.

    What a constant gives is known, so it stays a view.
    """
    get: Callable[[Tensor, Any], Tensor] = Tensor.__getitem__
    put: Callable[[Tensor, Any, Any], None] = Tensor.__setitem__

    def read(held: Tensor, index: Any) -> Tensor:
        if (items := _directed(index)) is None:
            return get(held, index)
        found: Tensor = torch.ops.aten.index(_view(held, items), _positions(items, held.dim()))
        return found

    def write(held: Tensor, index: Any, value: Any) -> None:
        if (items := _directed(index)) is None:
            put(held, index, value)
            return
        view = _view(held, items)
        torch.ops.aten.index_put_(view, _positions(items, held.dim()), _fitted(value, view, items))

    read.__name__, write.__name__ = get.__name__, put.__name__  # torch goes by them
    with mock.patch.object(Tensor, "__getitem__", read), mock.patch.object(Tensor, "__setitem__", write):
        yield


def _directed(index: Any) -> list[Any] | None:
    """The parts of an index that a position directs; None where none does, or other tensors do, too."""
    items = list(index) if isinstance(index, tuple) else [index]  # pyright: ignore
    others = [i for i in items if not _is_position(i)]
    if len(others) == len(items) or any(isinstance(i, Tensor | list | bool) for i in others):
        return None
    return items


def _is_position(item: Any) -> bool:
    if not isinstance(item, Tensor) or item.dim() or item.dtype not in _INTEGERS:
        return False
    return known_value(item) is None


def _view(held: Tensor, items: list[Any]) -> Tensor:
    return held[tuple(slice(None) if _is_position(i) else i for i in items)]


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

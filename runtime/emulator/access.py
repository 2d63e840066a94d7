"""Loads, stores and atomics of interpreted kernels: gathers and scatters in checked device memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArtifactError, ExecutionError
from ..tensors.host import Array
from . import types
from .tensor import Memory, Tensor, align_ranks, as_tensor
from .types import Type


@dataclass
class Running:
    """The chunk of programs that a thread interprets."""

    programs: tuple[Array, Array, Array]
    """Index of each program along x, y and z."""
    grid: tuple[int, int, int]
    undo: list[Callable[[], None]] | None = None
    """Takes the chunk's writes back, latest last; None where nothing can make it diverge."""


@dataclass
class _Local(threading.local):
    running: Running | None = field(default=None)


LOCAL = _Local()


def running() -> Running:
    """The chunk that this thread interprets; ArtifactError outside of a launch."""
    if LOCAL.running is None:
        raise ArtifactError("a kernel function is called outside of a launch")
    return LOCAL.running


@dataclass(frozen=True)
class Place:
    """Where a tensor of pointers leads: a flat view, indices into it, and which of them count."""

    view: Array
    index: Array
    mask: Array | None
    element: Type
    memory: Memory


def _place(pointer: Any, mask: Any, other_shape: Array | None = None) -> Place:
    if not isinstance(pointer, Tensor) or pointer.base is None or pointer.dtype.element_ty is None:
        raise ArtifactError("a kernel accesses memory through something that is no pointer")
    element = pointer.dtype.element_ty
    index = pointer.data // element.itemsize
    keep: Array | None = None
    if mask is not None and not (isinstance(mask, bool) and mask):
        index, keep = _broadcast(index, as_tensor(mask).data != 0)
        if keep.all():
            keep = None
    if other_shape is not None:
        index, wide = _broadcast(index, other_shape)
        keep = None if keep is None else np.broadcast_to(_broadcast(keep, wide)[0], index.shape)
    view = pointer.base.view(element)
    _check(index, keep, len(view), element)
    return Place(view, index, keep, element, pointer.base)


def _broadcast(left: Array, right: Array) -> tuple[Array, Array]:
    first, second = align_ranks(left, right)
    a, b = np.broadcast_arrays(first, second)
    return a, b


def _check(index: Array, keep: Array | None, limit: int, element: Type) -> None:
    used = index if keep is None else index[keep]
    if used.size and (int(used.min()) < 0 or int(used.max()) >= limit):
        bad = int(used.min()) if int(used.min()) < 0 else int(used.max())
        raise ExecutionError(
            f"a kernel accesses element {bad} of a block of {limit} elements of `{element}`",
            why="it is outside of the block of device memory that its pointer leads into",
        )


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: str = "",
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Tensor:
    """``tl.load``: elements where the mask is true, ``other`` (0 without one) elsewhere."""
    place = _place(pointer, mask)
    if place.mask is None:
        return Tensor(types.unpack(place.view[place.index], place.element), _loaded(place.element))
    stored = place.view[np.where(place.mask, place.index, 0)] if len(place.view) else _zeros(place)
    values = types.unpack(stored, place.element)
    fill = np.zeros((), values.dtype)
    if other is not None:
        fill = as_tensor(other).to(_loaded(place.element)).data
        values, fill = _broadcast(values, fill)
    return Tensor(np.where(place.mask, values, fill), _loaded(place.element))


def _zeros(place: Place) -> Array:
    return np.zeros(place.index.shape, place.element.stored)


def _loaded(element: Type) -> Type:
    return element


def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:
    """``tl.store``: where the mask is true."""
    element = pointer.dtype.element_ty
    made = as_tensor(value).to(element)
    place = _place(pointer, mask, made.data)
    stored = types.pack(_broadcast(place.index, made.data)[1], element)
    if place.mask is None:
        _remember(place, place.index)
        place.view[place.index] = stored
    else:
        index = place.index[place.mask]
        _remember(place, index)
        place.view[index] = stored[place.mask]


def _remember(place: Place, index: Array) -> None:
    undo = running().undo
    if undo is not None:
        view, old = place.view, place.view[index].copy()
        undo.append(lambda: view.__setitem__(index, old))


def _in_order(place: Place, update: Callable[[tuple[Any, ...], Array], Any]) -> Tensor:
    """Apply ``update(position, old value)`` element by element; the old values."""
    element = place.element
    keep = np.ones(place.index.shape, bool) if place.mask is None else place.mask
    _remember(place, place.index[keep])
    before = np.zeros(place.index.shape, element.held)
    for at in zip(*np.nonzero(keep), strict=True):
        old = types.unpack(place.view[place.index[at]].reshape(1), element)
        before[at] = old[0]
        new = np.asarray(update(at, old), element.held).reshape(1)
        place.view[place.index[at]] = types.pack(new, element)[0]
    return Tensor(before, element)


def _spread(place: Place, values: Array) -> Array:
    """Values in the shape of the places that they go to."""
    return np.broadcast_to(_broadcast(place.index, values)[1], place.index.shape)


def _atomic(update: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    """An atomic that applies ``update(old, value)``, in the order of programs and elements."""

    def atomic(pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
        made = as_tensor(value).to(pointer.dtype.element_ty).data
        place = _place(pointer, mask, made)
        values = _spread(place, made)
        return _in_order(place, lambda at, old: update(old, values[at]))

    return atomic


def atomic_add(pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    """``tl.atomic_add``, all at once where that is the same as in the order of programs and elements."""
    element = pointer.dtype.element_ty
    made = as_tensor(value).to(element)
    place = _place(pointer, mask, made.data)
    if element.dtype is not None or place.index.size == 1:
        return _add_one_by_one(pointer, value, mask)
    values = _spread(place, made.data)
    keep = np.ones(place.index.shape, bool) if place.mask is None else place.mask
    _remember(place, place.index[keep])
    before = np.where(keep, place.view[np.where(keep, place.index, 0)], np.zeros((), element.held))
    before[keep] += _added_before(place.index[keep], values[keep])
    np.add.at(place.view, place.index[keep], values[keep])
    return Tensor(before, element)


def _added_before(index: Array, values: Array) -> Array:
    """For each value the sum of those before it that go to the same index."""
    order = np.argsort(index, kind="stable")
    ordered, where = values[order], index[order]
    sums = np.cumsum(ordered, dtype=values.dtype) - ordered
    is_first = np.diff(where, prepend=where[:1] - 1) != 0
    made = np.empty_like(values)
    made[order] = sums - sums[is_first][np.cumsum(is_first) - 1]
    return made


_add_one_by_one = _atomic(np.add)
atomic_max = _atomic(np.maximum)
atomic_min = _atomic(np.minimum)
atomic_and = _atomic(np.bitwise_and)
atomic_or = _atomic(np.bitwise_or)
atomic_xor = _atomic(np.bitwise_xor)


def _newer(old: Any, new: Any) -> Any:
    return new


atomic_xchg = _atomic(_newer)


def atomic_cas(pointer: Any, compare: Any, value: Any, sem: Any = None, scope: Any = None) -> Tensor:
    """``tl.atomic_cas``: store the value where memory holds ``compare``."""
    wanted = as_tensor(compare).to(pointer.dtype.element_ty).data
    made = as_tensor(value).to(pointer.dtype.element_ty).data
    place = _place(pointer, None, _broadcast(wanted, made)[0])
    old_values, new_values = _spread(place, wanted), _spread(place, made)
    return _in_order(place, lambda at, old: np.where(old == old_values[at], new_values[at], old))

"""Reductions and scans of interpreted kernels, over one axis of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..errors import ArtifactError
from ..tensors.host import Array
from . import types
from .tensor import Tensor
from .types import FLOAT32, INT32, Type

Reduction = Callable[..., Any]


def reduce_with(
    function: Reduction, tensor: Tensor, axis: int | None, keep_dims: bool, dtype: Type
) -> Tensor:
    """Reduce by a NumPy function over one axis, or over all."""
    over: Any = tuple(range(1, tensor.data.ndim)) if axis is None else axis_of(tensor, axis)
    made = function(tensor.data, axis=over, keepdims=keep_dims)
    return Tensor(types.settle(np.asarray(made, dtype.held), dtype), dtype)


def axis_of(tensor: Tensor, axis: int) -> int:
    """The axis of the data, with that of the programs counted; ArtifactError when there is none."""
    rank = len(tensor.shape)
    if not -rank <= axis < rank:
        raise ArtifactError(f"a kernel reduces axis {axis} of a block of {rank} axes")
    return axis % rank + 1


def _sum_type(dtype: Type) -> Type:
    if dtype.is_int() and dtype.primitive_bitwidth < 32:
        return INT32 if dtype.kind != "uint" else types.UINT32
    return dtype


def total(
    tensor: Tensor, axis: int | None = None, keep_dims: bool = False, dtype: Type | None = None
) -> Tensor:
    """The sum over an axis."""
    wide = dtype or _sum_type(tensor.dtype)
    return reduce_with(np.sum, tensor.to(wide), axis, keep_dims, wide)


def largest(
    tensor: Tensor,
    axis: int | None = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """The largest element, NaN ignored; with its index if asked for."""
    if return_indices:
        return _with_index(np.argmax, tensor, axis, keep_dims)
    return _extreme(np.fmax, tensor, axis, keep_dims)


def smallest(
    tensor: Tensor,
    axis: int | None = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """The smallest element, NaN ignored; with its index if asked for."""
    if return_indices:
        return _with_index(np.argmin, tensor, axis, keep_dims)
    return _extreme(np.fmin, tensor, axis, keep_dims)


def _extreme(choose: np.ufunc, tensor: Tensor, axis: int | None, keep_dims: bool) -> Tensor:
    wide = _at_least_32_bits(tensor)
    return reduce_with(choose.reduce, wide, axis, keep_dims, wide.dtype)


def _without_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(FLOAT32) if tensor.dtype.is_bf16() else tensor


def _at_least_32_bits(tensor: Tensor) -> Tensor:
    if tensor.dtype.primitive_bitwidth >= 32:
        return tensor
    return tensor.to(FLOAT32 if tensor.dtype.is_floating() else INT32)


def _with_index(choose: Any, tensor: Tensor, axis: int | None, keep_dims: bool) -> tuple[Tensor, Tensor]:
    tensor = _without_bfloat16(tensor if axis is not None else _flat(tensor))
    over = axis_of(tensor, 0 if axis is None else axis)
    index = np.expand_dims(choose(tensor.data, axis=over), over)
    value = np.take_along_axis(tensor.data, index, over)
    if not keep_dims:
        index, value = np.squeeze(index, over), np.squeeze(value, over)
    return Tensor(value, tensor.dtype), Tensor(index.astype(np.int32), INT32)


def argmax(tensor: Tensor, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    """Index of the largest element."""
    return _with_index(np.argmax, tensor, axis, keep_dims)[1]


def argmin(tensor: Tensor, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    """Index of the smallest element."""
    return _with_index(np.argmin, tensor, axis, keep_dims)[1]


def xor_sum(tensor: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
    """Exclusive or over an axis."""
    return reduce_with(np.bitwise_xor.reduce, tensor, axis, keep_dims, tensor.dtype)


def reduce_or(tensor: Tensor, axis: int, keep_dims: bool = False) -> Tensor:
    """Or over an axis."""
    return reduce_with(np.bitwise_or.reduce, tensor, axis, keep_dims, tensor.dtype)


def _parts(tensors: tuple[Tensor, ...], take: Callable[[Array], Array]) -> tuple[Tensor, ...]:
    return tuple(Tensor(take(tensor.data), tensor.dtype) for tensor in tensors)


def _combined(combine: Reduction, *operands: Tensor) -> tuple[Tensor, ...]:
    made: Any = combine(*operands)
    return cast("tuple[Tensor, ...]", made) if isinstance(made, tuple) else (made,)


def reduce(tensors: Any, axis: int | None, combine_fn: Reduction, keep_dims: bool = False) -> Any:
    """Reduce by a kernel's own function: neighbours are combined in rounds, which keeps their order."""
    single = isinstance(tensors, Tensor)
    state: tuple[Tensor, ...] = (tensors,) if single else tuple(tensors)
    if axis is None:
        state, axis = tuple(_flat(tensor) for tensor in state), 0
    over = axis_of(state[0], axis)
    while state[0].data.shape[over] > 1:
        length = state[0].data.shape[over]
        even = length - length % 2
        left = _parts(state, lambda data: data[_slices(data, over, slice(0, even, 2))])  # noqa: B023
        right = _parts(state, lambda data: data[_slices(data, over, slice(1, even, 2))])  # noqa: B023
        rest = _parts(state, lambda data: data[_slices(data, over, slice(even, None))])  # noqa: B023
        made = _combined(combine_fn, *left, *right)
        state = tuple(
            Tensor(np.concatenate([m.data.astype(r.data.dtype), r.data], over), r.dtype)
            for m, r in zip(made, rest, strict=True)
        )
    if not keep_dims:
        state = _parts(state, lambda data: np.squeeze(data, over))
    return state[0] if single else state


def _slices(data: Array, axis: int, which: slice) -> tuple[slice, ...]:
    return tuple(which if at == axis else slice(None) for at in range(data.ndim))


def associative_scan(tensors: Any, axis: int, combine_fn: Reduction, reverse: bool = False) -> Any:
    """Running combination by a kernel's own function, in doubling steps (Hillis and Steele)."""
    single = isinstance(tensors, Tensor)
    state: tuple[Tensor, ...] = (tensors,) if single else tuple(tensors)
    over = axis_of(state[0], axis)
    # Indices are the same in all programs and held once; values are not.
    shape = np.broadcast_shapes(*(each.data.shape for each in state))
    state = _parts(state, lambda data: np.broadcast_to(data, shape))
    if reverse:
        state = _parts(state, lambda data: np.flip(data, over))
    step, length = 1, state[0].data.shape[over]
    while step < length:
        left = _parts(state, lambda data: data[_slices(data, over, slice(0, length - step))])  # noqa: B023
        right = _parts(state, lambda data: data[_slices(data, over, slice(step, None))])  # noqa: B023
        head = _parts(state, lambda data: data[_slices(data, over, slice(0, step))])  # noqa: B023
        made = _combined(combine_fn, *left, *right)
        state = tuple(
            Tensor(np.concatenate([h.data, m.data.astype(h.data.dtype)], over), h.dtype)
            for h, m in zip(head, made, strict=True)
        )
        step *= 2
    if reverse:
        state = _parts(state, lambda data: np.flip(data, over))
    return state[0] if single else state


def cumsum(tensor: Tensor, axis: int = 0, reverse: bool = False, dtype: Type | None = None) -> Tensor:
    """Running sum."""
    wide = _without_bfloat16(tensor)
    return _cumulative(np.cumsum, wide.to(dtype or _sum_type(wide.dtype)), axis, reverse)


def cumprod(tensor: Tensor, axis: int = 0, reverse: bool = False) -> Tensor:
    """Running product."""
    return _cumulative(np.cumprod, _without_bfloat16(tensor), axis, reverse)


def _cumulative(function: Any, tensor: Tensor, axis: int, reverse: bool) -> Tensor:
    over = axis_of(tensor, axis)
    data = np.flip(tensor.data, over) if reverse else tensor.data
    made = function(data, axis=over, dtype=tensor.dtype.held)
    return Tensor(types.settle(np.flip(made, over) if reverse else made, tensor.dtype), tensor.dtype)


def softmax(tensor: Tensor, dim: int = 0, keep_dims: bool = False, ieee_rounding: bool = False) -> Tensor:
    """Softmax over an axis."""
    over = axis_of(tensor, dim or 0)
    shifted = np.exp(tensor.data - tensor.data.max(axis=over, keepdims=True))
    return Tensor(shifted / shifted.sum(axis=over, keepdims=True), tensor.dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.numel)

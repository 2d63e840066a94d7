"""The namespace ``tl`` of interpreted kernels: shapes, reductions, products and the rest of the language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ..errors import ArtifactError, ExecutionError
from ..host import Array
from . import types
from .access import running
from .tensor import Tensor, align_ranks, as_shape, as_tensor, binary, pad_rank
from .types import FLOAT32, INT32, Type


def program_id(axis: int = 0) -> Tensor:
    """Index of each program along an axis of the grid."""
    return Tensor(running().programs[axis].astype(np.int32), INT32)


def num_programs(axis: int = 0) -> Tensor:
    """The grid's size along an axis."""
    return Tensor(np.array([running().grid[axis]], np.int32), INT32)


def constexpr(value: Any) -> Any:
    """Compile-time values are plain values here."""
    return value


def arange(start: int, end: int) -> Tensor:
    """Whole numbers, the same in all programs."""
    return Tensor(np.arange(start, end, dtype=np.int32)[None], INT32)


def full(shape: Any, value: Any, dtype: Type) -> Tensor:
    """A block of one value."""
    made = as_tensor(value).to(dtype).data
    wanted = as_shape((shape,)) if isinstance(shape, list | tuple) else as_shape((list(shape),))
    padded = pad_rank(made, len(wanted))
    return Tensor(np.broadcast_to(padded, (padded.shape[0], *wanted)), dtype)


def zeros(shape: Any, dtype: Type) -> Tensor:
    """A block of zeros."""
    return full(shape, 0, dtype)


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros of the same shape and type."""
    return zeros(list(tensor.shape), tensor.dtype)


def broadcast_to(tensor: Any, *shape: Any) -> Tensor:
    """Repeated to a shape."""
    return as_tensor(tensor).broadcast_to(*shape)


def broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common shape."""
    first, second = np.broadcast_arrays(*align_ranks(left.data, right.data))
    return Tensor(first, left.dtype, left.base), Tensor(second, right.dtype, right.base)


def reshape(tensor: Tensor, *shape: Any, can_reorder: bool = False) -> Tensor:
    """The same elements in another shape."""
    return tensor.reshape(*shape)


def ravel(tensor: Tensor, can_reorder: bool = False) -> Tensor:
    """One axis."""
    return tensor.reshape(tensor.numel)


def expand_dims(tensor: Any, axis: Any) -> Tensor:
    """New axes of size 1."""
    made = as_tensor(tensor)
    axes = sorted(cast("Sequence[int]", axis)) if isinstance(axis, list | tuple) else [int(axis)]
    for at in axes:
        made = made.expand_dims(at)
    return made


def trans(tensor: Tensor, *order: Any) -> Tensor:
    """Axes in another order."""
    return tensor.trans(*order)


def cat(left: Tensor, right: Tensor, can_reorder: bool = False, dim: int = 0) -> Tensor:
    """Two blocks one after the other."""
    return Tensor(np.concatenate(_same_programs(left, right), axis=dim + 1), left.dtype)


def join(left: Tensor, right: Tensor) -> Tensor:
    """Two blocks along a new last axis."""
    left, right = broadcast(left, right)
    return Tensor(np.stack([left.data, right.data], axis=-1), left.dtype)


def interleave(left: Tensor, right: Tensor) -> Tensor:
    """Elements of two blocks in turn along the last axis."""
    made = join(left, right)
    return made.reshape(*made.shape[:-2], made.shape[-2] * 2)


def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves along a last axis of 2."""
    return Tensor(tensor.data[..., 0], tensor.dtype), Tensor(tensor.data[..., 1], tensor.dtype)


def flip(tensor: Tensor, dim: int = -1) -> Tensor:
    """Elements in reverse."""
    return Tensor(np.flip(tensor.data, dim if dim < 0 else dim + 1), tensor.dtype)


def _same_programs(*tensors: Tensor) -> list[Array]:
    count = max(tensor.data.shape[0] for tensor in tensors)
    return [np.broadcast_to(tensor.data, (count, *tensor.shape)) for tensor in tensors]


def where(condition: Any, left: Any, right: Any) -> Tensor:
    """``left`` where the condition holds, else ``right``, in their computation type."""
    chosen = as_tensor(condition).data != 0

    def pick(first: Array, second: Array) -> Array:
        rank = max(first.ndim, second.ndim, chosen.ndim) - 1
        return np.where(pad_rank(chosen, rank), pad_rank(first, rank), pad_rank(second, rank))

    if isinstance(left, Tensor) and left.dtype.is_ptr():
        return Tensor(pick(left.data, right.data), left.dtype, left.base)
    return binary(pick, left, right)


def cdiv(left: Any, right: Any) -> Any:
    """Division rounded up."""
    return (left + right - 1) // right


def clamp(tensor: Any, low: Any, high: Any, propagate_nan: Any = None) -> Tensor:
    """Limited to a range."""
    return binary(np.fmin, binary(np.fmax, tensor, low), high)


def maximum(left: Any, right: Any, propagate_nan: Any = None) -> Tensor:
    """The larger; NaN loses unless it shall win (``propagate_nan``)."""
    return binary(np.maximum if propagate_nan else np.fmax, left, right)


def minimum(left: Any, right: Any, propagate_nan: Any = None) -> Tensor:
    """The smaller; NaN loses unless it shall win (``propagate_nan``)."""
    return binary(np.minimum if propagate_nan else np.fmin, left, right)


# --- reductions and scans -----------------------------------------------------------------------------

Reduction = Callable[..., Any]


def reduce_with(
    function: Reduction, tensor: Tensor, axis: int | None, keep_dims: bool, dtype: Type
) -> Tensor:
    """Reduce by a NumPy function over one axis, or over all."""
    over: Any = tuple(range(1, tensor.data.ndim)) if axis is None else _axis(tensor, axis)
    made = function(tensor.data, axis=over, keepdims=keep_dims)
    return Tensor(types.settle(np.asarray(made, dtype.held), dtype), dtype)


def _axis(tensor: Tensor, axis: int) -> int:
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
    wide = _at_least_32_bits(tensor)
    return reduce_with(np.fmax.reduce, wide, axis, keep_dims, wide.dtype)


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
    wide = _at_least_32_bits(tensor)
    return reduce_with(np.fmin.reduce, wide, axis, keep_dims, wide.dtype)


def _without_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(FLOAT32) if tensor.dtype.is_bf16() else tensor


def _at_least_32_bits(tensor: Tensor) -> Tensor:
    if tensor.dtype.primitive_bitwidth >= 32:
        return tensor
    return tensor.to(FLOAT32 if tensor.dtype.is_floating() else INT32)


def _with_index(choose: Any, tensor: Tensor, axis: int | None, keep_dims: bool) -> tuple[Tensor, Tensor]:
    tensor = _without_bfloat16(tensor if axis is not None else ravel(tensor))
    over = _axis(tensor, 0 if axis is None else axis)
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
        state, axis = tuple(ravel(tensor) for tensor in state), 0
    over = _axis(state[0], axis)
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
    over = _axis(state[0], axis)
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
    over = _axis(tensor, axis)
    data = np.flip(tensor.data, over) if reverse else tensor.data
    made = function(data, axis=over, dtype=tensor.dtype.held)
    return Tensor(types.settle(np.flip(made, over) if reverse else made, tensor.dtype), tensor.dtype)


def softmax(tensor: Tensor, dim: int = 0, keep_dims: bool = False, ieee_rounding: bool = False) -> Tensor:
    """Softmax over an axis."""
    over = _axis(tensor, dim or 0)
    shifted = np.exp(tensor.data - tensor.data.max(axis=over, keepdims=True))
    return Tensor(shifted / shifted.sum(axis=over, keepdims=True), tensor.dtype)


def sort(tensor: Tensor, dim: int | None = None, descending: bool = False) -> Tensor:
    """Sorted along the last axis."""
    ordered = np.sort(tensor.data, axis=-1)
    return Tensor(np.flip(ordered, -1) if descending else ordered, tensor.dtype)


def gather(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """Elements by index along an axis."""
    data, at = _same_programs(tensor, index)
    return Tensor(np.take_along_axis(data, at.astype(np.int64), _axis(tensor, axis)), tensor.dtype)


def histogram(tensor: Tensor, num_bins: int, mask: Any = None) -> Tensor:
    """How often each of the numbers below ``num_bins`` occurs."""
    keep = np.ones(tensor.data.shape, bool) if mask is None else as_tensor(mask).data != 0
    keep = np.broadcast_to(keep, tensor.data.shape)
    rows = [
        np.bincount(row[kept].astype(np.int64), minlength=num_bins)[:num_bins]
        for row, kept in zip(tensor.data, keep, strict=True)
    ]
    return Tensor(np.stack(rows).astype(np.int32), INT32)


def dot(
    left: Tensor,
    right: Tensor,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Type = FLOAT32,
) -> Tensor:
    """Matrix product, accumulated in float32 (integers in int32) whatever TF32 would allow."""
    if left.dtype.is_int():
        out_dtype = INT32
    held = np.float64 if left.dtype is types.FLOAT64 else out_dtype.held
    product = np.matmul(left.data.astype(held), right.data.astype(held))
    made = Tensor(types.settle(product.astype(out_dtype.held), out_dtype), out_dtype)
    return made if acc is None else made + acc


def nothing(*args: Any, **kwargs: Any) -> None:
    """Barriers, prints and hints."""


def same(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Hints about a tensor."""
    return tensor


def static_assert(condition: Any, message: str = "") -> None:
    """Checked: artifacts may be wrong."""
    if not condition:
        raise ArtifactError("a kernel's static assertion fails", why=str(message))


def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    """ExecutionError unless what the kernel asserts holds in every element."""
    holds = as_tensor(condition).data != 0
    if mask is not None:
        holds = holds | (as_tensor(mask).data == 0)
    if not np.all(holds):
        raise ExecutionError("a kernel's assertion fails", why=str(message))


def static_range(start: Any, end: Any = None, step: Any = None, **hints: Any) -> range:
    """``range``, whatever the loop hints say."""
    first, last = (0, start) if end is None else (start, end)
    return range(int(first), int(last), 1 if step is None else int(step))


def get_int_dtype(bitwidth: int, signed: bool) -> Type:
    """The integer type of a width."""
    return types.BY_NAME[f"{'int' if signed else 'uint'}{bitwidth}"]

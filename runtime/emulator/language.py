"""The namespace ``tl`` of interpreted kernels: shapes, reductions, products and the rest of the language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ..errors import ArtifactError, ExecutionError
from ..tensors.host import Array
from . import types
from .access import running
from .reductions import axis_of
from .tensor import Tensor, align_ranks, as_shape, as_tensor, binary, pad_rank
from .types import FLOAT32, FLOAT64, INT32, Type


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
    given = Tensor(np.array([value]), FLOAT64) if isinstance(value, float) else as_tensor(value)
    made = given.to(dtype).data
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


def sort(tensor: Tensor, dim: int | None = None, descending: bool = False) -> Tensor:
    """Sorted along the last axis."""
    ordered = np.sort(tensor.data, axis=-1)
    return Tensor(np.flip(ordered, -1) if descending else ordered, tensor.dtype)


def gather(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """Elements by index along an axis."""
    data, at = _same_programs(tensor, index)
    return Tensor(np.take_along_axis(data, at.astype(np.int64), axis_of(tensor, axis)), tensor.dtype)


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

"""The tensors that an interpreted kernel computes with, for many programs of its grid at once.

``data`` has one axis more than the kernel sees, in front: the programs of the chunk that runs (or 1 where all
have the same values). So one NumPy operation does the work of a whole grid, block sizes stay as they were
compiled, and results are those of the programs one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ..errors import ArtifactError
from ..tensors.host import Array
from . import types
from .types import INT1, INT32, Type


class Divergence(Exception):
    """The programs of a chunk want to go different ways; they must run one by one."""


class Memory:
    """A block of device memory that pointers lead into: one flat view per element size."""

    def __init__(self, data: Array) -> None:
        self._data = data

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return self._data.nbytes

    def view(self, element: Type) -> Array:
        """The block as a flat array of stored elements."""
        usable = self._data.nbytes - self._data.nbytes % element.itemsize
        return self._data[:usable].view(element.stored)


class Tensor:
    """A block of values, or of pointers (byte offsets into a `Memory`)."""

    __slots__ = ("base", "data", "dtype")
    __hash__ = None  # type: ignore[assignment]  # comparisons make tensors

    def __init__(self, data: Array, dtype: Type, base: Memory | None = None) -> None:
        self.data, self.dtype, self.base = data, dtype, base

    # --- what kernels ask of a tensor -------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as the kernel sees it."""
        return self.data.shape[1:]

    @property
    def numel(self) -> int:
        """Elements of one program's block."""
        return int(np.prod(self.shape))

    @property
    def type(self) -> Type:
        """Its element type."""
        return self.dtype

    @property
    def T(self) -> Tensor:
        """The transpose."""
        return Tensor(np.swapaxes(self.data, -1, -2), self.dtype, self.base)

    def to(self, dtype: Type, bitcast: bool = False, fp_downcast_rounding: str | None = None) -> Tensor:
        """Another element type, by value or by bits."""
        if self.dtype.is_ptr() and dtype.is_ptr():
            return Tensor(self.data, dtype, self.base)
        if bitcast and not self.dtype.is_ptr():
            return Tensor(types.bitcast(self.data, self.dtype, dtype), dtype)
        if fp_downcast_rounding == "rtz":
            raise ArtifactError("a kernel rounds towards zero, which the emulator cannot do")
        return Tensor(types.cast(self.data, self.dtype, dtype), dtype)

    cast = to

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape."""
        wanted = as_shape(shape)
        return Tensor(self.data.reshape(self.data.shape[0], *wanted), self.dtype, self.base)

    view = reshape

    def broadcast_to(self, *shape: Any) -> Tensor:
        """Repeated to a shape."""
        wanted = as_shape(shape)
        padded = pad_rank(self.data, len(wanted))
        return Tensor(np.broadcast_to(padded, (padded.shape[0], *wanted)), self.dtype, self.base)

    def expand_dims(self, axis: int) -> Tensor:
        """A new axis of size 1."""
        at = axis + 1 if axis >= 0 else axis
        return Tensor(np.expand_dims(self.data, at), self.dtype, self.base)

    def permute(self, *order: Any) -> Tensor:
        """Axes in another order."""
        axes = as_shape(order)
        return Tensor(np.transpose(self.data, (0, *(axis + 1 for axis in axes))), self.dtype, self.base)

    def trans(self, *order: Any) -> Tensor:
        """Axes in another order, the last two swapped without one."""
        return self.permute(*order) if order else self.T

    def __getitem__(self, keys: Any) -> Tensor:
        wanted: tuple[Any, ...] = tuple(cast("Sequence[Any]", keys)) if isinstance(keys, tuple) else (keys,)
        if any(key is not None and key != slice(None) for key in wanted):
            raise ArtifactError("a kernel indexes a tensor with something other than `None` and `:`")
        return Tensor(self.data[(slice(None), *wanted)], self.dtype, self.base)

    def logical_and(self, other: Any) -> Tensor:
        """Both."""
        return binary(np.logical_and, self != 0, as_tensor(other) != 0, result=INT1)

    def logical_or(self, other: Any) -> Tensor:
        """Either."""
        return binary(np.logical_or, self != 0, as_tensor(other) != 0, result=INT1)

    # --- control flow -----------------------------------------------------------------------------

    def _one(self) -> Any:
        """The value that all programs agree on; Divergence when they do not."""
        if self.numel != 1:
            raise ArtifactError("a kernel branches on a tensor of more than one element")
        values = self.data.reshape(-1)
        if values.size > 1 and (values != values[0]).any():
            raise Divergence
        return values[0]

    def __bool__(self) -> bool:
        return bool(self._one())

    def __index__(self) -> int:
        return int(self._one())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._one())

    # --- operators --------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        if self.dtype.is_ptr():
            return self._advance(other, 1)
        other = as_tensor(other, self)
        return other._advance(self, 1) if other.dtype.is_ptr() else binary(np.add, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self._advance(other, -1) if self.dtype.is_ptr() else binary(np.subtract, self, other)

    def _advance(self, offset: Any, sign: int) -> Tensor:
        steps = as_tensor(offset)
        assert self.dtype.element_ty is not None
        left, right = align_ranks(self.data, steps.data.astype(np.int64))
        return Tensor(left + right * (sign * self.dtype.element_ty.itemsize), self.dtype, self.base)

    def __rsub__(self, other: Any) -> Tensor:
        return binary(np.subtract, as_tensor(other, self), self)

    def __mul__(self, other: Any) -> Tensor:
        return binary(np.multiply, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return divide(as_tensor(other, self, is_division=True), self)

    def __floordiv__(self, other: Any) -> Tensor:
        return binary(quotient, self, other, is_division=True)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return binary(quotient, as_tensor(other, self), self, is_division=True)

    def __mod__(self, other: Any) -> Tensor:
        return binary(remainder, self, other, is_division=True)

    def __rmod__(self, other: Any) -> Tensor:
        return binary(remainder, as_tensor(other, self), self, is_division=True)

    def __and__(self, other: Any) -> Tensor:
        return binary(np.bitwise_and, self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Tensor:
        return binary(np.bitwise_or, self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Tensor:
        return binary(np.bitwise_xor, self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Tensor:
        return binary(np.left_shift, self, other)

    def __rshift__(self, other: Any) -> Tensor:
        return binary(np.right_shift, self, other)

    def __lt__(self, other: Any) -> Tensor:
        return compare(np.less, self, other)

    def __le__(self, other: Any) -> Tensor:
        return compare(np.less_equal, self, other)

    def __gt__(self, other: Any) -> Tensor:
        return compare(np.greater, self, other)

    def __ge__(self, other: Any) -> Tensor:
        return compare(np.greater_equal, self, other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return compare(np.equal, self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return compare(np.not_equal, self, other)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype) if self.dtype is not INT1 else Tensor(self.data, INT1)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype)

    def __abs__(self) -> Tensor:
        return Tensor(np.abs(self.data), self.dtype)


def as_shape(shape: Any) -> tuple[int, ...]:
    """A shape given as numbers or as one list."""
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = shape[0]
    return tuple(int(extent) for extent in shape)


def as_tensor(value: Any, beside: Tensor | None = None, *, is_division: bool = False) -> Tensor:
    """A Python number as a scalar of the type that Triton gives it next to a tensor."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, bool | int | float | np.generic):
        raise ArtifactError(f"a kernel computes with a `{type(value).__name__}`")
    number: Any = cast(Any, value).item() if isinstance(value, np.generic) else value
    dtype = types.literal_type(number, None if beside is None else beside.dtype, is_division=is_division)
    held = np.array([number]).astype(dtype.held)
    return Tensor(types.settle(held, dtype), dtype)


def pad_rank(data: Array, rank: int) -> Array:
    """Axes of size 1 after the programs' axis, until the kernel sees ``rank`` axes."""
    missing = rank - (data.ndim - 1)
    return data.reshape(data.shape[0], *([1] * missing), *data.shape[1:]) if missing > 0 else data


def align_ranks(left: Array, right: Array) -> tuple[Array, Array]:
    """Both with the same number of axes."""
    rank = max(left.ndim, right.ndim) - 1
    return pad_rank(left, rank), pad_rank(right, rank)


def binary(
    function: Callable[[Array, Array], Array],
    left: Any,
    right: Any,
    *,
    is_division: bool = False,
    result: Type | None = None,
) -> Tensor:
    """Apply a NumPy function to two tensors in Triton's computation type."""
    if not isinstance(left, Tensor):
        left = as_tensor(left, right if isinstance(right, Tensor) else None, is_division=is_division)
    right = as_tensor(right, left, is_division=is_division)
    if left.dtype.is_ptr() or right.dtype.is_ptr():
        return _compare_pointers(function, left, right)
    common = types.computation_type(left.dtype, right.dtype, is_division=is_division)
    first, second = align_ranks(
        types.cast(left.data, left.dtype, common), types.cast(right.data, right.dtype, common)
    )
    made = function(first, second)
    if result is not None:
        return Tensor(made, result)
    return Tensor(types.settle(made.astype(common.held, copy=False), common), common)


def _compare_pointers(function: Callable[[Array, Array], Array], left: Tensor, right: Tensor) -> Tensor:
    first, second = align_ranks(left.data, right.data)
    made = function(first, second)
    if made.dtype != np.bool_:
        raise ArtifactError("a kernel does arithmetic with two pointers")
    return Tensor(made, INT1)


def compare(function: Callable[[Array, Array], Array], left: Tensor, right: Any) -> Tensor:
    """A comparison."""
    if right is None:
        return Tensor(np.array([function is np.not_equal]), INT1)
    return binary(function, left, right, result=INT1)


def divide(left: Tensor, right: Any) -> Tensor:
    """Real division: integers become float32."""
    right = as_tensor(right, left, is_division=True)
    if left.dtype.is_int() and right.dtype.is_int():
        left, right = left.to(types.FLOAT32), right.to(types.FLOAT32)
    elif left.dtype.is_int():
        left = left.to(right.dtype)
    elif right.dtype.is_int():
        right = right.to(left.dtype)
    return binary(np.true_divide, left, right, is_division=True)


def quotient(left: Array, right: Array) -> Array:
    """Integer division towards zero, as in C; by zero gives zero, where the GPU gives anything."""
    safe = np.where(right == 0, 1, right).astype(right.dtype)
    made = np.floor_divide(left, safe)
    if left.dtype.kind == "i":
        made = made + ((left % safe != 0) & ((left < 0) != (safe < 0)))
    return np.where(right == 0, 0, made).astype(left.dtype)


def remainder(left: Array, right: Array) -> Array:
    """What is left by the division towards zero."""
    if left.dtype.kind == "f":
        return np.asarray(np.fmod(left, right))
    safe = np.where(right == 0, 1, right).astype(right.dtype)
    return np.asarray(np.fmod(left, safe))


def scalar(value: Any, dtype: Type = INT32) -> Tensor:
    """A scalar, the same in all programs, or one value per program for an array."""
    return Tensor(np.atleast_1d(np.asarray(value, dtype.held)), dtype)

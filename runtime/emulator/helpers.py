"""The namespace ``triton_helpers`` of interpreted kernels: what generated code calls beside ``tl``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import ArtifactError
from ..tensors.host import Array
from . import language as tl
from . import reductions, statistics, types
from .access import load
from .grids import exclusive_scan_decoupled_lookback, exclusive_scan_decoupled_lookback_64, x_grid_barrier
from .philox import normal4, philox, to_uniform
from .tensor import Tensor, as_tensor, binary, quotient, remainder
from .types import FLOAT32, INT1, INT64


def promote_to_tensor(x: Any) -> Tensor:
    """A number as a tensor."""
    return as_tensor(x)


def maximum(left: Any, right: Any) -> Tensor:
    """The larger; NaN wins."""
    return binary(np.maximum, left, right)


def minimum(left: Any, right: Any) -> Tensor:
    """The smaller; NaN wins."""
    return binary(np.minimum, left, right)


def max2(tensor: Tensor, dim: int) -> Tensor:
    """The largest over an axis; NaN wins."""
    return reductions.reduce_with(np.max, tensor, dim, False, tensor.dtype)


def min2(tensor: Tensor, dim: int) -> Tensor:
    """The smallest over an axis; NaN wins."""
    return reductions.reduce_with(np.min, tensor, dim, False, tensor.dtype)


def fmaximum(left: Any, right: Any) -> Tensor:
    """The larger; a number wins over NaN (torch 2.14)."""
    return binary(np.fmax, left, right)


def fmax2(tensor: Tensor, dim: int) -> Tensor:
    """The largest over an axis; numbers win over NaN (torch 2.14)."""
    return reductions.reduce_with(np.fmax.reduce, tensor, dim, False, tensor.dtype)


def prod(tensor: Tensor, axis: int) -> Tensor:
    """The product over an axis."""
    return reductions.reduce_with(np.prod, tensor, axis, False, tensor.dtype)


def any_true(tensor: Tensor, dim: int) -> Tensor:
    """Or over an axis."""
    return reductions.reduce_with(np.bitwise_or.reduce, tensor, dim, False, tensor.dtype)


def _better(value: Array, index: Array, other: Array, other_index: Array, sign: int) -> Array:
    with np.errstate(invalid="ignore"):
        wins = (value > other) if sign > 0 else (value < other)
        equal = value == other
    if value.dtype.kind == "f":
        nan, other_nan = np.isnan(value), np.isnan(other)
        wins, equal = wins | (nan & ~other_nan), equal | (nan & other_nan)
    return np.asarray(wins | (equal & (index < other_index)))


def _pairwise(sign: int) -> Any:
    def choose(value: Tensor, index: Tensor, other: Tensor, other_index: Tensor) -> tuple[Tensor, Tensor]:
        value, other = tl.broadcast(value, other)
        index, other_index = tl.broadcast(index, other_index)
        mask = Tensor(_better(value.data, index.data, other.data, other_index.data, sign), INT1)
        return tl.where(mask, value, other), tl.where(mask, index, other_index)

    return choose


maximum_with_index = _pairwise(1)
minimum_with_index = _pairwise(-1)


def max_with_index(value: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest with its index: NaN wins, then the lowest index."""
    made: tuple[Tensor, Tensor] = reductions.reduce(tl.broadcast(value, index), dim, maximum_with_index)
    return made


def min_with_index(value: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The smallest with its index: NaN wins, then the lowest index."""
    made: tuple[Tensor, Tensor] = reductions.reduce(tl.broadcast(value, index), dim, minimum_with_index)
    return made


def exp(x: Any, use_fast_math: bool = False) -> Tensor:
    """The exponential."""
    return statistics.exp(x)


def div_floor_integer(left: Any, right: Any) -> Tensor:
    """Integer division rounded down."""

    def floor(a: Array, b: Array) -> Array:
        return np.asarray(quotient(a, b) - ((remainder(a, b) != 0) & ((a < 0) != (b < 0))))

    return binary(floor, left, right)


def remainder_integer(left: Any, right: Any) -> Tensor:
    """The remainder with the divisor's sign."""

    def rest(a: Array, b: Array) -> Array:
        made = remainder(a, b)
        return np.where((made != 0) & ((a < 0) != (b < 0)), made + b, made)

    return binary(rest, left, right)


def pow_integer(base: Tensor, exponent: Tensor) -> Tensor:
    """An integer power, wrapping."""
    return binary(lambda a, b: np.power(a, np.maximum(b, 0)), base, exponent)


def is_floating(x: Any) -> bool:
    """Whether it holds real numbers."""
    return as_tensor(x).dtype.is_floating()


def device_assert_then(condition: Any, message: str, result: Any) -> Any:
    """The result, once the assertion holds."""
    tl.device_assert(condition, message)
    return result


def frexp(x: Any) -> tuple[Tensor, Tensor]:
    """Mantissa and binary exponent."""
    given = as_tensor(x)
    mantissa, exponent = np.frexp(given.data)
    return Tensor(mantissa, given.dtype), Tensor(exponent.astype(np.int32), types.INT32)


def sort_with_index(
    x: Tensor,
    idxs: Tensor,
    rnumel: Any,
    dim: int | None = None,
    stable: bool = False,
    descending: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sort the last axis, stable, NaN as the largest; lanes from ``rnumel`` on go last."""
    x, idxs = tl.broadcast(x, idxs)
    count = max(x.data.shape[0], idxs.data.shape[0])
    values = np.broadcast_to(x.data, (count, *x.shape))
    index = np.broadcast_to(idxs.data, (count, *x.shape))
    order = _stable_order(values, descending)
    if rnumel is not None:
        outside = np.take_along_axis(index >= int(rnumel), order, -1)
        order = np.take_along_axis(order, np.argsort(outside, axis=-1, kind="stable"), -1)
    made = np.take_along_axis(values, order, -1), np.take_along_axis(index, order, -1)
    return Tensor(made[0], x.dtype), Tensor(made[1], idxs.dtype)


def _stable_order(values: Array, descending: bool) -> Array:
    if not descending:
        return np.argsort(values, axis=-1, kind="stable")
    last = values.shape[-1] - 1  # equal elements keep their order when a reversed copy is sorted
    turned = np.argsort(np.flip(values, -1), axis=-1, kind="stable")
    return np.asarray(last - np.flip(turned, -1))


def bucketize_binary_search(
    values: Tensor, boundaries_ptr: Tensor, size: Any, numel: Any, stride: Any, boundary_indices: Any,
    indexing_dtype: types.Type, right: bool, sorter_ptr: Any = None, sorter_stride: Any = None,
    sorter_indices: Any = None,
) -> Tensor:  # fmt: skip
    """Index of the bucket of each value, by bisection."""
    low = tl.full(list(values.shape), 0, indexing_dtype)
    high = tl.full(list(values.shape), size, indexing_dtype)
    remaining = int(size) + 1
    while remaining > 1:
        middle = (high + low) // 2
        mask = (middle * stride + boundary_indices < numel).logical_and(middle < size)
        at = middle
        if sorter_ptr is not None and sorter_stride is not None:
            at = load(sorter_ptr + sorter_indices + sorter_stride * middle, mask=mask, other=0)
        bound = load(boundaries_ptr + boundary_indices + stride * at, mask=mask, other=0)
        above = values >= bound if right else values > bound
        if values.dtype.is_floating():
            above = above | (values != values)
        low, high = tl.where(above & mask, middle + 1, low), tl.where(above, high, middle)
        remaining = (remaining + 1) // 2
    return low


def rand4x(seed: Any, offsets: Tensor, block: int) -> Tensor:
    """Uniform numbers, four per counter, in the order of the offsets."""
    return to_uniform(_four_per_counter(seed, offsets))


def _four_per_counter(seed: Any, offsets: Tensor) -> Tensor:
    wide = offsets.to(types.UINT32)
    parts = philox(seed, Tensor(wide.data // np.uint32(4), types.UINT32))
    lane = wide.data % 4
    return Tensor(np.choose(lane, [part.data for part in parts]), types.UINT32)


def randn4x(seed: Any, offsets: Tensor, block: int) -> Tensor:
    """Normal numbers, four per counter, in the order of the offsets."""
    wide = offsets.to(types.UINT32)
    parts = normal4(seed, Tensor(wide.data // np.uint32(4), types.UINT32))
    return Tensor(np.choose(wide.data % 4, [part.data for part in parts]), FLOAT32)


def randint64(seed: Any, offset: Any, low: Any, high: Any) -> Tensor:
    """Integers in a range."""
    first, second, *_ = philox(seed, offset)
    wide = first.to(types.UINT64) | (second.to(types.UINT64) << 32)
    size = (as_tensor(high) - low).to(types.UINT64)
    made: Tensor = (wide % size).to(INT64) + low
    return made


def select_one(x: Tensor, mask: Tensor, dim: int, keep_dims: bool = False) -> Tensor:
    """The one element of an axis that the mask marks."""
    kept = Tensor(np.where(mask.data != 0, x.data, np.zeros((), x.data.dtype)), x.dtype)
    return reductions.reduce_with(np.sum, kept, dim, keep_dims, x.dtype)


def if_mask(mask: Any, value: Any) -> Any:
    """The value, or nothing where there is no mask."""
    return None if mask is None else value


def constexpr_next_power_of_2(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def inline_asm_pack(x: Tensor, pack: int) -> Tensor:
    """The block as inline assembly takes it: assembly is emulated element by element."""
    return x


def inline_asm_unpack(x: Tensor, original: Tensor, pack: int) -> Tensor:
    """The block as it was before `inline_asm_pack`."""
    return x.broadcast_to(*original.shape)


def fp8e4m3fn_to_float32(x: Tensor) -> Tensor:
    """Bits of an 8-bit float as float32."""
    return x.to(types.UINT8).to(types.FLOAT8E4NV, bitcast=True).to(FLOAT32)


def unsupported(name: str) -> Any:
    """A function that refuses when called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ArtifactError(f"the emulator has no `{name}`", hint="run the program on CUDA")

    return refuse


def namespace() -> SimpleNamespace:
    """All of them."""
    names = (
        promote_to_tensor, maximum, minimum, fmaximum, max2, min2, fmax2, prod, max_with_index,
        min_with_index, exp,
        statistics.online_softmax_reduce, statistics.online_softmax_combine,
        statistics.online_softmax_combine_with_sum, statistics.welford_reduce, statistics.welford_combine,
        statistics.welford, div_floor_integer,
        remainder_integer, pow_integer, is_floating, device_assert_then, frexp, sort_with_index,
        bucketize_binary_search, rand4x, randn4x, randint64,
        x_grid_barrier, exclusive_scan_decoupled_lookback, exclusive_scan_decoupled_lookback_64, select_one,
        if_mask, constexpr_next_power_of_2, inline_asm_pack, inline_asm_unpack, fp8e4m3fn_to_float32,
    )  # fmt: skip
    made: dict[str, Any] = {function.__name__: function for function in names}
    made |= {
        "any": any_true,
        # torch 2.14 calls those strict that keep the sign of zeros, as NumPy does
        "max2_strict": max2,
        "min2_strict": min2,
        "maximum_with_index": maximum_with_index,
        "minimum_with_index": minimum_with_index,
    }
    made["rand_eager_kernel"] = unsupported("triton_helpers.rand_eager_kernel")
    return SimpleNamespace(**made)

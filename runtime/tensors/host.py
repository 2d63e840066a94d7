"""Host memory as NumPy sees it, and host tensors of the element types that NumPy lacks."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DType
from ..errors import UsageError

Array = npt.NDArray[Any]

_RAW: dict[DType, np.dtype[Any]] = {
    DType.BFLOAT16: np.dtype(np.uint16),
    DType.FLOAT8_E5M2: np.dtype(np.uint8),
    DType.FLOAT8_E4M3FN: np.dtype(np.uint8),
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's type for it; for a type that NumPy lacks the unsigned integer of the same size."""
    raw = _RAW.get(dtype)
    return np.dtype(str(dtype)) if raw is None else raw


def is_native(dtype: DType) -> bool:
    """Whether NumPy has the type."""
    return dtype not in _RAW


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def array_at(address: int, dtype: DType, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """An array over the host memory at an address (raw type, strides in elements). It owns nothing."""
    kind, shape = numpy_dtype(dtype), tuple(shape)
    if 0 in shape:
        return np.empty(shape, kind)
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    buffer = memoryview((ctypes.c_char * (span * kind.itemsize)).from_address(address)).cast("B")
    return np.ndarray(shape, kind, buffer, 0, tuple(stride * kind.itemsize for stride in strides))


def address_of(array: Array) -> int:
    """Address of an array's first element."""
    address: int = array.__array_interface__["data"][0]  # `array.ctypes.data` leaks a few bytes each time
    return address


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes of host memory at an address. They own nothing."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


@lru_cache
def _float8_values(dtype: DType) -> Array:
    """The 256 values of an 8-bit floating type as float32, by code."""
    code = np.arange(256)
    mantissa_bits, bias = (2, 15) if dtype is DType.FLOAT8_E5M2 else (3, 7)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype is DType.FLOAT8_E5M2:
        values = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values = np.where((code & 0x7F) == 0x7F, np.nan, values)
    return np.where(code < 128, values, -values).astype(np.float32)


def _encode_float8(array: Array, dtype: DType) -> Array:
    """Round float32 to the nearest 8-bit value, ties to even; overflow is infinity, or NaN without one."""
    positive = _float8_values(dtype)[:128].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    top = len(finite)  # the code after the largest finite one: infinity or NaN
    middles = (np.append(finite, 2 * finite[-1] - finite[-2])[1:] + finite) / 2
    magnitude = np.abs(array.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    tie = (code < top) & (middles[np.minimum(code, top - 1)] == magnitude) & (code % 2 == 1)
    code = np.where(np.isnan(array), 0x7F, code + tie)
    return (code | np.where(np.signbit(array), 0x80, 0)).astype(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A host tensor of a type that NumPy lacks (bfloat16, 8-bit floats).

    ``raw`` holds the bits as unsigned integers, in the tensor's shape. ``numpy.asarray`` of it gives
    float32, which holds every value of these types exactly.
    """

    raw: Array
    dtype: DType

    def __post_init__(self) -> None:
        kind = dtype_of(self.dtype)
        object.__setattr__(self, "dtype", kind)
        has = self.raw.dtype if isinstance(self.raw, np.ndarray) else type(self.raw).__name__
        if has != _RAW.get(kind):
            raise _no_bits(kind, has)

    @classmethod
    def from_float32(cls, array: npt.ArrayLike, dtype: DType | str) -> HostTensor:
        """Round to ``dtype`` (nearest, ties to even)."""
        dtype = dtype_of(dtype)
        with np.errstate(over="ignore"):  # beyond float32 is beyond all of these types
            source = np.asarray(array, np.float32)
        if is_native(dtype):
            raise _no_bits(dtype, source.dtype)
        if dtype is not DType.BFLOAT16:
            return cls(_encode_float8(source, dtype), dtype)
        bits = source.view(np.uint32) if source.ndim else source.reshape(1).view(np.uint32).reshape(())
        high = bits >> np.uint32(16)
        rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)  # only NaN can wrap
        return cls(np.where(np.isnan(source), high | np.uint32(0x40), rounded).astype(np.uint16), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.raw.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.raw.nbytes

    def float32(self) -> Array:
        """The values as float32 (exact)."""
        if self.dtype is not DType.BFLOAT16:
            return np.asarray(_float8_values(self.dtype)[self.raw])
        wide = np.atleast_1d(self.raw).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(self.raw.shape)

    def numpy(self) -> Array:
        """The values in the type of the package `ml_dtypes` where it is installed, else as float32."""
        try:
            types = importlib.import_module("ml_dtypes")
        except ImportError:
            return self.float32()
        return self.raw.view(getattr(types, str(self.dtype)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"an array of a {self.dtype} tensor's values is always a copy; `raw` is none")
        return self.float32() if dtype is None else self.float32().astype(dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (device type, ordinal): the host."""
        return 1, 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule: `torch.from_dlpack` takes the tensor in place. BufferError for what cannot be."""
        from .dlpack import export_host

        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("a host tensor is not exported to another device")
        return export_host(self.raw.copy() if copy else self.raw, self.dtype, max_version)

    def __repr__(self) -> str:
        return f"HostTensor({self.float32()!r}, dtype={self.dtype})"


def dtype_of(dtype: DType | str) -> DType:
    """The element type of that name; UsageError with the known ones for another."""
    if isinstance(dtype, DType):
        return dtype
    try:
        return DType.from_name(dtype)
    except (KeyError, TypeError):
        raise UsageError(
            f"there is no element type `{dtype}`", hint=f"one of {', '.join(map(str, DType))}"
        ) from None


def _no_bits(dtype: DType, found: object) -> UsageError:
    if is_native(dtype):
        why = f"it holds types that NumPy lacks, {', '.join(map(str, _RAW))}"
        return UsageError(f"a `HostTensor` is not {dtype}", why=why, hint="use the NumPy array itself")
    why = f"a {dtype} tensor's bits are {_RAW[dtype]}"
    hint = "round values with `HostTensor.from_float32`"
    return UsageError(f"the bits of a `HostTensor` are {found}", why=why, hint=hint)


HostValue = Array | HostTensor


def host_value(raw: Array, dtype: DType) -> HostValue:
    """Raw bits as the caller gets them: an array where NumPy has the type, else a `HostTensor`."""
    return raw if is_native(dtype) else HostTensor(raw, dtype)

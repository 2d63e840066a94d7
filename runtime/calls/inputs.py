"""Checking what a caller passes in: name, rank, every dimension, dtype and strides, never byte counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Operand
from ..dtypes import DType
from ..errors import DevplanError, UsageError
from ..expr import Expr, Size, evaluate
from ..program import Argument, Method, Port, Symbol
from ..tensors.dlpack import CPU_DEVICE, PINNED, consume
from ..tensors.host import Array, HostTensor, address_of, array_at, is_native, numpy_dtype

_BY_ARRAY_TYPE = {numpy_dtype(dtype): dtype for dtype in DType if is_native(dtype)}
_BY_EXTENSION_NAME = {str(dtype): dtype for dtype in DType if not is_native(dtype)}


def as_host_tensor(value: object, label: str) -> tuple[Array, DType]:
    """A caller's host tensor as raw array and element type; UsageError when it is none.

    Takes NumPy arrays and scalars, `HostTensor`, `ml_dtypes` arrays, Python numbers, and whatever offers
    ``__array_interface__`` or, in host memory, ``__dlpack__``.
    """
    if isinstance(value, HostTensor):
        return value.raw, value.dtype
    if _is_foreign(value):
        return _from_dlpack(value, label)
    array = _to_array(value, label)
    if array.dtype in _BY_ARRAY_TYPE:
        return array, _BY_ARRAY_TYPE[array.dtype]
    if array.dtype.name in _BY_EXTENSION_NAME:
        dtype = _BY_EXTENSION_NAME[array.dtype.name]
        return array.view(numpy_dtype(dtype)), dtype
    raise UsageError(f"{label} has dtype `{array.dtype}`", why="no program has tensors of that type")


def _is_foreign(value: object) -> bool:
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def _from_dlpack(value: Any, label: str) -> tuple[Array, DType]:
    """Another library's host tensor, in place, bfloat16 included; UsageError when it is on a device."""
    try:
        kind, _ = value.__dlpack_device__()
        if kind not in (CPU_DEVICE, PINNED):
            hint = "copy it to the host, or export with `--io device`"
            raise UsageError(
                f"{label} is in device memory", why="the program takes it on the host", hint=hint
            )
        described, release = consume(value.__dlpack__())
        try:
            held = array_at(described.address, described.dtype, described.shape, described.strides)
        except BaseException:
            release()
            raise
    except DevplanError:
        raise
    except Exception as error:  # whatever the producer raises
        raise _unreadable(label, error) from error
    owner = _Borrowed(held, release)
    return np.asarray(owner), described.dtype


def _unreadable(label: str, error: Exception) -> UsageError:
    why = str(error) or type(error).__name__
    return UsageError(f"{label} cannot be read as a host tensor", why=why)


class _Borrowed:
    """Another library's memory, given back when no array looks at it any more."""

    def __init__(self, array: Array, release: Callable[[], None]) -> None:
        self._release = release
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._release()


def _to_array(value: object, label: str) -> Array:
    if getattr(value, "mask", None) is not None and isinstance(value, np.ndarray):
        hint = "fill in what is masked out first: `array.filled(...)`"
        raise UsageError(f"{label} is a masked array", why="what is masked out has no value", hint=hint)
    if isinstance(value, np.ndarray | np.generic | bool | int | float) or hasattr(
        value, "__array_interface__"
    ):
        try:
            return np.asarray(value)
        except Exception as error:  # NumPy raises many kinds for an interface that tells nonsense
            raise _unreadable(label, error) from error
    raise UsageError(
        f"{label} is of type `{type(value).__name__}`",
        why="a tensor was wanted",
        hint="pass a NumPy array, or an object with `__array_interface__` or `__dlpack__`",
    )


def host_array(value: object, label: str, dtype: DType, shape: Sequence[int]) -> Array:
    """The raw array of a caller's tensor; UsageError unless dtype, rank and every dimension fit."""
    if isinstance(value, bool | int | float):
        array, found = _number(value, label, dtype), dtype
    else:
        array, found = as_host_tensor(value, label)
    check_type(label, dtype, shape, found, array.shape)
    return array


def _number(value: float, label: str, dtype: DType) -> Array:
    """A Python number as a tensor without dimensions; UsageError when the type does not hold it."""
    kind, fits = numpy_dtype(dtype), isinstance(value, int)
    if dtype.is_floating:
        return _real(value, label, dtype)
    if dtype is DType.BOOL:
        fits = fits and value in (0, 1)
    elif fits:
        limits = np.iinfo(kind)
        fits = limits.min <= value <= limits.max
    if not fits:
        raise UsageError(f"{label} is {value}", why=f"{dtype} has no such value")
    return np.asarray(value, kind)


def _real(value: float, label: str, dtype: DType) -> Array:
    try:
        number = float(value)
    except OverflowError:
        raise UsageError(f"{label} is too large", why=f"{dtype} has no such value") from None
    with np.errstate(over="ignore"):
        rounded = HostTensor.from_float32(number, dtype) if not is_native(dtype) else None
        array = np.asarray(number, numpy_dtype(dtype)) if rounded is None else rounded.raw
    if math.isfinite(number) and not np.isfinite(array if rounded is None else rounded.float32()):
        raise UsageError(f"{label} is {value}", why=f"{dtype} has no such value")
    return array


def check_type(
    label: str, dtype: DType, shape: Sequence[int], got_dtype: DType, got_shape: Sequence[int]
) -> None:
    """UsageError unless the two agree; the message says what differs."""
    if got_dtype is dtype and tuple(got_shape) == tuple(shape):
        return  # words cost more than all of a small program's call
    wanted = f"wanted {describe_type(dtype, shape)}, got {describe_type(got_dtype, got_shape)}"
    if got_dtype is not dtype:
        hint = f"convert it to {dtype}"
        raise UsageError(f"{label} has dtype `{got_dtype}` instead of `{dtype}`", why=wanted, hint=hint)
    if len(got_shape) != len(shape):
        raise UsageError(f"{label} has {len(got_shape)} dimensions instead of {len(shape)}", why=wanted)
    for dimension, (want, got) in enumerate(zip(shape, got_shape, strict=True)):
        if want != got:
            raise UsageError(f"{label} has size {got} in dimension {dimension} instead of {want}", why=wanted)


def describe_type(dtype: DType, shape: Sequence[object]) -> str:
    """``float32[1, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def arrange(method: Method, args: Sequence[object], named: Mapping[str, object]) -> list[object]:
    """The inputs in the order of the method's ports; UsageError for missing, unknown or doubled names.

    Ports without a value (burnt-in scalars) may be left out.
    """
    ports = method.inputs
    if len(args) > len(ports):
        names = [port.name for port in ports]
        raise UsageError(
            f"method `{method.name}` takes {len(ports)} inputs, got {len(args)}", why=f"inputs are {names}"
        )
    given: dict[str, object] = dict(zip((port.name for port in ports), args, strict=False))
    for name, value in named.items():
        if name in given:
            raise UsageError(f"input `{name}` of method `{method.name}` is given twice")
        given[name] = value
    known = {port.name for port in ports}
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"method `{method.name}` has no input `{unknown[0]}`", hint=f"its inputs are {sorted(known)}"
        )
    if missing := [port.name for port in ports if port.value and port.name not in given]:
        raise UsageError(f"method `{method.name}` misses input `{missing[0]}`", why=f"missing are {missing}")
    return [given.get(port.name, port.literal) for port in ports]


def check_literal(label: str, literal: Argument, value: object) -> None:
    """UsageError unless a burnt-in input is given as it was exported."""
    if value is not literal and not _is_same(value, literal):
        raise UsageError(
            f"{label} is {value!r}", why=f"it was {literal!r} at export and is part of the program now"
        )


def _is_same(value: Any, literal: Any) -> bool:
    try:
        return bool(value == literal) or bool(value != value and literal != literal)  # NaN is not itself
    except (ValueError, TypeError, RuntimeError):  # an array of many elements
        return False


@dataclass(frozen=True, slots=True)
class SymbolReader:
    """Reads the method's symbols off the shapes of its inputs, and checks every dimension against them."""

    method: Method

    def bindings(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Symbol values for input shapes by port name; UsageError when out of bounds or contradictory."""
        found: dict[str, int] = {}
        for symbol in self.method.symbols:
            found[symbol.name] = self._read(symbol, shapes[symbol.input])
        return found

    def _read(self, symbol: Symbol, shape: tuple[int, ...]) -> int:
        if symbol.dimension >= len(shape):
            raise UsageError(
                f"input `{symbol.input}` has {len(shape)} dimensions",
                why=f"dimension {symbol.dimension} is dynamic and must be there",
            )
        size = shape[symbol.dimension]
        size = self._solve(symbol, size)
        if not symbol.lower <= size <= symbol.upper:
            raise UsageError(
                f"input `{symbol.input}` has size {size} in dimension {symbol.dimension}",
                why=f"the program was exported for {symbol.lower} to {symbol.upper}"
                f" (`{symbol.label or symbol.name}`)",
            )
        return size

    def _solve(self, symbol: Symbol, size: int) -> int:
        """The symbol's value where the dimension it is read from is an expression such as ``2*s0``."""
        port = next(port for port in self.method.inputs if port.name == symbol.input)
        extent = self.method.value(port.value).shape[symbol.dimension]
        if not isinstance(extent, Expr) or extent.text == symbol.name:
            return size
        low, high = symbol.lower, symbol.upper
        while low < high:  # size expressions of one symbol grow with it
            middle = (low + high) // 2
            low, high = (middle + 1, high) if extent.evaluate({symbol.name: middle}) < size else (low, middle)
        if extent.evaluate({symbol.name: low}) != size:
            raise UsageError(
                f"input `{symbol.input}` has size {size} in dimension {symbol.dimension}",
                why=f"it must be `{extent}` for a `{symbol.name}` from {symbol.lower} to {symbol.upper}",
            )
        return low


def concrete(sizes: Sequence[Size], bindings: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes for given symbol values."""
    return tuple(evaluate(size, bindings) for size in sizes)


Store = Callable[[Any], None]


IsLent = Callable[[int], bool]
"""Whether a host address is in a program's own memory, which the next call writes to."""


def refuse_lent(array: Array, label: str, is_lent: IsLent) -> None:
    """UsageError for what was borrowed of the same program: arrays of that are read-only."""
    if not array.flags.writeable and is_lent(address_of(array)):
        why = "it lies in the memory that this call writes to"
        raise UsageError(f"{label} is a borrowed output of this program", why=why, hint="pass a copy of it")


def host_store(port: Port, operand: Operand, is_lent: IsLent) -> Store:
    """A function that checks one host input and copies it to its address. Hot: a call runs it per input."""
    view = array_at(operand.address, operand.dtype, operand.shape, operand.strides)
    shape, kind, dtype = operand.shape, view.dtype, operand.dtype
    native, ndarray, label = is_native(dtype), np.ndarray, f"input `{port.name}`"

    def store(given: Any) -> None:
        if (
            native
            and type(given) is ndarray
            and given.dtype is kind
            and given.shape == shape
            and given.flags.writeable
        ):
            view[...] = given
        else:
            array = host_array(given, label, dtype, shape)
            refuse_lent(array, label, is_lent)
            view[...] = array

    return store


def check_device_input(port: Port, given: Operand, wanted: Operand) -> None:
    """UsageError unless a caller's device tensor can be used in place: type, strides, 16-byte alignment."""
    label = f"input `{port.name}`"
    check_type(label, wanted.dtype, wanted.shape, given.dtype, given.shape)
    pairs = zip(wanted.shape, wanted.strides, given.strides, strict=True)
    if any(extent > 1 and want != got for extent, want, got in pairs):
        raise UsageError(
            f"{label} has strides {given.strides} instead of {wanted.strides}",
            why="it is used in place, without a copy",
            hint="pass a contiguous copy",
        )
    if given.address % 16:
        raise UsageError(
            f"{label} starts at an address that is not a multiple of 16", hint="pass a copy of it"
        )

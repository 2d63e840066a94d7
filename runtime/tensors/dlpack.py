"""DLPack in ctypes: tensors handed to and taken from other libraries in place, without importing any.

Structures follow dlpack.h 1.1: the versioned capsule where the consumer knows it, else the older one.
https://dmlc.github.io/dlpack/latest/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..dtypes import DType
from .host import Array, address_of, contiguous_strides

CUDA, CPU_DEVICE, PINNED = 2, 1, 3
_VERSION = (1, 1)
_READ_ONLY = 1

_CODES = {
    DType.BOOL: 6,
    DType.BFLOAT16: 4,
    DType.FLOAT8_E4M3FN: 10,
    DType.FLOAT8_E5M2: 12,
}


def dlpack_type(dtype: DType) -> tuple[int, int]:
    """DLPack's (code, bits) of an element type."""
    if dtype in _CODES:
        return _CODES[dtype], 8 * dtype.itemsize
    code = 2 if dtype.is_floating else 1 if str(dtype).startswith("uint") else 0
    return code, 8 * dtype.itemsize


_BY_TYPE = {dlpack_type(dtype): dtype for dtype in DType}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Own prototypes: the attributes of `ctypes.pythonapi` are shared with every other library in the process.
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
# A destructor sees the capsule when nothing refers to it any more, so it must not be counted again.
_raw_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_USED, _USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"

_alive: dict[int, tuple[Any, ...]] = {}
"""Structures that consumers hold, by address, with all that must live as long."""


def _forget(address: int) -> None:
    _alive.pop(address, None)


def _drop_unused(capsule: int) -> None:
    """Destructor of a capsule that nobody consumed: a consumer would have renamed it."""
    for name in (_NAME, _NAME_VERSIONED):
        if _raw_valid(capsule, name):
            _alive.pop(_raw_pointer(capsule, name), None)


_deleter = ctypes.cast(_kept := _Deleter(_forget), ctypes.c_void_p)
_destructor = ctypes.cast(
    _also_kept := ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_unused), ctypes.c_void_p
)


@dataclass(frozen=True, slots=True)
class Description:
    """A tensor as DLPack tells it. Strides count elements; ``device`` is (type, ordinal)."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: tuple[int, int]
    is_read_only: bool = False


def export(description: Description, owner: object, max_version: tuple[int, int] | None) -> Any:
    """A capsule for a consumer that knows DLPack up to ``max_version``; ``owner`` lives while it is held."""
    rank = len(description.shape)
    shape = (ctypes.c_int64 * max(rank, 1))(*description.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*description.strides)
    code, bits = dlpack_type(description.dtype)
    pointer = ctypes.POINTER(ctypes.c_int64)
    tensor = _Tensor(
        description.address,
        *description.device,
        rank,
        code,
        bits,
        1,
        ctypes.cast(shape, pointer),
        ctypes.cast(strides, pointer),
        0,
    )
    made: ctypes.Structure
    if max_version is not None and max_version[0] >= 1:
        flags = _READ_ONLY if description.is_read_only else 0
        made, name = _Versioned(*_VERSION, None, _deleter.value, flags, tensor), _NAME_VERSIONED
    else:
        made, name = _Managed(tensor, None, _deleter.value), _NAME
    address = ctypes.addressof(made)
    _alive[address] = (made, shape, strides, owner)
    return _new(address, name, _destructor)


def export_host(raw: Array, dtype: DType, max_version: tuple[int, int] | None) -> Any:
    """A capsule for a host array, whose elements are of ``dtype``; BufferError for what DLPack cannot say."""
    is_read_only = not raw.flags.writeable
    if is_read_only and (max_version is None or max_version[0] < 1):
        raise BufferError("a read-only tensor needs a consumer of DLPack 1.0; copy it")
    if any(step % dtype.itemsize for step in raw.strides):
        raise BufferError("the strides are no multiples of the element size; copy it")
    strides = tuple(step // dtype.itemsize for step in raw.strides)
    described = Description(address_of(raw), dtype, raw.shape, strides, (CPU_DEVICE, 0), is_read_only)
    return export(described, raw, max_version)


def consume(capsule: Any) -> tuple[Description, Callable[[], None]]:
    """Take a producer's capsule: what it holds, and the function that gives it back (call it once).

    Raises:
        BufferError: it is no unused DLPack capsule, or holds what no program has (complex, vectors of lanes).
    """
    if _valid(capsule, _NAME_VERSIONED):
        address = _pointer(capsule, _NAME_VERSIONED)
        versioned = _Versioned.from_address(address)
        if versioned.major != 1:
            raise BufferError(f"DLPack version {versioned.major}.{versioned.minor} is not known")
        tensor, deleter, used = versioned.tensor, versioned.deleter, _USED_VERSIONED
        read_only = bool(versioned.flags & _READ_ONLY)
    elif _valid(capsule, _NAME):
        address = _pointer(capsule, _NAME)
        managed = _Managed.from_address(address)
        tensor, deleter, used, read_only = managed.tensor, managed.deleter, _USED, False
    else:
        raise BufferError("no unused DLPack capsule")
    described = _describe(tensor, read_only)
    _rename(capsule, used)

    def release() -> None:
        if deleter:
            _Deleter(deleter)(address)

    return described, release


def _describe(tensor: Any, is_read_only: bool) -> Description:
    dtype = _BY_TYPE.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise BufferError(
            f"DLPack type {tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes has no equal here"
        )
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return Description(address, dtype, shape, strides, (tensor.device_type, tensor.device_id), is_read_only)

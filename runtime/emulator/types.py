"""Triton's element types over NumPy, and the rules by which two of them become one.

bfloat16 and the 8-bit floats are held as float32 and rounded whenever a result is given that type, so that
every value is one that the type can represent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import DType
from ..errors import ArtifactError
from ..tensors.host import Array, HostTensor


@dataclass(frozen=True)
class Type:
    """An element type: ``kind`` is ``bool``, ``int``, ``uint``, ``float`` or ``pointer``."""

    name: str
    kind: str
    primitive_bitwidth: int
    held: np.dtype[Any]
    """NumPy's type for values."""
    stored: np.dtype[Any]
    """NumPy's type for bytes in memory."""
    dtype: DType | None = None
    """The packed type, where ``held`` is wider."""
    element_ty: Type | None = None
    """What a pointer points to."""

    def __str__(self) -> str:
        return self.name

    @property
    def scalar(self) -> Type:
        """Itself: shapes are not part of these types."""
        return self

    @property
    def itemsize(self) -> int:
        """Bytes in memory."""
        return self.stored.itemsize

    def is_floating(self) -> bool:
        """Whether it holds real numbers."""
        return self.kind == "float"

    def is_int(self) -> bool:
        """Whether it holds integers or bools, as in Triton."""
        return self.kind in ("int", "uint", "bool")

    def is_ptr(self) -> bool:
        """Whether it is a pointer."""
        return self.kind == "pointer"

    def is_bf16(self) -> bool:
        """Whether it is bfloat16."""
        return self.name == "bf16"


def _type(name: str, kind: str, held: str, dtype: DType | None = None) -> Type:
    value = np.dtype(held)
    if kind == "bool":
        return Type(name, kind, 1, value, np.dtype("u1"))
    if dtype is None:
        return Type(name, kind, value.itemsize * 8, value, value)
    stored = np.dtype(f"u{dtype.itemsize}")
    return Type(name, kind, dtype.itemsize * 8, value, stored, dtype)


INT1 = _type("int1", "bool", "?")
INT8, INT16, INT32, INT64 = (_type(f"int{bits}", "int", f"i{bits // 8}") for bits in (8, 16, 32, 64))
UINT8, UINT16, UINT32, UINT64 = (_type(f"uint{bits}", "uint", f"u{bits // 8}") for bits in (8, 16, 32, 64))
FLOAT16, FLOAT32, FLOAT64 = (
    _type("fp16", "float", "f2"),
    _type("fp32", "float", "f4"),
    _type("fp64", "float", "f8"),
)
BFLOAT16 = _type("bf16", "float", "f4", DType.BFLOAT16)
FLOAT8E5 = _type("fp8e5", "float", "f4", DType.FLOAT8_E5M2)
FLOAT8E4NV = _type("fp8e4nv", "float", "f4", DType.FLOAT8_E4M3FN)

ALL = (
    INT1, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
    FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E5, FLOAT8E4NV,
)  # fmt: skip
_SHORT = {
    "i1": INT1, "u1": INT1, "i8": INT8, "i16": INT16, "i32": INT32, "i64": INT64,
    "u8": UINT8, "u16": UINT16, "u32": UINT32, "u64": UINT64,
}  # fmt: skip
BY_NAME = {each.name: each for each in ALL} | _SHORT


def pointer_to(element: Type) -> Type:
    """The type of pointers to an element type."""
    return Type(f"pointer<{element.name}>", "pointer", 64, np.dtype("i8"), np.dtype("i8"), None, element)


def parse(text: str) -> Type:
    """A type in the words of kernel signatures (``*fp16``, ``i32``); ArtifactError for another."""
    is_pointer, name = text.startswith("*"), text.removeprefix("*").removeprefix("k")
    if name not in BY_NAME:
        raise ArtifactError(f"unknown kernel parameter type `{text}`")
    return pointer_to(BY_NAME[name]) if is_pointer else BY_NAME[name]


def of_dtype(dtype: DType) -> Type:
    """The type of a program's tensor."""
    table: dict[str, Type] = {"bool": INT1, "float8_e5m2": FLOAT8E5, "float8_e4m3fn": FLOAT8E4NV}
    name = str(dtype)
    return table.get(name) or BY_NAME[name.replace("bfloat", "bf").replace("float", "fp")]


def cast(values: Array, source: Type, target: Type) -> Array:
    """Values of one type as those of another: rounded to nearest, truncated towards zero for integers."""
    if source == target:
        return values
    if target.kind == "bool":
        return np.asarray(values != 0)
    if target.kind in ("int", "uint") and source.is_floating():
        return _to_integer(values, target)
    return settle(values.astype(target.held), target)


def _to_integer(values: Array, target: Type) -> Array:
    """Saturating, NaN to zero, as the GPU's conversion does."""
    info = np.iinfo(target.held)
    wide = np.nan_to_num(values.astype(np.float64), nan=0.0)
    inside = np.clip(wide, float(info.min), float(info.max)).astype(target.held)
    inside = np.where(wide >= float(info.max), np.array(info.max, target.held), inside)
    return np.asarray(inside, target.held)


def settle(values: Array, target: Type) -> Array:
    """Round to what the type can represent, where NumPy holds it in a wider one."""
    if target.dtype is None:
        return values
    return HostTensor.from_float32(values, target.dtype).float32()


def pack(values: Array, target: Type) -> Array:
    """Values as they stand in memory."""
    if target.dtype is None:
        return values.astype(target.stored, copy=False)
    return HostTensor.from_float32(values, target.dtype).raw


def unpack(stored: Array, source: Type) -> Array:
    """What stands in memory as values."""
    if source.kind == "bool":
        return np.asarray(stored != 0)
    if source.dtype is None:
        return stored
    return HostTensor(stored, source.dtype).float32()


def bitcast(values: Array, source: Type, target: Type) -> Array:
    """The same bits as another type of the same size."""
    if source.itemsize != target.itemsize:
        raise ArtifactError(f"a kernel reinterprets `{source}` as `{target}` of another size")
    stored = np.ascontiguousarray(pack(values, source))
    return unpack(stored.view(target.stored), target)


def computation_type(left: Type, right: Type, *, is_division: bool = False) -> Type:
    """The type in which Triton computes with two tensors."""
    kinds = (left, right)
    for wide in (FLOAT64, FLOAT32):
        if wide in kinds:
            return wide
    if left.is_floating() or right.is_floating():
        return _narrow_float(left, right, is_division)
    if left.kind == right.kind:
        return left if left.primitive_bitwidth >= right.primitive_bitwidth else right
    if "bool" in (left.kind, right.kind):
        return right if left.kind == "bool" else left
    unsigned, signed = (left, right) if left.kind == "uint" else (right, left)
    return unsigned if unsigned.primitive_bitwidth >= signed.primitive_bitwidth else signed


def _narrow_float(left: Type, right: Type, is_division: bool) -> Type:
    if is_division:
        return FLOAT32
    if not (left.is_floating() and right.is_floating()):
        return left if left.is_floating() else right
    if left == right:
        return left
    return (
        FLOAT32
        if {left, right} == {FLOAT16, BFLOAT16}
        else (FLOAT16 if FLOAT16 in (left, right) else BFLOAT16)
    )


def literal_type(value: float | bool, other: Type | None = None, *, is_division: bool = False) -> Type:
    """The type of a Python number next to a tensor: the tensor's, unless the number is of a higher kind."""
    own = INT1 if isinstance(value, bool) else FLOAT32 if isinstance(value, float) else _integer_type(value)
    if other is None or other.is_ptr():
        return own
    ranks = {"bool": 0, "int": 1, "uint": 1, "float": 2}
    if ranks[own.kind] <= ranks[other.kind]:
        return FLOAT32 if is_division and other in (FLOAT16, BFLOAT16) else other
    return own


def _integer_type(value: int) -> Type:
    for candidate in (INT32, UINT32, INT64, UINT64):
        info = np.iinfo(candidate.held)
        if info.min <= value <= info.max:
            return candidate
    raise ArtifactError(f"a kernel holds the integer {value}, which no type holds")

"""Element types: their names, sizes and numbers in the ET12 container."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type. ``value`` is (name, bytes per element, ScalarType number of ET12)."""

    UINT8 = ("uint8", 1, 0)
    INT8 = ("int8", 1, 1)
    INT16 = ("int16", 2, 2)
    INT32 = ("int32", 4, 3)
    INT64 = ("int64", 8, 4)
    FLOAT16 = ("float16", 2, 5)
    FLOAT32 = ("float32", 4, 6)
    FLOAT64 = ("float64", 8, 7)
    BOOL = ("bool", 1, 11)
    BFLOAT16 = ("bfloat16", 2, 15)
    FLOAT8_E5M2 = ("float8_e5m2", 1, 23)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 1, 24)
    UINT16 = ("uint16", 2, 27)
    UINT32 = ("uint32", 4, 28)
    UINT64 = ("uint64", 8, 29)

    def __str__(self) -> str:
        return self.value[0]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.value[1]

    @property
    def scalar_type(self) -> int:
        """The number that the ET12 container uses for this type."""
        return self.value[2]

    @property
    def is_floating(self) -> bool:
        """Whether the type holds real numbers."""
        return "float" in self.value[0]

    @classmethod
    def from_name(cls, name: str) -> DType:
        """Look a type up by its name (``float32``); raises KeyError for an unknown one."""
        return _BY_NAME[name]

    @classmethod
    def from_scalar_type(cls, number: int) -> DType:
        """Look a type up by its ET12 number; raises KeyError for an unknown one."""
        return _BY_NUMBER[number]


_BY_NAME = {dtype.value[0]: dtype for dtype in DType}
_BY_NUMBER = {dtype.value[2]: dtype for dtype in DType}

"""Kernel arguments as the driver wants them: an array of pointers to values, made once and kept alive."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..backend import Operand
from ..errors import ExecutionError
from ..expr import Expr
from ..program import Argument, KernelParameter, Ref

_INTEGERS: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
_FLOATS: dict[str, Any] = {"fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double}
_SCRATCH_POINTERS = 2
"""Triton kernels take two more pointers, global and profiling scratch; null when unused."""

CValue = Any
"""A ctypes scalar."""


def c_value(type_name: str, value: int | float | bool) -> CValue:
    """A scalar in a kernel parameter's type, in Triton's words; ExecutionError when it does not fit."""
    if (integer := _INTEGERS.get(type_name)) is not None:
        made = integer(int(value))
        if made.value != int(value):
            raise ExecutionError(f"{value} does not fit a kernel parameter of type `{type_name}`")
        return made
    if (floating := _FLOATS.get(type_name)) is not None:
        return floating(float(value))
    if type_name == "fp16":
        return ctypes.c_uint16(int.from_bytes(struct.pack("<e", float(value)), "little"))
    if type_name == "bf16":
        return ctypes.c_uint16(_bfloat16_bits(float(value)))
    raise ExecutionError(f"kernel parameter of unknown type `{type_name}`")


def _bfloat16_bits(value: float) -> int:
    """Round to nearest even; NaN stays NaN."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    if value != value:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def early_config(cu: Any, grid: Sequence[int], threads: int, shared_nbytes: int) -> Any:
    """A launch that may begin before the one ahead of it in the stream has ended; the stream is to be set.

    Programmatic stream serialisation of the CUDA driver API, for kernels that wait by themselves.
    """
    config, attribute, value = cu.CUlaunchConfig(), cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_nbytes
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    return config


class ArgumentArray:
    """The arguments of one launch. ``address`` is what `cuLaunchKernel` takes; keep the object alive."""

    def __init__(
        self,
        parameters: Sequence[KernelParameter],
        arguments: Sequence[Argument],
        operands: Mapping[str, Operand],
        bindings: Mapping[str, int],
    ) -> None:
        if len(parameters) != len(arguments):
            raise ExecutionError(
                f"the kernel takes {len(parameters)} arguments, the launch has {len(arguments)}"
            )
        self.values: list[CValue] = [
            _argument(parameter, argument, operands, bindings)
            for parameter, argument in zip(parameters, arguments, strict=True)
        ]
        self.values += [ctypes.c_uint64(0) for _ in range(_SCRATCH_POINTERS)]
        self._pointers = (ctypes.c_void_p * len(self.values))(
            *(ctypes.addressof(value) for value in self.values)
        )
        self.address = ctypes.addressof(self._pointers)


def _argument(
    parameter: KernelParameter,
    argument: Argument,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
) -> CValue:
    if parameter.type.startswith("*"):
        if argument is None:
            return ctypes.c_uint64(0)
        if isinstance(argument, Ref):
            return ctypes.c_uint64(operands[argument.name].address)
    elif isinstance(argument, Expr):
        return c_value(parameter.type, argument.evaluate(bindings))
    elif isinstance(argument, int | float):
        return c_value(parameter.type, argument)
    raise ExecutionError(
        f"kernel parameter `{parameter.name}` of type `{parameter.type}` cannot take {argument!r}"
    )

"""Kernel arguments in memory, as the driver reads them."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.backend import Operand
from devplan.runtime.cuda.launch import ArgumentArray, c_value
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ExecutionError
from devplan.runtime.expr import Expr
from devplan.runtime.program import Device, KernelParameter, Ref

X = Operand(0xDEAD0000, DType.FLOAT16, (4,), (1,), Device("cuda"))


def read(array: ArgumentArray, index: int, kind: type) -> int:
    pointer = ctypes.c_void_p.from_address(array.address + 8 * index).value
    assert pointer is not None
    return kind.from_address(pointer).value


def test_arguments_follow_the_parameters_and_two_scratch_pointers() -> None:
    parameters = [
        KernelParameter(*text.split()) for text in ("x *fp16", "n i64", "m i32", "s fp32", "none *i8")
    ]
    array = ArgumentArray(parameters, (Ref("x"), Expr("s0 * 2"), 7, 0.5, None), {"x": X}, {"s0": 21})
    assert len(array.values) == 7
    assert read(array, 0, ctypes.c_uint64) == 0xDEAD0000
    assert read(array, 1, ctypes.c_int64) == 42
    assert read(array, 2, ctypes.c_int32) == 7
    assert read(array, 3, ctypes.c_float) == 0.5
    assert [read(array, index, ctypes.c_uint64) for index in (4, 5, 6)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("i32", 1 << 31), ("i8", 200), ("u32", -1), ("complex", 1), ("i32", Ref("x")), ("*fp16", 5)],
)
def test_what_a_parameter_cannot_hold_is_refused(kind: str, argument: object) -> None:
    with pytest.raises(ExecutionError):
        ArgumentArray([KernelParameter("p", kind)], (argument,), {"x": X}, {})  # type: ignore[arg-type]


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(ExecutionError, match="takes 1 arguments, the launch has 2"):
        ArgumentArray([KernelParameter("p", "i32")], (1, 2), {}, {})


@given(st.floats(width=16))
def test_half_precision_scalars_are_packed_as_their_bits(value: float) -> None:
    wanted = np.float16(value).view(np.uint16)
    got = c_value("fp16", value).value
    assert got == wanted or (
        value != value and np.uint16(got).view(np.float16) != np.uint16(got).view(np.float16)
    )


@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_scalars_round_to_nearest(value: float) -> None:
    bits = c_value("bf16", value).value
    got = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    neighbours = [
        struct.unpack("<f", struct.pack("<I", (bits + step << 16) & 0xFFFFFFFF))[0] for step in (-1, 1)
    ]
    if abs(value) < 3e38 and bits & 0x7FFF:
        assert all(abs(got - value) <= abs(other - value) for other in neighbours if other == other)

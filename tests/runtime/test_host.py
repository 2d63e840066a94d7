"""Host tensors of types that NumPy lacks, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.dtypes import DType
from devplan.runtime.tensors.host import HostTensor, array_at, contiguous_strides

FLOATS = st.floats(width=32, allow_nan=False)


def values(dtype: DType) -> np.ndarray:
    """All finite values of a type, in order."""
    bits = np.arange(1 << (8 * dtype.itemsize)).astype(np.uint16 if dtype.itemsize == 2 else np.uint8)
    with np.errstate(invalid="ignore"):
        decoded = HostTensor(bits, dtype).float32().astype(np.float64)
    return np.unique(decoded[np.isfinite(decoded)])


TABLES = {dtype: values(dtype) for dtype in (DType.BFLOAT16, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FN)}


def test_the_largest_values_are_those_of_the_formats() -> None:
    assert TABLES[DType.BFLOAT16][-1] == float.fromhex("0x1.fep127")
    assert TABLES[DType.FLOAT8_E5M2][-1] == 57344
    assert TABLES[DType.FLOAT8_E4M3FN][-1] == 448
    assert [len(table) for table in TABLES.values()] == [65279, 247, 253]


@pytest.mark.parametrize("dtype", TABLES)
@given(value=FLOATS)
def test_rounding_is_to_the_nearest_value(dtype: DType, value: float) -> None:
    table = TABLES[dtype]
    made = float(HostTensor.from_float32(value, dtype).float32())
    if abs(value) > table[-1]:
        assert not np.isfinite(made) or abs(made) == table[-1]
    else:
        assert abs(made - value) == np.abs(table - value).min()


@pytest.mark.parametrize("dtype", TABLES)
def test_ties_go_to_the_even_code(dtype: DType) -> None:
    table = TABLES[dtype]
    table = table[(table > 0)]
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    exact = middles.astype(np.float64) == (table[1:] + table[:-1]) / 2
    raw = HostTensor.from_float32(middles[exact], dtype).raw
    assert exact.sum() > 100
    assert (raw % 2 == 0).all()


@pytest.mark.parametrize("dtype", TABLES)
def test_every_value_survives_the_way_to_float32_and_back(dtype: DType) -> None:
    table = TABLES[dtype].astype(np.float32)
    np.testing.assert_array_equal(HostTensor.from_float32(table, dtype).float32(), table)
    assert np.isnan(HostTensor.from_float32(np.nan, dtype).float32())


def test_scalars_and_arrays() -> None:
    tensor = HostTensor.from_float32(1.5, DType.BFLOAT16)
    assert tensor.shape == ()
    assert float(np.asarray(tensor)) == 1.5
    assert HostTensor.from_float32(np.ones((2, 3)), DType.BFLOAT16).nbytes == 12


@given(st.lists(st.integers(0, 4), max_size=4))
def test_arrays_over_memory_see_what_is_there(shape: list[int]) -> None:
    source = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    view = array_at(source.__array_interface__["data"][0], DType.INT64, shape, contiguous_strides(shape))
    np.testing.assert_array_equal(view, source)

"""Products in a column-major library's words: evaluated by a model of the library, against NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.cuda.matrix import Matrix, product
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ExecutionError
from devplan.runtime.program import CPU

M, N, K, BATCH = 3, 4, 5, 2


def operand(array: np.ndarray, dtype: DType = DType.FLOAT32) -> Operand:
    strides = tuple(step // array.itemsize for step in array.strides)
    return Operand(int(array.ctypes.data), dtype, array.shape, strides, CPU)


def laid_out(shape: tuple[int, ...], transposed: bool, padding: int) -> np.ndarray:
    """Random numbers; the last two dimensions stored by columns, or with gaps between rows, where asked."""
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    wide = np.random.default_rng(0).standard_normal((*stored[:-1], stored[-1] + padding)).astype(np.float32)
    narrow = wide[..., : stored[-1]]
    return narrow.swapaxes(-1, -2) if transposed else narrow


def column_major(matrix: Matrix, item: int) -> np.ndarray:
    """The matrix as the library addresses it."""
    address = matrix.operand.address + 4 * item * matrix.batch_stride
    span = (matrix.columns - 1) * matrix.leading + matrix.rows
    buffer: Any = (np.ctypeslib.ctypes.c_float * span).from_address(address)
    flat = np.frombuffer(buffer, np.float32)
    return np.lib.stride_tricks.as_strided(flat, (matrix.rows, matrix.columns), (4, 4 * matrix.leading))


def evaluate(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None, c: np.ndarray | None
) -> None:
    """What cuBLASLt does with the description."""
    described = product(*map(operand, (a, b, out)), *(None if x is None else operand(x) for x in (bias, c)))
    for item in range(described.batch):
        first, second = (column_major(x, item) for x in (described.first, described.second))
        result = (first.T if described.first.transposed else first) @ (
            second.T if described.second.transposed else second
        )
        if described.c is not None:
            result = result + column_major(described.c, item)
        if bias is not None:
            assert len(bias) == described.d.rows
            result = result + bias[:, None]
        column_major(described.d, item)[...] = result


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("a_t", "b_t", "out_t"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("padding", [0, 3])
def test_every_layout_gives_the_product(
    batched: bool, a_t: bool, b_t: bool, out_t: bool, padding: int
) -> None:
    lead = (BATCH,) if batched else ()
    a, b = laid_out((*lead, M, K), a_t, padding), laid_out((*lead, K, N), b_t, padding)
    out = laid_out((*lead, M, N), out_t, padding)
    evaluate(a, b, out, None, None)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product([1, 3], repeat=3)))
@pytest.mark.parametrize(("a_t", "b_t"), list(itertools.product([False, True], repeat=2)))
def test_extents_of_one_leave_no_doubt(m: int, n: int, k: int, a_t: bool, b_t: bool) -> None:
    a, b, out = laid_out((m, k), a_t, 2), laid_out((k, n), b_t, 2), laid_out((m, n), False, 0)
    evaluate(a, b, out, None, None)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)


def test_a_bias_is_added_to_each_row_and_c_to_the_whole() -> None:
    a, b, out = laid_out((M, K), False, 0), laid_out((K, N), True, 0), laid_out((M, N), False, 1)
    bias, c = np.arange(N, dtype=np.float32), laid_out((M, N), False, 2)
    evaluate(a, b, out, bias, c)
    np.testing.assert_allclose(out, a @ b + bias + c, rtol=1e-5)


def test_an_unbatched_operand_serves_every_item() -> None:
    a, b, out = (
        laid_out((BATCH, M, K), False, 0),
        laid_out((K, N), False, 0),
        laid_out((BATCH, M, N), False, 0),
    )
    evaluate(a, b, out, None, None)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = DType.FLOAT32) -> Operand:
    return Operand(1 << 20, dtype, shape, strides, CPU)


A, B, OUT = strided((M, K), (K, 1)), strided((K, N), (N, 1)), strided((M, N), (N, 1))


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        ((strided((M, K), (20, 2)), B, OUT, None, None), "no dense rows or columns"),
        ((strided((M, K), (0, 1)), B, OUT, None, None), "no dense rows or columns"),
        ((A, strided((N, K), (K, 1)), OUT, None, None), "extents differ"),
        ((A, B, strided((M, N), (1, M)), strided((N,), (1,)), None), "only to a row-major"),
        ((A, B, OUT, strided((M,), (1,)), None), "not one dense row"),
        ((A, B, OUT, None, strided((M, N), (1, M))), "laid out like"),
        ((strided((BATCH, M, K), (15, 5, 1)), B, OUT, None, None), "batched `out`"),
        ((strided((M, K), (K, 1), DType.FLOAT16), B, OUT, None, None), "types differ"),
        ((strided((K,), (1,)), B, OUT, None, None), "2 or 3 dimensions"),
    ],
)
def test_what_the_library_cannot_say_is_refused(operands: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ExecutionError, match=why):
        product(*operands)

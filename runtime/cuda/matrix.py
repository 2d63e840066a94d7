"""A matrix product in the words of a column-major library: which operand first, transposed or not.

The library stores matrices column by column. A row-major matrix is its transpose there, so a row-major
``out = a @ b`` is computed as ``out.T = b.T @ a.T``; a column-major ``out`` directly.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend import Operand
from ..errors import ExecutionError


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as the library sees it: column-major, ``leading`` elements from column to column."""

    operand: Operand
    rows: int
    columns: int
    leading: int
    transposed: bool
    batch_stride: int


@dataclass(frozen=True, slots=True)
class Product:
    """``d = op(first) @ op(second)``, with c laid out like d. ``bias`` runs along d's rows."""

    first: Matrix
    second: Matrix
    d: Matrix
    c: Matrix | None
    bias: Operand | None
    batch: int
    m: int
    n: int
    k: int


def _is_row_major(operand: Operand, what: str) -> tuple[bool, int]:
    """(row-major?, leading dimension) of the last two dimensions; ExecutionError when neither is dense."""
    rows, columns = operand.shape[-2:]
    row_stride, column_stride = operand.strides[-2:]
    if column_stride == 1 or columns == 1:
        leading = row_stride if rows > 1 else max(columns, 1)
        if leading >= columns:
            return True, leading
    if row_stride == 1 or rows == 1:
        leading = column_stride if columns > 1 else max(rows, 1)
        if leading >= rows:
            return False, leading
    raise ExecutionError(
        f"matmul cannot take `{what}` as it lies",
        why=f"shape {list(operand.shape)} with strides {list(operand.strides)}: no dense rows or columns",
    )


def _batch_stride(operand: Operand, batch: int, what: str) -> int:
    if len(operand.shape) == 2 or operand.shape[0] == 1 != batch:
        return 0
    if operand.shape[0] != batch:
        raise ExecutionError(
            "matmul's batches differ", why=f"`{what}` has {operand.shape[0]}, `out` has {batch}"
        )
    return operand.strides[0] if batch > 1 else 0


def product(a: Operand, b: Operand, out: Operand, bias: Operand | None, c: Operand | None) -> Product:
    """Describe ``out = a @ b`` for the library.

    a is [m, k] or [batch, m, k], b and out likewise; a or b may lack the batch or have one of 1.

    Raises:
        ExecutionError: ranks or extents do not fit, or the layout cannot be expressed.
    """
    verify_shapes(a, b, out, bias, c)
    batch = out.shape[0] if len(out.shape) == 3 else 1
    m, n, k = out.shape[-2], out.shape[-1], a.shape[-1]
    row_major, leading = _is_row_major(out, "out")
    if bias is not None and not row_major:
        raise ExecutionError(
            "matmul adds a bias only to a row-major `out`", why=f"its strides are {list(out.strides)}"
        )

    def matrix(operand: Operand, what: str) -> Matrix:
        is_rows, lead = _is_row_major(operand, what)
        rows, columns = operand.shape[-2:]
        shape = (columns, rows) if is_rows else (rows, columns)
        return Matrix(operand, *shape, lead, is_rows != row_major, _batch_stride(operand, batch, what))

    def result(operand: Operand, lead: int, what: str) -> Matrix:
        shape = (n, m) if row_major else (m, n)
        return Matrix(operand, *shape, lead, False, _batch_stride(operand, batch, what))

    c_matrix = None
    if c is not None:
        c_rows, c_leading = _is_row_major(c, "c")
        if c_rows != row_major:
            raise ExecutionError(
                "matmul needs `c` laid out like `out`", why=f"strides {c.strides} and {out.strides}"
            )
        c_matrix = result(c, c_leading, "c")
    first, second = matrix(a, "a"), matrix(b, "b")
    if row_major:
        first, second = second, first
    return Product(first, second, result(out, leading, "out"), c_matrix, bias, batch, m, n, k)


def verify_shapes(a: Operand, b: Operand, out: Operand, bias: Operand | None, c: Operand | None) -> None:
    """ExecutionError unless ranks, extents and element types fit together."""

    def refuse(why: str) -> None:
        shapes = f"a {list(a.shape)}, b {list(b.shape)}, out {list(out.shape)}"
        raise ExecutionError("matmul's operands do not fit", why=f"{why}: {shapes}")

    if not all(len(operand.shape) in (2, 3) for operand in (a, b, out)):
        refuse("each needs 2 or 3 dimensions")
    if len(out.shape) == 2 and any(len(x.shape) == 3 and x.shape[0] != 1 for x in (a, b)):
        refuse("a batch needs a batched `out`")
    if a.shape[-1] != b.shape[-2] or out.shape[-2:] != (a.shape[-2], b.shape[-1]):
        refuse("extents differ")
    if len({a.dtype, b.dtype, out.dtype, *((c.dtype,) if c else ()), *((bias.dtype,) if bias else ())}) != 1:
        refuse(f"types differ, {a.dtype}, {b.dtype} and {out.dtype}")
    if bias is not None and (bias.shape != (out.shape[-1],) or bias.strides != (1,)):
        refuse(f"the bias {list(bias.shape)} is not one dense row")
    if c is not None and c.shape[-2:] != out.shape[-2:]:
        refuse(f"`c` {list(c.shape)} is not shaped like `out`")

"""Elimination and Cholesky's factorization of small matrices as kernels of ours.

A program holds one matrix of a batch in registers: elimination with partial pivoting and back-substitution
(Golub and Van Loan, "Matrix Computations", 3.4), or the outer-product form of Cholesky's factorization (4.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tape import ExternCall, OwnLaunch
from .own_launch import own_launch
from .own_operators import own_operator

LARGEST = 128
"""Rows of a matrix that registers hold."""
ELIMINATED = "devplan.eliminated.default"
CHOLESKY = "devplan.cholesky.default"


@own_operator("eliminated(Tensor a, Tensor b) -> Tensor")
def _fake_eliminated(a: Tensor, b: Tensor) -> Tensor:
    """a [items, n, n], b [items, n, r]: L and U in one, the solution, and which row each step took."""
    return a.new_empty(a.shape[0], a.shape[1], a.shape[1] + b.shape[2] + 1)


@own_operator("cholesky(Tensor a) -> Tensor")
def _fake_cholesky(a: Tensor) -> Tensor:
    """The lower factor of each matrix [items, n, n]; the upper triangle is not read."""
    return torch.empty_like(a)


def eliminated(a: Tensor, b: Tensor) -> Tensor:
    """The same by LAPACK; on the target itself, the kernel."""
    if a.is_cuda:
        kept: Tensor = torch.ops.devplan.eliminated(a, b)
        return kept
    factors, pivots, _ = torch.linalg.lu_factor_ex(a)
    made = torch.linalg.lu_solve(factors, pivots, b)
    return torch.cat([factors, made, (pivots - 1).to(a.dtype).unsqueeze(-1)], -1)


def cholesky(a: Tensor) -> Tensor:
    """The same by LAPACK, likewise."""
    made: Tensor = torch.ops.devplan.cholesky(a) if a.is_cuda else torch.linalg.cholesky_ex(a)[0]
    return made


# --- kernels -----------------------------------------------------------------------------------------

_ELIMINATE = """\
@triton.jit
def eliminate(a, b, output{runtime}{constants}):
    item = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    rows = row[:, None]
    columns = row[None, :]
    right = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    is_matrix = (rows < N) & (columns < N)
    is_right = (rows < N) & (right < R)
    left = tl.load(a + item * (N * N) + rows * N + columns, mask=is_matrix, other=0.0)
    values = tl.load(b + item * (N * R) + rows * R + right, mask=is_right, other=0.0)
    order = tl.zeros([BLOCK], tl.int32)
    for k in range(N):
        column = tl.sum(tl.where(columns == k, left, 0.0), 1)
        taken = tl.argmax(tl.where((row >= k) & (row < N), tl.abs(column), -1.0), 0)
        order = tl.where(row == k, taken, order)
        upper = tl.sum(tl.where(rows == taken, left, 0.0), 0)[None, :]
        other = tl.sum(tl.where(rows == k, left, 0.0), 0)[None, :]
        left = tl.where(rows == k, upper, tl.where(rows == taken, other, left))
        solved = tl.sum(tl.where(rows == taken, values, 0.0), 0)[None, :]
        other = tl.sum(tl.where(rows == k, values, 0.0), 0)[None, :]
        values = tl.where(rows == k, solved, tl.where(rows == taken, other, values))
        pivot = tl.sum(tl.where(columns == k, upper, 0.0), 1)[:, None]
        column = tl.sum(tl.where(columns == k, left, 0.0), 1)[:, None]
        factor = tl.where((rows > k) & (pivot != 0.0), column / pivot, 0.0)
        rest = tl.where(columns > k, left - factor * upper, left)
        left = tl.where((rows > k) & (columns == k), factor, rest)
        values = tl.where(rows > k, values - factor * solved, values)
    for step in range(N):
        k = N - 1 - step
        column = tl.sum(tl.where(columns == k, left, 0.0), 1)[:, None]
        pivot = tl.sum(tl.where(rows == k, column, 0.0), 0)[None, :]
        solved = tl.sum(tl.where(rows == k, values, 0.0), 0)[None, :] / pivot
        values = tl.where(rows == k, solved, tl.where(rows < k, values - column * solved, values))
    at = output + item * (N * (N + R + 1)) + rows * (N + R + 1)
    tl.store(at + columns, left, mask=is_matrix & (tl.program_id(1) == 0))
    tl.store(at + N + right, values, mask=is_right)
    tl.store(at + N + R, order[:, None].to(left.dtype), mask=(rows < N) & (tl.program_id(1) == 0))
"""

_CHOLESKY = """\
@triton.jit
def cholesky(a, output{runtime}{constants}):
    item = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    rows = row[:, None]
    columns = row[None, :]
    is_matrix = (rows < N) & (columns < N)
    at = item * (N * N) + rows * N + columns
    left = tl.load(a + at, mask=is_matrix & (rows >= columns), other=0.0)
    for k in range(N):
        column = tl.sum(tl.where(columns == k, left, 0.0), 1)[:, None]
        pivot = tl.sqrt(tl.sum(tl.where(rows == k, column, 0.0), 0))[None, :]
        below = tl.where(rows == k, pivot, tl.where(rows > k, column / pivot, 0.0))
        beside = tl.sum(tl.where(rows == columns, below, 0.0), 0)[None, :]
        rest = tl.where((columns > k) & (rows >= columns), left - below * beside, left)
        left = tl.where(columns == k, below, rest)
    tl.store(output + at, left, mask=is_matrix)
"""


def to_elimination(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of ``devplan.eliminated``."""
    a, b = call.operands
    right = b.sizes[2]
    wide = 1 << (right - 1).bit_length() if isinstance(right, int) else 64
    constants = {"BLOCK": _block(a.sizes[1]), "WIDE": max(2, min(64, wide))}
    sizes = {"ITEMS": a.sizes[0], "N": a.sizes[1], "R": right}
    windows = {"a": a, "b": b, "output": call.outs[0]}
    grid = ("ITEMS", "-(R // -WIDE)", "1")
    warps = 1 if constants["BLOCK"] <= 16 else 4
    return (own_launch(_ELIMINATE, windows, sizes, constants, grid, (call.outs[0],), num_warps=warps),)


def to_cholesky(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of ``devplan.cholesky``."""
    (a,) = call.operands
    constants = {"BLOCK": _block(a.sizes[1])}
    sizes = {"ITEMS": a.sizes[0], "N": a.sizes[1]}
    windows = {"a": a, "output": call.outs[0]}
    warps = 1 if constants["BLOCK"] <= 16 else 4
    return (
        own_launch(
            _CHOLESKY, windows, sizes, constants, ("ITEMS", "1", "1"), (call.outs[0],), num_warps=warps
        ),
    )


def _block(rows: Any) -> int:
    return max(2, 1 << (int(rows) - 1).bit_length())

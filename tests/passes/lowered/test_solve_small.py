"""Factorizations of small matrices as kernels, against eager on the emulator; what is too large is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from devplan.passes.kernels.small_matrices import LARGEST
from devplan.tests.support.functions import against_eager

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    row = against_eager(function, *inputs)
    assert row.status == "right", row.error
    assert row.max_error < 1e-4


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def positive(items: int, rows: int) -> torch.Tensor:
    made = rand(items, rows, rows)
    return made @ made.mT + torch.eye(rows)


def test_inverses_and_determinants() -> None:
    def compute(a: torch.Tensor, wide: torch.Tensor, ones: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.linalg.inv(a),
            torch.inverse(wide[0]),
            torch.linalg.det(a),
            *torch.linalg.slogdet(a),
            torch.logdet(a),
            torch.linalg.det(ones),
            torch.linalg.inv_ex(ones).info,
            *torch.linalg.lu_factor(a),
            *(torch.linalg.matrix_power(a, n) for n in (0, 1, 5, -2)),
        ]

    check(compute, rand(3, 4, 4), rand(1, 33, 33, dtype=torch.float64), torch.ones(3, 3))


def test_systems_with_vectors_matrices_and_batches_on_either_side() -> None:
    def compute(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.linalg.solve(a, b),
            torch.linalg.solve(a[0], b),
            torch.linalg.solve(a[0], b[0, :, 0]),
            torch.linalg.solve(a, b.mT, left=False),
            torch.linalg.solve_triangular(a, b, upper=True),
            torch.linalg.solve_triangular(a, b.mT, upper=False, left=False),
            torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True),
        ]

    check(compute, positive(3, 5), rand(3, 5, 2))


def test_factors_of_positive_definite_matrices() -> None:
    def compute(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        lower = torch.linalg.cholesky(a)
        return [
            lower,
            torch.linalg.cholesky(a, upper=True),
            torch.cholesky_solve(b, lower),
            torch.cholesky_inverse(lower),
            torch.linalg.cholesky_ex(a - 3 * torch.eye(5)).info,
        ]

    check(compute, positive(3, 5), rand(3, 5, 2))


def test_the_largest_that_registers_hold() -> None:
    check(torch.linalg.solve, positive(1, LARGEST), rand(1, LARGEST, 70))
    row = against_eager(torch.linalg.inv, positive(1, LARGEST + 1))
    assert row.status == "refused"
    assert "`aten.linalg_inv.default`" in row.error

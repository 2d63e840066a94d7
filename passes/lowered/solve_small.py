"""Inverses, determinants, linear systems and Cholesky factors of small matrices, for kernels of ours.

Where eager raises an error, for a matrix that is singular or not positive definite, results are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..exported.inline import inline, stand_in
from ..inductor.overloads import is_overload, packet_name
from ..kernels.small_matrices import LARGEST

if TYPE_CHECKING:
    from ..exported.method import ExportedMethod


def solve_small(method: ExportedMethod) -> None:
    """Rewrite an exported graph's factorizations in place, where matrices are small enough."""
    for node in list(method.graph.graph.nodes):
        target = node.target
        if not is_overload(target) or target.namespace != "aten":
            continue
        rule = _RULES.get(packet_name(target))
        if rule is not None:
            _rewrite(method, node, rule)
    method.graph.recompile()


class _TooLargeError(Exception):
    """The matrix stays with whatever else can run the operator."""


def _rewrite(method: ExportedMethod, node: torch.fx.Node, rule: Callable[..., Any]) -> None:
    nodes = list[torch.fx.Node](node.all_input_nodes)

    def run(*values: Any) -> Any:
        known = dict(zip(nodes, values, strict=True))
        map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        return rule(*args, **kwargs)

    try:
        made = inline(run, nodes, node)
    except _TooLargeError:
        return
    stand_in(method, node, made)


# --- rules, as the operators of these names ----------------------------------------------------------


def _require(a: Tensor) -> int:
    """The number of rows of a square matrix that the kernels take."""
    rows, columns = a.shape[-2:]
    is_small = isinstance(rows, int) and isinstance(columns, int) and 0 < rows == columns <= LARGEST
    if not is_small or a.dtype not in (torch.float32, torch.float64):
        raise _TooLargeError
    return rows


def _eliminated(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L and U in one, the solution, and the rows taken, counted from 0, in the matrices' own type."""
    rows, right = _require(a), b.size(-1)
    broadcast: Any = torch.broadcast_shapes
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    items = math.prod(batch)
    a = a.expand(*batch, rows, rows).reshape(items, rows, rows).contiguous()
    b = b.expand(*batch, rows, right).reshape(items, rows, right).contiguous()
    made = torch.ops.devplan.eliminated(a, b).reshape(*batch, rows, rows + right + 1)
    return made[..., :rows], made[..., rows:-1], made[..., -1]


def _lu(a: Tensor) -> tuple[Tensor, Tensor]:
    factors, _, order = _eliminated(a, a.new_zeros((_require(a), 1)))
    return factors, order


def _info(factors: Tensor) -> Tensor:
    """The first step, counted from 1, whose pivot is no pivot; else 0."""
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    bad = (diagonal == 0) | diagonal.isnan()
    return torch.where(bad.any(-1), bad.to(torch.int32).argmax(-1) + 1, 0).to(torch.int32)


def _pivots(order: Tensor) -> Tensor:
    return order.to(torch.int32) + 1


def _inverse_ex(a: Tensor, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    factors, made, _ = _eliminated(a, torch.eye(_require(a), dtype=a.dtype, device=a.device))
    return made, _info(factors)


def _inverse(a: Tensor) -> Tensor:
    return _inverse_ex(a)[0]


def _sign(order: Tensor) -> Tensor:
    steps = torch.arange(order.size(-1), device=order.device)
    return (1 - 2 * ((order != steps).sum(-1) % 2)).to(order.dtype)


def _whole_det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors, order = _lu(a)
    made = factors.diagonal(dim1=-2, dim2=-1).prod(-1) * _sign(order)
    return made, factors, _pivots(order)


def _det(a: Tensor) -> Tensor:
    return _whole_det(a)[0]


def _whole_slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors, order = _lu(a)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    sign = diagonal.sign().prod(-1) * _sign(order)
    return sign, diagonal.abs().log().sum(-1), factors, _pivots(order)


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor]:
    return _whole_slogdet(a)[:2]


def _logdet(a: Tensor) -> Tensor:
    sign, size = _slogdet(a)
    return torch.where(sign < 0, math.nan, size)


def _whole_solve(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if is_vector else b
    if not left:
        a, right = a.mT, right.mT
    factors, made, order = _eliminated(a, right)
    made = made if left else made.mT
    return made.squeeze(-1) if is_vector else made, factors, _pivots(order), _info(factors)


def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    return _whole_solve(a, b, left=left)[0]


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    made = _whole_solve(a, b, left=left)
    return made[0], made[3]


def _lu_factor_ex(
    a: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if not pivot:
        raise _TooLargeError
    factors, order = _lu(a)
    return factors, _pivots(order), _info(factors)


def _lu_factor(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    return _lu_factor_ex(a, pivot=pivot)[:2]


def _cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    rows = _require(a)
    given = a.mT if upper else a
    items = given.reshape(-1, rows, rows).contiguous()
    made = torch.ops.devplan.cholesky(items).reshape(a.shape)
    return made.mT if upper else made, _info(made)


def _cholesky(a: Tensor, upper: bool = False) -> Tensor:
    return _cholesky_ex(a, upper=upper)[0]


def _triangle(a: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    made = a.triu() if upper else a.tril()
    one = torch.eye(_require(a), dtype=torch.bool, device=a.device)
    return torch.where(one, 1.0, made) if unitriangular else made


def _solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    a = _triangle(a, upper, unitriangular)
    return _eliminated(a, b)[1] if left else _eliminated(a.mT, b.mT)[1].mT


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    given = _triangle(a, upper, unitriangular)
    return _eliminated(given.mT if transpose else given, b)[1], a.clone()


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = factor.mT if upper else factor
    first = _solve_triangular(lower, b, upper=False)
    return _solve_triangular(lower.mT, first, upper=True)


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    return _cholesky_solve(
        torch.eye(_require(factor), dtype=factor.dtype, device=factor.device), factor, upper
    )


def _matrix_power(a: Tensor, n: int) -> Tensor:
    if n == 0:
        return torch.eye(a.size(-1), dtype=a.dtype, device=a.device).expand(a.shape).clone()
    a, n = (_inverse(a), -n) if n < 0 else (a, n)
    made: Tensor | None = None
    while n:
        made = (a if made is None else torch.matmul(made, a)) if n % 2 else made
        a, n = torch.matmul(a, a) if n > 1 else a, n // 2
    assert made is not None
    return made.clone()


_RULES: dict[str, Callable[..., Any]] = {
    "inverse": _inverse,
    "linalg_inv": _inverse,
    "linalg_inv_ex": _inverse_ex,
    "det": _det,
    "linalg_det": _det,
    "_linalg_det": _whole_det,
    "slogdet": _slogdet,
    "linalg_slogdet": _slogdet,
    "_linalg_slogdet": _whole_slogdet,
    "logdet": _logdet,
    "linalg_solve": _solve,
    "linalg_solve_ex": _solve_ex,
    "_linalg_solve_ex": _whole_solve,
    "linalg_lu_factor": _lu_factor,
    "linalg_lu_factor_ex": _lu_factor_ex,
    "cholesky": _cholesky,
    "linalg_cholesky": _cholesky,
    "linalg_cholesky_ex": _cholesky_ex,
    "linalg_solve_triangular": _solve_triangular,
    "triangular_solve": _triangular_solve,
    "cholesky_solve": _cholesky_solve,
    "cholesky_inverse": _cholesky_inverse,
    "matrix_power": _matrix_power,
    "linalg_matrix_power": _matrix_power,
}

"""Torch's symbolic sizes and element types as the program's own."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ...runtime.dtypes import DType
from ...runtime.errors import UnsupportedOperatorError
from ...runtime.expr import Expr, Size
from ..inductor.interfaces import in_integers, python_text

_UNBOUNDED = 1 << 40
_TRACED_FROM = 2


def to_size(value: Any) -> Size:
    """A sympy expression, ``SymInt`` or plain integer as a `Size`."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, int | sympy.Integer):
        return int(value)
    made = Expr(python_text(in_integers(value)))
    try:
        _ = made.symbols
    except ValueError as error:
        hint = "resize to sizes that are given, or by simple factors"
        raise UnsupportedOperatorError("a size is no integer expression", why=str(error), hint=hint) from None
    return made


def to_dtype(dtype: torch.dtype) -> DType:
    """The program's element type; UnsupportedOperatorError for complex and quantized ones."""
    try:
        return DType.from_name(str(dtype).removeprefix("torch."))
    except KeyError:
        raise UnsupportedOperatorError(
            f"element type `{dtype}` has no place in an artifact",
            hint="write complex arithmetic as pairs of real tensors",
        ) from None


def bound_of(exported: Any, extent: torch.SymInt, root: Any = None) -> tuple[int, int | None]:
    """Inclusive bounds of a symbolic extent, or of a symbol in it; no upper bound is None.

    While it traces, torch takes every dynamic size to be 2 or more; what the user declared is kept in the
    exported program's constraints, and is what may be passed at run time.
    """
    node = extent.node
    expression = node.expr if root is None else root
    ranges = node.shape_env.bound_sympy(expression)
    lower = int(ranges.lower) if isinstance(ranges.lower, sympy.Integer) else 0
    upper = int(ranges.upper) if isinstance(ranges.upper, sympy.Integer) else _UNBOUNDED
    said = getattr(exported, "range_constraints", {}).get(expression)
    if lower == _TRACED_FROM and said is not None and isinstance(said.lower, sympy.Integer):
        lower = max(int(said.lower), 1)
    return max(lower, 0), upper if upper < _UNBOUNDED else None

"""Sizes that depend on dynamic dimensions: integer expressions over named symbols."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub,
    ast.Pow, ast.Constant, ast.Name, ast.Load, ast.Call, ast.IfExp, ast.Compare, ast.BoolOp, ast.And, ast.Or,
    ast.Not, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.LShift, ast.RShift, ast.BitAnd,
)  # fmt: skip
_FUNCTIONS = {"min": min, "max": max}


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[CodeType, frozenset[str]]:
    """Compile once; refuses anything that is not integer arithmetic, since artifacts carry these texts."""
    tree = ast.parse(text, mode="eval")
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"`{text}` is not a size expression: {type(node).__name__}")
        is_known = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        )
        if isinstance(node, ast.Call) and not is_known:
            raise ValueError(f"`{text}` calls something other than min or max")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, bool):
            raise ValueError(f"`{text}` holds {node.value!r}, which is not an integer")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            names.add(node.id)
    return compile(tree, "<size>", "eval"), frozenset(names)


@dataclass(frozen=True, slots=True)
class Expr:
    """An integer expression in Python's syntax over symbols, such as ``(s0 + 7) // 8 * 384``.

    Only arithmetic, comparison, ``min`` and ``max`` are allowed; ValueError at first use otherwise.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def symbols(self) -> frozenset[str]:
        """The names that must be bound to evaluate the expression."""
        return _compiled(self.text)[1]

    def evaluate(self, bindings: Mapping[str, int]) -> int:
        """The expression's value; raises KeyError when a symbol is not bound."""
        code, names = _compiled(self.text)
        scope = {name: bindings[name] for name in names}
        return int(eval(code, {"__builtins__": {}, **_FUNCTIONS}, scope))


Size = int | Expr
"""A number of bytes, elements or blocks: known, or an expression over the method's symbols."""


def evaluate(size: Size, bindings: Mapping[str, int]) -> int:
    """The size for given symbol values."""
    return size if isinstance(size, int) else size.evaluate(bindings)

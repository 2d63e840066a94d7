"""Conditions on declared sizes that torch cannot prove, although they hold for each of them.

Where code asks whether a tensor lies in one run, torch 2.13 may end at
``min(16 * n + 16, 32 * n + 32) == 16 * n + 16``, which its algebra leaves open, and refuse the range. Sizes
have bounds here: all are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from ...runtime.program import Symbol
from .narrowed import excluded_sizes

_REFUSAL = "Constraints violated"
"""How torch says that its guards exclude declared sizes."""


def traced_for_range(trace: Callable[[bool], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """``trace(False)``; where torch refuses the range, ``trace(True)`` if what it puts off always holds.

    ``trace`` is told whether conditions are to become checks in the graph. Those are taken out again.
    """
    try:
        return trace(False)
    except Exception as error:
        if _REFUSAL not in str(error):
            raise
        refusal = error
    try:
        exported = trace(True)
    except Exception:
        raise refusal from None
    if not all(_holds(node, exported) for node in _checks(exported)):
        raise refusal
    for node in _checks(exported):
        exported.graph.erase_node(node)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return exported


def _checks(exported: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in exported.graph.nodes if node.target is torch.ops.aten._assert_scalar.default]


def _holds(check: torch.fx.Node, exported: torch.export.ExportedProgram) -> bool:
    """Whether the check's condition is about declared sizes alone, and true for all of them."""
    asked: Any = check.args[0]
    value = asked.meta.get("val") if isinstance(asked, torch.fx.Node) else asked
    if not isinstance(value, torch.SymBool):
        return value is True
    condition: Any = value.node.expr
    bounds: Any = {symbol: exported.range_constraints.get(symbol) for symbol in condition.free_symbols}
    if not all(b is not None and b.upper.is_Integer for b in bounds.values()):
        return False
    symbols = {str(s): Symbol(str(s), int(b.lower), int(b.upper), "", 0) for s, b in bounds.items()}
    return condition is sympy.true or excluded_sizes(condition, symbols) is None

"""Which generated kernels Inductor may launch as one: small ones that do not depend on each other.

A decoder's layer turns its query and writes its key and its value in three kernels of a microsecond each, of
which most is the launch. Large kernels fill the GPU alone and stay apart, as do reductions, whose programs
want other block sizes.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode, SchedulerNode

_MOST_ELEMENTS = 1 << 16
OWNER, ATTRIBUTE = ForeachKernelSchedulerNode, "group_algorithm_for_combo_kernels"
"""Where Inductor keeps the choice, which is for others to make."""
IS_POSSIBLE = hasattr(OWNER, ATTRIBUTE)

_independent: Any = getattr(OWNER, ATTRIBUTE, None)


def small_and_independent(scheduler: Any) -> list[list[Any]]:
    """Groups of Inductor's scheduler nodes, each to become one kernel."""
    groups = [[node for node in group if _is_small(node)] for group in _independent(scheduler)]
    return [group for group in groups if len(group) > 1]


def _is_small(node: Any) -> bool:
    if not isinstance(node, SchedulerNode | FusedSchedulerNode) or node.is_reduction() or node.is_template():
        return False
    numel = sympy.sympify(node.group[1][0])
    return bool(numel.is_Integer) and int(numel) <= _MOST_ELEMENTS

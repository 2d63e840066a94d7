"""Find offsets for a packing problem: a portfolio behind one function, the best placement kept."""

from __future__ import annotations

from .options import Effort
from .problem import Placement, Problem, align

__all__ = ["place"]


def place(problem: Problem, effort: Effort = "default") -> Placement:
    """Offsets for every buffer, as low as the effort finds; stops when the lower bound is met."""
    order = sorted(
        range(len(problem.buffers)), key=lambda i: (-problem.buffers[i].size, problem.buffers[i].lower, i)
    )
    return first_fit(problem, order)


def first_fit(problem: Problem, order: list[int]) -> Placement:
    buffers = problem.buffers
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for index in order:
        buffer = buffers[index]
        at = 0
        for other in placed:
            each = buffers[other]
            if each.lower < buffer.upper and buffer.lower < each.upper:
                if at + buffer.size <= offsets[other]:
                    break
                at = max(at, align(offsets[other] + each.size, buffer.alignment))
        offsets[index] = at
        placed.append(index)
        placed.sort(key=offsets.__getitem__)
    height = max((o + b.size for o, b in zip(offsets, buffers, strict=True)), default=0)
    return Placement(tuple(offsets), height, "size")

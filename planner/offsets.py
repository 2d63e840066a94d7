"""Find offsets for a packing problem: a portfolio behind one function, the best placement kept.

A sweep of greedy passes comes first and meets the lower bound on most networks. Where it does not, a narrow
beam lowers the top and exact search goes on from there; what is too large for it is fitted anew, iterated;
last, if asked for, a constraint solver. Everything stops at the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .beam import beam
from .exact import LARGEST
from .greedy import sweep
from .iterate import iterate
from .options import Effort
from .problem import Placement, Problem
from .search import Budget, improve
from .solver import decide

_SOLVER_SECONDS = {"fast": 2.0, "default": 10.0, "max": 30.0}


@dataclass(frozen=True, slots=True)
class _Work:
    """What an effort spends: greedy passes, then beams' widths, exact search, rounds of fitting anew."""

    passes: int
    widths: tuple[int, ...]
    budget: Budget
    rounds: int


def place(
    problem: Problem, effort: Effort = "default", *, solver: bool = False, time_limit: float | None = None
) -> Placement:
    """Offsets for every buffer, as low as the effort finds; stops when the lower bound is met.

    Deterministic for an effort unless ``time_limit`` (processor seconds) or the effort's own guard strikes.
    Buffers without a life or a size get offset 0.
    """
    kept = [i for i, b in enumerate(problem.buffers) if b.lower < b.upper and b.size > 0]
    if not kept:
        return Placement((0,) * len(problem.buffers), 0, "nothing to place")
    dense = Problem(tuple(problem.buffers[i] for i in kept))
    work = _work(len(kept), effort, time_limit)
    best = sweep(dense, work.passes)
    for width in work.widths:
        if best.height > dense.lower_bound:
            best = beam(dense, best, width)
    best = improve(dense, best, work.budget)
    best = iterate(dense, best, work.rounds)
    if solver and best.height > problem.lower_bound:
        best = decide(dense, problem.lower_bound, _SOLVER_SECONDS[effort]) or best
    offsets = [0] * len(problem.buffers)
    for index, offset in zip(kept, best.offsets, strict=True):
        offsets[index] = offset
    return replace(best, offsets=tuple(offsets))


def _work(count: int, effort: Effort, time_limit: float | None) -> _Work:
    """Passes cost about n^1.5, search steps about n: larger problems get fewer of both."""
    size = 0 if count <= 1000 else 1 if count <= 4000 else 2 if count <= 20_000 else 3
    widths: tuple[int, ...] = {"fast": (1,), "default": (1, 4), "max": (1, 4, 16, 64)}[effort]
    widths = widths if count <= 1000 else ()
    rounds = 0
    if effort == "fast":
        passes, steps, seconds = (8, 4, 2, 1)[size], 0, 0.0
    elif effort == "default":
        passes, steps, seconds = (
            (99, 16, 4, 2)[size],
            (10_000, 60_000, 20_000, 0)[size],
            min(max(0.85, count / 500), 8.0),
        )
    else:
        passes, steps, seconds = (99, 99, 12, 4)[size], 50_000_000, 55.0
        rounds = 0 if count <= LARGEST else 200_000 // count
    bound_work = 800_000_000 if effort == "max" else 0
    budget = Budget(steps, min(seconds, time_limit) if time_limit is not None else seconds, bound_work)
    return _Work(passes, widths, budget, rounds)

"""Iterated first fit: place anew with those earlier that stood at the top.

The buffers that reach the highest address, and what lies right beneath them, were placed too late. Moving
them forward in the order and fitting again lowers the top, if slowly (the family of TVM's and Vela's hill
climbing). For problems too large for exact search this is all that is left beyond the sweep.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .greedy import fit
from .problem import Placement, Problem

_SEED = 7919


def iterate(problem: Problem, best: Placement, rounds: int) -> Placement:
    """The best placement after so many passes, each from the best order so far with its top moved forward."""
    random = np.random.default_rng(_SEED)
    size = np.array([buffer.size for buffer in problem.buffers], dtype=np.int64)
    order = np.lexsort(
        (-size, np.array(best.offsets))
    )  # by offset, which gives the placement again or better
    for _ in range(rounds):
        if best.height <= problem.lower_bound:
            break
        changed = _moved(order, size, best, random)
        offsets = fit(problem, changed, ceiling=best.height)
        if offsets is None:
            continue
        height = problem.height(offsets)
        order = changed  # equal heights too: plateaus are wide
        if height < best.height:
            best = Placement(tuple(offsets), height, "iterated first fit")
        else:
            best = Placement(tuple(offsets), height, best.algorithm)
    return best


def _moved(
    order: NDArray[np.intp], size: NDArray[np.int64], best: Placement, random: np.random.Generator
) -> NDArray[np.intp]:
    """The order with the buffers at the top, and a few at random, brought forward."""
    offsets = np.array(best.offsets)
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order))
    top = np.flatnonzero(offsets + size == best.height)
    others = random.integers(0, len(order), size=2)
    for index in (*top.tolist(), *others.tolist()):
        rank[index] *= random.random()
    return np.argsort(rank, kind="stable")

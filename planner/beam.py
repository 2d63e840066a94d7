"""Beam search over placements from the bottom up, a few of the best kept at every step.

At each step some section whose floor is the lowest gets one of the buffers that can lie there. A state is
scored by how near its sections come to the bound: the sum of ((floor + what is to come) / bound)^p, which
punishes the fullest sections most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exact import ExactSearch
from .problem import Placement, Problem

_POWER = 24.0


@dataclass(frozen=True, slots=True)
class _Link:
    """What was placed where, as a linked list from the last back."""

    buffer: int
    offset: int
    before: _Link | None


@dataclass(frozen=True, slots=True)
class _State:
    """A partial placement: lowest addresses of unplaced buffers, floors and rests of sections."""

    score: float
    lowest: NDArray[Any]
    floor: NDArray[Any]
    rest: NDArray[Any]
    link: _Link | None


def beam(problem: Problem, best: Placement, width: int) -> Placement:
    """The placement found with so many states at a time, if it is lower than the best so far."""
    graph = ExactSearch(problem, best.height - 1)
    start = graph.start()
    states = [_State(0.0, start.lowest, start.floor, start.rest, None)]
    for _ in range(len(problem.buffers)):
        grown: dict[bytes, _State] = {}
        for state in states:
            for child in _children(graph, state, problem.lower_bound / graph.unit):
                grown.setdefault(child.lowest.tobytes(), child)
        states = sorted(grown.values(), key=lambda state: state.score)[:width]
        if not states:
            return best
    offsets = [0] * len(problem.buffers)
    link = states[0].link
    while link is not None:
        offsets[graph.order[link.buffer]] = link.offset * graph.unit
        link = link.before
    height = problem.height(offsets)
    return Placement(tuple(offsets), height, f"beam search, width {width}") if height < best.height else best


def _children(graph: ExactSearch, state: _State, bound: float) -> list[_State]:
    """One state for each buffer that can lie on the lowest floor and leaves room for the rest."""
    section = int(np.where(state.rest > 0, state.floor, graph.placed).argmin())
    members = graph.members[graph.starts[section] : graph.starts[section + 1]]
    bottom = int(state.floor[section])
    found: list[_State] = []
    candidates: list[int] = members[state.lowest[members] == bottom].tolist()
    for buffer in candidates:
        lowest, rest = state.lowest.copy(), state.rest.copy()
        near = graph.neighbours[buffer]
        lowest[near] = np.maximum(lowest[near], graph.aligned(bottom + graph.sizes[buffer], near))
        lowest[buffer] = graph.placed
        rest[graph.first[buffer] : graph.last[buffer]] -= graph.sizes[buffer]
        floor = np.minimum.reduceat(lowest[graph.members], graph.starts[:-1])
        filled = np.where(rest > 0, floor + rest, 0)
        if filled.max() <= graph.capacity:
            score = float(((filled / bound) ** _POWER).sum())
            found.append(_State(score, lowest, floor, rest, _Link(buffer, bottom, state.link)))
    return found

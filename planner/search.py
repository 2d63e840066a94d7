"""Improve a placement by exact searches with restarts, and prove bounds on the way.

The run times of `ExactSearch` have a heavy tail: a lucky start ends in hundreds of steps where another takes
millions. So every start gets few steps, and the starts differ in the order that buffers are tried in and in
whether weights are kept. Two capacities are asked in turn: the lower bound, and one between it and the best
height so far, which gains ground when the bound is out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .clock import Deadline
from .exact import ExactSearch
from .problem import Placement, Problem, sections

_Numbers = NDArray[np.float64]
_FIRST_LIMIT = 300
_GROWTH = 1.15
_NOISE = 0.3
_SEEDS = (6, 20240411, 1, 3)
_STREAM_WORK = 400_000_000
"""Work after which the limits start small again, from another seed and with nothing remembered."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search."""

    steps: int
    seconds: float
    """Processor seconds, as a guard."""
    bound_work: int = 0
    """Work for the bound alone, at first: steps times members of sections, about what they cost."""


def improve(problem: Problem, best: Placement, budget: Budget) -> Placement:
    """The best placement found within the budget; stops when none can be lower."""
    if best.height <= problem.lower_bound or not ExactSearch.fits(problem, best.height):
        return best
    return _Improvement(problem, best, budget).run()


class _Improvement:
    """One improvement: what is known so far, and what the budget has left."""

    def __init__(self, problem: Problem, best: Placement, budget: Budget) -> None:
        self.problem, self.best = problem, best
        self.deadline = Deadline(budget.seconds)
        self.steps_left = budget.steps
        _, spans = sections(problem.buffers)
        members = sum(last - first for first, last in spans)
        self.steps_at_mix = budget.steps - budget.bound_work // members
        self.stream_steps = max(_STREAM_WORK // members, 40 * len(problem.buffers))
        self.low = problem.lower_bound
        """No placement is lower."""
        self.share = 0.5
        """Where between low and best the second capacity lies."""
        self.searches: dict[int, ExactSearch] = {}

    def run(self) -> Placement:
        for stream in count():
            self._run_stream(stream)
            if self._is_over():
                break
        return self.best

    def _run_stream(self, stream: int) -> None:
        """Starts with rising limits until the stream's share of steps is spent."""
        self.searches.clear()
        end = self.steps_left - self.stream_steps
        limit = float(max(_FIRST_LIMIT, 2 * len(self.problem.buffers)))
        for number, starts in enumerate(self._rounds(_SEEDS[stream] if stream < len(_SEEDS) else stream)):
            for priority in starts:
                if self._is_over() or self.steps_left <= end:
                    return
                self._ask(self.low, priority, int(limit), keep=number % 2 == 1)
                if number % 2 == 0 and self.steps_left <= self.steps_at_mix and not self._is_over():
                    self._ask_between(priority, int(limit))
            limit *= _GROWTH

    def _is_over(self) -> bool:
        return self.best.height <= self.low or self.steps_left <= 0 or self.deadline.is_over()

    def _rounds(self, seed: int) -> Iterator[list[_Numbers]]:
        """Priorities to start with, round after round; all but the first round's are blurred."""
        bases = priorities(self.problem)
        yield bases
        random = np.random.default_rng(seed)
        while True:
            yield [base * np.exp(random.normal(0.0, _NOISE, len(base))) for base in bases]

    def _search(self, capacity: int) -> ExactSearch:
        """The search for a capacity, with what it remembers; the bound's and the last one are kept."""
        if capacity not in self.searches:
            kept = {self.low: self.searches[self.low]} if self.low in self.searches else {}
            self.searches = {**kept, capacity: ExactSearch(self.problem, capacity, self.deadline)}
        return self.searches[capacity]

    def _ask(self, capacity: int, priority: _Numbers, limit: int, keep: bool) -> bool | None:
        search = self._search(capacity)
        if not keep:
            search.weights[:] = 1.0
        before = search.steps
        found = search.run(priority, min(limit, self.steps_left))
        self.steps_left -= search.steps - before
        if found:
            offsets = search.placement()
            self.best = Placement(offsets, self.problem.height(offsets), "exact search")
        elif found is False:
            self.low = max(self.low, (capacity // search.unit + 1) * search.unit)
        return found

    def _ask_between(self, priority: _Numbers, limit: int) -> None:
        """Ask for a height between the bound and the best; nearer to the best after every failure."""
        unit = self._search(self.low).unit
        room = (self.best.height - self.low) // unit
        if room < 2:
            return
        capacity = self.low + min(max(int(room * self.share), 1), room - 1) * unit
        found = self._ask(capacity, priority, limit, keep=False)
        self.share = max(0.5, self.share - 0.1) if found else min((1 + self.share) / 2, 0.97)


def priorities(problem: Problem) -> list[_Numbers]:
    """Which buffers a search may try first: one array of positive weights per kind of start."""
    _, spans = sections(problem.buffers)
    size = np.array([buffer.size for buffer in problem.buffers], dtype=np.float64)
    length = np.array([last - first for first, last in spans], dtype=np.float64)
    total = ExactSearch(problem, problem.lower_bound).totals()
    area = size * length
    critical = (total / total.max()) ** 8
    return [area, length * size.max() * 2 + size, size * length.max() * 2 + length, critical * area, 1 / size]

"""Exact search: is there a placement of at most this height?

Depth-first over placements from the bottom up. A state is, for every buffer not yet placed, the lowest
address it can still have. A section's *floor* is the least of these among its buffers, and floor plus what
is still to be placed must not pass the capacity: at a capacity near the lower bound this one inequality
forbids nearly all waste. The search

- branches on a section: one of the buffers that can lie on its floor does, or none does and the floor rises
  to the lowest top of a neighbour, which costs slack (complete by pushing any placement down);
- picks the section with the fewest branches per weight, where sections that failed before weigh more
  (the "dom/wdeg" rule of constraint solving), among those whose candidates nothing can get beneath;
- solves parts that no unplaced buffer connects on their own;
- remembers the states that failed, across restarts;
- is restarted often, since its run times are heavy-tailed.

Sections, floors and independent parts follow MiniMalloc (Moffitt, ASPLOS 2024); branching on sections,
failure weights and remembered failures are ours.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clock import NEVER, Deadline
from .problem import Problem, sections

LARGEST = 6000
"""Buffers that the search takes at most: its recursion is as deep."""

_Ints = NDArray[np.signedinteger[Any]]
_SMALL = 1 << 28
"""Capacities below this, in units, are searched with 32-bit numbers."""
_MEMORY_LIMIT = 3_000_000
"""States remembered at most (about 100 bytes each)."""


def _unit(problem: Problem) -> int:
    """The largest number of bytes that every size and every alignment that matters is a multiple of."""
    unit = reduce(gcd, (buffer.size for buffer in problem.buffers), 0) or 1
    return reduce(gcd, (b.alignment for b in problem.buffers if unit % b.alignment), unit)


class _GiveUpError(Exception):
    """The step or time limit was reached."""


class ExactSearch:
    """The search for one capacity. `run` may be called many times; what failed stays known.

    Args:
        problem: buffers that all have a life and a size.
        capacity: bytes; fixed for this object, since failures are remembered.
        deadline: when to give up.
    """

    def __init__(self, problem: Problem, capacity: int, deadline: Deadline = NEVER) -> None:
        buffers = problem.buffers
        self.unit = _unit(problem)
        self.capacity = capacity // self.unit
        is_small = self.capacity < _SMALL
        self.integer: type[np.signedinteger[Any]] = np.int32 if is_small else np.int64
        self.placed = 1 << 30 if is_small else 1 << 60
        """The lowest address of what is placed: beyond all others."""
        self.deadline = deadline
        self.steps = 0
        self.count, spans = sections(buffers)
        self.order = sorted(range(len(buffers)), key=lambda i: (spans[i], -buffers[i].size, i))
        self.first = [spans[i][0] for i in self.order]
        self.last = [spans[i][1] for i in self.order]
        self.sizes = [buffers[i].size // self.unit for i in self.order]
        self.size: _Ints = np.array(self.sizes, dtype=self.integer)
        steps = [max(buffers[i].alignment // self.unit, 1) for i in self.order]
        self.alignment: _Ints | None = (
            np.array(steps, dtype=self.integer) if max(steps, default=1) > 1 else None
        )
        self.weights = np.ones(self.count)
        self.failed: set[int] = set()
        self._index()

    @staticmethod
    def fits(problem: Problem, capacity: int) -> bool:
        """Whether numbers and recursion stay within what the search can hold."""
        return 0 < len(problem.buffers) <= LARGEST and capacity // _unit(problem) < 1 << 58

    def _index(self) -> None:
        """Who lives in each section, one after the other, and who meets whom."""
        n = len(self.order)
        first, last = np.array(self.first), np.array(self.last)
        members: list[list[int]] = [[] for _ in range(self.count)]
        for b in range(n):
            for section in range(self.first[b], self.last[b]):
                members[section].append(b)
        self.members: NDArray[np.intp] = np.array([b for each in members for b in each], dtype=np.intp)
        self.starts = np.cumsum([0, *map(len, members)])
        self.section_of = np.repeat(np.arange(self.count), [len(each) for each in members])
        self.neighbours = [np.nonzero((first < self.last[b]) & (last > self.first[b]))[0] for b in range(n)]
        self.reach = [(int(first[near].min()), int(last[near].max())) for near in self.neighbours]
        self.lengths = last - first
        self.begin_at = [bisect_left(self.first, section) for section in range(self.count + 1)]

    def totals(self) -> NDArray[np.float64]:
        """For each buffer (in the caller's order) the largest sum of sizes in a section of its life."""
        self._reset()
        tops = [float(self.rest[a:b].max()) for a, b in zip(self.first, self.last, strict=True)]
        found = np.zeros(len(self.order))
        found[self.order] = tops
        return found

    def start(self) -> ExactSearch:
        """This search with nothing placed yet: ``lowest``, ``floor`` and ``rest`` are those of the start."""
        self._reset()
        return self

    def _reset(self) -> None:
        n = len(self.order)
        self.lowest: _Ints = np.zeros(n, dtype=self.integer)
        self.rest: _Ints = np.zeros(self.count, dtype=self.integer)
        self.left: _Ints = np.zeros(self.count, dtype=np.int32)
        self.crossing: _Ints = np.zeros(self.count + 1, dtype=np.int32)
        self.floor: _Ints = np.zeros(self.count, dtype=self.integer)
        for b in range(n):
            self.rest[self.first[b] : self.last[b]] += self.sizes[b]
            self.left[self.first[b] : self.last[b]] += 1
            self.crossing[self.first[b] + 1 : self.last[b]] += 1
        self.offsets = [0] * n

    def run(self, priority: Sequence[float] | NDArray[np.float64], limit: int) -> bool | None:
        """Search for at most ``limit`` steps, trying buffers of high priority first.

        True: found, see `placement`. False: proved that no placement fits. None: gave up.
        """
        self.rank = np.empty(len(self.order), dtype=np.intp)
        self.rank[np.argsort(-np.asarray(priority)[self.order], kind="stable")] = np.arange(len(self.order))
        self.limit = self.steps + limit
        self._reset()
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(max(depth, 1000 + 6 * len(self.order)))
        try:
            return self._raise_floors(0, self.count) and self._solve_parts(0, self.count)
        except _GiveUpError:
            return None
        finally:
            sys.setrecursionlimit(depth)

    def placement(self) -> tuple[int, ...]:
        """The offsets found, in bytes, in the order of the problem's buffers."""
        found = [0] * len(self.order)
        for b, index in enumerate(self.order):
            found[index] = self.offsets[b] * self.unit
        return tuple(found)

    def _raise_floors(self, a: int, b: int) -> bool:
        """Recompute the floors of sections [a, b); false when one has no room left for its buffers."""
        at = self.starts[a]
        members = self.members[at : self.starts[b]]
        floor = np.minimum.reduceat(self.lowest[members], self.starts[a:b] - at)
        slack = self.capacity - floor - self.rest[a:b]
        slack[self.left[a:b] == 0] = 0
        worst = int(slack.argmin())
        if slack[worst] < 0:
            self.weights[a + worst] += 1
            return False
        self.floor[a:b] = floor
        return True

    def _solve_parts(self, a: int, b: int) -> bool:
        """Cut [a, b) where no unplaced buffer crosses, and solve the parts, the tightest first."""
        cuts = np.nonzero(self.crossing[a + 1 : b] == 0)[0]
        if not len(cuts):
            return not self.left[a] or self._solve(a, b)
        edges = [a, *(cuts + (a + 1)).tolist(), b]
        parts = [(p, q) for p, q in pairwise(edges) if self.left[p]]
        if len(parts) == 1:
            return self._solve(*parts[0])
        parts.sort(key=lambda part: int((self._slack(*part)).min()))
        arrays: list[NDArray[Any]] = [self.lowest, self.rest, self.left, self.crossing, self.floor]
        saved = [array.copy() for array in arrays]
        for number, part in enumerate(parts):
            if not self._solve(*part):
                if number:  # the parts before were solved, hence changed
                    for array, copy in zip(arrays, saved, strict=True):
                        array[:] = copy
                return False
        return True

    def _slack(self, a: int, b: int) -> _Ints:
        return self.capacity - self.floor[a:b] - self.rest[a:b]

    def _solve(self, a: int, b: int) -> bool:
        """Place everything left in [a, b), which nothing unplaced leaves; restores the state on failure."""
        self.steps += 1
        if self.steps > self.limit or (self.steps % 64 == 0 and self.deadline.is_over()):
            raise _GiveUpError
        key = hash((a, b, self.lowest[self.begin_at[a] : self.begin_at[b]].tobytes()))
        if key in self.failed:
            return False
        section = self._pick(a, b)
        bottom = int(self.floor[section])
        slack = self.capacity - bottom - int(self.rest[section])
        members = self.members[self.starts[section] : self.starts[section + 1]]
        candidates = members[self.lowest[members] == bottom]
        candidates = candidates[self.rank[candidates].argsort()]
        tried: set[tuple[int, int, int]] = set()
        chosen: list[int] = candidates.tolist()
        for candidate in chosen:
            kind = (self.first[candidate], self.last[candidate], self.sizes[candidate])
            if kind not in tried:
                tried.add(kind)
                if self._place(candidate, bottom, a, b):
                    return True
        if slack > 0 and self._waste(chosen, a, b):
            return True
        if len(self.failed) < _MEMORY_LIMIT:
            self.failed.add(key)
        return False

    def _pick(self, a: int, b: int) -> int:
        """The section to decide next: fewest branches per weight, nothing unplaced beneath its candidates."""
        at = self.starts[a]
        members = self.members[at : self.starts[b]]
        is_candidate = self.lowest[members] == self.floor[self.section_of[at : self.starts[b]]]
        base, top = self.begin_at[a], self.begin_at[b]
        hits = np.bincount(members[is_candidate] - base, minlength=top - base)
        exposed = np.zeros(len(self.order), dtype=bool)
        exposed[base:top] = hits == self.lengths[base:top]
        starts = self.starts[a:b] - at
        branches = np.add.reduceat(is_candidate, starts, dtype=np.int32)
        blocked = np.add.reduceat(is_candidate & ~exposed[members], starts, dtype=np.int32)
        cost = (branches + (self._slack(a, b) > 0)) / self.weights[a:b]
        cost[(blocked > 0) | (self.left[a:b] == 0)] = np.inf
        return a + int(cost.argmin())

    def _place(self, buffer: int, bottom: int, a: int, b: int) -> bool:
        """Put the buffer there and go on; false, and all as before, when that leads nowhere."""
        first, last, size = self.first[buffer], self.last[buffer], self.sizes[buffer]
        near = self.neighbours[buffer]
        low, high = max(self.reach[buffer][0], a), min(self.reach[buffer][1], b)
        lowest, floor = self.lowest[near], self.floor[low:high].copy()
        self.lowest[near] = np.maximum(lowest, self.aligned(bottom + size, near))
        self.lowest[buffer] = self.placed
        self.rest[first:last] -= size
        self.left[first:last] -= 1
        if self._raise_floors(low, high):
            self.offsets[buffer] = bottom
            self.crossing[first + 1 : last] -= 1
            if self._solve_parts(a, b):
                return True
            self.crossing[first + 1 : last] += 1
        self.lowest[near], self.floor[low:high] = lowest, floor
        self.rest[first:last] += size
        self.left[first:last] += 1
        return False

    def _waste(self, candidates: list[int], a: int, b: int) -> bool:
        """Let none of these lie on the floor: each must then rest on a neighbour that is still to come."""
        tops = self.lowest + self.size
        raised: list[int] = []
        for candidate in candidates:
            near = self.neighbours[candidate]
            raised.append(int(np.where(near == candidate, self.placed, tops[near]).min()))
        low = max(min(self.first[each] for each in candidates), a)
        high = min(max(self.last[each] for each in candidates), b)
        lowest, floor = self.lowest[candidates], self.floor[low:high].copy()
        self.lowest[candidates] = np.maximum(
            lowest, self.aligned(np.array(raised, dtype=self.integer), candidates)
        )
        if self._raise_floors(low, high) and self._solve(a, b):
            return True
        self.lowest[candidates], self.floor[low:high] = lowest, floor
        return False

    def aligned(self, address: int | _Ints, buffers: NDArray[np.intp] | list[int]) -> int | _Ints:
        """The address, raised for each of the buffers to a multiple of its alignment."""
        if self.alignment is None:
            return address
        steps = self.alignment[buffers]
        return -(-address // steps) * steps

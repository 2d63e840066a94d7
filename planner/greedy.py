"""One pass over the buffers in some order, each to the lowest or the tightest gap: the sweep of orders.

No order wins everywhere, so several are tried (planning by size: Pisarchyk and Lee, arXiv 2001.03288; by
size and life: XLA; by section totals: MiniMalloc), ties always in the given order, since networks repeat the
same sizes layer after layer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .problem import Placement, Problem, align
from .timetable import Timetable

_Numbers = NDArray[np.float64]


def orders(problem: Problem) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Orders worth trying, by name, the most promising first."""
    size = np.array([b.size for b in problem.buffers], dtype=np.float64)
    lower = np.array([b.lower for b in problem.buffers], dtype=np.int64)
    upper = np.array([b.upper for b in problem.buffers], dtype=np.int64)
    life = (upper - lower).astype(np.float64)
    area = size * life
    total = live_totals(lower, upper, size)
    yield "size", _descending(size)
    yield "area", _descending(area)
    yield "breadth", _descending(total, size)
    yield "total, size, life", _descending(total, size, life)
    yield "total, life, size", _descending(total, life, size)
    yield "life", _descending(life, size)
    for power in (0.3, 0.1, 0.5, 0.2, 0.05):
        yield f"size x life^{power}", _descending(size * life**power)
    yield "whole life, then size", _descending((life >= life.max(initial=0.0)).astype(np.float64), size)
    yield "start", np.lexsort((-size, lower))
    yield "end", np.lexsort((-size, -upper))
    yield "total, area", _descending(total, area)


def _descending(*keys: _Numbers) -> NDArray[np.intp]:
    """Indices by the keys, largest first, the first key deciding, ties in the given order."""
    return np.lexsort([-key for key in reversed(keys)])


def live_totals(lower: NDArray[np.int64], upper: NDArray[np.int64], size: _Numbers) -> _Numbers:
    """For each buffer the largest sum of live sizes during its life."""
    times = np.unique(np.concatenate([lower, upper]))
    change = np.zeros(len(times) + 1)
    first, last = np.searchsorted(times, lower), np.searchsorted(times, upper)
    np.add.at(change, first, size)
    np.add.at(change, last, -size)
    live = np.cumsum(change)
    table = [live]  # sparse table: maxima over spans of 2^k moments
    while 2 ** len(table) <= len(times):
        half = 2 ** (len(table) - 1)
        table.append(np.maximum(table[-1][:-half], table[-1][half:]))
    found = np.zeros(len(size))
    spans = last - first
    for index in range(len(size)):
        level = int(spans[index]).bit_length() - 1
        if level >= 0:
            row = table[level]
            found[index] = max(row[first[index]], row[last[index] - 2**level])
    return found


def fit(
    problem: Problem, order: NDArray[np.intp], tightest: bool = False, ceiling: int | None = None
) -> list[int] | None:
    """Place in this order, each buffer in the lowest gap that takes it, or in the tightest.

    Gives up with None as soon as a buffer would reach beyond the ceiling.
    """
    scan = _fit_large if len(problem.buffers) > 400 else _fit_small
    return scan(problem, order.tolist(), tightest, 1 << 62 if ceiling is None else ceiling)


def _fit_small(problem: Problem, order: list[int], tightest: bool, ceiling: int) -> list[int] | None:
    buffers = problem.buffers
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int, int, int]] = []  # offset, end, lower, upper
    for index in order:
        buffer = buffers[index]
        at, best, best_gap = 0, -1, 1 << 62
        for offset, end, lower, upper in placed:
            if lower < buffer.upper and buffer.lower < upper:
                gap = offset - at - buffer.size
                if 0 <= gap < best_gap:
                    best, best_gap = at, gap
                    if not tightest:
                        break
                if end > at:
                    at = align(end, buffer.alignment)
        at = best if best >= 0 else at
        if at + buffer.size > ceiling:
            return None
        offsets[index] = at
        insort(placed, (at, at + buffer.size, buffer.lower, buffer.upper))
    return offsets


def _fit_large(problem: Problem, order: list[int], tightest: bool, ceiling: int) -> list[int] | None:
    """The same with NumPy: neighbours in time from a timetable, their gaps in one sweep."""
    buffers, n = problem.buffers, len(problem.buffers)
    timetable = Timetable(problem)
    offsets, ends = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for index in order:
        buffer = buffers[index]
        near = timetable.near(index)
        at = 0
        if len(near):
            begins = offsets[near]
            sequence = begins.argsort(kind="stable")
            tops = np.maximum.accumulate(ends[near][sequence])
            if buffer.alignment > 1:
                tops = -(-tops // buffer.alignment) * buffer.alignment
            starts = np.concatenate(([0], tops[:-1]))
            gaps = begins[sequence] - starts - buffer.size
            fitting = np.flatnonzero(gaps >= 0)
            at = int(tops[-1])
            if len(fitting):
                at = int(starts[fitting[gaps[fitting].argmin()] if tightest else fitting[0]])
        if at + buffer.size > ceiling:
            return None
        offsets[index], ends[index] = at, at + buffer.size
        timetable.add(index)
    return [int(each) for each in offsets]


def temporal(problem: Problem, tightest: bool = False) -> list[int]:
    """Place in order of birth, as an allocator at run time would: only what is alive is looked at."""
    buffers = problem.buffers
    offsets = [0] * len(buffers)
    live: list[tuple[int, int, int]] = []  # offset, end, upper
    for index in sorted(range(len(buffers)), key=lambda i: (buffers[i].lower, -buffers[i].size, i)):
        buffer = buffers[index]
        live = [each for each in live if each[2] > buffer.lower]
        at, best, best_gap = 0, -1, 1 << 62
        for offset, end, _ in live:
            gap = offset - at - buffer.size
            if 0 <= gap < best_gap:
                best, best_gap = at, gap
                if not tightest:
                    break
            at = max(at, align(end, buffer.alignment))
        offsets[index] = best if best >= 0 else at
        insort(live, (offsets[index], offsets[index] + buffer.size, buffer.upper))
    return offsets


def sweep(problem: Problem, passes: int) -> Placement:
    """The best of up to so many passes; stops at the lower bound."""
    best = Placement((), 1 << 62, "")
    for number, (name, tightest, order) in enumerate(_attempts(problem)):
        if number >= max(passes, 1) or best.height <= problem.lower_bound:
            break
        offsets = (
            temporal(problem, tightest) if order is None else fit(problem, order, tightest, best.height - 1)
        )
        if offsets is not None and (height := problem.height(offsets)) < best.height:
            best = Placement(tuple(offsets), height, f"{name}, {'tightest' if tightest else 'lowest'} gap")
    return best


def _attempts(problem: Problem) -> Iterator[tuple[str, bool, NDArray[np.intp] | None]]:
    ordered = list(orders(problem))
    if len(problem.buffers) > 4000:
        ordered[1:1] = [each for each in ordered if each[0] in ("size x life^0.3", "size x life^0.1")]
    for name, order in ordered[:7]:
        yield name, False, order
    yield "temporal", False, None
    yield "temporal", True, None
    for name, order in ordered[7:]:
        yield name, False, order
    for name, order in ordered:
        yield name, True, order

"""First fit for tens of thousands of buffers: look only at those placed nearby in time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

_PER_BUCKET = 48
_SHORT = 8
"""A buffer that spans more buckets than this is kept aside and looked at always."""


class Timetable:
    """Placed buffers, found again by when they live.

    Time is cut into buckets of about equally many births; a short-lived buffer is noted in every bucket it
    meets. Looking up a span gives every placed buffer that lives in it, some more than once.
    """

    def __init__(self, problem: Problem) -> None:
        self.lower = np.array([b.lower for b in problem.buffers], dtype=np.int64)
        self.upper = np.array([b.upper for b in problem.buffers], dtype=np.int64)
        edges = np.sort(self.lower)[_PER_BUCKET::_PER_BUCKET]
        self.first: list[int] = np.searchsorted(edges, self.lower, side="right").tolist()
        self.last: list[int] = np.searchsorted(edges, self.upper, side="left").tolist()
        self.buckets = [_Growing() for _ in range(len(edges) + 1)]
        self.long = _Growing()
        self.all = _Growing()

    def add(self, index: int) -> None:
        """Note that this buffer is placed."""
        self.all.append(index)
        first, last = self.first[index], self.last[index]
        if last - first > _SHORT:
            self.long.append(index)
            return
        for bucket in range(first, last + 1):
            self.buckets[bucket].append(index)

    def near(self, index: int) -> NDArray[np.intp]:
        """The placed buffers that live at some time together with this one."""
        first, last = self.first[index], self.last[index]
        if last - first > _SHORT * 4:
            found = self.all.items()
        else:
            parts = [bucket.items() for bucket in self.buckets[first : last + 1]]
            found = np.concatenate([self.long.items(), *parts])
        meets = (self.lower[found] < self.upper[index]) & (self.upper[found] > self.lower[index])
        inside: NDArray[np.intp] = found[meets]
        return inside


class _Growing:
    """A list of indices that NumPy can read."""

    def __init__(self) -> None:
        self.count = 0
        self.room: NDArray[np.intp] = np.empty(16, dtype=np.intp)

    def append(self, index: int) -> None:
        if self.count == len(self.room):
            self.room = np.concatenate([self.room, np.empty(self.count, dtype=np.intp)])
        self.room[self.count] = index
        self.count += 1

    def items(self) -> NDArray[np.intp]:
        return self.room[: self.count]

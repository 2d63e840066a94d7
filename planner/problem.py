"""The packing problem: rectangles of fixed life and size that may only slide along the address axis.

Offline dynamic storage allocation. The *lower bound* is the largest sum of sizes alive at once. Time is cut
into *sections*: of all the moments, only those whose set of live buffers lies in no other's set matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are needed over [lower, upper). ``size`` is a multiple of ``alignment``."""

    lower: int
    upper: int
    size: int
    alignment: int = 1


@dataclass(frozen=True)
class Problem:
    """Buffers to place from address 0 up; their order carries no meaning but breaks ties."""

    buffers: tuple[Buffer, ...]

    @cached_property
    def lower_bound(self) -> int:
        """The largest sum of sizes alive at once: no placement can be lower."""
        return lower_bound((b.lower, b.upper, b.size) for b in self.buffers)

    def height(self, offsets: Iterable[int]) -> int:
        """The highest address that a placement reaches."""
        pairs = zip(offsets, self.buffers, strict=True)
        return max((offset + buffer.size for offset, buffer in pairs), default=0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets by buffer, the height they reach, and what found them."""

    offsets: tuple[int, ...]
    height: int
    algorithm: str


def lower_bound(spans: Iterable[tuple[int, int, int]]) -> int:
    """The largest sum of sizes alive at once, for (lower, upper, size) triples."""
    events: dict[int, int] = {}
    for lower, upper, size in spans:
        if lower < upper:
            events[lower] = events.get(lower, 0) + size
            events[upper] = events.get(upper, 0) - size
    live = peak = 0
    for time in sorted(events):
        live += events[time]
        peak = max(peak, live)
    return peak


def sections(buffers: Iterable[Buffer]) -> tuple[int, list[tuple[int, int]]]:
    """How many maximal sections there are, and the half-open span of them that each buffer lives in.

    A section ends where a buffer dies after another was born: the set alive just before is maximal.
    """
    lives = [(buffer.lower, buffer.upper) for buffer in buffers]
    births, deaths = {lower for lower, _ in lives}, {upper for _, upper in lives}
    times = sorted(births | deaths)
    kept: list[int] = []
    born = False
    for now, after in pairwise(times):
        born = born or now in births
        if born and after in deaths:
            kept.append(now)
            born = False
    return len(kept), [(bisect_left(kept, lower), bisect_left(kept, upper)) for lower, upper in lives]


def align(address: int, alignment: int) -> int:
    """The lowest multiple of ``alignment`` that is not below the address."""
    return -(-address // alignment) * alignment

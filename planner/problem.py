"""The packing problem: rectangles of fixed life and size that may only slide along the address axis.

Offline dynamic storage allocation. Time is cut into *sections*, maximal stretches in which no buffer is born
or dies without another bound being reached first; only sections whose live set is not within another's
matter. The *lower bound* is the largest sum of sizes alive at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are needed over [lower, upper). ``size`` is a multiple of ``alignment``."""

    lower: int
    upper: int
    size: int
    alignment: int = 1


@dataclass(frozen=True)
class Problem:
    """Buffers to place from address 0 up; order carries no meaning but breaks ties."""

    buffers: tuple[Buffer, ...]

    @cached_property
    def lower_bound(self) -> int:
        """The largest sum of sizes alive at once: no placement can be lower."""
        return lower_bound((b.lower, b.upper, b.size) for b in self.buffers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets by buffer, the height they reach, and what found them."""

    offsets: tuple[int, ...]
    height: int
    algorithm: str
    steps: int = 0
    """How much search it took: placements tried."""


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


def align(address: int, alignment: int) -> int:
    """The lowest multiple of ``alignment`` that is not below the address."""
    return -(-address // alignment) * alignment

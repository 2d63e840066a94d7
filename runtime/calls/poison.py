"""Overwrites each storage when its live range ends, so that a plan that reads it later shows."""

from __future__ import annotations

from collections.abc import Mapping

from ..backend import Backend, Step
from ..memory.allocator import ArenaBlock
from ..program import Device, MethodPlan
from .binding import Decorate

Span = tuple[int, int]
"""First byte and one past the last, within an arena."""


def dying_spans(plan: MethodPlan) -> dict[int, list[tuple[int, Span]]]:
    """By instruction index: (memory id, bytes) whose contents nobody needs after that instruction."""
    ranges = {live.storage: live for live in plan.live_ranges}
    dying: dict[int, list[tuple[int, Span]]] = {}
    for allocation in plan.allocations:
        live = ranges.get(allocation.storage)
        if live is None or live.end <= live.begin or not allocation.nbytes:
            continue
        spans: list[Span] = [(allocation.offset, allocation.offset + allocation.nbytes)]
        for other in plan.allocations:
            held = ranges.get(other.storage)
            if (
                held is not None
                and other.memory_id == allocation.memory_id
                and held.begin <= live.end < held.end
            ):
                spans = [
                    part
                    for span in spans
                    for part in without(span, (other.offset, other.offset + other.nbytes))
                ]
        dying.setdefault(live.end - 1, []).extend((allocation.memory_id, span) for span in spans)
    return dying


def without(span: Span, hole: Span) -> list[Span]:
    """What is left of a span outside a hole."""
    parts = [(span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1])]
    return [(begin, end) for begin, end in parts if begin < end]


def poisoner(
    plan: MethodPlan, arenas: Mapping[int, ArenaBlock], backends: Mapping[Device, Backend]
) -> Decorate:
    """Wraps steps so that storages that die with an instruction are filled with 0xFF after it.

    The last instruction's are left alone: results are fetched after it.
    """
    dying = dying_spans(plan)
    last = max((live.end for live in plan.live_ranges), default=0) - 1

    def decorate(index: int, step: Step) -> Step:
        spans = dying.get(index, []) if index != last else []
        if not spans:
            return step
        fills = [
            (backends[arenas[memory_id].device], arenas[memory_id].address + begin, end - begin)
            for memory_id, (begin, end) in spans
        ]

        def run() -> None:
            step()
            for backend, address, nbytes in fills:
                backend.fill(address, nbytes, 0xFF)

        return run

    return decorate

"""What is alive at a peak, for readers, and the budget that a plan must keep."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.errors import BudgetError
from ..runtime.program import Device, LiveRange, Method, MethodPlan, PlannedProgram, Role, SourceLocation

_LISTED = 8


@dataclass(frozen=True, slots=True)
class PeakEntry:
    """A storage that is alive at a peak: its bytes as reserved, when it lives, and where it comes from."""

    storage: str
    nbytes: int
    role: Role
    live: LiveRange
    origin: SourceLocation

    def __str__(self) -> str:
        return " ".join(f"`{self.storage}` {self.nbytes} B {self.origin}".split())


def peak_report(planned: PlannedProgram, method: str, memory_id: int) -> list[PeakEntry]:
    """The storages alive at the peak of a method's arena, the largest first; the first peak if several.

    A storage without an origin of its own takes that of the first instruction that touches it.
    """
    return _entries(planned.program.method(method), planned.plan.method(method), memory_id)


def _entries(method: Method, plan: MethodPlan, memory_id: int) -> list[PeakEntry]:
    lives = {live.storage: live for live in plan.live_ranges}
    mine = [(place, lives[place.storage]) for place in plan.allocations if place.memory_id == memory_id]
    events: dict[int, int] = {}
    for place, live in mine:
        if live.begin < live.end:
            events[live.begin] = events.get(live.begin, 0) + place.nbytes
            events[live.end] = events.get(live.end, 0) - place.nbytes
    total = most = when = 0
    for time in sorted(events):
        total += events[time]
        if total > most:
            most, when = total, time
    storages = {storage.name: storage for storage in method.storages}
    origins = _origins(method)
    entries = [
        PeakEntry(place.storage, place.nbytes, storages[place.storage].role, live, origins[place.storage])
        for place, live in mine
        if live.begin <= when < live.end and place.nbytes
    ]
    return sorted(entries, key=lambda entry: (-entry.nbytes, entry.storage))


def _origins(method: Method) -> dict[str, SourceLocation]:
    """Where each storage comes from: its own word, else its first writer's, else its first reader's."""
    storage_of = {value.name: value.storage for value in method.values}
    found = {storage.name: storage.origin for storage in method.storages}
    for touched in ("writes", "reads"):
        for instruction in method.instructions:
            names: tuple[str, ...] = getattr(instruction, touched)
            for name in names:
                if not str(found[storage_of[name]]):
                    found[storage_of[name]] = instruction.origin
    return found


def enforce_budget(planned: PlannedProgram, budget: int) -> None:
    """Raise BudgetError when a device needs more than ``budget`` bytes for arena and state together.

    Constants do not count: they are as large as they are. The largest method decides, since methods share.
    """
    needs: dict[Device, dict[int, tuple[int, str]]] = {}
    for plan in planned.plan.methods:
        for arena in plan.arenas:
            blocks = needs.setdefault(arena.device, {})
            blocks[arena.memory_id] = max(blocks.get(arena.memory_id, (-1, "")), (arena.nbytes, plan.method))
    for device, blocks in needs.items():
        total = sum(nbytes for nbytes, _ in blocks.values())
        if total > budget:
            memory_id = max(blocks, key=lambda block: blocks[block])
            at_peak = _peak(planned, blocks[memory_id][1], memory_id)
            raise BudgetError(
                f"the memory budget of {budget} bytes does not suffice on `{device}`",
                why=f"arena and state take {total} bytes (constants not counted); {at_peak}",
                hint="raise `--memory-budget`, lower dynamic dimensions' bounds, or use a smaller batch",
            )


def _peak(planned: PlannedProgram, method: str, memory_id: int) -> str:
    entries = peak_report(planned, method, memory_id)
    listed = ", ".join(map(str, entries[:_LISTED]))
    rest = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"at the peak of `{method}` are live {listed}{rest}"

"""Why the memory is what it is: what is alive at each peak, what was not done and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.program import PlannedProgram
from .words import origin, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_LISTED = 16


def explanation(planned: PlannedProgram, methods: list[str]) -> list[RenderableType]:
    """For each arena of the named methods the storages alive at its peak, then the methods' notes."""
    from ..planner import peak_report

    items: list[RenderableType] = []
    for plan in (plan for plan in planned.plan.methods if plan.method in methods):
        for arena in plan.arenas:
            entries = peak_report(planned, plan.method, arena.memory_id)
            above = (
                f", {size(arena.nbytes - arena.lower_bound)} above the bound"
                if arena.nbytes > arena.lower_bound
                else ""
            )
            made = table(
                f"Alive at the peak of {plan.method} on {arena.device}: {size(arena.nbytes)}{above}",
                "storage", "role", "bytes>", "live>", "from+",
            )  # fmt: skip
            for entry in entries[:_LISTED]:
                live = f"{entry.live.begin}-{entry.live.end - 1}"
                made.add_row(entry.storage, entry.role.value, size(entry.nbytes), live, origin(entry.origin))
            if len(entries) > _LISTED:
                rest = sum(entry.nbytes for entry in entries[_LISTED:])
                made.add_row(f"and {len(entries) - _LISTED} more", "", size(rest), "", "")
            items += [made, ""]
    notes = [f"{m.name}: {note}" for m in planned.program.methods if m.name in methods for note in m.notes]
    return [*items, *notes]

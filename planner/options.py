"""What the planner can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Effort = Literal["fast", "default", "max"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The settings of one planning run; the same settings and program always give the same plan."""

    effort: Effort = "default"
    """How hard offsets and orders are searched for. Work is counted in steps, not in seconds."""
    reorder: bool = True
    """Whether instructions may change places where that lowers the peak."""
    static: bool = True
    """False for ``--no-device-planning``: live ranges only, addresses are found at run time."""
    memory_budget: int | None = None
    """Bytes that arena and state may take together on any one device. Constants do not count."""
    eliminate_copies: bool = True
    """Whether local copies may become windows of their destination."""
    solver: bool = False
    """Whether OR-Tools' CP-SAT may be asked if the lower bound is reachable (extra ``solver``)."""
    time_limit: float | None = None
    """Seconds of search per arena; None takes the effort's guard. One that strikes costs determinism."""
    buckets: Mapping[str, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], ...]]
    )
    """By method: sizes of its symbols, in their order, that get a plan of their own beside the bound's."""

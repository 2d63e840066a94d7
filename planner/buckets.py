"""Plans for declared sizes of dynamic dimensions, inside the arena that is planned for the bound.

A bucket shares the method's instruction list and live ranges; only sizes and offsets are its own. The places
at the bound serve every smaller size too, so where the search happens to find nothing lower they are taken:
no bucket ever needs a larger arena than the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..runtime.calls.buckets import bucket_title, method_at
from ..runtime.errors import PlanError
from ..runtime.program import Allocation, Arena, BucketPlan, Device, Method, MethodPlan

PlanArena = Callable[[Method, Device, int], tuple[Arena, list[Allocation]]]
"""Places the storages of a method on one device: (method, device, memory id)."""


def plan_bucket(method: Method, sizes: Sequence[int], at_bound: MethodPlan, place: PlanArena) -> BucketPlan:
    """The plan for these sizes of the method's symbols.

    Raises:
        PlanError: a storage is larger at these sizes than at the bound, for which memory is reserved.
    """
    fixed = method_at(method, sizes)
    _refuse_larger(method, fixed, sizes)
    arenas: list[Arena] = []
    places: dict[str, Allocation] = {}
    for bound in at_bound.arenas:
        if bound.kind == "state":
            continue
        arena, placed = place(fixed, bound.device, bound.memory_id)
        if arena.nbytes > bound.nbytes:
            arena, placed = _as_at_bound(arena, placed, at_bound)
        arenas.append(arena)
        places |= {each.storage: each for each in placed}
    ordered = tuple(places[storage.name] for storage in method.storages if storage.name in places)
    return BucketPlan(tuple(sizes), tuple(arenas), ordered)


def _refuse_larger(method: Method, fixed: Method, sizes: Sequence[int]) -> None:
    for storage, exact in zip(method.storages, fixed.storages, strict=True):
        if storage.is_planned and exact.reserved_nbytes > storage.reserved_nbytes:
            at = bucket_title(method, sizes)
            raise PlanError(
                f"storage `{storage.name}` of method `{method.name}` is larger at {at}",
                why=f"{exact.reserved_nbytes} bytes, and {storage.reserved_nbytes} at the declared bound",
            )


def _as_at_bound(
    arena: Arena, placed: Sequence[Allocation], at_bound: MethodPlan
) -> tuple[Arena, list[Allocation]]:
    """The bound's offsets with the bucket's sizes: lives are the same and nothing is larger."""
    offsets = {place.storage: place.offset for place in at_bound.allocations}
    ranges = {live.storage: live for live in at_bound.live_ranges}
    moved = [replace(place, offset=offsets[place.storage]) for place in placed]
    used = [
        p.offset + p.nbytes for p in moved if ranges[p.storage].begin < ranges[p.storage].end and p.nbytes
    ]
    return replace(arena, nbytes=max(used, default=0), algorithm="as at the bound"), moved

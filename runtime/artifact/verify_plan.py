"""What must hold of a plan in a file: every storage has its place, and no two live ones share a byte."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from ..calls.buckets import method_at, plan_at
from ..errors import ArtifactError
from ..program import Allocation, BucketPlan, Device, Method, MethodPlan, PlannedProgram, Role
from .operands import operands


def verify_plan(planned: PlannedProgram) -> None:
    """Check the plan of every method; ArtifactError names the first broken invariant."""
    program, plan = planned.program, planned.plan
    names = [method.name for method in program.methods]
    planned_names = [item.method for item in plan.methods]
    if sorted(set(planned_names)) != sorted(planned_names) or not set(planned_names) <= set(names):
        raise ArtifactError("the plan is not of this program", why=f"it plans {planned_names} of {names}")
    if plan.is_static and len(planned_names) != len(names):
        raise ArtifactError("a method has no plan", why=f"planned are {planned_names} of {names}")
    devices: dict[int, Device] = {}
    homes: dict[str, tuple[int, int]] = {}
    for item in plan.methods:
        _verify_arenas(item, devices)
        _Checker(program.method(item.method), item).run(plan.is_static)
        for bucket in item.buckets:
            _verify_bucket(program.method(item.method), item, bucket, plan.is_static)
        _verify_state(program.method(item.method), item, homes)


def _verify_arenas(plan: MethodPlan, devices: dict[int, Device]) -> None:
    """A memory id means one block on one device, in every method."""
    seen: set[int] = set()
    for arena in plan.arenas:
        if not 1 <= arena.memory_id < 2**16 or arena.memory_id in seen:
            raise ArtifactError(
                f"method `{plan.method}` has an impossible memory id {arena.memory_id}",
                why="ids begin at 1 and differ",
            )
        seen.add(arena.memory_id)
        if devices.setdefault(arena.memory_id, arena.device) != arena.device:
            raise ArtifactError(
                f"memory {arena.memory_id} is on {arena.device} in method `{plan.method}`",
                why=f"in another method it is on {devices[arena.memory_id]}",
            )
        if not 0 <= arena.nbytes < 2**62:
            raise ArtifactError(f"arena {arena.memory_id} of method `{plan.method}` has {arena.nbytes} bytes")


def _verify_bucket(method: Method, plan: MethodPlan, bucket: BucketPlan, is_static: bool) -> None:
    """A bucket is a plan for exact sizes within the arenas of its method."""
    where = f"bucket {list(bucket.sizes)} of method `{method.name}`"
    bounds = [(symbol.lower, symbol.upper) for symbol in method.symbols]
    inside = len(bounds) == len(bucket.sizes) and all(
        lower <= size <= upper for size, (lower, upper) in zip(bucket.sizes, bounds, strict=True)
    )
    if not inside or not is_static or [each.sizes for each in plan.buckets].count(bucket.sizes) != 1:
        raise ArtifactError(f"{where} is impossible", why=f"the method's sizes are within {bounds}")
    blocks = {arena.memory_id: arena for arena in plan.arenas if arena.kind != "state"}
    for arena in bucket.arenas:
        block = blocks.get(arena.memory_id)
        if block is None or block.device != arena.device or not 0 <= arena.nbytes <= block.nbytes:
            raise ArtifactError(f"{where} does not fit into arena {arena.memory_id}", why="of its method")
    try:
        fixed = method_at(method, bucket.sizes)
    except (ArithmeticError, ValueError, TypeError, MemoryError) as error:
        raise ArtifactError(f"{where} has no sizes", why=str(error)) from None
    if negative := [storage.name for storage in fixed.storages if storage.reserved_nbytes < 0]:
        raise ArtifactError(f"{where} has a storage `{negative[0]}` of less than no bytes")
    _verify_arenas(plan_at(plan, bucket), {arena.memory_id: arena.device for arena in plan.arenas})
    try:
        _Checker(fixed, plan_at(plan, bucket)).run(is_static)
    except ArtifactError as error:
        what = error.what.removeprefix(f"method `{method.name}`: ")
        raise ArtifactError(f"{where}: {what}", why=error.why) from None


def _verify_state(method: Method, plan: MethodPlan, homes: dict[str, tuple[int, int]]) -> None:
    """State is at one address in all methods."""
    places = {item.storage: (item.memory_id, item.offset) for item in plan.allocations}
    for storage in method.storages:
        place = places.get(storage.name)
        if storage.role is Role.STATE and place and homes.setdefault(storage.content, place) != place:
            raise ArtifactError(
                f"state `{storage.content}` is at {place} in method `{method.name}`",
                why=f"in another method it is at {homes[storage.content]}",
            )


class _Checker:
    def __init__(self, method: Method, plan: MethodPlan) -> None:
        self.method, self.plan = method, plan
        self.arenas = {arena.memory_id: arena for arena in plan.arenas}
        self.storages = {storage.name: storage for storage in method.storages}

    def fail(self, what: str, why: str = "") -> ArtifactError:
        return ArtifactError(f"method `{self.method.name}`: {what}", why=why)

    def run(self, is_static: bool) -> None:
        live = self._live_ranges()
        seen: set[str] = set()
        for item in self.plan.allocations:
            if item.storage in seen:
                raise self.fail(f"storage `{item.storage}` has two places")
            seen.add(item.storage)
            self._allocation(item, live.get(item.storage))
        missing = [item.name for item in self.method.storages if item.is_planned and item.name not in seen]
        if is_static and missing:
            raise self.fail(f"storage `{missing[0]}` has no place")
        self._coverage(live)
        for memory_id in self.arenas:
            self._overlaps(self._in_memory(memory_id), live)

    def _allocation(self, item: Allocation, live: tuple[int, int] | None) -> None:
        storage, arena = self.storages.get(item.storage), self.arenas.get(item.memory_id)
        if storage is None:
            raise self.fail(f"`{item.storage}` has a place", "there is no such storage")
        if arena is None:
            raise self.fail(
                f"storage `{item.storage}` is in memory {item.memory_id}", "there is no such arena"
            )
        if storage.external or storage.role is Role.CONSTANT:
            raise self.fail(
                f"storage `{item.storage}` has a place in an arena", "its memory is given elsewhere"
            )
        if arena.device != storage.device:
            raise self.fail(
                f"storage `{item.storage}` is on {storage.device}", f"its arena is on {arena.device}"
            )
        if item.nbytes < storage.reserved_nbytes:
            raise self.fail(
                f"storage `{item.storage}` has {item.nbytes} bytes", f"it needs {storage.reserved_nbytes}"
            )
        is_used = live is None or live[0] < live[1]
        if item.offset < 0 or (is_used and item.offset + item.nbytes > arena.nbytes):
            raise self.fail(
                f"storage `{item.storage}` ends at byte {item.offset + item.nbytes}",
                f"its arena has {arena.nbytes}",
            )
        if item.offset % storage.alignment:
            raise self.fail(
                f"storage `{item.storage}` is at {item.offset}", f"not aligned to {storage.alignment}"
            )

    def _live_ranges(self) -> dict[str, tuple[int, int]]:
        count = len(self.method.instructions)
        live: dict[str, tuple[int, int]] = {}
        for item in self.plan.live_ranges:
            if item.storage not in self.storages or item.storage in live:
                raise self.fail(f"`{item.storage}` has a live range", "it is no storage, or has two")
            if not 0 <= item.begin <= item.end <= count + 1:
                raise self.fail(
                    f"`{item.storage}` is live in [{item.begin}, {item.end})", f"of {count} instructions"
                )
            live[item.storage] = (item.begin, item.end)
        return live

    def _coverage(self, live: Mapping[str, tuple[int, int]]) -> None:
        """What an instruction touches must be live then, or the overlaps would be checked in vain."""
        storages = {value.name: value.storage for value in self.method.values}
        for index, item in enumerate(self.method.instructions):
            for name in operands(item):
                begin, end = live.get(storages[name], (index, index + 1))
                if not begin <= index < end:
                    raise self.fail(
                        f"instruction {index} uses `{name}`", f"its storage is live in [{begin}, {end})"
                    )

    def _in_memory(self, memory_id: int) -> list[Allocation]:
        """What is in one arena; storages of one state variable are one thing."""
        found: dict[tuple[str, str], Allocation] = {}
        for item in self.plan.allocations:
            if item.memory_id == memory_id:
                storage = self.storages[item.storage]
                name = storage.content if storage.role is Role.STATE else storage.name
                found.setdefault((storage.role.value, name), item)
        return list(found.values())

    def _overlaps(self, allocations: Sequence[Allocation], live: Mapping[str, tuple[int, int]]) -> None:
        """Sweep over time, the places in use kept sorted by offset: a newcomer may not meet its neighbours.

        A storage without a live range counts as live all the time.
        """
        events: list[tuple[int, int, Allocation]] = []
        for item in allocations:
            begin, end = live.get(item.storage, (0, len(self.method.instructions) + 1))
            if begin < end and item.nbytes:
                events += [(begin, 1, item), (end, 0, item)]  # at one instant, ends before beginnings
        used: list[tuple[int, int, str]] = []
        for _, is_begin, item in sorted(events, key=lambda event: event[:2]):
            place = (item.offset, item.offset + item.nbytes, item.storage)
            at = bisect.bisect_left(used, place)
            if not is_begin:
                used.pop(at)
                continue
            for other in used[max(at - 1, 0) : at + 1]:
                if other[0] < place[1] and place[0] < other[1]:
                    raise self.fail(f"storages `{other[2]}` and `{item.storage}` overlap while both are live")
            used.insert(at, place)

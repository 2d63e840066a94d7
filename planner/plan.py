"""Give every storage of a program its place: one arena per device, shared by all methods, and state."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from ..runtime.program import (
    Allocation,
    Arena,
    Device,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Program,
    Role,
    Storage,
)
from .buckets import plan_bucket
from .inplace import drop_untouched, eliminate_copies
from .liveness import live_ranges
from .offsets import place
from .options import PlanOptions
from .order import peaks, reorder
from .problem import Buffer, Placement, Problem, align
from .report import enforce_budget


def plan(program: Program, options: PlanOptions | None = None) -> PlannedProgram:
    """The program with a place for every storage, its instructions perhaps in a better order.

    Every device gets one arena, whose memory id is the same in all methods, and one more for the program's
    state on it, laid out alike in every method. Raises BudgetError when ``memory_budget`` does not suffice.
    """
    options = options or PlanOptions()
    given = program
    if options.static:
        given = replace(program, methods=tuple(_prepared(method, options) for method in program.methods))
    layout = _Layout(given)
    planned = [_with_buckets(*_plan_best(method, layout, options), options) for method in given.methods]
    program = replace(program, methods=tuple(method for method, _ in planned))
    result = PlannedProgram(program, Plan(tuple(plan for _, plan in planned), options.static))
    if options.memory_budget is not None:
        enforce_budget(result, options.memory_budget)
    return result


def _prepared(method: Method, options: PlanOptions) -> Method:
    """The method without what nothing touches, and without needless copies."""
    return drop_untouched(eliminate_copies(method) if options.eliminate_copies else method)


def _plan_best(method: Method, layout: _Layout, options: PlanOptions) -> tuple[Method, MethodPlan]:
    """The method in the better of two orders, the given and the reordered, with its plan."""
    if not (options.reorder and options.static):
        return method, _plan_method(method, layout, options)
    reordered = reorder(method, options.effort)
    plan_ = _plan_method(reordered, layout, options)
    bounds = peaks(method)
    if reordered is method or all(
        a.nbytes <= bounds.get(a.device, 0) for a in plan_.arenas if a.kind == "arena"
    ):
        return reordered, plan_
    other = _plan_method(method, layout, options)
    pairs = [(a.nbytes, b.nbytes) for a, b in zip(plan_.arenas, other.arenas, strict=True)]
    return (reordered, plan_) if all(a <= b for a, b in pairs) else (method, other)


def _with_buckets(method: Method, plan_: MethodPlan, options: PlanOptions) -> tuple[Method, MethodPlan]:
    """The plan with one for each of the method's declared buckets; none where addresses come at run time."""
    sizes = options.buckets.get(method.name, ()) if options.static else ()

    def place_arena(fixed: Method, device: Device, memory_id: int) -> tuple[Arena, list[Allocation]]:
        return _plan_arena(fixed, device, memory_id, plan_.live_ranges, options)

    made = tuple(plan_bucket(method, each, plan_, place_arena) for each in sizes)
    return method, replace(plan_, buckets=made)


class _Layout:
    """What the methods have in common: the memory ids, and where state lies."""

    def __init__(self, program: Program) -> None:
        storages = [storage for method in program.methods for storage in method.storages]
        devices = sorted({storage.device for storage in storages if storage.is_planned})
        self.arenas = {device: memory_id for memory_id, device in enumerate(devices, 1)}
        homes = sorted({state.device for state in program.state})
        self.states = {device: memory_id for memory_id, device in enumerate(homes, len(devices) + 1)}
        self.state_arenas: list[Arena] = []
        self.state_offsets: dict[str, tuple[int, int]] = {}
        alignments: dict[str, int] = {}
        for storage in storages:
            if storage.role is Role.STATE:
                alignments[storage.content] = max(alignments.get(storage.content, 256), storage.alignment)
        for device, memory_id in self.states.items():
            top = 0
            for state in program.state:
                if state.device == device:
                    step = alignments.get(state.name, 256)
                    at, nbytes = align(top, step), align(state.nbytes, step)
                    self.state_offsets[state.name] = (at, nbytes)
                    top = at + nbytes
            total = sum(self.state_offsets[s.name][1] for s in program.state if s.device == device)
            self.state_arenas.append(Arena(memory_id, device, top, total, total, "stacked", kind="state"))


def _plan_method(method: Method, layout: _Layout, options: PlanOptions) -> MethodPlan:
    ranges = live_ranges(method)
    arenas: list[Arena] = []
    places: dict[str, Allocation] = {}
    for storage in method.storages:
        if storage.role is Role.STATE:
            at, nbytes = layout.state_offsets[storage.content]
            places[storage.name] = Allocation(storage.name, layout.states[storage.device], at, nbytes)
    if options.static:
        for device, memory_id in layout.arenas.items():
            arena, placed = _plan_arena(method, device, memory_id, ranges, options)
            arenas.append(arena)
            places |= {each.storage: each for each in placed}
    ordered = tuple(places[storage.name] for storage in method.storages if storage.name in places)
    return MethodPlan(method.name, (*arenas, *layout.state_arenas), ordered, ranges)


def _plan_arena(
    method: Method, device: Device, memory_id: int, ranges: Iterable[LiveRange], options: PlanOptions
) -> tuple[Arena, list[Allocation]]:
    started = time.perf_counter()
    by_name = {each.storage: each for each in ranges}
    mine = [storage for storage in method.storages if storage.is_planned and storage.device == device]
    problem = Problem(tuple(_buffer(storage, by_name[storage.name]) for storage in mine))
    found: Placement = place(problem, options.effort, solver=options.solver, time_limit=options.time_limit)
    allocations = [
        Allocation(storage.name, memory_id, offset, buffer.size)
        for storage, buffer, offset in zip(mine, problem.buffers, found.offsets, strict=True)
    ]
    total = sum(buffer.size for buffer in problem.buffers)
    seconds = time.perf_counter() - started
    arena = Arena(memory_id, device, found.height, problem.lower_bound, total, found.algorithm, seconds)
    return arena, allocations


def _buffer(storage: Storage, live: LiveRange) -> Buffer:
    """What a storage takes: its bytes at the bound, rounded up so that neighbours stay aligned."""
    return Buffer(live.begin, live.end, align(storage.reserved_nbytes, storage.alignment), storage.alignment)

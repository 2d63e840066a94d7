"""Prove a plan: an independent checker that shares no code with the planner.

It does not trust the plan's live ranges. It executes the method on an abstract memory in which every byte
knows which storage wrote it last, along every path through the jumps, and forgets a storage's bytes when
its live range ends. Whatever is read must then still be what its storage wrote.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from ..runtime.dtypes import DType
from ..runtime.errors import PlanError
from ..runtime.expr import Expr, evaluate
from ..runtime.program import (
    Allocation,
    Argument,
    BucketPlan,
    Copy,
    CopyKind,
    HostCall,
    Instruction,
    Jump,
    Launch,
    LibraryCall,
    LiveRange,
    Method,
    MethodPlan,
    PlannedProgram,
    Program,
    Ref,
    Role,
    Storage,
    Value,
)

_T = TypeVar("_T", Storage, Value)


def check(planned: PlannedProgram) -> None:
    """Raise PlanError at the first invariant that the plan breaks.

    No two live storages overlap; everything is aligned, inside its arena and on its device; every read comes
    after a write, on every path; storages share bytes only where values share a storage; state and arenas
    mean the same in all methods; the reported lower bounds are right. All of that holds for every bucket at
    its own sizes, within the arenas of its method.
    """
    program, plans = planned.program, {plan.method: plan for plan in planned.plan.methods}
    for method in program.methods:
        if method.name not in plans:
            raise PlanError(f"method `{method.name}` has no plan")
        _MethodCheck(program, method, plans[method.name], planned.plan.is_static).run()
        _check_buckets(program, method, plans[method.name])
    _check_shared(program, planned.plan.methods)


def _check_buckets(program: Program, method: Method, plan: MethodPlan) -> None:
    """Each bucket is a proof of its own: the method with fixed sizes, the bucket's places, the same lives."""
    seen: set[tuple[int, ...]] = set()
    for bucket in plan.buckets:
        where = f"method `{method.name}`, bucket {list(bucket.sizes)}"
        if bucket.sizes in seen or len(bucket.sizes) != len(method.symbols):
            raise PlanError(f"{where}: its sizes are not one for each symbol, or come twice")
        seen.add(bucket.sizes)
        for symbol, size in zip(method.symbols, bucket.sizes, strict=True):
            if not symbol.lower <= size <= symbol.upper:
                raise PlanError(f"{where}: `{symbol.name}` is not from {symbol.lower} to {symbol.upper}")
        try:
            _MethodCheck(program, _fixed(method, bucket.sizes), _inside(plan, bucket, where), True).run()
        except PlanError as error:
            raise PlanError(f"bucket {list(bucket.sizes)} of {error.what}", why=error.why) from error


def _inside(plan: MethodPlan, bucket: BucketPlan, where: str) -> MethodPlan:
    """A bucket's places with the method's state and lives; its arenas must fit into the method's."""
    blocks = {arena.memory_id: arena for arena in plan.arenas}
    for arena in bucket.arenas:
        block = blocks.get(arena.memory_id)
        if block is None or (block.device, block.kind) != (arena.device, arena.kind) or block.kind == "state":
            raise PlanError(f"{where}: memory {arena.memory_id} is no arena of the method on its device")
        if arena.nbytes > block.nbytes:
            raise PlanError(f"{where}: it takes {arena.nbytes} bytes of an arena of {block.nbytes}")
    state = tuple(arena for arena in plan.arenas if arena.kind == "state")
    held = tuple(p for p in plan.allocations if p.memory_id in {arena.memory_id for arena in state})
    return MethodPlan(plan.method, (*bucket.arenas, *state), (*bucket.allocations, *held), plan.live_ranges)


def _fixed(method: Method, sizes: tuple[int, ...]) -> Method:
    """The method with a number in place of every storage's size expression."""
    pairs = zip(method.symbols, sizes, strict=True)
    symbols = tuple(replace(symbol, lower=size, upper=size) for symbol, size in pairs)
    bindings = {symbol.name: symbol.upper for symbol in symbols}
    storages = tuple(
        replace(storage, nbytes=storage.nbytes.evaluate(bindings), max_nbytes=-1)
        if isinstance(storage.nbytes, Expr)
        else storage
        for storage in method.storages
    )
    return replace(method, symbols=symbols, storages=storages)


def _check_shared(program: Program, plans: Iterable[MethodPlan]) -> None:
    """Memory ids and state blocks must mean the same in every method."""
    blocks: dict[int, object] = {}
    homes: dict[str, tuple[int, int, int]] = {}
    for plan in plans:
        storages = {storage.name: storage for storage in program.method(plan.method).storages}
        for arena in plan.arenas:
            size = arena.nbytes if arena.kind == "state" else 0
            same = blocks.setdefault(arena.memory_id, (arena.device, arena.kind, size))
            if same != (arena.device, arena.kind, size):
                raise PlanError(f"memory id {arena.memory_id} means different blocks in different methods")
        for place in plan.allocations:
            storage = storages[place.storage]
            if storage.role is Role.STATE:
                here = (place.memory_id, place.offset, place.nbytes)
                if homes.setdefault(storage.content, here) != here:
                    raise PlanError(
                        f"state `{storage.content}` lies at different addresses in different methods"
                    )
    taken = sorted(
        (memory, offset, offset + nbytes, name) for name, (memory, offset, nbytes) in homes.items()
    )
    for (memory, _, end, one), (other_memory, begin, _, two) in pairwise(taken):
        if memory == other_memory and begin < end:
            raise PlanError(f"state `{one}` and `{two}` overlap")


@dataclass
class _Memory:
    """Which storages hold the bytes that they were given; in an arena, intact ones never overlap."""

    intact: set[str] = field(default_factory=set[str])
    spaces: dict[int, list[tuple[int, int, str]]] = field(
        default_factory=dict[int, list[tuple[int, int, str]]]
    )

    def copy(self) -> _Memory:
        return _Memory(set(self.intact), {key: list(space) for key, space in self.spaces.items()})

    def write(self, name: str, place: Allocation | None) -> None:
        """The storage's bytes are its own now; whoever overlaps it has lost theirs."""
        if name in self.intact:
            return
        self.intact.add(name)
        if place is None or place.nbytes == 0:
            return
        space = self.spaces.setdefault(place.memory_id, [])
        begin, end = place.offset, place.offset + place.nbytes
        at = bisect_left(space, (begin, begin, ""))
        if at and space[at - 1][1] > begin:
            at -= 1
        while at < len(space) and space[at][0] < end:
            self.intact.discard(space.pop(at)[2])
        insort(space, (begin, end, name))

    def drop(self, names: Iterable[str], places: dict[str, Allocation]) -> None:
        """These storages' lives have ended."""
        for name in names:
            if name in self.intact:
                self.intact.discard(name)
                place = places.get(name)
                if place and place.nbytes:
                    self.spaces[place.memory_id].remove((place.offset, place.offset + place.nbytes, name))


class _MethodCheck:
    """The proof of one method."""

    def __init__(self, program: Program, method: Method, plan: MethodPlan, is_static: bool) -> None:
        self.program, self.method, self.plan, self.is_static = program, method, plan, is_static
        self.storages = self._unique(method.storages)
        self.values = self._unique(method.values)
        self.places = {place.storage: place for place in plan.allocations}
        self.ranges = {live.storage: live for live in plan.live_ranges}
        self.upper = {symbol.name: symbol.upper for symbol in method.symbols}
        self.constants = {constant.name for constant in program.constants}
        self.states = {state.name: state for state in program.state}

    def run(self) -> None:
        for value in self.method.values:
            self._check_value(value)
        for storage in self.method.storages:
            self._check_storage(storage)
        for place in self.plan.allocations:
            if place.storage not in self.storages:
                raise self._error(f"an allocation is for `{place.storage}`, which is no storage")
        for index, instruction in enumerate(self.method.instructions):
            self._check_instruction(index, instruction)
        self._check_ports()
        self._check_undeclared()
        self._simulate()
        if self.is_static:
            self._check_arenas()

    def _error(self, what: str, why: str = "") -> PlanError:
        return PlanError(f"method `{self.method.name}`: {what}", why=why)

    def _unique(self, items: Iterable[_T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        for item in items:
            if item.name in found:
                raise self._error(f"two of its items are named `{item.name}`")
            found[item.name] = item
        return found

    def _check_value(self, value: Value) -> None:
        """A value's window, at the bound of every symbol, must lie within its storage."""
        storage = self.storages.get(value.storage)
        if storage is None:
            raise self._error(f"value `{value.name}` is a window onto `{value.storage}`, which is no storage")
        extents = [evaluate(extent, self.upper) for extent in value.shape]
        strides = [evaluate(stride, self.upper) for stride in value.strides]
        if len(extents) != len(strides) or min([*extents, *strides], default=0) < 0:
            raise self._error(f"value `{value.name}` has a shape and strides that do not fit together")
        if 0 in extents:
            return
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
        begin = evaluate(value.offset, self.upper)
        end = begin + span * value.dtype.itemsize
        if begin < 0 or end > storage.reserved_nbytes:
            why = f"it spans bytes {begin} to {end}, the storage has {storage.reserved_nbytes}"
            raise self._error(f"value `{value.name}` reaches beyond its storage `{storage.name}`", why)

    def _check_storage(self, storage: Storage) -> None:
        place = self.places.get(storage.name)
        if storage.role is Role.STATE:
            state = self.states.get(storage.content)
            if state is None or state.device != storage.device or state.nbytes > storage.reserved_nbytes:
                raise self._error(f"storage `{storage.name}` does not fit the state `{storage.content}`")
        elif storage.role is Role.CONSTANT and storage.content not in self.constants:
            raise self._error(f"storage `{storage.name}` holds `{storage.content}`, which is no constant")
        wants_place = storage.role is Role.STATE or (storage.is_planned and self.is_static)
        if wants_place != (place is not None):
            raise self._error(
                f"storage `{storage.name}` {'has no' if wants_place else 'must not have a'} place"
            )
        if place is not None:
            self._check_place(storage, place)

    def _check_place(self, storage: Storage, place: Allocation) -> None:
        arena = next((arena for arena in self.plan.arenas if arena.memory_id == place.memory_id), None)
        if arena is None:
            raise self._error(f"storage `{storage.name}` lies in memory {place.memory_id}, which is no arena")
        if arena.device != storage.device:
            raise self._error(
                f"storage `{storage.name}` of {storage.device} lies in an arena of {arena.device}"
            )
        if (arena.kind == "state") != (storage.role is Role.STATE):
            raise self._error(f"storage `{storage.name}` lies in the {arena.kind} block")
        if place.nbytes < storage.reserved_nbytes:
            why = f"it needs {storage.reserved_nbytes} bytes and has {place.nbytes}"
            raise self._error(f"storage `{storage.name}` has too little room", why)
        if place.offset % storage.alignment:
            why = f"offset {place.offset}, alignment {storage.alignment}"
            raise self._error(f"storage `{storage.name}` is not aligned", why)
        if place.offset < 0 or place.offset + place.nbytes > arena.nbytes:
            why = f"bytes {place.offset} to {place.offset + place.nbytes} of {arena.nbytes}"
            raise self._error(f"storage `{storage.name}` reaches beyond its arena", why)

    def _check_instruction(self, index: int, instruction: Instruction) -> None:
        for name in (*_touched(instruction)[0], *_touched(instruction)[1]):
            if name not in self.values:
                raise self._error(f"instruction {index} names `{name}`, which is no value")
        if isinstance(instruction, Jump) and not 0 <= instruction.target <= len(self.method.instructions):
            raise self._error(f"instruction {index} jumps to {instruction.target}, outside the method")
        for name in _touched(instruction)[1]:
            if self._home(name).role is Role.CONSTANT:
                raise self._error(f"instruction {index} writes the constant `{self._home(name).content}`")
        if isinstance(instruction, Copy):
            self._check_copy(index, instruction)
            return
        devices = {self._home(name).device for names in _touched(instruction) for name in names}
        if len(devices) > 1:
            raise self._error(
                f"instruction {index} touches {' and '.join(sorted(map(str, devices)))} at once"
            )
        if isinstance(instruction, (HostCall, Jump)) and any(device.kind != "cpu" for device in devices):
            raise self._error(f"instruction {index} runs on the host but touches device memory")

    def _check_copy(self, index: int, copy: Copy) -> None:
        source, destination = self._home(copy.source).device, self._home(copy.destination).device
        kinds = (source.kind == "cpu", destination.kind == "cpu")
        wanted = {(True, False): CopyKind.H2D, (False, True): CopyKind.D2H, (False, False): CopyKind.D2D}
        kind = CopyKind.LOCAL if source == destination else wanted[kinds]
        if copy.kind is not kind:
            why = f"`{copy.source}` is on {source}, `{copy.destination}` on {destination}"
            raise self._error(f"instruction {index} is no {copy.kind.value} copy", why)

    def _home(self, value: str) -> Storage:
        return self.storages[self.values[value].storage]

    def _check_ports(self) -> None:
        for port in (*self.method.inputs, *self.method.outputs):
            if port.value and port.value not in self.values:
                raise self._error(f"port `{port.name}` names `{port.value}`, which is no value")
        self._check_counts()
        inputs = {port.name: port for port in self.method.inputs}
        outputs = {port.name: port for port in self.method.outputs}
        for port in self.method.outputs:
            if port.aliases and port.value:
                kind, name = port.aliases
                home = self._home(port.value)
                other = (inputs if kind == "input" else outputs).get(name)
                shared = home.content == name if kind == "state" else bool(other and other.value)
                if shared and other and kind != "state":
                    shared = self._home(other.value) is home
                if not shared:
                    raise self._error(
                        f"output `{port.name}` is no alias of {kind} `{name}`: they share no storage"
                    )

    def _check_counts(self) -> None:
        """A count is one int64 on the host; an output has a dimension that it may count."""
        for count in self.method.counts:
            value = self.values.get(count.value)
            if value is None or value.dtype is not DType.INT64 or any(extent != 1 for extent in value.shape):
                raise self._error(f"count `{count.name}` is no integer")
            if self._home(count.value).device.kind != "cpu":
                raise self._error(f"count `{count.name}` is not on the host")
            if not 0 <= count.lower <= count.upper:
                raise self._error(f"count `{count.name}` runs from {count.lower} to {count.upper}")
        known = {count.name for count in self.method.counts}
        for port in self.method.outputs:
            if port.count and (
                port.count not in known or not 0 <= port.axis < len(self.values[port.value].shape)
            ):
                raise self._error(f"output `{port.name}` counts `{port.count}` along dimension {port.axis}")

    def _check_undeclared(self) -> None:
        """An output may share bytes with an input, state or another output only where it says so."""
        owners = {self._home(port.value).name: port.name for port in self.method.inputs if port.value}
        for port in self.method.outputs:
            if port.value and not port.aliases:
                home = self._home(port.value)
                owner = home.content if home.role is Role.STATE else owners.get(home.name)
                if owner:
                    raise self._error(f"output `{port.name}` shares bytes with `{owner}` and does not say so")
                owners[home.name] = port.name

    def _simulate(self) -> None:
        """Run every path over the abstract memory; at a join only what is intact on all paths remains."""
        code = self.method.instructions
        start = _Memory()
        for storage in self.method.storages:
            if storage.external or storage.role in (Role.CONSTANT, Role.STATE):
                start.write(storage.name, self.places.get(storage.name))
        for name in self._given():
            start.write(name, self.places.get(name))
        self._require(start, self._given(), "at the start", "the input")
        entry: dict[int, _Memory] = {0: start}
        pending = [0]
        ends = self._ends()
        targets = {each.target for each in code if isinstance(each, Jump)}
        while pending:
            index, memory = pending[-1], entry[pending.pop()].copy()
            while index < len(code):
                self._step(index, memory)
                last, index = index, index + 1
                jump = code[last]
                if isinstance(jump, Jump):
                    self._arrive(jump.target, memory, entry, pending)
                    if not jump.condition:
                        break
                memory.drop(ends.get(index, ()), self.places)
                if index in targets:
                    self._arrive(index, memory, entry, pending)
                    break
            else:
                self._arrive(len(code), memory, entry, [])
        if len(code) in entry:
            outputs = [self.values[port.value].storage for port in self.method.outputs if port.value]
            self._require(entry[len(code)], outputs, "at the end", "the output")
            counts = [self.values[count.value].storage for count in self.method.counts]
            self._require(entry[len(code)], counts, "at the end", "the count")

    def _given(self) -> list[str]:
        return [self.values[port.value].storage for port in self.method.inputs if port.value]

    def _ends(self) -> dict[int, list[str]]:
        ends: dict[int, list[str]] = {}
        for live in self.plan.live_ranges:
            if live.end < len(self.method.instructions):
                ends.setdefault(live.end, []).append(live.storage)
        return ends

    def _arrive(self, target: int, memory: _Memory, entry: dict[int, _Memory], pending: list[int]) -> None:
        """Bring a path's memory to an instruction; go on from there if that tells something new."""
        at_end = target >= len(self.method.instructions)
        over = [] if at_end else [name for name in memory.intact if not self._lives(name, target)]
        arriving = memory.copy()
        arriving.drop(over, self.places)
        known = entry.get(target)
        if known is None:
            entry[target] = arriving
        else:
            lost = known.intact - arriving.intact
            if not lost:
                return
            known.drop(lost, self.places)
        pending.append(target)

    def _lives(self, name: str, index: int) -> bool:
        live = self.ranges.get(name)
        return live is None or live.begin <= index < live.end

    def _step(self, index: int, memory: _Memory) -> None:
        reads, writes = _touched(self.method.instructions[index])
        read = [self.values[name].storage for name in reads]
        written = [self.values[name].storage for name in writes]
        for name in (*read, *written):
            live = self.ranges.get(name)
            if live is None and (self.storages[name].is_planned or self.storages[name].role is Role.STATE):
                raise self._error(f"storage `{name}` has no live range")
            if not self._lives(name, index):
                raise self._error(f"instruction {index} touches storage `{name}` outside its live range")
        self._require(memory, read, f"instruction {index}", "it")
        for name in written:
            memory.write(name, self.places.get(name))
        self._require(memory, (*read, *written), f"instruction {index} and its own writes", "it")

    def _require(self, memory: _Memory, names: Iterable[str], where: str, what: str) -> None:
        for name in names:
            if name not in memory.intact and self.storages[name].nbytes != 0:
                why = (
                    f"{what} needs storage `{name}`, which on some path was never written or was written over"
                )
                raise self._error(f"{where}: bytes are lost", why)

    def _check_arenas(self) -> None:
        """Declared lives must not clash either, and the reported bound must be what they add up to."""
        for arena in self.plan.arenas:
            mine = [place for place in self.plan.allocations if place.memory_id == arena.memory_id]
            missing = [place.storage for place in mine if place.storage not in self.ranges]
            if missing:
                raise self._error(f"storage `{missing[0]}` has no live range")
            if arena.kind == "arena":
                bound = self._sweep(mine)
                if bound != arena.lower_bound:
                    raise self._error(
                        f"arena {arena.memory_id} reports the bound {arena.lower_bound}, not {bound}"
                    )

    def _sweep(self, places: list[Allocation]) -> int:
        """Walk over time, keeping the live places sorted by address; returns the largest live sum."""
        space: list[tuple[int, int, str]] = []
        total = peak = 0
        for _, opens, place, live in sorted(self._events(places), key=lambda event: event[:2]):
            item = (place.offset, place.offset + place.nbytes, place.storage)
            at = bisect_left(space, item)
            if not opens:
                space.pop(at)
                total -= place.nbytes
                continue
            for other in (*space[max(at - 1, 0) : at], *space[at : at + 1]):
                if other[0] < item[1] and item[0] < other[1]:
                    why = f"both live at instruction {live.begin}"
                    raise self._error(f"storages `{other[2]}` and `{place.storage}` overlap", why)
            space.insert(at, item)
            total += place.nbytes
            peak = max(peak, total)
        return peak

    def _events(self, places: list[Allocation]) -> Iterator[tuple[int, int, Allocation, LiveRange]]:
        for place in places:
            live = self.ranges[place.storage]
            if live.begin < live.end and place.nbytes:
                yield live.begin, 1, place, live
                yield live.end, 0, place, live


def _touched(instruction: Instruction) -> tuple[list[str], list[str]]:
    """The values an instruction reads and those it writes; scratch it is merely handed counts as written."""
    reads, writes = list(instruction.reads), list(instruction.writes)
    if isinstance(instruction, LibraryCall) and instruction.workspace:
        writes.append(instruction.workspace)
    if isinstance(instruction, (Launch, HostCall)):
        stack: list[Argument] = list(instruction.arguments)
        while stack:
            argument = stack.pop()
            if isinstance(argument, tuple):
                stack.extend(argument)
            elif isinstance(argument, Ref) and argument.name not in reads and argument.name not in writes:
                writes.append(argument.name)
    return reads, writes

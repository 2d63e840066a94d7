"""When each storage must keep its bytes: live ranges over a method's flat instruction list.

An instruction holds everything it touches while it runs, so a range is half-open over instruction indices.
Control flow needs no graph: execution visits a forward-jumping list in rising order, so the span from first
to last access is enough, and branches, lying apart in the list, share space by themselves. A backward jump
closes a loop; what may be carried from one iteration to the next lives over the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..runtime.program import (
    Argument,
    HostCall,
    Instruction,
    Jump,
    Launch,
    LibraryCall,
    LiveRange,
    Method,
    Ref,
    Role,
    Storage,
    Value,
)


def value_accesses(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the values an instruction reads and writes, its workspace and scratch among the written."""
    reads, writes = instruction.reads, instruction.writes
    match instruction:
        case LibraryCall():
            return reads, (*writes, instruction.workspace) if instruction.workspace else writes
        case Launch() | HostCall():
            named = {*reads, *writes}
            scratch = tuple(name for name in references(instruction.arguments) if name not in named)
            return reads, writes + scratch
        case _:
            return reads, writes


def references(argument: Argument) -> Iterator[str]:
    """The values that an argument refers to, through tuples."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for each in argument:
            yield from references(each)


@dataclass(slots=True)
class Access:
    """Where a storage is touched: the instruction indices of its reads and of its writes, rising."""

    reads: list[int]
    writes: list[int]

    @property
    def first(self) -> int:
        return min([*self.reads[:1], *self.writes[:1]])

    @property
    def last(self) -> int:
        return max([*self.reads[-1:], *self.writes[-1:]])


def accesses(method: Method) -> dict[str, Access]:
    """Every storage that an instruction touches, through any of its values."""
    storage_of = {value.name: value.storage for value in method.values}
    found: dict[str, Access] = {}
    for index, instruction in enumerate(method.instructions):
        reads, writes = value_accesses(instruction)
        for name in reads:
            found.setdefault(storage_of[name], Access([], [])).reads.append(index)
        for name in writes:
            found.setdefault(storage_of[name], Access([], [])).writes.append(index)
    return found


def live_ranges(method: Method) -> tuple[LiveRange, ...]:
    """The live range of every storage that is planned or state, in the order of the method's storages.

    An input's storage lives from 0, an output's to the end (at least one tick, even in an empty method),
    state over the whole call. A storage that nothing touches has the range [0, 0).
    """
    end = max(len(method.instructions), 1)
    touched = accesses(method)
    storage_of = {value.name: value.storage for value in method.values}
    returned = {storage_of[name] for name in method.results}
    given = {storage_of[port.value] for port in method.inputs if port.value}
    spans: dict[str, tuple[int, int]] = {}
    for storage in method.storages:
        if storage.role is Role.STATE:
            spans[storage.name] = (0, end)
        elif storage.is_planned:
            access = touched.get(storage.name)
            begin, stop = (access.first, access.last + 1) if access else (end, 0)
            if storage.role is Role.INPUT or storage.name in given:
                begin, stop = 0, max(stop, 1)
            if storage.role is Role.OUTPUT or storage.name in returned:
                begin, stop = min(begin, end - 1), end
            spans[storage.name] = (begin, stop) if begin < stop else (0, 0)
    _extend_over_loops(method, touched, spans)
    return tuple(LiveRange(name, *span) for name, span in spans.items())


def _extend_over_loops(method: Method, touched: dict[str, Access], spans: dict[str, tuple[int, int]]) -> None:
    """Widen ranges over every loop that may carry their bytes around, until nothing changes."""
    jumps = [(index, each.target) for index, each in enumerate(method.instructions) if isinstance(each, Jump)]
    loops = [(target, index + 1) for index, target in jumps if target <= index]
    if not loops:
        return
    storages = {storage.name: storage for storage in method.storages}
    values: dict[str, list[Value]] = {}
    for value in method.values:
        values.setdefault(value.storage, []).append(value)
    local = {
        name for name, access in touched.items()
        if name in storages and _is_written_first(storages[name], values.get(name, []), access, jumps)
    }  # fmt: skip
    changed = True
    while changed:
        changed = False
        for head, tail in loops:
            for name, (begin, end) in spans.items():
                meets = begin < tail and head < end
                inside = head <= begin and end <= tail and name in local
                if meets and not inside and (begin > head or end < tail):
                    spans[name] = (min(begin, head), max(end, tail))
                    changed = True


def _is_written_first(
    storage: Storage, values: list[Value], access: Access, jumps: list[tuple[int, int]]
) -> bool:
    """Whether each pass over the storage's accesses begins by writing all of it, past no jump."""
    if not access.writes or (access.reads and access.reads[0] <= access.writes[0]):
        return False
    first = access.writes[0]
    # A jump from before the write into the rest of the span could read an earlier iteration's bytes.
    if any(index < first < target <= access.last for index, target in jumps):
        return False
    if any(first < target <= access.last < index for index, target in jumps):
        return False
    return storage.role is Role.WORKSPACE or all(_covers(value, storage) for value in values)


def _covers(value: Value, storage: Storage) -> bool:
    """Whether writing the value writes every byte of the storage; false when that cannot be told."""
    numel = 1
    for extent in value.shape:
        if not isinstance(extent, int):
            return False
        numel *= extent
    return (
        value.offset == 0
        and isinstance(storage.nbytes, int)
        and numel * value.dtype.itemsize >= storage.nbytes
    )

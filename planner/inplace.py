"""Let a value be born where a local copy would take it, and drop what nothing touches.

A local copy is needless when its source can be a window of its destination from the start. That is how
concatenation writes straight into its slices and how new state is written in place. It is done only where
the program alone proves it: equal strides, nobody else looks at those bytes in between, no jump about, and
no device's peak rises. What was not done is noted on the method, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..runtime.program import (
    Copy,
    CopyKind,
    Instruction,
    Jump,
    Method,
    Role,
    Storage,
    Value,
)
from .liveness import accesses, value_accesses
from .order import peaks

_POINTER_ALIGNMENT = 16
"""What compiled kernels may assume of a pointer's last bits."""


def drop_untouched(method: Method) -> Method:
    """The method without values that nothing names and storages that no value needs."""
    named = {port.value for port in method.inputs} | set(method.results)
    for instruction in method.instructions:
        reads, writes = value_accesses(instruction)
        named.update(reads, writes)
    values = tuple(value for value in method.values if value.name in named)
    homes = {value.storage for value in values}
    storages = tuple(storage for storage in method.storages if storage.name in homes)
    if len(values) == len(method.values) and len(storages) == len(method.storages):
        return method
    return replace(method, values=values, storages=storages)


def eliminate_copies(method: Method) -> Method:
    """The method without the local copies that could be proved needless; the others are noted."""
    notes: list[str] = []
    index = 0
    while index < len(method.instructions):
        copy = method.instructions[index]
        if isinstance(copy, Copy) and copy.kind is CopyKind.LOCAL:
            reason = _Candidate(method, index, copy).obstacle()
            if not reason:
                without = _without(method, index, copy)
                if all(without_peak <= peak for peak, without_peak in _paired_peaks(method, without)):
                    method = without
                    continue
                reason = "the peak would rise"
            notes.append(f"`{copy.source}` is not written straight into `{copy.destination}`: {reason}")
        index += 1
    return replace(method, notes=(*method.notes, *notes)) if notes else method


def _paired_peaks(before: Method, after: Method) -> Iterable[tuple[int, int]]:
    new = peaks(after)
    return ((peak, new.get(device, 0)) for device, peak in peaks(before).items())


@dataclass(frozen=True)
class _Window:
    """The bytes of its storage that a static value spans, and whether it fills them without holes."""

    begin: int
    end: int
    is_dense: bool

    @classmethod
    def of(cls, value: Value) -> _Window | None:
        """None for a dynamic value."""
        span, numel = 1, 1
        for extent, stride in zip(value.shape, value.strides, strict=True):
            if not isinstance(extent, int) or not isinstance(stride, int):
                return None
            span += (extent - 1) * stride
            numel *= extent
        if not isinstance(value.offset, int):
            return None
        if numel == 0:
            return cls(value.offset, value.offset, True)
        size = value.dtype.itemsize
        return cls(value.offset, value.offset + span * size, span == numel)

    def meets(self, other: _Window) -> bool:
        return self.begin < other.end and other.begin < self.end

    def holds(self, other: _Window) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class _Candidate:
    """One local copy and the question why its source cannot be a window of its destination."""

    def __init__(self, method: Method, index: int, copy: Copy) -> None:
        self.method, self.index = method, index
        self.values = {value.name: value for value in method.values}
        self.source, self.destination = self.values[copy.source], self.values[copy.destination]
        storages = {storage.name: storage for storage in method.storages}
        self.old: Storage = storages[self.source.storage]
        self.new: Storage = storages[self.destination.storage]

    def obstacle(self) -> str:
        """What stands in the way, in words; empty if nothing does."""
        return self._shape_obstacle() or self._role_obstacle() or self._time_obstacle()

    def _shape_obstacle(self) -> str:
        source, destination = self.source, self.destination
        if (source.dtype, source.shape) != (destination.dtype, destination.shape):
            return "their types differ"
        if source.strides != destination.strides:
            return "their strides differ"
        old, new = _Window.of(source), _Window.of(destination)
        if old is None or new is None:
            return "a shape is dynamic"
        if (new.begin - old.begin) % min(_POINTER_ALIGNMENT, self.old.alignment):
            return f"its place is not aligned to {_POINTER_ALIGNMENT} bytes"
        for value in self.method.values:
            if value.storage == self.old.name and value.name != source.name:
                window = _Window.of(value)
                alike = (value.shape, value.strides, value.offset) == (
                    source.shape,
                    source.strides,
                    source.offset,
                )
                if window is None or not (alike or (old.is_dense and old.holds(window))):
                    return f"`{value.name}` shares its storage and reaches further"
        return ""

    def _role_obstacle(self) -> str:
        if self.old.name == self.new.name:
            return "they share a storage"
        ports = {port.value for port in self.method.inputs if port.value} | set(self.method.results)
        if self.old.role is not Role.TEMPORARY or self.old.external:
            return f"the source is {self.old.role.value} memory"
        if any(self.values[name].storage == self.old.name for name in ports):
            return "the source is an input or output itself"
        if self.new.external:
            return "the destination is the caller's memory"
        return "the destination is a constant" if self.new.role is Role.CONSTANT else ""

    def _time_obstacle(self) -> str:
        touched = accesses(self.method)[self.old.name]
        first, last = touched.first, touched.last
        code = self.method.instructions
        jumps = [(at, each.target) for at, each in enumerate(code) if isinstance(each, Jump)]
        if any(
            first <= at <= last or first < target <= last or target <= first <= at for at, target in jumps
        ):
            return "a jump lies in between"
        if not touched.writes or touched.writes[0] > self.index or touched.writes[-1] > self.index:
            return "the source is written again later"
        if touched.reads and touched.reads[0] <= touched.writes[0]:
            return "the source is read before it is written"
        if last > self.index and any(
            self._touches_destination(at, True) for at in range(self.index + 1, last + 1)
        ):
            return "the destination changes while the source is still read"
        for at in range(first, self.index):
            if self._touches_destination(at, False):
                return f"instruction {at} still uses the destination"
        return ""

    def _touches_destination(self, index: int, writes_only: bool) -> bool:
        reads, writes = value_accesses(self.method.instructions[index])
        target = _Window.of(self.destination)
        for name in writes if writes_only else (*reads, *writes):
            value = self.values[name]
            if value.storage == self.new.name:
                window = _Window.of(value)
                if window is None or target is None or window.meets(target):
                    return True
        return False


def _without(method: Method, index: int, copy: Copy) -> Method:
    """The method without that copy, all windows of its source moved into the destination."""
    values = {value.name: value for value in method.values}
    source, destination = values[copy.source], values[copy.destination]
    assert isinstance(source.offset, int) and isinstance(destination.offset, int)
    shift = destination.offset - source.offset

    def moved(value: Value) -> Value:
        if value.storage != source.storage:
            return value
        assert isinstance(value.offset, int)
        return replace(value, storage=destination.storage, offset=value.offset + shift)

    code = (*method.instructions[:index], *method.instructions[index + 1 :])
    return replace(
        method,
        storages=tuple(storage for storage in method.storages if storage.name != source.storage),
        values=tuple(map(moved, method.values)),
        instructions=tuple(_retargeted(instruction, index) for instruction in code),
    )


def _retargeted(instruction: Instruction, removed: int) -> Instruction:
    if isinstance(instruction, Jump) and instruction.target > removed:
        return replace(instruction, target=instruction.target - 1)
    return instruction

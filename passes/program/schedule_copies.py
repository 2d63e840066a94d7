"""Move copies to where they can overlap with work: uploads early, downloads late, no arena larger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...planner.liveness import live_ranges, value_accesses
from ...planner.problem import align
from ...runtime.program import (
    CPU,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Method,
    Program,
    Storage,
)
from ..base import Pass, PassResult, Stage


@dataclass(frozen=True)
class ScheduleCopies(Pass[Program]):
    """Move each h2d copy as early and each d2h copy as late as pays, and no further. No options.

    A copy moves within its stretch between jumps and jump targets, past instructions that touch neither of
    its ends in conflict. It lands only beside work of its own GPU, at a region's border, so that it joins a
    stretch of that GPU's work instead of cutting another's. It stops where its bytes would raise the largest
    sum of live bytes of a device over what it is at the start: no arena's lower bound grows.
    """

    name: ClassVar[str] = "schedule-copies"
    stage: ClassVar[Stage] = Stage.PROGRAM

    def run(self, subject: Program) -> PassResult[Program]:
        """Reorder every method."""
        program = replace(subject, methods=tuple(_Schedule(method).run() for method in subject.methods))
        return PassResult(program, program != subject)


def peaks(method: Method) -> dict[Device, int]:
    """The largest sum of live bytes on each device: the lower bound of its arena."""
    return {device: max(profile, default=0) for device, profile in _profiles(method).items()}


def _profiles(method: Method) -> dict[Device, list[int]]:
    storages = {storage.name: storage for storage in method.storages}
    length = max(len(method.instructions), 1)
    found: dict[Device, list[int]] = {}
    for live in live_ranges(method):
        storage = storages[live.storage]
        if storage.is_planned:
            profile = found.setdefault(storage.device, [0] * length)
            for index in range(live.begin, live.end):
                profile[index] += reserved(storage)
    return found


def reserved(storage: Storage) -> int:
    """What a storage takes of its arena, rounded up to its alignment; 0 if it is not planned."""
    return align(storage.reserved_nbytes, storage.alignment) if storage.is_planned else 0


class _Schedule:
    def __init__(self, method: Method) -> None:
        self._method = method
        self._storages = {storage.name: storage for storage in method.storages}
        self._storage_of = {value.name: self._storages[value.storage] for value in method.values}
        self._peaks = peaks(method)
        self._targets = {each.target for each in method.instructions if isinstance(each, Jump)}

    def run(self) -> Method:
        for copy in self._copies(CopyKind.H2D):
            self._shift(copy, -1)
        for copy in reversed(self._copies(CopyKind.D2H)):
            self._shift(copy, 1)
        return self._method

    def _copies(self, kind: CopyKind) -> list[Copy]:
        return [each for each in self._method.instructions if isinstance(each, Copy) and each.kind is kind]

    def _shift(self, copy: Copy, step: int) -> None:
        """Move a copy up (-1) or down (+1) to the furthest place that pays."""
        instructions = list(self._method.instructions)
        start = next(index for index, each in enumerate(instructions) if each is copy)
        end = copy.destination if step < 0 else copy.source
        device, nbytes = self._storage_of[end].device, reserved(self._storage_of[end])
        profile = _profiles(self._method).get(device, [0] * len(instructions))
        live = self._live(self._storage_of[end].name)
        place, index = start, start
        while 0 <= index + step < len(instructions) and self._can_cross(copy, instructions, index, step):
            index += step
            extra = 0 if index in live else nbytes
            if profile[index] + extra > self._peaks.get(device, 0):
                break
            if self._is_landing(instructions, index, step, device):
                place = index
        place = self._behind_its_like(instructions, place, start, step, copy)
        instructions.insert(place, instructions.pop(start))
        self._method = replace(self._method, instructions=tuple(instructions))

    def _live(self, storage: str) -> range:
        found = next((each for each in live_ranges(self._method) if each.storage == storage), None)
        return range(found.begin, found.end) if found else range(0)

    def _can_cross(self, copy: Copy, instructions: Sequence[Instruction], index: int, step: int) -> bool:
        """Whether the copy, now at ``index``, may change places with its neighbour."""
        other = instructions[index + step]
        if isinstance(other, Jump) or (index if step < 0 else index + 1) in self._targets:
            return False
        reads, writes = value_accesses(other)
        written = {self._storage_of[name].name for name in writes}
        touched = written | {self._storage_of[name].name for name in reads}
        source, destination = self._storage_of[copy.source].name, self._storage_of[copy.destination].name
        return source not in written and destination not in touched

    def _is_landing(self, instructions: Sequence[Instruction], index: int, step: int, device: Device) -> bool:
        """Whether the place before (going up) or behind the instruction at ``index`` joins the GPU's work."""
        inner, outer = instructions[index], index + step
        beyond = instructions[outer] if 0 <= outer < len(instructions) else None
        if beyond is not None and inner.region == beyond.region != -1:
            return False
        return any(each is not None and self._device(each) == device for each in (inner, beyond))

    def _behind_its_like(
        self, instructions: Sequence[Instruction], place: int, start: int, step: int, copy: Copy
    ) -> int:
        """Stop short of the GPU's copies that stand at the place already: a download is waited for."""
        while place != start:
            other = instructions[place]
            if not isinstance(other, Copy) or self._device(other) != self._device(copy):
                break
            place -= step
        return place

    def _device(self, instruction: Instruction) -> Device:
        if isinstance(instruction, HostCall | Jump):
            return CPU
        if isinstance(instruction, Copy):
            end = instruction.source if instruction.kind is CopyKind.D2H else instruction.destination
            return self._storage_of[end].device
        return self._storage_of[(*instruction.writes, *instruction.reads)[0]].device

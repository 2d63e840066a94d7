"""A method tied to addresses: operands resolved, instructions bound, device segments captured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..backend import Backend, Operand, Step
from ..errors import DevplanError, PlanError
from ..expr import evaluate
from ..program import CPU, Copy, CopyKind, Device, HostCall, Instruction, Jump, Launch, Method, Storage, Value
from .host_io import HostEnd
from .inputs import concrete

Bindings = Mapping[str, int]


def resolve(
    method: Method, addresses: Mapping[str, int], bindings: Bindings, only: set[str] | None = None
) -> dict[str, Operand]:
    """Operands by value name; PlanError when a value leaves its storage."""
    storages = {storage.name: storage for storage in method.storages}
    return {
        value.name: operand_of(value, storages[value.storage], addresses[value.storage], bindings)
        for value in method.values
        if value.storage in addresses and (only is None or value.name in only)
    }


def operand_of(value: Value, storage: Storage, address: int, bindings: Bindings) -> Operand:
    """The value's place in memory; PlanError when it leaves its storage."""
    shape, strides = concrete(value.shape, bindings), concrete(value.strides, bindings)
    offset = evaluate(value.offset, bindings)
    operand = Operand(address + offset, value.dtype, shape, strides, storage.device)
    limit = max(evaluate(storage.nbytes, bindings), 0)
    if offset < 0 or (operand.span_nbytes and offset + operand.span_nbytes > limit):
        raise PlanError(f"value `{value.name}` leaves storage `{storage.name}` of {limit} bytes")
    return operand


def refuse_larger(method: Method, bindings: Bindings) -> None:
    """PlanError when a storage is larger at these sizes than at the bound, for which memory is reserved."""
    for storage in method.storages:
        if storage.max_nbytes >= 0 and (nbytes := evaluate(storage.nbytes, bindings)) > storage.max_nbytes:
            sizes = ", ".join(f"{name}={size}" for name, size in bindings.items())
            raise PlanError(
                f"storage `{storage.name}` of method `{method.name}` takes {nbytes} bytes at {sizes}",
                why=f"{storage.max_nbytes} are reserved, what it takes at the declared bounds",
                hint="export with `--no-device-planning`, or make the size grow with the dimension",
            )


def device_of(instruction: Instruction, operands: Mapping[str, Operand]) -> Device:
    """Where an instruction runs. A copy runs on its accelerator; device to device on the destination."""
    if isinstance(instruction, HostCall | Jump):
        return CPU
    if isinstance(instruction, Copy):
        end = instruction.source if instruction.kind is CopyKind.D2H else instruction.destination
        return operands[end].device
    names = (*instruction.writes, *instruction.reads)
    if not names:
        raise PlanError(f"an instruction has no operands: {instruction}")
    return operands[names[0]].device


def is_empty(instruction: Instruction, operands: Mapping[str, Operand], bindings: Bindings) -> bool:
    """Whether there is nothing to do: a grid or a copy of nothing."""
    if isinstance(instruction, Launch):
        return any(evaluate(size, bindings) == 0 for size in instruction.grid)
    return isinstance(instruction, Copy) and operands[instruction.source].numel == 0


@dataclass
class CopyTally:
    """How many copies ran, and their bytes, by kind."""

    counts: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))
    nbytes: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))

    def add(self, kind: CopyKind, nbytes: int, times: int = 1) -> None:
        """Count copies of ``nbytes`` each."""
        self.counts[kind] += times
        self.nbytes[kind] += nbytes * times

    def merge(self, other: CopyTally, times: int = 1) -> None:
        """Count another tally some times."""
        for kind in CopyKind:
            self.counts[kind] += other.counts[kind] * times
            self.nbytes[kind] += other.nbytes[kind] * times


def _nothing() -> None:
    """The step of an instruction that has nothing to do."""


def _loop(steps: Sequence[Step]) -> Step:
    def run() -> None:
        for step in steps:
            step()

    return run


@dataclass
class Segment:
    """Instructions [begin, end) on one device, or one jump. ``step`` runs them, captured or one by one."""

    begin: int
    end: int
    device: Device
    steps: Sequence[Step]
    copies: CopyTally
    jump: Jump | None = None
    runs: int = 0
    step: Step = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.steps[0] if len(self.steps) == 1 else _loop(self.steps)


@runtime_checkable
class WaitsItself(Protocol):
    """A captured step that can also wait for its end, quicker than in two steps."""

    def and_wait(self) -> Step:
        """Both as one step."""
        ...


Decorate = Callable[[int, Step], Step]
"""Wraps the step of an instruction, by index (poisoning, profiling)."""


class Binder:
    """Binds instructions and groups them into segments that one device can run without the host."""

    def __init__(
        self,
        method: Method,
        backends: Mapping[Device, Backend],
        operands: Mapping[str, Operand],
        bindings: Bindings,
        decorate: Decorate | None = None,
        ends: Mapping[str, HostEnd] | None = None,
        saved: Collection[int] = (),
    ) -> None:
        self._method, self._backends, self._operands = method, backends, operands
        self._bindings, self._decorate, self._ends = bindings, decorate, ends or {}
        self._saved = saved

    def segments(self) -> list[Segment]:
        """All instructions of the method, bound; segments end at host steps, jumps and jump targets."""
        instructions = self._method.instructions
        targets = {i.target for i in instructions if isinstance(i, Jump)}
        made: list[Segment] = []
        begin = 0
        while begin < len(instructions):
            end = self._segment_end(begin, targets)
            made.append(self._segment(begin, end))
            begin = end
        return made

    def _segment_end(self, begin: int, targets: set[int]) -> int:
        instructions = self._method.instructions
        device, end = self._device(begin), begin + 1
        if device == CPU or isinstance(instructions[begin], Jump):
            return end
        while end < len(instructions) and end not in targets and self._device(end) == device:
            end += 1
        return end

    def _device(self, index: int) -> Device:
        return device_of(self._method.instructions[index], self._operands)

    def _segment(self, begin: int, end: int) -> Segment:
        instructions = self._method.instructions[begin:end]
        device, copies = self._device(begin), CopyTally()
        first = instructions[0]
        if isinstance(first, Jump):
            return Segment(begin, end, CPU, [], copies, first)
        steps = [step for index in range(begin, end) if (step := self._step(index)) is not None]
        for index, instruction in enumerate(instructions, begin):
            if index in self._saved:
                continue
            if isinstance(instruction, Copy) and (source := self._operands[instruction.source]).numel:
                copies.add(instruction.kind, source.numel * source.dtype.itemsize)
        return Segment(begin, end, device, steps, copies)

    def _step(self, index: int) -> Step | None:
        instruction = self._method.instructions[index]
        assert not isinstance(instruction, Jump)
        step: Step | None = None
        if index in self._saved:
            return None
        if not is_empty(instruction, self._operands, self._bindings):
            backend = self._backends[self._device(index)]
            step = self._moving(instruction) or backend.bind(instruction, self._operands, self._bindings)
        return step if self._decorate is None else self._decorate(index, step or _nothing)

    def _moving(self, instruction: Instruction) -> Step | None:
        """The step of a copy whose host end may move."""
        if not isinstance(instruction, Copy):
            return None
        end = self._ends.get(instruction.source) or self._ends.get(instruction.destination)
        if end is None or end.mover is None:
            return None
        source, destination = self._operands[instruction.source], self._operands[instruction.destination]
        return end.mover.bind_moving(instruction, source, destination, end)


class Execution:
    """Runs bound segments in order, following jumps, and orders devices against each other."""

    def __init__(
        self, segments: Sequence[Segment], operands: Mapping[str, Operand], backends: Mapping[Device, Backend]
    ) -> None:
        self.segments, self._backends = segments, backends
        index_of = {segment.begin: number for number, segment in enumerate(segments)}
        self._jumps: dict[int, tuple[int, Callable[[], bool]]] = {}
        for number, segment in enumerate(segments):
            if segment.jump is not None:
                target = index_of.get(segment.jump.target, len(segments))
                self._jumps[number] = (target, jump_condition(segment.jump, operands))
        self.no_graph_reason = ""
        self.is_captured = False
        self.run: Step = self._simple() or self._run

    def capture(self) -> None:
        """Let each device capture its segments. One that fails runs step by step, and the reason tells."""
        self.is_captured, failure = True, ""
        for segment in self.segments:
            if segment.device == CPU or not segment.steps:
                continue
            try:
                segment.step = self._backends[segment.device].capture(segment.steps)
            except DevplanError as error:
                failure = f"the capture failed: {error}"
        self.no_graph_reason = failure or self.obstacle()
        self.run = self._simple() or self._run

    def obstacle(self) -> str:
        """Why the method cannot be one device graph; empty when it can."""
        accelerators = {segment.device for segment in self.segments if segment.device != CPU}
        hosts = sum(segment.device == CPU and segment.jump is None for segment in self.segments)
        if not accelerators:
            return "nothing runs on a device"
        if self._jumps:
            return "the method branches"
        if hosts:
            return f"{hosts} operators run on the host"
        if len(accelerators) > 1:
            return f"the method uses {len(accelerators)} devices"
        return self._backends[next(iter(accelerators))].no_graph_reason

    def copies(self) -> CopyTally:
        """Copies executed so far."""
        total = CopyTally()
        for segment in self.segments:
            total.merge(segment.copies, segment.runs)
        return total

    def _simple(self) -> Step | None:
        """The hot path: one segment, so one launch and one wait."""
        if len(self.segments) != 1 or self._jumps:
            return None
        segment = self.segments[0]
        step, synchronize = segment.step, self._backends[segment.device].synchronize
        if isinstance(step, WaitsItself):
            both = step.and_wait()

            def run_both() -> None:
                segment.runs += 1
                both()

            return run_both

        def run() -> None:
            segment.runs += 1
            step()
            synchronize()

        return run

    def _run(self) -> None:
        number, busy = 0, None
        while number < len(self.segments):
            segment = self.segments[number]
            segment.runs += 1
            if busy is not None and busy != segment.device:
                self._backends[busy].synchronize()
                busy = None
            if segment.jump is not None:
                target, condition = self._jumps[number]
                number = number + 1 if condition() else target
                continue
            segment.step()
            busy = segment.device if segment.device != CPU else None
            number += 1
        if busy is not None:
            self._backends[busy].synchronize()


def jump_condition(jump: Jump, operands: Mapping[str, Operand]) -> Callable[[], bool]:
    """True when execution goes on with the next instruction."""
    if not jump.condition:
        return lambda: False
    operand = operands[jump.condition]
    if operand.device != CPU or operand.numel != 1 or operand.dtype.itemsize != 1:
        raise PlanError(f"condition `{jump.condition}` is not one bool on the host")
    flag = ctypes.c_uint8.from_address(operand.address)
    return lambda: flag.value != 0

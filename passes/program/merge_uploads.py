"""Send several small inputs to a GPU as one transfer from one staging buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from ...planner.liveness import accesses
from ...planner.problem import align
from ...runtime.dtypes import DType
from ...runtime.program import (
    CPU,
    Copy,
    CopyKind,
    Device,
    Instruction,
    Jump,
    Method,
    Port,
    Program,
    Role,
    Storage,
    Value,
)
from ..base import Pass, PassResult, Stage
from .schedule_copies import peaks


@dataclass(frozen=True)
class MergeUploads(Pass[Program]):
    """Merge neighbouring h2d copies of small inputs to one GPU into one copy.

    Options: ``max_nbytes``, the largest input that is merged (a bigger one is worth a transfer of its own,
    whose start-up no longer counts), ``max_total_nbytes`` of a merged transfer, and ``max_growth``, by how
    many bytes an arena's lower bound may grow for it (the merged device storage lives as long as the
    longest-lived of its parts).

    The inputs move into one storage on the host, at offsets, and their device tensors into one storage on the
    device, at the same offsets; a single copy of bytes connects the two. Only whole inputs of known size are
    merged, whose device tensors are written by nothing else.
    """

    name: ClassVar[str] = "merge-uploads"
    stage: ClassVar[Stage] = Stage.PROGRAM

    max_nbytes: int = 65536
    max_total_nbytes: int = 1048576
    max_growth: int = 4096

    def run(self, subject: Program) -> PassResult[Program]:
        """Merge in every method."""
        program = replace(subject, methods=tuple(self._method(method) for method in subject.methods))
        return PassResult(program, program != subject)

    def _method(self, method: Method) -> Method:
        while (merged := self._merge_one(method)) is not method:
            method = merged
        return method

    def _merge_one(self, method: Method) -> Method:
        """Merge what can be merged of the first stretch where anything can."""
        limit = peaks(method)
        for run in _runs(method):
            chosen: list[Copy] = []
            for copy in sorted(run, key=lambda each: _nbytes(method, each)):
                attempt = [each for each in run if each is copy or each in chosen]
                if _nbytes(method, copy) > self.max_nbytes or _total(method, attempt) > self.max_total_nbytes:
                    break
                grown = peaks(_merge(method, attempt))
                if all(peak <= limit.get(device, 0) + self.max_growth for device, peak in grown.items()):
                    chosen = attempt
            if len(chosen) > 1:
                return _merge(method, chosen)
        return method


_ALIGNMENT = 256
"""Of every part, on both sides: what kernels may assume of a tensor's address."""


def _runs(method: Method) -> Iterator[list[Copy]]:
    """Stretches of neighbouring uploads to one device that may be merged."""
    values = {value.name: value for value in method.values}
    storages = {storage.name: storage for storage in method.storages}

    def key(pair: tuple[int, object]) -> Device | None:
        index, item = pair
        if isinstance(item, Copy) and _is_candidate(method, item, values, storages, index):
            return storages[values[item.destination].storage].device
        return None

    for device, group in groupby(enumerate(method.instructions), key=key):
        by_source = {values[item.source].storage: item for _, item in group if isinstance(item, Copy)}
        copies = list(by_source.values())
        if device is not None and len(copies) > 1:
            yield copies


def _is_candidate(
    method: Method, copy: Copy, values: Mapping[str, Value], storages: Mapping[str, Storage], index: int
) -> bool:
    if copy.kind is not CopyKind.H2D:
        return False
    source, destination = values[copy.source], values[copy.destination]
    held, made = storages[source.storage], storages[destination.storage]
    returned = {port.value for port in method.outputs} | {
        port.aliases[1] for port in method.outputs if port.aliases and port.aliases[0] == "input"
    }
    shown = {v.name for v in values.values() if v.storage in (held.name, made.name)}
    inputs = {port.value: port.name for port in method.inputs}
    if held.role is not Role.INPUT or held.external or source.name not in inputs or shown & returned:
        return False
    if inputs[source.name] in returned or made.role is not Role.TEMPORARY or made.external:
        return False
    if not (_is_whole(source, held) and _is_whole(destination, made)):
        return False
    touched = accesses(method)[made.name]
    return touched.first == index and touched.writes == [index]


def _is_whole(value: Value, storage: Storage) -> bool:
    numel = 1
    for extent in value.shape:
        if not isinstance(extent, int):
            return False
        numel *= extent
    return value.offset == 0 and numel > 0 and numel * value.dtype.itemsize == storage.nbytes


def _nbytes(method: Method, copy: Copy) -> int:
    return method.storage(method.value(copy.source).storage).reserved_nbytes


def _total(method: Method, copies: Sequence[Copy]) -> int:
    return sum(align(_nbytes(method, copy), _ALIGNMENT) for copy in copies)


def _merge(method: Method, copies: Sequence[Copy]) -> Method:
    """The method with these copies, in their order, as one."""
    device = method.storage(method.value(copies[0].destination).storage).device
    offsets: dict[str, int] = {}
    total = 0
    for copy in copies:
        for end in (copy.source, copy.destination):
            offsets[method.value(end).storage] = total
        total += align(_nbytes(method, copy), _ALIGNMENT)
    tag = f"uploads_{device.kind}{device.index}"
    taken = {storage.name for storage in method.storages} | {value.name for value in method.values}
    host, target = _fresh(tag, taken), _fresh(f"{tag}_on_device", taken)
    moved = {method.value(c.source).storage: host for c in copies}
    moved |= {method.value(c.destination).storage: target for c in copies}
    storages = [
        Storage(host, CPU, total, Role.INPUT, _ALIGNMENT),
        Storage(target, device, total, Role.TEMPORARY, _ALIGNMENT),
        *(storage for storage in method.storages if storage.name not in moved),
    ]
    values = [
        *(_moved(value, moved, offsets) for value in method.values),
        Value(host, host, DType.UINT8, (total,), (1,)),
        Value(target, target, DType.UINT8, (total,), (1,)),
    ]
    merged = Copy(CopyKind.H2D, host, target, _reason(method, copies))
    gone = {i for i, each in enumerate(method.instructions) if any(each is copy for copy in copies[1:])}
    instructions = [
        merged if each is copies[0] else _retargeted(each, gone)
        for i, each in enumerate(method.instructions)
        if i not in gone
    ]
    return replace(method, storages=tuple(storages), values=tuple(values), instructions=tuple(instructions))


def _retargeted(instruction: Instruction, gone: set[int]) -> Instruction:
    """A jump goes to where its target is now that earlier instructions are gone."""
    if not isinstance(instruction, Jump):
        return instruction
    return replace(instruction, target=instruction.target - sum(i < instruction.target for i in gone))


def _moved(value: Value, moved: Mapping[str, str], offsets: Mapping[str, int]) -> Value:
    if value.storage not in moved:
        return value
    assert isinstance(value.offset, int)
    return replace(value, storage=moved[value.storage], offset=value.offset + offsets[value.storage])


def _fresh(wish: str, taken: set[str]) -> str:
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    taken.add(name)
    return name


def _reason(method: Method, copies: Sequence[Copy]) -> str:
    def port(value: str) -> Port:
        return next(port for port in method.inputs if port.value == value)

    names = [f"`{port(copy.source).name}`" for copy in copies]
    readers = list(
        dict.fromkeys(tail for copy in copies if (tail := copy.reason.partition(" is read by ")[2]))
    )
    what = f"inputs {', '.join(names[:-1])} and {names[-1]} go up as one transfer from one staging buffer"
    return f"{what}, read by {' and by '.join(readers)}" if readers else what

"""A method's instructions as ET12 sees them: kernel calls, jumps, and runs that one delegate executes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..program import CPU, Copy, CopyKind, Device, Instruction, Jump, Launch, LibraryCall, Method


@dataclass(frozen=True, slots=True)
class Step:
    """Instructions ``[first, first + count)``. With a device: a run for a delegate; else one instruction."""

    first: int
    count: int = 1
    device: Device | None = None


def steps(method: Method) -> tuple[Step, ...]:
    """Cut the list into steps: maximal runs of delegate instructions of one device, and the rest one by one.

    A run never reaches across a jump's target, so that every target is a step's beginning.
    """
    devices = value_devices(method)
    targets = {item.target for item in method.instructions if isinstance(item, Jump)}
    found: list[Step] = []
    for index, instruction in enumerate(method.instructions):
        device = delegate_device(instruction, devices)
        last = found[-1] if found else None
        if device is None or last is None or last.device != device or index in targets:
            found.append(Step(index, 1, device))
        else:
            found[-1] = Step(last.first, last.count + 1, device)
    return tuple(found)


def value_devices(method: Method) -> dict[str, Device]:
    """The device of every value, by name."""
    devices = {storage.name: storage.device for storage in method.storages}
    return {value.name: devices[value.storage] for value in method.values}


def delegate_device(instruction: Instruction, devices: Mapping[str, Device]) -> Device | None:
    """The device whose delegate executes the instruction; None when ET12 has a call of its own for it."""
    match instruction:
        case Launch() | LibraryCall():
            return devices[(*instruction.writes, *instruction.reads)[0]]
        case Copy(kind=CopyKind.LOCAL) if devices[instruction.destination] != CPU:
            return devices[instruction.destination]
        case _:
            return None

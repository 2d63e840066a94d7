"""How long the parts of a bound method take on their devices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backend import Backend, Operand, Step
from ..calls.binding import device_of, is_empty
from ..program import CPU, Copy, CopyKind, Device, HostCall, Instruction, Jump

if TYPE_CHECKING:
    from ..engine import LoadedMethod, LoadedProgram


@dataclass(frozen=True)
class Timed:
    """One instruction and its step; ``device`` runs it."""

    index: int
    instruction: Instruction
    device: Device
    step: Step


@dataclass(frozen=True)
class Percentiles:
    """Of a list of times, in microseconds."""

    p50: float
    p90: float
    p99: float
    min: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Nearest-rank percentiles of at least one time."""
        ordered = sorted(seconds)

        def rank(share: float) -> float:
            return ordered[min(len(ordered) - 1, max(0, -(-int(share * len(ordered)) // 100) - 1))] * 1e6

        return cls(rank(50), rank(90), rank(99), ordered[0] * 1e6, sum(ordered) / len(ordered) * 1e6)

    def document(self) -> dict[str, float]:
        """As the command line's contract names them."""
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99, "min": self.min, "mean": self.mean}


def timed_steps(program: LoadedProgram, method: LoadedMethod) -> list[Timed] | None:
    """The instructions of a called method, bound one by one; None when it branches: they have no order."""
    bound = method.bound
    if bound is None or any(isinstance(i, Jump) for i in method.description.instructions):
        return None
    made: list[Timed] = []
    for index, instruction in enumerate(method.description.instructions):
        device = device_of(instruction, bound.operands)
        if index in bound.direct.saved or is_empty(instruction, bound.operands, bound.bindings):
            continue
        step = _bind(program.backends[device], instruction, bound.direct.used, bound.bindings)
        made.append(Timed(index, instruction, device, step))
    return made


def _bind(
    backend: Backend, instruction: Any, operands: Mapping[str, Operand], bindings: Mapping[str, int]
) -> Step:
    return backend.bind(instruction, operands, bindings)


def part_of(instruction: Instruction) -> str:
    """``h2d``, ``d2h``, or ``device`` for all that is no copy between host and device; ``host``."""
    if isinstance(instruction, Copy) and instruction.kind in (CopyKind.H2D, CopyKind.D2H):
        return str(instruction.kind.value)
    return "host" if isinstance(instruction, HostCall) else "device"


def timeline(
    backends: Mapping[Device, Backend],
    groups: Sequence[tuple[Device, Sequence[Step]]],
    repeat: int,
    before: Step | None = None,
) -> list[list[float]]:
    """Run groups of steps in order, ``repeat`` times; seconds by run and group.

    ``before`` runs ahead of each: an input's place is free for others once it was read, so that a second run
    needs the inputs stored again (`LoadedMethod.refill`).
    On one CUDA device the device's clock counts, elsewhere the host's, around each group with a wait.
    """
    devices = {device for device, _ in groups}
    if len(devices) == 1:
        ask = getattr(backends[next(iter(devices))], "timeline", None)
        if ask is not None:
            times: list[list[float]] = ask([steps for _, steps in groups], repeat, before)
            return times
    runs: list[list[float]] = []
    for _ in range(repeat):
        if before is not None:
            before()
        runs.append([_wall(backends[device], steps) for device, steps in groups])
    return runs


def _wall(backend: Backend, steps: Sequence[Step]) -> float:
    start = time.perf_counter()
    for step in steps:
        step()
    if backend.device != CPU:
        backend.synchronize()
    return time.perf_counter() - start

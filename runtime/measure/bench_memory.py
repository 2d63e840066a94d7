"""The memory of a loaded program by the driver's word, every byte of it under a name."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cuda.nvidia_library import WorkspaceUse
    from ..engine import LoadedMethod, LoadedProgram


class MemoryWatch:
    """The free memory of the GPUs that a program runs on, from before it is loaded until after its calls.

    ``free_before`` is from before anything was loaded; ``context`` are the bytes that CUDA and its libraries
    keep for the process, once they have run such a program; ``ledger`` has what each step took.
    """

    def __init__(self, gpus: set[int]) -> None:
        from ..cuda.backend import shared_backend
        from ..cuda.ledger import Ledger

        self._backends = [shared_backend(gpu) for gpu in sorted(gpus)]
        self.free_before, self.context = self.free(), 0
        self.ledger = Ledger(self.free)

    def free(self) -> int:
        """Free bytes on all these GPUs, with their contexts in place."""
        return sum(backend.free_nbytes() for backend in self._backends)

    def settle(self) -> None:
        """Such a program has run and is closed: what is still gone is the process's."""
        self.context = self.free_before - self.free()

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Note what these steps take, each by the name it has in the ledger and the rest by this one."""
        from ..cuda.ledger import opened

        with opened(self.ledger), self.ledger.span(name):
            yield


def watch_of(
    artifact: Path, device: str | None, device_map: Mapping[str, str] | None, weights: Sequence[Path]
) -> MemoryWatch | None:
    """A watch on the GPUs that an artifact would run on; None where there is none, and on another device."""
    if device is not None and not device.startswith("cuda"):
        return None
    from ..cuda.driver import cuda_available

    if not cuda_available()[0]:
        return None
    from ..artifact import read
    from ..loading import device_slots, ordinals

    slots = device_slots(read(artifact, weights=weights).planned)
    gpus = set(ordinals(slots, device, device_map or {}).values())
    return MemoryWatch(gpus) if gpus else None


def watched(watch: MemoryWatch | None, name: str) -> AbstractContextManager[None]:
    """`MemoryWatch.step`, where something is watched."""
    return nullcontext() if watch is None else watch.step(name)


def memory_of(
    program: LoadedProgram, method: LoadedMethod, watch: MemoryWatch | None
) -> dict[str, int | None]:
    """What `BenchResult.memory` holds; ``watch`` is from before the program was loaded."""
    report = program.memory
    memory: dict[str, int | None] = {
        "arena": report.arena,
        "constants": report.constants,
        "state": report.state,
        "staging": report.staging,
        "graph": method.graph_nbytes,
    }
    if watch is None:
        return memory | dict.fromkeys(_WATCHED)
    measured = watch.free_before - watch.free()
    planned = report.arena + report.constants + report.state
    ledger, taken = watch.ledger, watch.ledger.taken
    parts = {
        "graph": taken["graph"],
        "tensors": ledger.requested - planned,
        "rounding": taken["blocks"] - ledger.requested,
        **{name: taken[name] for name in ("code", "streams", "load", "calls")},
        "context": watch.context,
    }
    parts["unnamed"] = measured - planned - sum(parts.values())
    return memory | parts | {"measured_total": measured}


_WATCHED = (
    "tensors", "rounding", "code", "streams", "load", "calls", "unnamed", "context", "measured_total"
)  # fmt: skip


def workspaces_of(program: LoadedProgram) -> dict[str, dict[str, int]]:
    """By library function: distinct calls, the most that the plan offers one, the most that one needs."""
    found: dict[str, dict[str, int]] = {}
    for backend in program.backends.values():
        uses: Mapping[str, WorkspaceUse] = getattr(backend, "workspaces", {})
        for use in uses.values():
            entry = found.setdefault(use.function, {"calls": 0, "offered": 0, "needed": 0})
            entry["calls"] += 1
            entry["offered"] = max(entry["offered"], use.offered)
            entry["needed"] = max(entry["needed"], use.needed)
    return found

"""The memory of a loaded program by the driver's word, every byte of it under a name."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..cuda.ledger import Ledger
    from ..cuda.nvidia_library import WorkspaceUse
    from ..engine import LoadedMethod, LoadedProgram


def memory_of(
    program: LoadedProgram,
    method: LoadedMethod,
    free_before: int | None,
    context: int | None,
    ledger: Ledger | None,
) -> dict[str, int | None]:
    """What `BenchResult.memory` holds.

    ``free_before`` and ``context`` are `bench`'s; ``ledger`` was open while it was loaded and first called.
    """
    report = program.memory
    free_after = _gpu_free(program)
    measured = free_before - free_after if free_before is not None and free_after is not None else None
    planned = report.arena + report.constants + report.state
    memory: dict[str, int | None] = {
        "arena": report.arena,
        "constants": report.constants,
        "state": report.state,
        "staging": report.staging,
        "graph": method.graph_nbytes,
    }
    if ledger is None or measured is None or context is None:
        return memory | dict.fromkeys(_BY_LEDGER) | {"context": context, "measured_total": measured}
    taken = ledger.taken
    parts = {
        "graph": taken["graph"],
        "tensors": ledger.requested - planned,
        "rounding": taken["blocks"] - ledger.requested,
        **{name: taken[name] for name in ("code", "streams", "load", "calls")},
        "context": context,
    }
    parts["unnamed"] = measured - planned - sum(parts.values())
    return memory | parts | {"measured_total": measured}


_BY_LEDGER = ("tensors", "rounding", "code", "streams", "load", "calls", "unnamed")


@contextmanager
def ledger_of(gpus: set[int], ledger: Ledger | None = None) -> Generator[Ledger | None]:
    """A ledger of these GPUs, open for all steps (again, if one is given); None without any GPU."""
    if not gpus:
        yield None
        return
    from ..cuda.backend import shared_backend
    from ..cuda.ledger import Ledger, opened

    backends = [shared_backend(gpu) for gpu in sorted(gpus)]
    with opened(ledger or Ledger(lambda: sum(backend.free_nbytes() for backend in backends))) as found:
        yield found


def span(ledger: Ledger | None, name: str) -> AbstractContextManager[None]:
    """`Ledger.span`, of the ledger if there is one."""
    return nullcontext() if ledger is None else ledger.span(name)


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


def _gpu_free(program: LoadedProgram) -> int | None:
    gpus: dict[int, Any] = {
        getattr(backend, "ordinal", slot.index): ask
        for slot, backend in program.backends.items()
        if (ask := getattr(backend, "memory_info", None)) is not None
    }
    return sum(ask()[0] for ask in gpus.values()) if gpus else None


def gpus_of(
    artifact: Path, device: str | None, device_map: Mapping[str, str] | None, weights: Sequence[Path]
) -> set[int]:
    """The GPUs that an artifact would run on; none where there is none, and on another device."""
    if device is not None and not device.startswith("cuda"):
        return set()
    from ..cuda.driver import cuda_available

    if not cuda_available()[0]:
        return set()
    from ..artifact import read
    from ..loading import device_slots, ordinals

    slots = device_slots(read(artifact, weights=weights).planned)
    return set(ordinals(slots, device, device_map or {}).values())


def free_memory(gpus: set[int]) -> int | None:
    """Free bytes on all these GPUs, with their contexts in place; None without any."""
    if not gpus:
        return None
    from ..cuda.backend import shared_backend

    return sum(shared_backend(gpu).memory_info()[0] for gpu in gpus)

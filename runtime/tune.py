"""Choosing library algorithms by measuring them on this GPU, and keeping the choice in a file.

Heuristics choose well on average and badly now and then. A tuning file maps a call's key (what it computes,
its layouts and its workspace) to the index of an algorithm in the library's own list, and says for which GPU
and which version of the library that list was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .errors import DeviceError, UsageError
from .program import LibraryCall

if TYPE_CHECKING:
    from .backend import Operand
    from .cuda.backend import CudaBackend
    from .engine import LoadedMethod, LoadedProgram

_FORMAT = "devplan tuning 1"
_CALLS_PER_RUN, _RUNS = 16, 7
_WORTH_IT = 0.98
"""An algorithm must take at most this share of the first one's time to replace it: below is noise."""


@dataclass(frozen=True)
class Tuning:
    """Algorithms by key, for one GPU model and one version of cuBLASLt."""

    gpu: str
    version: int
    algorithms: Mapping[str, int] = field(default_factory=dict[str, int])

    def save(self, path: Path) -> None:
        """Write the file."""
        body = {
            "format": _FORMAT,
            "gpu": self.gpu,
            "cublaslt": self.version,
            "algorithms": dict(self.algorithms),
        }
        path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, path: Path) -> Tuning:
        """Read a file; UsageError when it is none."""
        try:
            body = json.loads(path.read_text())
            if body["format"] != _FORMAT:
                raise ValueError(f"its format is `{body['format']}`")
            algorithms = {str(key): int(index) for key, index in body["algorithms"].items()}
            return cls(str(body["gpu"]), int(body["cublaslt"]), algorithms)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "make one with `devplan tune ARTIFACT`"
            raise UsageError(f"`{path}` is no tuning file", why=str(error), hint=hint) from error


@dataclass(frozen=True)
class Finding:
    """One distinct call: seconds of the library's first choice and of the best, which is number ``best``."""

    key: str
    candidates: int
    best: int
    first_seconds: float
    best_seconds: float


def apply(program: LoadedProgram, tuning: Tuning) -> str:
    """Let a program that was not called yet use a tuning; gives why it was not used, or an empty text."""
    reason = "the program runs on no GPU"
    for backend in _gpus(program):
        version = backend.library("cublaslt").version
        if (backend.label, version) == (tuning.gpu, tuning.version):
            backend.tuning, reason = tuning.algorithms, ""
        else:
            reason = (
                f"the tuning is for {tuning.gpu} and cuBLASLt {tuning.version}, "
                f"this is {backend.label} and {version}"
            )
    return reason


def tune(program: LoadedProgram, method: LoadedMethod) -> tuple[Tuning, list[Finding]]:
    """Measure every algorithm of every distinct product of a method that was called before.

    The arena's contents are overwritten; state is not (a product that writes state is left out).

    Raises:
        DeviceError: the program runs on no GPU.
        UsageError: the method was not called yet.
    """
    bound = method.bound
    if bound is None:
        raise UsageError(
            f"method `{method.name}` cannot be tuned", why="it was not called yet, or has no plan"
        )
    gpus = {backend.device: backend for backend in _gpus(program)}
    if not gpus:
        raise DeviceError(
            "tuning needs a GPU", why=f"the program runs on {', '.join(program.devices.values())}"
        )
    findings: dict[str, Finding] = {}
    for call in _products(method):
        backend = gpus[bound.operands[call.writes[0]].device]
        key = backend.library("cublaslt").key(call, bound.operands)
        if key and key not in findings:
            findings[key] = _measure(backend, call, bound.operands, key)
    first = next(iter(gpus.values()))
    chosen = {found.key: found.best for found in findings.values() if found.best}
    tuning = Tuning(first.label, first.library("cublaslt").version, chosen)
    return tuning, list(findings.values())


def _gpus(program: LoadedProgram) -> Iterator[CudaBackend]:
    for backend in program.backends.values():
        candidate: Any = backend
        if hasattr(candidate, "tuning"):
            yield candidate


def _products(method: LoadedMethod) -> Iterator[LibraryCall]:
    """Products that write no state."""
    description = method.description
    states = {storage.name for storage in description.storages if storage.role.value == "state"}
    held = {value.name for value in description.values if value.storage in states}
    for instruction in description.instructions:
        if not isinstance(instruction, LibraryCall) or instruction.function != "matmul":
            continue
        if not held.intersection(instruction.writes):
            yield instruction


def _measure(backend: CudaBackend, call: LibraryCall, operands: Mapping[str, Operand], key: str) -> Finding:
    library = backend.library("cublaslt")
    count = library.algorithms(call, operands)
    groups = [[library.bind(call, operands, index)] * _CALLS_PER_RUN for index in range(count)]
    runs = backend.timeline(groups, _RUNS)
    times = [median(run[index] for run in runs) / _CALLS_PER_RUN for index in range(count)]
    best = min(range(count), key=times.__getitem__)
    if times[best] > _WORTH_IT * times[0]:
        best = 0
    return Finding(key, count, best, times[0], times[best])

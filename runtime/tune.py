"""Choosing library algorithms by measuring them on this GPU, and keeping the choice in a file.

Heuristics choose well on average and badly now and then. A tuning file maps a call's key (what it computes,
its layouts and its workspace) to the index of an algorithm in the library's own list, and says for which GPU
and which version of the library that list was.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .artifact.atomic import write_whole
from .errors import DeviceError, DevplanError, UsageError
from .program import LibraryCall, Method

if TYPE_CHECKING:
    from .backend import Operand, Step
    from .cuda.backend import CudaBackend
    from .engine import LoadedMethod, LoadedProgram

_FORMAT = "devplan tuning 1"
_LIBRARIES = {"matmul": "cublaslt", "convolution": "cudnn"}
"""The functions that are tuned, and who computes them."""
CALLS_PER_RUN, RUNS = 16, 7
_SECONDS_PER_CALL = 2.0
"""No more algorithms of a call are made ready after this: some of cuDNN's are compiled first."""
WORTH_IT = 0.98
"""An algorithm must take at most this share of the library's choice to replace it: below is noise."""


@dataclass(frozen=True)
class Tuning:
    """Algorithms by key, for one GPU model and the versions of the libraries they belong to."""

    gpu: str
    versions: Mapping[str, int]
    algorithms: Mapping[str, int] = field(default_factory=dict[str, int])
    architecture: str = ""
    """Of that GPU, such as ``sm_90``."""
    triton: str = ""
    """The version that compiled the kernels."""
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """Blocks, warps and stages of kernels by key, for exports."""

    def save(self, path: Path) -> None:
        """Write the file, in one step."""
        body: dict[str, Any] = {"format": _FORMAT, "gpu": self.gpu, "architecture": self.architecture}
        body |= {"versions": dict(self.versions), "algorithms": dict(self.algorithms), "triton": self.triton}
        body["kernels"] = {key: dict(choice) for key, choice in self.kernels.items()}
        write_whole(path, json.dumps(body, indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, path: Path) -> Tuning:
        """Read a file; UsageError when it is none."""
        try:
            body = json.loads(path.read_text())
            if body["format"] != _FORMAT:
                raise ValueError(f"its format is `{body['format']}`")
            numbers = [{str(k): int(v) for k, v in body[name].items()} for name in ("versions", "algorithms")]
            if unknown := set(numbers[0]) - set(_LIBRARIES.values()):
                raise ValueError(f"it is for {', '.join(sorted(unknown))}")
            kernels = {
                str(key): {str(name): int(number) for name, number in choice.items()}
                for key, choice in body.get("kernels", {}).items()
            }
            architecture, triton = (str(body.get(name, "")) for name in ("architecture", "triton"))
            return cls(str(body["gpu"]), numbers[0], numbers[1], architecture, triton, kernels)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "make one with `devplan tune ARTIFACT`"
            why = str(getattr(error, "strerror", None) or error)
            raise UsageError(f"`{path}` is no tuning file", why=why, hint=hint) from error


@dataclass(frozen=True)
class Finding:
    """One distinct call: seconds of the library's own choice and of the best.

    ``best`` is that algorithm's number, None when it is the library's choice.
    """

    key: str
    candidates: int
    best: int | None
    first_seconds: float
    best_seconds: float


def apply(program: LoadedProgram, tuning: Tuning) -> str:
    """Let a program that was not called yet use a tuning; gives why it was not used, or an empty text."""
    if tuning.kernels and not tuning.versions:
        return "it chooses kernels' configurations alone, which `export --tuning` uses"
    reason = "the program runs on no GPU"
    for backend in _gpus(program):
        here = {name: backend.library(name).version for name in tuning.versions}
        if (backend.label, here) == (tuning.gpu, dict(tuning.versions)):
            backend.tuning, reason = tuning.algorithms, ""
        else:
            made = " and ".join(f"{name} {version}" for name, version in tuning.versions.items())
            found = " and ".join(f"{name} {version}" for name, version in here.items())
            reason = f"the tuning is for {tuning.gpu} with {made}, this is {backend.label} with {found}"
    return reason


def tune(program: LoadedProgram, method: LoadedMethod) -> tuple[Tuning, list[Finding]]:
    """Measure every algorithm of every distinct product and convolution of a method that was called before.

    The arena's contents are overwritten; state is not (a call that writes state is left out).

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
    versions: dict[str, int] = {}
    for call in _tunable(method):
        backend = gpus[bound.operands[call.writes[0]].device]
        library = backend.library(_LIBRARIES[call.function])
        versions[_LIBRARIES[call.function]] = library.version
        key = library.key(call, bound.operands)
        if key and key not in findings:
            findings[key] = _measure(backend, call, bound.operands, key)
    chosen = {found.key: found.best for found in findings.values() if found.best is not None}
    gpu = next(iter(gpus.values()))
    return Tuning(gpu.label, versions, chosen, gpu.info.architecture), list(findings.values())


def _gpus(program: LoadedProgram) -> Iterator[CudaBackend]:
    for backend in program.backends.values():
        candidate: Any = backend
        if hasattr(candidate, "tuning"):
            yield candidate


def _tunable(method: LoadedMethod) -> Iterator[LibraryCall]:
    """Calls of functions that are tuned, and that write no state."""
    description = method.description
    held = state_values(description)
    for instruction in description.instructions:
        if not isinstance(instruction, LibraryCall) or instruction.function not in _LIBRARIES:
            continue
        if not held.intersection(instruction.writes):
            yield instruction


def state_values(method: Method) -> set[str]:
    """Names of the values that lie in state."""
    states = {storage.name for storage in method.storages if storage.role.value == "state"}
    return {value.name for value in method.values if value.storage in states}


def _measure(backend: CudaBackend, call: LibraryCall, operands: Mapping[str, Operand], key: str) -> Finding:
    library = backend.library(_LIBRARIES[call.function])
    steps: dict[int | None, Step] = {None: library.bind(call, operands)}
    begun = time.monotonic()
    for index in range(library.algorithms(call, operands)):
        if time.monotonic() - begun > _SECONDS_PER_CALL:
            break
        with contextlib.suppress(DevplanError):  # offered, but not for this workspace or precision
            steps[index] = library.bind(call, operands, index)
    runs = backend.timeline([[step] * CALLS_PER_RUN for step in steps.values()], RUNS)
    seconds = {index: median(run[place] for run in runs) / CALLS_PER_RUN for place, index in enumerate(steps)}
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] > WORTH_IT * seconds[None]:
        best = None
    return Finding(key, len(steps) - 1, best, seconds[None], seconds[best])

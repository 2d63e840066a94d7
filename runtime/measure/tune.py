"""Choosing library algorithms by measuring them on this GPU, and keeping the choice in a file.

Heuristics choose well on average and badly now and then. A tuning file maps a call's key (what it computes,
its layouts and its workspace) to the index of an algorithm in the library's own list, and says for which GPU
and which version of the library that list was. An export embeds that part of it in the artifact; a file that
is given at load goes before what is embedded. Either is a hint: where it does not fit, heuristics choose.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..artifact.atomic import write_whole
from ..errors import DeviceError, DevplanError, UsageError
from ..library import TUNED
from ..program import LibraryCall, LibraryTuning, Method, Program

if TYPE_CHECKING:
    from ..backend import Operand, Step
    from ..cuda.backend import CudaBackend
    from ..engine import LoadedMethod, LoadedProgram

_FORMAT = "devplan tuning 1"
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

    def joined(self, other: Tuning) -> Tuning:
        """This, and what another found on the same GPU."""
        return replace(
            self,
            versions={**self.versions, **other.versions},
            algorithms={**self.algorithms, **other.algorithms},
            kernels={**self.kernels, **other.kernels},
        )

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
            if unknown := set(numbers[0]) - set(TUNED.values()):
                raise ValueError(f"it is for {', '.join(sorted(unknown))}")
            if min(number for table in numbers for number in (0, *table.values())) < 0:
                raise ValueError("it has a negative number")
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

    @property
    def libraries(self) -> LibraryTuning:
        """The libraries' part."""
        versions, algorithms = (tuple(sorted(part.items())) for part in (self.versions, self.algorithms))
        return LibraryTuning(self.gpu, self.architecture, versions, algorithms)


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
    """Let a program that was not called yet use a file; gives why it was not used, or an empty text."""
    if tuning.kernels and not tuning.versions:
        return "it chooses kernels' configurations alone, which `export --tuning` uses"
    return use(program, tuning.libraries)


def apply_embedded(program: LoadedProgram) -> str:
    """Let a program that was not called yet use what its artifact embeds; says what came of it.

    Gives an empty text where nothing is embedded.
    """
    tunings = program.planned.program.tunings
    reasons = [use(program, tuning) for tuning in tunings]
    used = [tuning for tuning, reason in zip(tunings, reasons, strict=True) if not reason]
    if used:
        return f"using {_and(f'{_algorithms(tuning)} measured on {tuning.gpu}' for tuning in used)}"
    return f"algorithms that the artifact embeds are not used: {'; '.join(reasons)}" if reasons else ""


def use(program: LoadedProgram, tuning: LibraryTuning) -> str:
    """Take a tuning for the GPUs that it is for; gives why it is for none of them, or an empty text.

    Only libraries that the program calls are asked for their version, and none is needed for that alone.
    """
    called = for_program(tuning, program.planned.program)
    if tuning.versions and not called.versions:
        return f"the program calls nothing of {_and(name for name, _ in tuning.versions)}"
    reasons = {backend: _reason(backend, called) for backend in _gpus(program)}
    for backend, reason in reasons.items():
        if not reason:
            backend.tuning = dict(called.algorithms)
    if "" in reasons.values():
        return ""
    return next(iter(reasons.values()), "the program runs on no GPU")


def for_program(tuning: LibraryTuning, program: Program) -> LibraryTuning:
    """What of a tuning is for library functions that a program calls."""
    calls = (item for method in program.methods for item in method.instructions)
    functions = {call.function for call in calls if isinstance(call, LibraryCall)} & TUNED.keys()
    libraries = {TUNED[function] for function in functions}
    versions = tuple((name, version) for name, version in tuning.versions if name in libraries)
    algorithms = tuple((key, number) for key, number in tuning.algorithms if key.split(" ")[0] in functions)
    return replace(tuning, versions=versions, algorithms=algorithms)


def _reason(backend: CudaBackend, tuning: LibraryTuning) -> str:
    """Why a tuning is not for a GPU, or an empty text."""
    made, found = [tuning.gpu], [backend.label]
    if backend.label == tuning.gpu and tuning.architecture not in ("", backend.info.architecture):
        made, found = [f"{tuning.gpu} ({tuning.architecture})"], [backend.info.architecture]
    elif backend.label == tuning.gpu:
        for name, version in tuning.versions:
            try:
                here = backend.library_version(name)
            except DeviceError as error:
                return str(error)
            made.append(f"{name} {version}")
            found.append(f"{name} {here}")
    if made == found:
        return ""
    return f"the tuning is for {_with(made)}, this is {_with(found)}"


def _with(parts: Sequence[str]) -> str:
    """``NVIDIA H200 with cublaslt 130100 and cudnn 91000``."""
    return f"{parts[0]} with {_and(parts[1:])}" if len(parts) > 1 else parts[0]


def _and(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _algorithms(tuning: LibraryTuning) -> str:
    number = len(tuning.algorithms)
    return f"{number} library algorithm{'' if number == 1 else 's'}"


def tune(
    program: LoadedProgram, method: LoadedMethod, known: Container[str] = ()
) -> tuple[Tuning, list[Finding]]:
    """Measure every algorithm of every distinct product and convolution of a method that was called before.

    They are measured at the sizes of its last call; calls whose key is ``known`` are passed over. The arena's
    contents are overwritten; state is not (a call that writes state is left out).

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
    with _heuristics(gpus.values()):
        for call in _tunable(method):
            backend = gpus[bound.operands[call.writes[0]].device]
            library = backend.library(TUNED[call.function])
            versions[TUNED[call.function]] = library.version
            key = library.key(call, bound.operands)
            if key and key not in findings and key not in known:
                findings[key] = _measure(backend, call, bound.operands, key)
    chosen = {found.key: found.best for found in findings.values() if found.best is not None}
    gpu = next(iter(gpus.values()))
    return Tuning(gpu.label, versions, chosen, gpu.info.architecture), list(findings.values())


@contextlib.contextmanager
def _heuristics(gpus: Iterable[CudaBackend]) -> Generator[None]:
    """What a tuned program is compared with, too, is the libraries' own choice, not what it embeds."""
    before = [(backend, backend.tuning) for backend in gpus]
    for backend, _ in before:
        backend.tuning = {}
    try:
        yield
    finally:
        for backend, tuning in before:
            backend.tuning = tuning


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
        if not isinstance(instruction, LibraryCall) or instruction.function not in TUNED:
            continue
        if not held.intersection(instruction.writes):
            yield instruction


def state_values(method: Method) -> set[str]:
    """Names of the values that lie in state."""
    states = {storage.name for storage in method.storages if storage.role.value == "state"}
    return {value.name for value in method.values if value.storage in states}


def _measure(backend: CudaBackend, call: LibraryCall, operands: Mapping[str, Operand], key: str) -> Finding:
    library = backend.library(TUNED[call.function])
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

"""What `tune` does; `runtime.measure.tune` measures, `passes.lowered.tune_kernels` does so for kernels."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifacts import check_targets, choose_method
from .console import Output
from .loading import load_program, to_places
from .run_inputs import gather_inputs
from .words import count, microseconds, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runtime.engine import LoadedMethod, LoadedProgram
    from ..runtime.measure.tune import Finding, Tuning


@dataclass(frozen=True)
class Wanted:
    """The options of one `tune`."""

    artifact: Path
    output: Path | None
    method: str | None
    inputs: Path | None
    shapes: tuple[str, ...]
    seed: int
    device: str | None
    allow_torch_ops: bool
    weights: tuple[Path, ...] = ()
    kernels: bool = True
    jobs: int = 0


def run_tuning(wanted: Wanted, output: Output) -> int:
    """Measure, write the file and print; 0."""
    path = wanted.output or Path(f"{wanted.artifact.stem}.tuning.json")
    check_targets(path, sources=(wanted.artifact, *wanted.weights))
    with load_program(
        wanted.artifact,
        wanted.device,
        output,
        allow_torch_ops=wanted.allow_torch_ops,
        weights=wanted.weights,
    ) as program:
        tuning, calls, kernels = _measured(program, wanted, output)
    tuning.save(path)
    output.document(
        {
            "file": str(path),
            "gpu": tuning.gpu,
            "architecture": tuning.architecture,
            "versions": {**tuning.versions, **({"triton": tuning.triton} if tuning.triton else {})},
            "calls": [{**_times(found), "chosen": found.best} for found in calls],
            "kernels": [{**_times(found), "chosen": tuning.kernels.get(found.key)} for found in kernels],
        }
    )
    if calls:
        output.show(_view("Library calls", "library's choice>", [(f, _number(f.best)) for f in calls]))
    if kernels:
        chosen = [(found, _words(tuning.kernels.get(found.key))) for found in kernels]
        output.show(*([""] if calls else []), _view("Kernels", "as exported>", chosen))
    algorithms, configurations = len(tuning.algorithms), len(tuning.kernels)
    better = f"{count(algorithms, 'library algorithm')} for `run` and `export --tuning`"
    output.say(f"wrote {path}: {better}, {count(configurations, 'configuration')} for `export --tuning`")
    return 0


def _measured(
    program: LoadedProgram, wanted: Wanted, output: Output
) -> tuple[Tuning, list[Finding], list[Finding]]:
    """What is best of all methods and sizes, the library calls, and the kernels."""
    from ..runtime.measure.tune import tune

    missing = _missing_compilers() if wanted.kernels else []
    if missing:
        are = "is" if len(missing) == 1 else "are"
        output.say(f"kernels are not measured: {' and '.join(missing)} {are} not installed")
    whole: Tuning | None = None
    calls: dict[str, Finding] = {}
    kernels: dict[str, Finding] = {}
    for method, inputs in _targets(program, wanted):
        method.run(to_places(program, method.description, inputs))
        tuning, found = tune(program, method, calls)
        calls |= {finding.key: finding for finding in found}
        if wanted.kernels and not missing:
            tuning, found = _with_kernels(tuning, program, method, wanted.jobs, output, kernels)
            kernels |= {finding.key: finding for finding in found}
        whole = tuning if whole is None else whole.joined(tuning)
    assert whole is not None
    return whole, list(calls.values()), list(kernels.values())


def _targets(program: LoadedProgram, wanted: Wanted) -> Iterator[tuple[LoadedMethod, dict[str, Any]]]:
    """The methods to call, each at its bound and at its buckets' sizes, unless inputs or shapes are given."""
    is_given = wanted.inputs is not None or bool(wanted.shapes)
    names = list(program.methods)
    if wanted.method is not None or is_given:
        names = [choose_method(wanted.method, names)]
    for name in names:
        method = program.method(name)
        buckets = [b for plan in program.planned.plan.methods if plan.method == name for b in plan.buckets]
        given = gather_inputs(method.description, (), wanted.inputs, wanted.shapes, wanted.seed)
        yield method, given[0]
        symbols = [symbol.name for symbol in method.description.symbols]
        for bucket in () if is_given else buckets:
            sizes = dict(zip(symbols, bucket.sizes, strict=True))
            yield method, gather_inputs(method.description, seed=wanted.seed, sizes=sizes)[0]


def _missing_compilers() -> list[str]:
    return [name for name in ("torch", "triton") if find_spec(name) is None]


def _with_kernels(
    tuning: Tuning,
    program: LoadedProgram,
    method: LoadedMethod,
    jobs: int,
    output: Output,
    known: Container[str],
) -> tuple[Tuning, list[Finding]]:
    """The tuning with configurations of kernels, too."""
    from importlib.metadata import version

    from ..passes.lowered.tune_kernels import tune_kernels

    def report(done: int, total: int) -> None:
        output.say(f"measured {done} of {count(total, 'kernel')} of `{method.name}`")

    kernels, findings = tune_kernels(program, method, jobs, report, known)
    return replace(tuning, triton=version("triton"), kernels=kernels), findings


def _times(found: Finding) -> dict[str, Any]:
    return {
        "key": found.key,
        "candidates": found.candidates,
        "first_us": found.first_seconds * 1e6,
        "best_us": found.best_seconds * 1e6,
    }


def _number(best: int | None) -> str:
    return "-" if best is None else str(best)


def _words(choice: Mapping[str, int] | None) -> str:
    """``64x128x32, 8 warps, 3 stages``."""
    if choice is None:
        return "-"
    blocks = "x".join(str(number) for name, number in choice.items() if name.startswith("BLOCK"))
    rest = [count(choice["num_warps"], "warp"), count(choice["num_stages"], "stage")]
    return ", ".join([*([blocks] if blocks else []), *rest])


def _view(title: str, first: str, found: Sequence[tuple[Finding, str]]) -> RenderableType:
    made = table(title, "what", "tried>", "chosen>", first, "best>")
    for finding, chosen in found:
        times = (microseconds(finding.first_seconds * 1e6), microseconds(finding.best_seconds * 1e6))
        made.add_row(_short(finding.key), str(finding.candidates), chosen, *times)
    return made


_WIDEST = 40


def _short(key: str) -> str:
    """A key for a column of a table: what a person knows it by."""
    head, _, last = key.partition(" aligned")[0].rpartition(" ")
    text = head if re.fullmatch("[0-9a-f]{12}", last) else f"{head} {last}".strip()
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"

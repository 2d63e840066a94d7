"""What `export` does once its arguments are known to be good."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import ArtifactError, DevplanError, UnsupportedOperatorError
from . import budgets
from .console import Output, muffled
from .export import Job
from .loading import as_it_was
from .progress import Stages, stages

if TYPE_CHECKING:
    from ..passes.export import ExportResult
    from ..passes.pipeline import PassRun
    from ..passes.source.model import ModelSource


@dataclass(frozen=True)
class Written:
    """An export that is done: the artifact's description and what it took."""

    description: dict[str, Any]
    stage_seconds: dict[str, float]
    seconds: float
    peak_rss_bytes: int
    notes: tuple[str, ...]


def run_job(job: Job, output: Output, started: float) -> int:
    """Export, check the budgets, write the artifact in one step, print the summary; 0."""
    with stages(output) as told:
        told("load", 0.0, job.source)
        source, result = _export(job, output, told)
        from ..passes.source.load import resolve

        budgets.check_plan(result.planned, job.config)
        told("write", 0.0, job.target.name)
        with _replacing(job.target, with_data=job.config.options.weights == "external") as scratch:
            description = _write(scratch, result, job)
            budgets.check_artifact(description["file"]["bytes"], job.config)
            if job.config.check:
                told("verify", 0.0, "against eager PyTorch")
                _verify(scratch, source if not _is_weightless(job) else resolve(job.source), output)
        if job.config.report is not None:
            told("report", 0.0, str(job.config.report))
            _write_report(job, description, result)
    seconds = time.perf_counter() - started
    notes = (*source.notes, *(note for method in result.planned.program.methods for note in method.notes))
    written = Written(description, told.seconds, seconds, peak_rss(), tuple(dict.fromkeys(notes)))
    _print(job, written, output)
    return 0


def peak_rss() -> int:
    """The most memory that this process and its children held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return max(_own_peak(unit), unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _own_peak(unit: int) -> int:
    """By Linux's high-water mark where there is one: `ru_maxrss` counts what a parent held when it forked."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    marks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(marks[0]) if marks else unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _is_weightless(job: Job) -> bool:
    """Whether the model is built without its weights."""
    return job.config.options.weights in ("reference", "none")


def _export(job: Job, output: Output, told: Stages) -> tuple[ModelSource, ExportResult]:
    from .versions import require_export

    for line in require_export(job.config.options.device):
        output.say(f"note: {line}")
    from ..passes.source.load import resolve

    with as_it_was():
        source = resolve(job.source, weightless=_is_weightless(job))
    from ..passes.export import export

    runs: list[PassRun] = []
    with muffled(not output.verbose):
        result = export(source, job.config.options, told, observe=runs.append)
    if job.explain:
        output.show(*_explained(runs, result), "")
    return source, result


def _explained(runs: Sequence[PassRun], result: ExportResult) -> Iterator[str]:
    """What each pass did, then each method's placement and copies."""
    from ..passes.placed.ledger import explain

    for run in runs:
        what = f"{run.ran.name} on {getattr(run.subject, 'name', 'the program')}"
        yield f"{what}: {'changed' if run.changed else 'unchanged'}, {run.seconds * 1000:.1f} ms"
    for graph in result.placed:
        yield from ("", f"{graph.name}:", *(f"  {line}" for line in explain(graph)))


def _write(path: Path, result: ExportResult, job: Job) -> dict[str, Any]:
    from .. import __version__
    from ..runtime.artifact import read, write
    from ..runtime.describe import describe
    from ..runtime.weights.safetensors import weight_files

    config = job.config
    try:
        write(
            path,
            result.planned,
            result.constants,
            producer=__version__,
            weights=config.options.weights,
            files=weight_files(config.weights_files),
            recipes=result.recipes,
        )
    except ArtifactError as error:  # nothing is damaged: the format has no place for such a program
        raise UnsupportedOperatorError(error.what, why=error.why, hint=error.hint) from error
    return describe(read(path))


def _verify(path: Path, source: ModelSource, output: Output) -> None:
    from .loading import load_program
    from .verify_job import Check, verify_program

    with load_program(path, None, output) as program:
        verify_program(program, source, Check(path)).raise_on_difference()


def _write_report(job: Job, description: dict[str, Any], result: ExportResult) -> None:
    from .report import write_page

    assert job.config.report is not None
    write_page(job.config.report, job.target.name, description, result.planned)


@contextmanager
def _replacing(target: Path, *, with_data: bool) -> Generator[Path]:
    """A scratch file that takes the target's place when all went well, and leaves nothing when not.

    With a data file beside it, both are made in a scratch folder: their names belong together. The data file
    moves first; its name is that of its contents, so it never replaces another's.
    """
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    made = scratch / target.name if with_data else scratch
    try:
        if with_data:
            scratch.mkdir()
        yield made
        for data in sorted(scratch.glob("*.ptd")) if with_data else ():
            data.replace(target.with_name(data.name))
        made.replace(target)
    except OSError as error:
        why = str(error.strerror or error)
        raise DevplanError(
            f"cannot write `{target}`", why=why, hint="check the folder and the free space"
        ) from error
    finally:
        if with_data:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


def _print(job: Job, written: Written, output: Output) -> None:
    from .summary import summary

    extra = {"export_seconds": round(written.seconds, 3), "peak_rss_bytes": written.peak_rss_bytes}
    stage_seconds = {name: round(seconds, 3) for name, seconds in written.stage_seconds.items()}
    output.document(
        {**written.description, **extra, "stage_seconds": stage_seconds, "notes": list(written.notes)}
    )
    output.show(*summary(job.target, written))

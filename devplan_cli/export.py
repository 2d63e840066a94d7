"""``devplan export SOURCE``: load a model, run the pass pipeline, write an artifact."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import UsageError
from . import export_flags, flags
from .artifacts import check_targets
from .console import Output
from .streams import write_document_text

if TYPE_CHECKING:
    from ..passes.config.read import Config
    from ..passes.options import BucketRule, IoRule

EXAMPLE = """Examples:

devplan export model.py --dtype float16 --arch sm_80,sm_90

devplan export llm.py --io device --skip-h2d prefill.tokens --memory-budget 2GiB --check

devplan export model.py --buckets batch=1,8,32

devplan export model.py --config low-memory --print-config
"""


def export(
    source: export_flags.Source = None,
    output: export_flags.Output = None,
    config: export_flags.Config = None,
    device: export_flags.Device = None,
    dtype: export_flags.Dtype = None,
    quantize: export_flags.Quantize = None,
    arch: export_flags.Arch = None,
    io: export_flags.Io = None,
    skip_h2d: export_flags.SkipH2d = None,
    skip_d2h: export_flags.SkipD2h = None,
    buckets: export_flags.Buckets = None,
    device_planning: export_flags.DevicePlanning = None,
    planning_effort: export_flags.PlanningEffort = None,
    reorder: export_flags.Reorder = None,
    weights: export_flags.Weights = None,
    weights_file: export_flags.WeightsFile = None,
    library_calls: export_flags.LibraryCalls = None,
    library_workspace: export_flags.LibraryWorkspace = None,
    tuning: export_flags.Tuning = None,
    allow_host_ops: export_flags.AllowHostOps = None,
    allow_tf32: export_flags.AllowTf32 = None,
    jobs: export_flags.Jobs = None,
    memory_budget: export_flags.MemoryBudget = None,
    max_artifact_size: export_flags.MaxArtifactSize = None,
    max_copies: export_flags.MaxCopies = None,
    fail_on_copy: export_flags.FailOnCopy = None,
    check: export_flags.Check = None,
    report: export_flags.Report = None,
    explain: export_flags.Explain = False,
    print_config: export_flags.PrintConfig = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
    no_progress: export_flags.NoProgress = False,
) -> int:
    """Export a model to an artifact that runs without torch, on a machine without a GPU."""
    started = time.perf_counter()
    given = {
        "export.output": output,
        "export.device": device,
        "export.dtype": dtype,
        "export.quantize": quantize,
        "export.arch": arch,
        "export.weights": weights,
        "export.weights-file": weights_file or None,
        "export.library-calls": library_calls,
        "export.library-workspace": library_workspace,
        "export.tuning": tuning,
        "export.allow-host-ops": allow_host_ops,
        "export.allow-tf32": allow_tf32,
        "export.jobs": jobs,
        "export.check": check,
        "export.report": report,
        "plan.device-planning": device_planning,
        "plan.effort": planning_effort,
        "plan.reorder": reorder,
        "budget.memory": memory_budget,
        "budget.artifact-size": max_artifact_size,
        "budget.copies": max_copies,
        "budget.fail-on-copy": fail_on_copy,
    }
    rules = _io_rules(io, skip_h2d, skip_d2h)
    settings = _configuration(config, given, rules, _bucket_rules(buckets))
    out = Output(json, quiet, verbose, progress=not no_progress)
    if print_config:
        if json:
            why = "`--print-config` prints TOML, `--json` promises JSON"
            raise UsageError("wrong usage", why=why, hint="drop one of them")
        write_document_text(settings.toml())
        return 0
    job = replace(_job(source, settings), explain=explain)
    out.say(f"exporting {job.source} to {job.target}")
    from .export_job import run_job

    return run_job(job, out, started)


@dataclass(frozen=True)
class Job:
    """One export whose arguments have been checked."""

    source: str
    target: Path
    config: Config
    explain: bool = False
    """Whether to tell where each operator was placed and why."""


def _configuration(
    file: str | None,
    given: dict[str, Any],
    io: tuple[tuple[str, IoRule], ...],
    buckets: tuple[tuple[str, BucketRule], ...],
) -> Config:
    from ..passes.config.read import load_config
    from ..passes.targets import TARGETS
    from .gpus import present_architectures

    return load_config(
        file, given, io, buckets=buckets, architectures=tuple(TARGETS), native=present_architectures
    )


def _io_rules(
    io: list[str] | None, skip_h2d: list[str] | None, skip_d2h: list[str] | None
) -> tuple[tuple[str, IoRule], ...]:
    from ..passes.config.rules import parse_io, parse_skip

    rules: list[tuple[str, IoRule]] = []
    for text in io or ():
        try:
            rules.append(("--io", parse_io(text)))
        except ValueError as error:
            hint = "write `--io device` or `--io METHOD.TENSOR=device`"
            raise UsageError(f"cannot use `--io {text}`", why=str(error), hint=hint) from error
    rules += [("--skip-h2d", parse_skip("h2d", target)) for target in skip_h2d or ()]
    rules += [("--skip-d2h", parse_skip("d2h", target)) for target in skip_d2h or ()]
    return tuple(rules)


def _bucket_rules(buckets: list[str] | None) -> tuple[tuple[str, BucketRule], ...]:
    from ..passes.config.rules import parse_bucket

    rules: list[tuple[str, BucketRule]] = []
    for text in buckets or ():
        try:
            rules.append((f"--buckets {text}", parse_bucket(text)))
        except ValueError as error:
            hint = "write `--buckets batch=1,8,32`"
            raise UsageError(f"cannot use `--buckets {text}`", why=str(error), hint=hint) from error
    return tuple(rules)


def _job(source: str | None, config: Config) -> Job:
    """Check what can be checked before torch is imported."""
    from ..passes.source.text import default_name, split_source

    if source is None:
        hint = "write `devplan export model.py`; see `devplan export --help`"
        raise UsageError("wrong usage", why="SOURCE is missing", hint=hint)
    target, name = split_source(source)
    path = config.output or Path(f"{default_name(target, name)}.pte")
    check_targets(path, config.report, sources=(Path(target), *config.weights_files))
    return Job(source, path, config)

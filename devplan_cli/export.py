"""``devplan export SOURCE``: load a model, run the pass pipeline, write an artifact."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.errors import UsageError
from . import flags
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
_WHAT, _IO, _PLAN = "What and for what", "Inputs and outputs", "Planning"
_CODE, _BUDGET, _AFTER = "Constants and code", "Budgets: over one, nothing is written (code 5)", "Afterwards"

Text = str | None


def _option(*names: str, metavar: str = "", help: str, panel: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar or None, help=help, show_default=False, rich_help_panel=panel)


def export(
    source: Annotated[
        Text,
        typer.Argument(metavar="SOURCE", help="model.py, model.py:NAME, package.module:NAME or program.pt2"),
    ] = None,
    output: Annotated[
        Text,
        _option(
            "--output", "-o", metavar="FILE", help="The artifact; NAME.pte here if left out.", panel=_WHAT
        ),
    ] = None,
    config: Annotated[
        Text,
        _option(
            "--config", metavar="FILE", help="A TOML file, or the name of one of `configs/`.", panel=_WHAT
        ),
    ] = None,
    device: Annotated[
        Text,
        _option(
            "--device",
            metavar="DEVICE",
            help="cuda or cpu: where the graph is placed; `cuda` if left out.",
            panel=_WHAT,
        ),
    ] = None,
    dtype: Annotated[
        Text,
        _option(
            "--dtype",
            metavar="TYPE",
            help="float32, bfloat16 or float16: cast parameters and floating inputs.",
            panel=_WHAT,
        ),
    ] = None,
    quantize: Annotated[
        Text,
        _option(
            "--quantize",
            metavar="SCHEME",
            help="int8-weight-only or int4-weight-only[:GROUP]: round the weights of linear layers.",
            panel=_WHAT,
        ),
    ] = None,
    arch: Annotated[
        Text,
        _option(
            "--arch",
            metavar="LIST",
            help="sm_80,sm_90,... or native; the GPU present, else sm_80,sm_90, if left out.",
            panel=_WHAT,
        ),
    ] = None,
    io: Annotated[
        list[str] | None,
        _option(
            "--io",
            metavar="RULE",
            help="host, device or METHOD.TENSOR=device: where callers keep them; repeatable.",
            panel=_IO,
        ),
    ] = None,
    skip_h2d: Annotated[
        list[str] | None,
        _option(
            "--skip-h2d",
            metavar="[METHOD[.INPUT]]",
            help="Take these inputs (all, without a value) on the device.",
            panel=_IO,
        ),
    ] = None,
    skip_d2h: Annotated[
        list[str] | None,
        _option(
            "--skip-d2h",
            metavar="[METHOD[.OUTPUT]]",
            help="Leave these outputs (all, without a value) on the device.",
            panel=_IO,
        ),
    ] = None,
    buckets: Annotated[
        list[str] | None,
        _option(
            "--buckets",
            metavar="RULE",
            help="DIM=1,8,32: sizes of a dynamic dimension with a plan and a CUDA graph of"
            " their own; repeatable. DIM is a Dim's name or INPUT:NUMBER.",
            panel=_PLAN,
        ),
    ] = None,
    device_planning: Annotated[
        bool | None,
        _option(
            "--device-planning/--no-device-planning",
            help="Static device arenas, or allocation at run time.",
            panel=_PLAN,
        ),
    ] = None,
    planning_effort: Annotated[
        Text,
        _option(
            "--planning-effort",
            metavar="EFFORT",
            help="fast, default or max: how long to search for a smaller arena.",
            panel=_PLAN,
        ),
    ] = None,
    reorder: Annotated[
        bool | None,
        _option(
            "--reorder/--no-reorder", help="Reorder instructions where that lowers the peak.", panel=_PLAN
        ),
    ] = None,
    weights: Annotated[
        Text,
        _option(
            "--weights",
            metavar="PLACE",
            help="embed, external, reference or none: where weights are kept. The last two build the model "
            "without weights, however large.",
            panel=_CODE,
        ),
    ] = None,
    weights_file: Annotated[
        list[str] | None,
        _option(
            "--weights-file",
            metavar="FILE",
            help="A safetensors file, or a folder of them, for `reference`; repeatable.",
            panel=_CODE,
        ),
    ] = None,
    library_calls: Annotated[
        bool | None,
        _option(
            "--library-calls/--no-library-calls",
            help="Use cuBLASLt and cuDNN, or kernels only: then nothing but the driver is needed.",
            panel=_CODE,
        ),
    ] = None,
    library_workspace: Annotated[
        Text,
        _option(
            "--library-workspace",
            metavar="SIZE",
            help="Most memory reserved for one call of a library, which chooses its algorithm within it.  "
            "[default: 4MiB for a product, 8MiB for a convolution]",
            panel=_CODE,
        ),
    ] = None,
    tuning: Annotated[
        Text,
        _option(
            "--tuning",
            metavar="FILE.json",
            help="Compile kernels, and choose algorithms of libraries, as `devplan tune` found best.",
            panel=_CODE,
        ),
    ] = None,
    allow_host_ops: Annotated[
        bool | None,
        _option(
            "--allow-host-ops", help="Let operators that the device cannot run run on the host.", panel=_CODE
        ),
    ] = None,
    allow_tf32: Annotated[
        bool | None, _option("--allow-tf32", help="Let float32 products use TF32.", panel=_CODE)
    ] = None,
    jobs: Annotated[
        int | None, _option("--jobs", "-j", metavar="N", help="Processes that compile kernels.", panel=_CODE)
    ] = None,
    memory_budget: Annotated[
        Text,
        _option("--memory-budget", metavar="SIZE", help="Most planned device memory.", panel=_BUDGET),
    ] = None,
    max_artifact_size: Annotated[
        Text,
        _option("--max-artifact-size", metavar="SIZE", help="Most bytes of the artifact.", panel=_BUDGET),
    ] = None,
    max_copies: Annotated[
        int | None,
        _option("--max-copies", metavar="N", help="Most copies of all methods.", panel=_BUDGET),
    ] = None,
    fail_on_copy: Annotated[
        bool | None, _option("--fail-on-copy", help="The same as `--max-copies 0`.", panel=_BUDGET)
    ] = None,
    check: Annotated[
        bool | None, _option("--check", help="Run `verify` on the result before it is written.", panel=_AFTER)
    ] = None,
    report: Annotated[
        Text,
        _option("--report", metavar="FILE.html", help="Write the memory timeline as a page.", panel=_AFTER),
    ] = None,
    explain: Annotated[
        bool,
        _option(
            "--explain",
            help="Print what each pass did, where each operator was placed and why, and every copy.",
            panel=_AFTER,
        ),
    ] = False,
    print_config: Annotated[
        bool,
        _option(
            "--print-config",
            help="Print the configuration with the origin of each value, and stop.",
            panel=_AFTER,
        ),
    ] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
    no_progress: Annotated[
        bool,
        typer.Option(
            "--no-progress", help="Plain lines instead of progress bars.", rich_help_panel="Printing"
        ),
    ] = False,
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

"""``devplan bench ARTIFACT``: latency with percentiles, cold start, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = """Examples:

devplan bench model.pte --repeat 500 --json

devplan bench batched.pte --each-bucket
"""


def bench(
    artifact: flags.Artifact,
    method: flags.Method = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE.npz|FILE.safetensors", help="Inputs by name.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="NAME=1x98", help="Shape of a random input; may be repeated."),
    ] = None,
    seed: flags.Seed = 0,
    weights: flags.Weights = None,
    tuning: flags.Tuning = None,
    device_map: flags.DeviceMap = None,
    device: flags.DeviceName = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Timed calls.")] = 100,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Calls before those.")] = 10,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start/--no-cold-start", help="Also time a fresh process up to its first result."
        ),
    ] = True,
    each_bucket: Annotated[
        bool, typer.Option("--each-bucket", help="Also time calls of each bucket's sizes.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE.html", help="Write a page with the distribution of latencies."
        ),
    ] = None,
    allow_torch_ops: flags.AllowTorch = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Measure latency with percentiles, split into copies and device time; cold start; memory."""
    from .bench_job import Measurement, run_measurement
    from .loading import parse_device_map

    asked = Measurement(
        artifact=artifact,
        method=method,
        inputs=inputs,
        shapes=tuple(shape or ()),
        seed=seed,
        device=device,
        repeat=repeat,
        warmup=warmup,
        cold_start=cold_start,
        allow_torch_ops=allow_torch_ops,
        report=report,
        weights=tuple(weights or ()),
        each_bucket=each_bucket,
        tuning=tuning,
        device_map=parse_device_map(device_map or ()),
    )
    return run_measurement(asked, Output(json, quiet, verbose))

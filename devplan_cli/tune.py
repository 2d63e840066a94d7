"""``devplan tune ARTIFACT``: measure library algorithms on this GPU, and keep the best in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = "Example: devplan tune model.pte -o h200.json, then devplan run model.pte --tuning h200.json"


def tune(
    artifact: flags.Artifact,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.json", help="Tuning file.  [default: NAME.tuning.json]"),
    ] = None,
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
    device: flags.DeviceName = None,
    allow_torch_ops: flags.AllowTorch = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Measure each algorithm of each product and convolution on this GPU; `run --tuning` uses the result."""
    from .tune_job import Wanted, run_tuning

    shapes, files = tuple(shape or ()), tuple(weights or ())
    wanted = Wanted(artifact, output, method, inputs, shapes, seed, device, allow_torch_ops, files)
    return run_tuning(wanted, Output(json, quiet, verbose))

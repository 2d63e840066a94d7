"""``devplan tune ARTIFACT``: measure algorithms and kernels on this GPU, and keep the best in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = """Examples:

devplan tune model.pte -o h200.json

devplan run model.pte --tuning h200.json

devplan export model.py --arch sm_90 --tuning h200.json
"""


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
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels/--no-kernels", help="Also measure configurations of kernels (needs torch and triton)."
        ),
    ] = True,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", metavar="N", min=0, help="Processes that compile kernels.")
    ] = 0,
    allow_torch_ops: flags.AllowTorch = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Measure library algorithms and kernels' configurations on this GPU, for `run` and `export`.

    All methods, at their bounds and buckets, unless a method, inputs or shapes are given.
    """
    from .tune_job import Wanted, run_tuning

    shapes, files = tuple(shape or ()), tuple(weights or ())
    wanted = Wanted(
        artifact=artifact,
        output=output,
        method=method,
        inputs=inputs,
        shapes=shapes,
        seed=seed,
        device=device,
        allow_torch_ops=allow_torch_ops,
        weights=files,
        kernels=kernels,
        jobs=jobs,
    )
    return run_tuning(wanted, Output(json, quiet, verbose))

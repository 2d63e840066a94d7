"""``devplan verify ARTIFACT SOURCE``: compare an artifact with the eager model it was made from."""

from __future__ import annotations

from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = """Examples:

devplan verify model.pte model.py

devplan verify model.pte model.py --device emulator --atol 1e-4
"""


def verify(
    artifact: flags.Artifact,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="What the artifact was exported from.")
    ],
    device: flags.DeviceName = None,
    calls: Annotated[
        int, typer.Option("--calls", metavar="N", min=1, help="Calls in a row of each method.")
    ] = 3,
    rtol: Annotated[
        float | None, typer.Option("--rtol", min=0.0, help="Relative tolerance; by dtype if left out.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option("--atol", min=0.0, help="Absolute tolerance; by dtype if left out.")
    ] = None,
    seed: flags.Seed = 0,
    weights: flags.Weights = None,
    allow_torch_ops: flags.AllowTorch = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Run artifact and eager model on the same inputs and compare, three calls in a row, state included."""
    from ..passes.source.text import split_source
    from .artifacts import require_file
    from .loading import check_device_name

    check_device_name(device)
    require_file(artifact)
    split_source(source)
    out = Output(json, quiet, verbose)
    out.say(f"verifying {artifact} against {source}")
    from .verify_job import Check, run_check

    check = Check(
        artifact=artifact,
        device=device,
        calls=calls,
        rtol=rtol,
        atol=atol,
        seed=seed,
        allow_torch_ops=allow_torch_ops,
        weights=tuple(weights or ()),
    )
    return run_check(check, source, out)

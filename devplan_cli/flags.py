"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PRINT = "Printing"

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="A `.pte` artifact.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.", rich_help_panel=_PRINT)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no more than errors.", rich_help_panel=_PRINT)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more; show tracebacks.", rich_help_panel=_PRINT)
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cuda:N|emulator|cpu",
        help="Where to run; `emulator:triton` takes Triton's interpreter.  "
        "[default: the GPU, else the emulator]",
    ),
]
Method = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help="The method; needed if there are several.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of random inputs.")]
AllowTorch = Annotated[
    bool, typer.Option("--allow-torch-ops", help="Let operators without a kernel of ours run in torch.")
]
Weights = Annotated[
    list[Path] | None,
    typer.Option(
        "--weights",
        metavar="FILE.safetensors",
        help="Weights of an artifact that was exported without them; a file or a folder, may be repeated.",
    ),
]
Tuning = Annotated[
    Path | None, typer.Option("--tuning", metavar="FILE.json", help="Algorithms that `devplan tune` chose.")
]
DeviceMap = Annotated[
    list[str] | None,
    typer.Option(
        "--device-map", metavar="cuda:0=cuda:1", help="Which GPU serves which slot; may be repeated."
    ),
]

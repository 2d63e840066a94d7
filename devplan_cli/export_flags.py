"""The options of `devplan export`, each with its help and the group that it is listed in."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_WHAT, _IO, _PLAN = "What and for what", "Inputs and outputs", "Planning"
_CODE, _BUDGET, _AFTER = "Constants and code", "Budgets: over one, nothing is written (code 5)", "Afterwards"

Text = str | None


def _option(*names: str, metavar: str = "", help: str, panel: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar or None, help=help, show_default=False, rich_help_panel=panel)


Source = Annotated[
    Text,
    typer.Argument(metavar="SOURCE", help="model.py, model.py:NAME, package.module:NAME or program.pt2"),
]
Output = Annotated[
    Text,
    _option("--output", "-o", metavar="FILE", help="The artifact; NAME.pte here if left out.", panel=_WHAT),
]
Config = Annotated[
    Text,
    _option("--config", metavar="FILE", help="A TOML file, or the name of one of `configs/`.", panel=_WHAT),
]
Device = Annotated[
    Text,
    _option(
        "--device",
        metavar="DEVICE",
        help="cuda or cpu: where the graph is placed; `cuda` if left out.",
        panel=_WHAT,
    ),
]
Dtype = Annotated[
    Text,
    _option(
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16 or float16: cast parameters and floating inputs.",
        panel=_WHAT,
    ),
]
Quantize = Annotated[
    Text,
    _option(
        "--quantize",
        metavar="SCHEME",
        help="int8-weight-only or int4-weight-only[:GROUP]: round the weights of linear layers.",
        panel=_WHAT,
    ),
]
Arch = Annotated[
    Text,
    _option(
        "--arch",
        metavar="LIST",
        help="sm_80,sm_90,... or native; the GPU present, else sm_80,sm_90, if left out.",
        panel=_WHAT,
    ),
]
Io = Annotated[
    list[str] | None,
    _option(
        "--io",
        metavar="RULE",
        help="host, device or METHOD.TENSOR=device: where callers keep them; repeatable.",
        panel=_IO,
    ),
]
SkipH2d = Annotated[
    list[str] | None,
    _option(
        "--skip-h2d",
        metavar="[METHOD[.INPUT]]",
        help="Take these inputs (all, without a value) on the device.",
        panel=_IO,
    ),
]
SkipD2h = Annotated[
    list[str] | None,
    _option(
        "--skip-d2h",
        metavar="[METHOD[.OUTPUT]]",
        help="Leave these outputs (all, without a value) on the device.",
        panel=_IO,
    ),
]
Buckets = Annotated[
    list[str] | None,
    _option(
        "--buckets",
        metavar="RULE",
        help="DIM=1,8,32: sizes of a dynamic dimension with a plan and a CUDA graph of"
        " their own; repeatable. DIM is a Dim's name or INPUT:NUMBER.",
        panel=_PLAN,
    ),
]
DevicePlanning = Annotated[
    bool | None,
    _option(
        "--device-planning/--no-device-planning",
        help="Static device arenas, or allocation at run time.",
        panel=_PLAN,
    ),
]
PlanningEffort = Annotated[
    Text,
    _option(
        "--planning-effort",
        metavar="EFFORT",
        help="fast, default or max: how long to search for a smaller arena.",
        panel=_PLAN,
    ),
]
Reorder = Annotated[
    bool | None,
    _option("--reorder/--no-reorder", help="Reorder instructions where that lowers the peak.", panel=_PLAN),
]
Weights = Annotated[
    Text,
    _option(
        "--weights",
        metavar="PLACE",
        help="embed, external, reference or none: where weights are kept. The last two build the model "
        "without weights, however large.",
        panel=_CODE,
    ),
]
WeightsFile = Annotated[
    list[str] | None,
    _option(
        "--weights-file",
        metavar="FILE",
        help="A safetensors file, or a folder of them, for `reference`; repeatable.",
        panel=_CODE,
    ),
]
LibraryCalls = Annotated[
    bool | None,
    _option(
        "--library-calls/--no-library-calls",
        help="Use cuBLASLt and cuDNN, or kernels only: then nothing but the driver is needed.",
        panel=_CODE,
    ),
]
LibraryWorkspace = Annotated[
    Text,
    _option(
        "--library-workspace",
        metavar="SIZE",
        help="Most memory reserved for one call of a library, which chooses its algorithm within it.  "
        "[default: 4MiB for a product, 8MiB for a convolution]",
        panel=_CODE,
    ),
]
Tuning = Annotated[
    Text,
    _option(
        "--tuning",
        metavar="FILE.json",
        help="Compile kernels, and choose algorithms of libraries, as `devplan tune` found best.",
        panel=_CODE,
    ),
]
AllowHostOps = Annotated[
    bool | None,
    _option(
        "--allow-host-ops", help="Let operators that the device cannot run run on the host.", panel=_CODE
    ),
]
AllowTf32 = Annotated[
    bool | None, _option("--allow-tf32", help="Let float32 products use TF32.", panel=_CODE)
]
Jobs = Annotated[
    int | None, _option("--jobs", "-j", metavar="N", help="Processes that compile kernels.", panel=_CODE)
]
MemoryBudget = Annotated[
    Text,
    _option("--memory-budget", metavar="SIZE", help="Most planned device memory.", panel=_BUDGET),
]
MaxArtifactSize = Annotated[
    Text,
    _option("--max-artifact-size", metavar="SIZE", help="Most bytes of the artifact.", panel=_BUDGET),
]
MaxCopies = Annotated[
    int | None,
    _option("--max-copies", metavar="N", help="Most copies of all methods.", panel=_BUDGET),
]
FailOnCopy = Annotated[
    bool | None, _option("--fail-on-copy", help="The same as `--max-copies 0`.", panel=_BUDGET)
]
Check = Annotated[
    bool | None, _option("--check", help="Run `verify` on the result before it is written.", panel=_AFTER)
]
Report = Annotated[
    Text,
    _option("--report", metavar="FILE.html", help="Write the memory timeline as a page.", panel=_AFTER),
]
Explain = Annotated[
    bool,
    _option(
        "--explain",
        help="Print what each pass did, where each operator was placed and why, and every copy.",
        panel=_AFTER,
    ),
]
PrintConfig = Annotated[
    bool,
    _option(
        "--print-config",
        help="Print the configuration with the origin of each value, and stop.",
        panel=_AFTER,
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option("--no-progress", help="Plain lines instead of progress bars.", rich_help_panel="Printing"),
]

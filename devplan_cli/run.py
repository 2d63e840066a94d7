"""``devplan run ARTIFACT``: execute a method on CUDA, or on the emulator where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = """Examples:

devplan run model.pte --input x=x.npy --outputs out.npz

devplan run model.pte --seed 1 --expect out.npz --rtol 1e-4 --json
"""


def run(
    artifact: flags.Artifact,
    method: flags.Method = None,
    input: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="An input; may be repeated.")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE.npz|FILE.safetensors", help="Inputs by name.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="NAME=1x98", help="Shape of a random input; may be repeated."),
    ] = None,
    seed: flags.Seed = 0,
    outputs: Annotated[
        Path | None,
        typer.Option("--outputs", metavar="FILE.npz", help="Write the outputs (or `.safetensors`)."),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option("--expect", metavar="FILE.npz", help="Compare with these; code 4 if they differ."),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option("--rtol", min=0.0, help="Relative tolerance of `--expect`; by dtype if left out."),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option("--atol", min=0.0, help="Absolute tolerance of `--expect`; by dtype if left out."),
    ] = None,
    device: flags.DeviceName = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Timed calls.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Calls before those.")] = 0,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE.json", help="Write a trace for Perfetto.")
    ] = None,
    require_cuda_graph: Annotated[
        bool, typer.Option("--require-cuda-graph", help="Fail with the reason where no CUDA graph is used.")
    ] = False,
    weights: flags.Weights = None,
    tuning: flags.Tuning = None,
    device_map: flags.DeviceMap = None,
    allow_torch_ops: flags.AllowTorch = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Execute a method on CUDA, or on the emulator where there is no GPU."""
    from .loading import parse_device_map
    from .run_job import Order, run_order

    order = Order(
        artifact=artifact,
        method=method,
        single=tuple(input or ()),
        inputs=inputs,
        shapes=tuple(shape or ()),
        seed=seed,
        outputs=outputs,
        expect=expect,
        rtol=rtol,
        atol=atol,
        device=device,
        repeat=repeat,
        warmup=warmup,
        profile=profile,
        require_cuda_graph=require_cuda_graph,
        allow_torch_ops=allow_torch_ops,
        tuning=tuning,
        device_map=parse_device_map(device_map or ()),
        weights=tuple(weights or ()),
    )
    return run_order(order, Output(json, quiet, verbose))

"""What `bench` does; the measuring itself is `runtime.bench`'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifacts import choose_method, open_artifact
from .console import Output
from .loading import check_device_name
from .run_inputs import gather_inputs
from .run_job import buckets_view
from .words import count, microseconds, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Measurement:
    """The options of one `bench`."""

    artifact: Path
    method: str | None
    inputs: Path | None
    shapes: tuple[str, ...]
    seed: int
    device: str | None
    repeat: int
    warmup: int
    cold_start: bool
    allow_torch_ops: bool
    report: Path | None = None
    weights: tuple[Path, ...] = ()


def run_measurement(asked: Measurement, output: Output) -> int:
    """Measure and print; 0."""
    check_device_name(asked.device)
    program = open_artifact(asked.artifact).planned.program
    method = program.method(choose_method(asked.method, [m.name for m in program.methods]))
    inputs, _ = gather_inputs(method, (), asked.inputs, asked.shapes, asked.seed)
    output.say(f"measuring {count(asked.repeat, 'call')} of `{method.name}`")
    from ..runtime.bench import measure

    document = measure(
        asked.artifact,
        method.name,
        inputs,
        device=asked.device,
        repeat=asked.repeat,
        warmup=asked.warmup,
        cold_start=asked.cold_start,
        allow_torch_ops=asked.allow_torch_ops,
        page=asked.report,
        weights=asked.weights,
    )
    if asked.report is not None:
        output.say(f"wrote {asked.report}")
    output.document(document)
    output.show(*view(document))
    return 0


def view(document: dict[str, Any]) -> list[RenderableType]:
    """Tables of latency, cold start and memory."""
    points = ("p50", "p90", "p99", "min", "mean")
    latency = table(
        f"Latency of {document['method']} on {document['device']}", "part", *(f"{p}>" for p in points)
    )
    for part, numbers in document["latency_us"].items():
        if numbers:
            latency.add_row(part, *(microseconds(numbers[p]) for p in points))
    memory = table("Memory", "part", "bytes>")
    for part, nbytes in document["memory"].items():
        memory.add_row(part, "-" if nbytes is None else size(nbytes))
    items: list[RenderableType] = [latency, "", memory]
    if "buckets" in document:
        items += ["", *buckets_view(document)]
    if document.get("cold_start_s"):
        cold = table("Cold start", "up to", "seconds>")
        for part, seconds in document["cold_start_s"].items():
            cold.add_row(part, f"{seconds:.3f}")
        items += ["", cold]
    return items

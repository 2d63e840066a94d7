"""What `bench` does; the measuring itself is `runtime.measure.bench`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import UsageError
from .artifacts import check_targets, choose_method, open_artifact
from .console import Output
from .loading import check_device_name, teller
from .run_inputs import gather_inputs
from .run_job import buckets_view
from .words import count, microseconds, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runtime.program import Method, PlannedProgram


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
    each_bucket: bool = False
    tuning: Path | None = None
    device_map: Mapping[str, str] | None = None


def run_measurement(asked: Measurement, output: Output) -> int:
    """Measure and print; 0."""
    check_device_name(asked.device)
    check_targets(asked.report, sources=(asked.artifact, *asked.weights))
    planned = open_artifact(asked.artifact).planned
    method = planned.program.method(choose_method(asked.method, [m.name for m in planned.program.methods]))
    inputs, _ = gather_inputs(method, (), asked.inputs, asked.shapes, asked.seed)
    each = _bucket_inputs(planned, method, asked.seed) if asked.each_bucket else []
    output.say(f"measuring {count(asked.repeat, 'call')} of `{method.name}`")
    from ..runtime.measure.bench import measure

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
        bucket_inputs=each,
        weights=asked.weights,
        tuning=asked.tuning,
        device_map=asked.device_map,
        notify=teller(output),
    )
    if asked.report is not None:
        output.say(f"wrote {asked.report}")
    output.document(document)
    output.show(*view(document))
    return 0


def _bucket_inputs(planned: PlannedProgram, method: Method, seed: int) -> list[dict[str, Any]]:
    """Random inputs for each of the method's buckets; UsageError when there is none."""
    buckets = [
        bucket for plan in planned.plan.methods if plan.method == method.name for bucket in plan.buckets
    ]
    if not buckets:
        hint = "export with `--buckets batch=1,8,32`"
        raise UsageError(
            "cannot use `--each-bucket`", why=f"method `{method.name}` has no buckets", hint=hint
        )
    names = [symbol.name for symbol in method.symbols]
    return [
        gather_inputs(method, seed=seed, sizes=dict(zip(names, bucket.sizes, strict=True)))[0]
        for bucket in buckets
    ]


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
        if nbytes is not None:  # which a device may not have, as the emulator has no streams
            memory.add_row(part, size(nbytes))
    items: list[RenderableType] = [latency, "", memory]
    if "buckets" in document:
        items += ["", *buckets_view(document)]
    if document.get("cold_start_s"):
        cold = table("Cold start", "up to", "seconds>")
        for part, seconds in document["cold_start_s"].items():
            cold.add_row(part, f"{seconds:.3f}")
        items += ["", cold]
    return items

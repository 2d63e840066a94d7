"""Measuring an artifact: latency with its parts, cold start, memory by the driver's word."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DevplanError, ExecutionError
from .bench_inputs import place_inputs
from .bench_memory import MemoryWatch, memory_of, watch_of, watched, workspaces_of

if TYPE_CHECKING:
    from ..calls.bound import BucketUse
    from ..engine import LoadedMethod, LoadedProgram
    from .timing import Percentiles

PARTS = ("h2d", "device", "d2h")


@dataclass(frozen=True)
class BenchResult:
    """What was measured. ``latency`` maps ``end_to_end``, ``h2d``, ``device``, ``d2h`` to percentiles.

    A part is None where it cannot be told apart (a method that branches). ``memory`` is in bytes, None where
    the device has no such number. ``measured_total`` is by how much the driver's free memory fell from the
    bare context to the loaded program after its calls, and the sum of all parts but ``staging``, which is on
    the host. ``context`` is what is still gone when a program has run and was closed (handles and code of
    CUDA and its libraries). Of what a program takes beyond that the driver is asked at each step: ``tensors``
    are outputs and inputs that lie on the device, with padding, ``rounding`` what it gave beyond the bytes
    asked for, ``code`` is of kernels and libraries, ``streams`` with pinned memory, ``load`` and ``calls``
    what it took meanwhile at no such step. ``unnamed`` is the rest.
    """

    method: str
    device: str
    latency: Mapping[str, Percentiles | None]
    memory: Mapping[str, int | None]
    no_graph_reason: str
    times: tuple[float, ...] = ()
    """Seconds of each timed call, host to host, in order."""
    cold_start: Mapping[str, float] = field(default_factory=dict[str, float])
    buckets: tuple[BucketUse, ...] = ()
    """What became of each declared bucket in all calls, warm-up included."""
    other_calls: int = 0
    workspaces: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """By library function: distinct calls, and the most bytes that one is offered and needs."""
    bucket_latency: tuple[Percentiles, ...] = ()
    """Of calls of each bucket's sizes, host to host, where it was asked for."""

    def document(self) -> dict[str, Any]:
        """As the command line's contract has it."""
        document: dict[str, Any] = {
            "method": self.method,
            "device": self.device,
            "cuda_graph": {"reason": self.no_graph_reason} if self.no_graph_reason else True,
            "latency_us": {part: p.document() if p else None for part, p in self.latency.items()},
            "cold_start_s": dict(self.cold_start),
            "memory": dict(self.memory),
            "workspaces": {name: dict(use) for name, use in self.workspaces.items()},
        }
        if self.buckets:
            document["buckets"] = [bucket.document() for bucket in self.buckets]
            for bucket, latency in zip(document["buckets"], self.bucket_latency, strict=False):
                bucket["latency_us"] = latency.document()
            document["other_calls"] = self.other_calls
        return document


def measure(
    artifact: Path,
    method: str,
    inputs: Mapping[str, Any],
    *,
    device: str | None = None,
    repeat: int = 100,
    warmup: int = 10,
    cold_start: bool = True,
    allow_torch_ops: bool = False,
    page: Path | None = None,
    bucket_inputs: Sequence[Mapping[str, Any]] = (),
    weights: Sequence[Path] = (),
    tuning: Path | None = None,
    device_map: Mapping[str, str] | None = None,
    notify: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Load an artifact, measure one method, give `BenchResult.document`.

    ``page`` is HTML to write; ``bucket_inputs`` are inputs of each bucket's sizes, to be timed as well; the
    other arguments that are not `bench`'s are `load`'s.
    """
    from ..start import load

    options: dict[str, Any] = {
        "device": device,
        "allow_torch_ops": allow_torch_ops,
        "weights": [str(file) for file in weights],
        "tuning": None if tuning is None else str(tuning),
        "device_map": dict(device_map) if device_map else None,
    }
    cold = measure_cold_start(artifact, method, inputs, options) if cold_start else {}
    watch = watch_of(artifact, device, device_map, weights)
    if watch is not None:
        with load(artifact, **options, notify=_silent) as program:
            program.method(method).run(place_inputs(program, program.method(method), inputs))
        watch.settle()
    with watched(watch, "load"):
        program = load(artifact, **options, notify=notify)
    with program:
        called = program.method(method)
        with watched(watch, "calls"):
            placed = place_inputs(program, called, inputs)
            if watch is not None:
                called.run(placed)
        result = bench(program, called, placed, repeat, warmup, watch)
        if bucket_inputs:
            each = [place_inputs(program, called, given) for given in bucket_inputs]
            latencies = tuple(_latency(called, given, repeat, max(warmup, 1))[0] for given in each)
            uses, others = called.buckets, called.other_calls
            result = replace(result, buckets=uses, other_calls=others, bucket_latency=latencies)
    document = {**result.document(), "cold_start_s": cold or None}
    if page is not None:
        from ..artifact.atomic import write_whole
        from .bench_page import page as page_of

        write_whole(page, page_of(document, [seconds * 1e6 for seconds in result.times]))
    return document


def bench(
    program: LoadedProgram,
    method: LoadedMethod,
    inputs: Mapping[str, Any],
    repeat: int = 100,
    warmup: int = 10,
    watch: MemoryWatch | None = None,
) -> BenchResult:
    """Measure a loaded method with these inputs.

    Args:
        program: the loaded program.
        method: one of its methods.
        inputs: by name.
        repeat: timed calls.
        warmup: calls before them.
        watch: on the GPU's memory, since before the program was loaded and called once.
    """
    done = 0 if watch is None else 1  # a call was made while it was watched
    end_to_end, times = _latency(method, inputs, repeat, max(warmup, 1) - done)
    latency: dict[str, Percentiles | None] = {"end_to_end": end_to_end}
    memory = memory_of(program, method, watch)  # before the parts, which take some too
    latency |= _parts(program, method, inputs, repeat)
    labels = [backend.label for slot, backend in program.backends.items() if slot.kind != "cpu"]
    device = ", ".join(labels) or "cpu"
    return BenchResult(
        method.name,
        device,
        latency,
        memory,
        method.no_graph_reason,
        tuple(times),
        buckets=method.buckets,
        other_calls=method.other_calls,
        workspaces=workspaces_of(program),
    )


def _latency(
    method: LoadedMethod, inputs: Mapping[str, Any], repeat: int, warmup: int
) -> tuple[Percentiles, list[float]]:
    """Of calls host to host, after those that warm up; the seconds of each too."""
    from .timing import Percentiles

    for _ in range(warmup):
        method.run(inputs)
    clock, times = time.perf_counter, list[float]()
    for _ in range(repeat):
        start = clock()
        method.run(inputs)
        times.append(clock() - start)
    return Percentiles.of(times), times


def _parts(
    program: LoadedProgram, method: LoadedMethod, inputs: Mapping[str, Any], repeat: int
) -> dict[str, Percentiles | None]:
    from .timing import Percentiles, part_of, timed_steps, timeline

    steps = timed_steps(program, method)
    if not steps:
        return dict.fromkeys(PARTS)
    groups: list[tuple[str, Any, list[Any]]] = []
    for timed in steps:
        part = part_of(timed.instruction)
        if not groups or groups[-1][:2] != (part, timed.device):
            groups.append((part, timed.device, []))
        groups[-1][2].append(timed.step)
    parts = [(device, group) for _, device, group in groups]
    runs = timeline(program.backends, parts, repeat, lambda: method.refill(inputs))

    def total(part: str, run: list[float]) -> float:
        return sum(seconds for (name, _, _), seconds in zip(groups, run, strict=True) if name == part)

    return {part: Percentiles.of([total(part, run) for run in runs]) for part in PARTS}


def _silent(line: str) -> None:
    """Told what was told before."""


def _failure_of(done: subprocess.CompletedProcess[str]) -> DevplanError:
    """The error that a fresh process ended with: of its kind, where a user can act on it."""
    kinds = {kind.kind: kind for kind in DevplanError.__subclasses__()}
    try:
        kind, what, why, hint = json.loads(done.stdout)
        return kinds[kind](what, why=why, hint=hint)
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines()
        return ExecutionError("the cold start failed", why=lines[-1] if lines else f"exit {done.returncode}")


def measure_cold_start(
    artifact: Path,
    method: str,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Seconds from the start of a fresh process to the end of ``import``, ``load`` and ``first_result``.

    ``options`` are `load`'s, in words that JSON has.

    Raises:
        DevplanError: what that process raised.
        ExecutionError: it failed otherwise; the message holds its last line.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.npz"
        arrays: dict[str, Any] = {}
        for name, value in inputs.items():
            # NumPy's files know no bfloat16: its bits are kept under a name that says so.
            dtype, raw = getattr(value, "dtype", None), getattr(value, "raw", None)
            arrays[f"{name}:{dtype}" if raw is not None else name] = value if raw is None else raw
        np.savez(file, **arrays)
        command = [
            sys.executable,
            "-m",
            f"{__package__}.cold_start",
            str(artifact),
            method,
            str(file),
            json.dumps(options),
        ]
        command.append(repr(time.time()))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failure_of(done)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds

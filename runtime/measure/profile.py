"""A trace of one call for Perfetto and Chrome: one row per stream, one slice per instruction.

The format is the Trace Event Format's "complete" events (times in microseconds):
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..artifact.atomic import write_whole
from ..errors import ExecutionError
from ..program import Copy, Device, HostCall, Instruction, Launch, LibraryCall
from .timing import Timed, part_of, timed_steps, timeline

if TYPE_CHECKING:
    from ..engine import LoadedMethod, LoadedProgram

_RUNS = 20


def write_trace(program: LoadedProgram, method: LoadedMethod, inputs: Mapping[str, Any], path: Path) -> None:
    """Call a method, time each of its instructions (median of 20 runs), and write the trace.

    On CUDA the device's clock counts, between events in one graph. Each event costs the device about a
    microsecond, so the whole is longer than a call.

    Raises:
        ExecutionError: the method branches, so that its instructions have no one order.
    """
    method.run(inputs)
    steps = timed_steps(program, method)
    if steps is None:
        raise ExecutionError(
            f"method `{method.name}` cannot be profiled",
            why="it branches, so its instructions have no one order",
        )
    groups = [(timed.device, [timed.step]) for timed in steps]
    runs = timeline(program.backends, groups, _RUNS, lambda: method.refill(inputs)) if steps else []
    durations = [median(run[index] for run in runs) for index in range(len(steps))]
    document = {
        "displayTimeUnit": "ns",
        "traceEvents": trace_events(method.name, steps, durations, program.devices),
    }
    write_whole(path, json.dumps(document))


def trace_events(
    method: str, steps: Sequence[Timed], seconds: Sequence[float], labels: Mapping[Device, str]
) -> list[dict[str, Any]]:
    """Events for steps that run one after another; rows are devices' streams, and the host."""
    rows = sorted({timed.device for timed in steps})
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"devplan: {method}"}}
    ]
    for number, device in enumerate(rows):
        kind = "host" if device.kind == "cpu" else f"{device} stream ({labels.get(device, '')})"
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": kind}})
    at = 0.0
    for timed, duration in zip(steps, seconds, strict=True):
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": rows.index(timed.device),
                "ts": round(at * 1e6, 3),
                "dur": round(duration * 1e6, 3),
                "name": name_of(timed.instruction),
                "cat": part_of(timed.instruction),
                "args": {"instruction": timed.index, **_details(timed.instruction)},
            }
        )
        at += duration
    return events


def name_of(instruction: Instruction) -> str:
    """What a person looks for: the user's module, else what runs."""
    what = _what(instruction)
    module = instruction.origin.module
    return f"{module}: {what}" if module else what


def _what(instruction: Instruction) -> str:
    if isinstance(instruction, Launch):
        return instruction.kernel
    if isinstance(instruction, LibraryCall):
        return instruction.function
    if isinstance(instruction, HostCall):
        return instruction.target
    if isinstance(instruction, Copy):
        return f"{instruction.kind.value} {instruction.source}"
    return "jump"


def _details(instruction: Instruction) -> dict[str, Any]:
    origin = instruction.origin
    details: dict[str, Any] = {"reads": list(instruction.reads), "writes": list(instruction.writes)}
    if origin.operator:
        details["operator"] = origin.operator
    if origin.file:
        details["source"] = f"{origin.file}:{origin.line}"
    if isinstance(instruction, Copy) and instruction.reason:
        details["reason"] = instruction.reason
    return details

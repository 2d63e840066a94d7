"""Measuring and profiling, on hand-made programs and a fake device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import ArtifactError, ExecutionError, UsageError
from devplan.runtime.measure.bench import bench, measure_cold_start
from devplan.runtime.measure.profile import write_trace
from devplan.runtime.measure.timing import Percentiles, part_of, timed_steps
from devplan.runtime.program import CPU, Copy, CopyKind, Device, Launch, SourceLocation
from devplan.runtime.recording import RecordingBackend

CUDA = Device("cuda", 0)
INPUTS = {"x": np.arange(4, dtype=np.float32)}


@pytest.fixture
def loaded(program: Any) -> LoadedProgram:
    """Copy in, launch, copy out."""
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch("double", [x], [y], 4)
    method.output("y", y)
    program.kernel("double")
    return LoadedProgram(
        program.planned(), program.bytes, {CUDA: RecordingBackend(CUDA, {}), CPU: CpuBackend()}
    )


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
def test_percentiles_are_of_the_given_times_and_in_order(times: list[float]) -> None:
    found = Percentiles.of(times)
    micro = sorted(seconds * 1e6 for seconds in times)
    assert {found.p50, found.p90, found.p99, found.min} <= set(micro)
    assert found.min == micro[0] and found.min <= found.p50 <= found.p90 <= found.p99 <= micro[-1]
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert sum(time <= value for time in micro) >= share * len(micro) - 1e-9
    assert found.mean == pytest.approx(sum(micro) / len(micro))


def test_a_measurement_has_the_contracts_keys(loaded: LoadedProgram) -> None:
    document = bench(loaded, loaded.method(), INPUTS, repeat=5, warmup=1).document()
    assert list(document["latency_us"]) == ["end_to_end", "h2d", "device", "d2h"]
    for numbers in document["latency_us"].values():
        assert list(numbers) == ["p50", "p90", "p99", "min", "mean"]
    assert list(document["memory"]) == [
        "arena", "constants", "state", "staging", "graph", "tensors", "rounding", "code", "streams", "load",
        "calls", "unnamed", "context", "measured_total",
    ]  # fmt: skip
    assert document["memory"]["measured_total"] is None
    assert document["method"] == "forward"
    json.dumps(document)


def test_a_measurement_calls_as_often_as_asked(loaded: LoadedProgram) -> None:
    bench(loaded, loaded.method(), INPUTS, repeat=7, warmup=3)
    assert loaded.method().copies.counts[CopyKind.H2D] == 10


def test_a_method_that_branches_has_no_parts(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    method.jump(2)
    method.output("y", x)
    loaded = LoadedProgram(program.planned(), {}, {CUDA: RecordingBackend(CUDA, {}), CPU: CpuBackend()})
    document = bench(loaded, loaded.method(), INPUTS, repeat=2, warmup=1).document()
    assert document["latency_us"]["device"] is None
    assert timed_steps(loaded, loaded.method()) is None
    with pytest.raises(ExecutionError, match="branches"):
        write_trace(loaded, loaded.method(), INPUTS, Path("never.json"))


def test_copies_between_host_and_device_are_parts_of_their_own() -> None:
    assert part_of(Copy(CopyKind.H2D, "a", "b")) == "h2d"
    assert part_of(Copy(CopyKind.D2H, "a", "b")) == "d2h"
    assert part_of(Copy(CopyKind.LOCAL, "a", "b")) == "device"
    assert part_of(Launch("k", (), (1, 1, 1), (), ())) == "device"


def test_a_trace_has_a_row_per_stream_and_a_slice_per_instruction(
    loaded: LoadedProgram, tmp_path: Path
) -> None:
    write_trace(loaded, loaded.method(), INPUTS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(rows) == 1 and rows[0].startswith("cuda:0 stream")
    assert [(event["name"], event["cat"]) for event in slices] == [
        ("h2d x_host", "h2d"), ("double", "device"), ("d2h y", "d2h"),
    ]  # fmt: skip
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(event["ts"] >= end - 0.002 for event, end in zip(slices[1:], ends, strict=False))


def test_a_slice_is_named_after_the_users_module() -> None:
    from devplan.runtime.measure.profile import name_of

    origin = SourceLocation("encoder.layer.0", "aten.addmm", "model.py", 12)
    assert name_of(Launch("fused_7", (), (1, 1, 1), (), (), origin=origin)) == "encoder.layer.0: fused_7"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"device": "emulator"}, ArtifactError, "cannot be read"),
        ({"device": "cuda:x"}, UsageError, "no valid index"),
        ({"device": None, "device_map": {"cuda:0": "cpu"}}, UsageError, "no slot is served"),
        ({"unknown": 1}, ExecutionError, "unexpected keyword argument 'unknown'"),
    ],
)
def test_a_cold_start_that_fails_says_why(tmp_path: Path, options: Any, kind: Any, message: str) -> None:
    """As the same would fail in this process, with the same code."""
    with pytest.raises(kind, match=message) as caught:
        measure_cold_start(tmp_path / "missing.pte", "forward", {}, options)
    assert type(caught.value) is kind

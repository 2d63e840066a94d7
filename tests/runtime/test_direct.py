"""Small inputs and outputs without copies: the kernels that read or write them use the host's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from devplan.runtime.dtypes import DType
from devplan.runtime.program import CopyKind
from devplan.runtime.recording import RecordingBackend, elementwise

ADD = {"add": elementwise(lambda a, b: a + b, "a_device", "b_device", "y")}
PARAMETERS = (("a", "*fp32"), ("b", "*fp32"), ("y", "*fp32"))


@pytest.fixture(autouse=True)
def reads_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the recording device use host memory up to 64 bytes."""
    for name in ("direct_read_nbytes", "direct_write_nbytes"):
        monkeypatch.setattr(RecordingBackend, name, 64, raising=False)


def adder(program: Any, size: int = 16, grid: int = 1) -> Any:
    """y = a + b, all on the host."""
    method = program.method()
    a, b = method.input("a", (size,)), method.input("b", (size,))
    y = method.tensor("y", (size,))
    method.launch("add", [a, b], [y], grid=(grid, 1, 1))
    program.kernel("add", "", PARAMETERS)
    return method


def ran(device: RecordingBackend, loaded: Any, *inputs: Any) -> tuple[dict[str, Any], list[str]]:
    """A call's results, and what the device was asked to do in it."""
    loaded.prepare()
    device.trace.clear()
    results = loaded.method()(*inputs)
    return results, [line.split()[0] for line in device.trace]


def test_an_addition_of_a_few_numbers_is_one_launch(program: Any) -> None:
    adder(program).output("y", "y")
    loaded, device = program.load(ADD, packed=True)  # the plan gives input and output one place on the host
    a, b = np.arange(16, dtype=np.float32), np.full(16, 0.5, np.float32)
    with loaded:
        for turn in range(3):
            results, requests = ran(device, loaded, a + turn, b)
            np.testing.assert_array_equal(results["y"], a + turn + b)
            assert requests == ["launch", "synchronize"]
        assert sum(loaded.copies.counts.values()) == 0


@pytest.mark.parametrize(
    ("size", "grid", "copies"),
    [(16, 1, []), (17, 1, ["h2d", "h2d", "d2h"]), (16, 256, []), (16, 257, ["h2d", "h2d"])],
)
def test_large_tensors_and_many_programs_are_served_by_copies(
    program: Any, size: int, grid: int, copies: list[str]
) -> None:
    adder(program, size, grid).output("y", "y")
    loaded, device = program.load(ADD)
    ones = np.ones(size, np.float32)
    with loaded:
        results, requests = ran(device, loaded, ones, ones)
        np.testing.assert_array_equal(results["y"], 2 * ones)
        assert [kind for kind in requests if kind in ("h2d", "d2h")] == copies
        assert loaded.copies.counts[CopyKind.H2D] == copies.count("h2d")


@pytest.mark.parametrize(("more", "copies"), [(2, []), (3, ["h2d"])])
def test_what_more_than_three_launches_read_is_copied_once(
    program: Any, more: int, copies: list[str]
) -> None:
    method = adder(program)
    program.kernel("twice", "", (("a", "*fp32"), ("z", "*fp32")))
    z = method.tensor("z", (16,))
    for _ in range(more):
        method.launch("twice", ["a_device"], [z])
    method.output("y", "y")
    method.output("z", z)
    loaded, device = program.load({**ADD, "twice": elementwise(lambda a: a + a, "a_device", "z")})
    ones = np.ones(16, np.float32)
    with loaded:
        results, requests = ran(device, loaded, ones, ones)
        np.testing.assert_array_equal(results["z"], 2 * ones)
        assert [kind for kind in requests if kind == "h2d"] == copies


def test_what_is_read_again_on_the_device_is_copied_back(program: Any) -> None:
    method = adder(program)
    method.output("y", "y")
    z = method.tensor("z", (16,))
    method.call("twice", ["y"], [z])
    method.output("z", z)
    loaded, device = program.load({**ADD, "twice": elementwise(lambda y: y + y, "y", "z")})
    ones = np.ones(16, np.float32)
    with loaded:
        results, requests = ran(device, loaded, ones, ones)
        np.testing.assert_array_equal(results["z"], 4 * ones)
        assert requests == ["launch", "d2h", "twice(y)", "d2h", "synchronize"]


def test_parts_of_one_upload_are_read_where_they_are(program: Any) -> None:
    method = program.method()
    at = method.input("both", (64,), DType.UINT8)
    for index, name in enumerate(("a_device", "b_device")):
        method.view(name, at, (8,), (1,), 32 * index)
        method.values[-1] = replace(method.values[-1], dtype=DType.FLOAT32)
    y = method.tensor("y", (8,))
    method.launch("add", ["a_device", "b_device"], [y])
    program.kernel("add", "", PARAMETERS)
    method.output("y", y)
    loaded, device = program.load(ADD)
    halves = np.arange(16, dtype=np.float32)
    with loaded:
        results, requests = ran(device, loaded, halves.view(np.uint8))
        np.testing.assert_array_equal(results["y"], halves[:8] + halves[8:])
        assert requests == ["launch", "synchronize"]


def test_blocks_are_given_back(program: Any) -> None:
    adder(program).output("y", "y")
    loaded, device = program.load(ADD)
    loaded.prepare()
    loaded.close()
    assert device.closed
    assert sum(line.startswith("allocate host") for line in device.trace) == device.trace.count("free host")


def test_outputs_are_the_callers_own(program: Any) -> None:
    adder(program).output("y", "y")
    loaded, _ = program.load(ADD)
    ones = np.ones(16, np.float32)
    with loaded:
        first = loaded.method()(ones, ones)["y"]
        loaded.method()(ones, 2 * ones)
        np.testing.assert_array_equal(first, 2 * ones)
        borrowed = loaded.method()(ones, 3 * ones, borrow=True)["y"]
        np.testing.assert_array_equal(borrowed.numpy(), 4 * ones)

"""Jumps, host operators, several devices, device tensors and plans of loaded programs, on fake devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.calls.binding import CopyTally
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import ExecutionError, PlanError, UsageError
from devplan.runtime.program import CPU, CopyKind, Device, Port, Role
from devplan.runtime.recording import RecordingBackend, elementwise, operand_view

CUDA = Device("cuda", 0)


def branching(program: Any) -> Any:
    """y = x + 1 if flag else x - 1, as compare-and-jump over device segments."""
    method = program.method()
    flag = method.input("flag", (), DType.BOOL, to=CPU)
    x = method.input("x")
    y = method.tensor("y")
    method.jump(4, flag)  # 1
    method.launch("up", [x], [y])  # 2
    method.jump(5)  # 3
    method.launch("down", [x], [y])  # 4
    method.output("y", y)  # 5
    program.kernel("up")
    program.kernel("down")
    return {
        "up": elementwise(lambda x: x + 1, "x_device", "y"),
        "down": elementwise(lambda x: x - 1, "x_device", "y"),
    }


@pytest.mark.parametrize("static", [True, False])
def test_jumps(program: Any, static: bool) -> None:
    work = branching(program)
    loaded, _ = program.load(work, static=static)
    x = np.ones(4, np.float32)
    for flag, expected in ((True, 2), (False, 0), (True, 2)):
        np.testing.assert_array_equal(loaded.method()(np.array(flag), x)["y"], expected)
    if static:
        assert loaded.method().no_graph_reason == "the method branches"


def test_host_calls_split_the_graph(program: Any, double: Any) -> None:
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch("double", [x], [y])
    method.tensor("h", device=CPU)
    method.copy(y, "h", CopyKind.D2H)
    method.tensor("g", device=CPU)
    method.host("aten::neg.out", ["h"], ["g"])
    z = method.tensor("z")
    method.copy("g", z, CopyKind.H2D)
    method.output("z", z)
    program.kernel("double")

    class FakeHost(CpuBackend):
        def bind(self, instruction: Any, operands: Any, bindings: Any) -> Any:
            return lambda: operand_view(operands["g"]).__setitem__(..., -operand_view(operands["h"]))

    fake = RecordingBackend(CUDA, double)
    loaded = LoadedProgram(program.planned(), {}, {CUDA: fake, CPU: FakeHost()})
    np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["z"], -2)
    assert loaded.method().no_graph_reason == "1 operators run on the host"
    assert [line for line in fake.trace if line.startswith(("capture", "sync"))] == [
        "capture 3",
        "capture 2",
        "synchronize cuda:0",
        "synchronize cuda:0",
    ]


def test_two_devices_wait_for_each_other(program: Any) -> None:
    other = Device("cuda", 1)
    method = program.method()
    x = method.input("x")
    moved = method.tensor("moved", device=other)
    method.copy(x, moved, CopyKind.D2D)
    y = method.tensor("y", device=other)
    method.launch("negate", [moved], [y])
    method.output("y", y)
    program.kernel("negate")
    trace: list[str] = []
    fakes = {
        CUDA: RecordingBackend(CUDA, trace=trace),
        other: RecordingBackend(other, {"negate": elementwise(np.negative, "moved", "y")}, trace),
    }
    loaded = LoadedProgram(program.planned(), {}, {**fakes, CPU: CpuBackend()})
    trace.clear()
    np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["y"], -1)
    assert [line for line in trace if not line.startswith(("bind", "capture"))] == [
        "h2d x_host -> x_device",
        "synchronize cuda:0",
        "d2d x_device -> moved",
        "launch negate[1,1,1](%moved, %y) -> y",
        "d2h y -> y_host",
        "synchronize cuda:1",
    ]
    assert loaded.method().no_graph_reason == "the method uses 2 devices"


def test_unplanned_programs_allocate_and_free_as_they_go(doubler: Any, double: Any) -> None:
    loaded, fake = doubler.load(double, static=False)
    x = np.arange(4, dtype=np.float32)
    before = fake.blocks.count
    for _ in range(2):
        np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)
        assert fake.blocks.count == before
    assert [line for line in fake.trace if line.startswith(("alloc", "free"))][-8:] == [
        "allocate host 16",
        "allocate cuda:0 16",
        "free host",
        "allocate cuda:0 16",
        "free cuda:0",
        "allocate host 16",
        "free cuda:0",
        "free host",
    ]
    assert loaded.copies.counts[CopyKind.H2D] == 2


def device_io(program: Any) -> Any:
    """Input and output stay in device memory."""
    method = program.method()
    method.tensor("x", role=Role.INPUT, external=True)
    method.inputs.append(Port("x", "x"))
    method.tensor("y", role=Role.OUTPUT, external=True)
    method.launch("double", ["x"], ["y"])
    method.outputs.append(Port("y", "y"))
    program.kernel("double")
    return {"double": elementwise(lambda x: x + x, "x", "y")}


@pytest.mark.parametrize("static", [True, False])
def test_device_io_copies_nothing(program: Any, static: bool) -> None:
    loaded, fake = program.load(device_io(program), static=static)
    tensor = loaded.to_device(np.arange(4, dtype=np.float32))
    first = loaded.method()(tensor)["y"]
    second = loaded.method()(first)["y"]
    np.testing.assert_array_equal(first.numpy(), [0, 2, 4, 6])
    np.testing.assert_array_equal(second.numpy(), [0, 4, 8, 12])
    assert loaded.copies == CopyTally()
    with pytest.raises(UsageError, match=r"input `x` must be in the memory of `cuda:0`"):
        loaded.method()(np.ones(4, np.float32))
    with pytest.raises(UsageError, match="input `x` has size 5"):
        loaded.method()(loaded.to_device(np.ones(5, np.float32)))
    loaded.close()
    np.testing.assert_array_equal(second.numpy(), [0, 4, 8, 12])
    assert not fake.closed
    del first, second, tensor
    assert fake.closed
    assert fake.blocks.count == 0


def test_device_outputs_reuse_blocks_and_graphs(program: Any) -> None:
    loaded, fake = program.load(device_io(program))
    tensor = loaded.to_device(np.arange(4, dtype=np.float32))
    for _ in range(10):
        loaded.method()(tensor)
    assert sum(line.startswith("capture") for line in fake.trace) == 1


def test_a_returned_input_is_the_callers_tensor(program: Any) -> None:
    work = device_io(program)
    program.methods[0].outputs.append(Port("same", "x", ("input", "x")))
    loaded, _ = program.load(work)
    tensor = loaded.to_device(np.arange(4, dtype=np.float32))
    assert loaded.method()(tensor)["same"] is tensor


def test_scrub_and_poison(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    for name, source in (("a", x), ("b", "a"), ("c", "b")):
        method.tensor(name)
        method.launch(f"to_{name}", [source], [name])
        program.kernel(f"to_{name}")
    method.output("y", "c")
    seen: list[float] = []

    def to_c(operands: Mapping[str, Operand]) -> None:
        seen.append(operand_view(operands["a"])[0])  # dead by now
        operand_view(operands["c"])[...] = operand_view(operands["b"])

    work = {
        "to_a": elementwise(lambda x: x + 1, "x_device", "a"),
        "to_b": elementwise(lambda a: a + 1, "a", "b"),
        "to_c": to_c,
    }
    loaded, _ = program.load(work, scrub=True, poison=True, packed=False)
    for _ in range(2):
        np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["y"], 3)
    assert np.isnan(seen).all()


def test_values_must_stay_in_their_storage(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    method.view("tail", x, (4,), (1,), offset=4)
    method.output("y", x)
    loaded, _ = program.load()
    with pytest.raises(PlanError, match="value `tail` leaves storage `x_device` of 16 bytes"):
        loaded.method().prepare()


def counting_loop(program: Any) -> Any:
    """while flag: total += x; flag = total < limit (flag on the host, sums on the device)."""
    method = program.method()
    x = method.input("x")  # 0
    total = method.tensor("total")
    method.tensor("flag_device", (), DType.BOOL)
    flag = method.tensor("flag", (), DType.BOOL, CPU)
    method.launch("clear", [x], [total])  # 1
    method.launch("add", [x, total], [total])  # 2
    method.launch("below", [total], ["flag_device"])  # 3
    method.copy("flag_device", flag, CopyKind.D2H)  # 4
    method.jump(7, flag)  # 5
    method.jump(2)  # 6
    method.output("y", total)  # 7
    for name in ("clear", "add", "below"):
        program.kernel(name)
    return {
        "clear": elementwise(np.zeros_like, "x_device", "total"),
        "add": elementwise(lambda x, total: x + total, "x_device", "total", "total"),
        "below": elementwise(lambda total: total[0] < 10, "total", "flag_device"),
    }


@pytest.mark.parametrize("static", [True, False])
def test_loops(program: Any, static: bool) -> None:
    loaded, fake = program.load(counting_loop(program), static=static)
    before = fake.blocks.count
    for step, expected in ((3, 12), (1, 10), (20, 20)):
        y = loaded.method()(np.full(4, step, np.float32))["y"]
        np.testing.assert_array_equal(y, expected)
    assert loaded.copies.counts[CopyKind.D2H] == 3 + (4 + 10 + 1)
    assert fake.blocks.count == before


def test_inputs_on_the_device_arena_are_uploaded(program: Any) -> None:
    """A plan may keep an input in a device's arena without a copy instruction."""
    method = program.method()
    method.tensor("x", role=Role.INPUT)
    method.inputs.append(Port("x", "x"))
    method.output("y", "x")
    loaded, _ = program.load()
    x = np.arange(8, dtype=np.float32)[::2]
    np.testing.assert_array_equal(loaded.method()(x)["y"], x)


def test_planned_device_outputs_are_copied_for_the_caller(program: Any, double: Any) -> None:
    method = program.method()
    x = method.input("x")
    y = method.tensor("y", role=Role.OUTPUT)
    method.launch("double", [x], [y])
    method.outputs.append(Port("y", y))
    program.kernel("double")
    loaded, _ = program.load(double)
    first = loaded.method()(np.ones(4, np.float32))["y"]
    borrowed = loaded.method()(np.zeros(4, np.float32), borrow=True)["y"]
    np.testing.assert_array_equal(first.numpy(), 2)
    np.testing.assert_array_equal(borrowed.numpy(), 0)
    np.testing.assert_array_equal(borrowed.device_array().numpy(), 0)
    loaded.method()(np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="used too late"):
        borrowed.device_array()


def test_a_callers_stream_goes_to_the_one_device_that_takes_it(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
    with pytest.raises(UsageError, match="the program runs on 0"):
        loaded.use_stream(7)

    class Streaming(RecordingBackend):
        streams: ClassVar[list[Any]] = []

        def use_stream(self, stream: object) -> None:
            self.streams.append(stream)

    fake = Streaming(CUDA, double)
    loaded = LoadedProgram(doubler.planned(), {}, {CUDA: fake, CPU: CpuBackend()})
    loaded.use_stream(7)
    loaded.use_stream(None)
    assert fake.streams == [7, None]

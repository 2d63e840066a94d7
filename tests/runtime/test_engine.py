"""The engine on a fake device that records: what is allocated, bound, captured and run, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.binding import CopyTally
from devplan.runtime.cpu import CpuBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import EngineOptions, LoadedProgram
from devplan.runtime.errors import ArtifactError, ExecutionError, PlanError, UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.host import HostTensor, array_at
from devplan.runtime.outputs import BorrowedTensor
from devplan.runtime.program import CPU, CopyKind, Device, Port, Role
from devplan.runtime.recording import RecordingBackend

CUDA = Device("cuda", 0)


def view(operand: Operand) -> np.ndarray:
    return array_at(operand.address, operand.dtype, operand.shape, operand.strides)


def elementwise(function: Any, *names: str) -> Any:
    """Work of a kernel: the last named value becomes the function of the others."""

    def work(operands: Mapping[str, Operand]) -> None:
        *given, out = [view(operands[name]) for name in names]
        out[...] = function(*given)

    return work


def load(
    builder: Any, work: Mapping[str, Any] | None = None, **keywords: Any
) -> tuple[LoadedProgram, RecordingBackend]:
    options = EngineOptions(keywords.pop("scrub", False), keywords.pop("poison", False))
    fake = RecordingBackend(CUDA, work, fail=keywords.pop("fail", lambda line: False))
    planned = builder.planned(**keywords)
    return LoadedProgram(planned, builder.bytes, {CUDA: fake, CPU: CpuBackend()}, options), fake


@pytest.fixture
def doubler(program: Any) -> Any:
    """y = x + x on the device."""
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch("double", [x], [y], 4)
    method.output("y", y)
    program.kernel("double")
    return program


DOUBLE = {"double": elementwise(lambda x: x + x, "x_device", "y")}


def test_trace_of_a_call(doubler: Any) -> None:
    loaded, fake = load(doubler, DOUBLE)
    loaded.method().prepare()
    assert fake.trace == [
        "allocate host 512",
        "allocate cuda:0 512",
        "bind h2d x_host -> x_device",
        "bind launch double[1,1,1](%x_device, %y, 4) -> y",
        "bind d2h y -> y_host",
        "capture 3",
    ]
    fake.trace.clear()
    result = loaded.method()(np.arange(4, dtype=np.float32))
    assert fake.trace == [
        "h2d x_host -> x_device",
        "launch double[1,1,1](%x_device, %y, 4) -> y",
        "d2h y -> y_host",
        "synchronize cuda:0",
    ]
    np.testing.assert_array_equal(result["y"], [0, 2, 4, 6])
    assert loaded.method().no_graph_reason == ""


def test_close_gives_everything_back(doubler: Any) -> None:
    loaded, fake = load(doubler, DOUBLE)
    with loaded:
        loaded.method()(np.ones(4, np.float32))
        assert fake.blocks.count == 2
    assert fake.blocks.count == 0
    assert fake.closed
    with pytest.raises(ExecutionError, match="closed"):
        loaded.method()(np.ones(4, np.float32))
    loaded.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(4), "input `x` has dtype `float64` instead of `float32`"),
        (np.ones((4, 1), np.float32), "input `x` has 2 dimensions instead of 1"),
        (np.ones(5, np.float32), "input `x` has size 5 in dimension 0 instead of 4"),
        (np.ones(16, np.uint8), "input `x` has dtype `uint8` instead of `float32`"),
        ("text", "input `x` is of type `str`"),
        (np.ones(4, ">f4"), "input `x` has dtype"),
        (np.array(["a"]), "input `x` has dtype `<U1`"),
    ],
)
def test_wrong_inputs_are_refused(doubler: Any, value: Any, message: str) -> None:
    loaded, _ = load(doubler, DOUBLE)
    with pytest.raises(UsageError) as caught:
        loaded.method()(value)
    assert message in str(caught.value)


def test_wrong_names_are_refused(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    x = np.ones(4, np.float32)
    with pytest.raises(UsageError, match="no input `z`"):
        loaded.method()(z=x)
    with pytest.raises(UsageError, match="misses input `x`"):
        loaded.method()()
    with pytest.raises(UsageError, match="takes 1 inputs, got 2"):
        loaded.method()(x, x)
    with pytest.raises(UsageError, match="given twice"):
        loaded.method()(x, x=x)
    with pytest.raises(UsageError, match="no method `backward`"):
        loaded.method("backward")


def test_strided_inputs_are_normalised(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    strided = np.arange(8, dtype=np.float32)[::-2]
    np.testing.assert_array_equal(loaded.method()(strided)["y"], 2 * strided)


def test_dlpack_and_array_interface_inputs(doubler: Any) -> None:
    class Interface:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.__array_interface__ = array, array.__array_interface__

    class Capsule:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    loaded, _ = load(doubler, DOUBLE)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(loaded.method()(Interface(x))["y"], 2 * x)
    np.testing.assert_array_equal(loaded.method()(Capsule(x))["y"], 2 * x)


def test_outputs_are_the_callers_own(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    first = loaded.method()(np.ones(4, np.float32))["y"]
    loaded.method()(np.zeros(4, np.float32))
    np.testing.assert_array_equal(first, 2)
    first[0] = 7
    assert first.flags.owndata


def test_borrowed_outputs_raise_once_overwritten(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    borrowed = loaded.method()(np.ones(4, np.float32), borrow=True)["y"]
    assert isinstance(borrowed, BorrowedTensor)
    assert (borrowed.shape, borrowed.dtype) == ((4,), DType.FLOAT32)
    np.testing.assert_array_equal(np.asarray(borrowed), 2)
    loaded.method()(np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="used too late"):
        borrowed.numpy()
    fresh = loaded.method()(np.ones(4, np.float32), borrow=True)["y"]
    loaded.close()
    with pytest.raises(ExecutionError, match="used too late"):
        fresh.numpy()


def test_a_second_thread_is_refused(doubler: Any) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(operands: Mapping[str, Operand]) -> None:
        inside.set()
        leave.wait(5)

    loaded, _ = load(doubler, {"double": slow})
    x = np.ones(4, np.float32)
    thread = threading.Thread(target=loaded.method(), args=(x,))
    thread.start()
    inside.wait(5)
    with pytest.raises(ExecutionError, match="in use by another thread"):
        loaded.method()(x)
    leave.set()
    thread.join()
    loaded.method()(x)


def test_constants_are_uploaded_once_per_content(program: Any) -> None:
    weight = np.arange(4, dtype=np.float32)
    for name in ("first", "second"):
        method = program.method(name)
        x = method.input("x")
        w = program.constant(method, f"{name}.weight", weight)
        y = method.tensor("y")
        method.launch("add", [x, w], [y])
        method.output("y", y)
    program.kernel("add")
    work = {
        "add": lambda operands: view(operands["y"]).__setitem__(
            ..., view(operands["x_device"]) + view(next(o for n, o in operands.items() if "weight" in n))
        )
    }
    loaded, fake = load(program, work)
    assert [line for line in fake.trace if "upload" in line] == ["upload 16"]
    assert loaded.memory.constants == 16
    for name in ("first", "second"):
        result = loaded.method(name)(np.ones(4, np.float32))
        np.testing.assert_array_equal(result["y"], weight + 1)


def test_missing_constant_bytes_are_an_artifact_error(program: Any) -> None:
    method = program.method()
    program.constant(method, "w", np.ones(4, np.float32))
    program.bytes.clear()
    with pytest.raises(ArtifactError, match="constant `w` are missing"):
        load(program)


def test_missing_initial_values_are_an_artifact_error(program: Any) -> None:
    program.variable(program.method(), "s", (4,), initial=np.ones(4, np.float32))
    program.bytes.clear()
    with pytest.raises(ArtifactError, match="initial value of state `s` is missing"):
        load(program)


def test_methods_share_the_largest_arena(program: Any) -> None:
    for name, size in (("small", 4), ("large", 400)):
        method = program.method(name)
        x = method.input("x", (size,))
        method.output("y", x)
    loaded, fake = load(program)
    assert "allocate cuda:0 1792" in fake.trace
    assert loaded.memory.arena == 1792 + 2 * 1792
    for name, size in (("small", 4), ("large", 400), ("small", 4)):
        x = np.random.default_rng(0).random(size, np.float32)
        np.testing.assert_array_equal(loaded.method(name)(x)["y"], x)


def counter(program: Any, initial: np.ndarray | None = None) -> Any:
    method = program.method()
    x = method.input("x")
    total = program.variable(method, "total", (4,), initial=initial)
    method.launch("add", [x, total], [total])
    method.output("y", total)
    program.kernel("add")
    return {"add": elementwise(lambda x, total: x + total, "x_device", "total", "total")}


def test_state_over_three_calls(program: Any, tmp_path: Any) -> None:
    loaded, _ = load(program, counter(program, np.full(4, 10, np.float32)))
    one = np.ones(4, np.float32)
    assert [loaded.method()(one)["y"][0] for _ in range(3)] == [11, 12, 13]
    np.testing.assert_array_equal(loaded.state.get("total"), 13)
    loaded.state.save(tmp_path / "state.npz")
    loaded.state.set("total", np.zeros(4, np.float32))
    assert loaded.method()(one)["y"][0] == 1
    loaded.state.reset("total")
    assert loaded.method()(one)["y"][0] == 11
    loaded.state.load(tmp_path / "state.npz")
    assert loaded.method()(one)["y"][0] == 14
    with pytest.raises(UsageError, match="no state `other`"):
        loaded.state.get("other")
    with pytest.raises(UsageError, match="state `total` has size 3"):
        loaded.state.set("total", np.zeros(3, np.float32))


def test_state_starts_as_zeros_without_initial_values(program: Any) -> None:
    loaded, _ = load(program, counter(program))
    assert loaded.method()(np.ones(4, np.float32))["y"][0] == 1


def test_clones_have_their_own_state_and_arena(program: Any) -> None:
    loaded, fake = load(program, counter(program, np.full(4, 10, np.float32)))
    one = np.ones(4, np.float32)
    loaded.method()(one)
    fresh, copied = loaded.clone(), loaded.clone(copy_state=True)
    assert fresh.method()(one)["y"][0] == 11
    assert copied.method()(one)["y"][0] == 12
    assert loaded.method()(one)["y"][0] == 12
    loaded.close()
    assert fresh.method()(one)["y"][0] == 12
    fresh.close()
    copied.close()
    assert fake.blocks.count == 0
    assert fake.closed


def test_three_threads_with_three_clones(program: Any) -> None:
    loaded, _ = load(program, counter(program))
    totals: dict[int, float] = {}

    def work(step: int, clone: LoadedProgram) -> None:
        for _ in range(200):
            totals[step] = clone.method()(np.full(4, step, np.float32))["y"][3]

    threads = [threading.Thread(target=work, args=(step, loaded.clone())) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == {1: 200, 2: 400, 3: 600}


def test_a_failed_step_leaves_a_stateless_program_usable(doubler: Any) -> None:
    failing = [True]
    loaded, _ = load(doubler, DOUBLE, fail=lambda line: line.startswith("launch") and failing[0])
    x = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="failed on purpose"):
        loaded.method()(x)
    failing[0] = False
    np.testing.assert_array_equal(loaded.method()(x)["y"], 2)


def test_a_failed_step_leaves_state_unknown_until_it_is_set(program: Any) -> None:
    work, failing = counter(program), [True]
    loaded, _ = load(program, work, fail=lambda line: line.startswith("d2h") and failing[0])
    one = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="on purpose"):
        loaded.method()(one)
    failing[0] = False
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.method()(one)
    loaded.state.reset()
    assert loaded.method()(one)["y"][0] == 1


def test_a_failed_device_is_dead_and_says_so(doubler: Any) -> None:
    loaded, fake = load(doubler, DOUBLE, fail=lambda line: line.startswith("synchronize"))
    x = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="failed on purpose"):
        loaded.method()(x)
    fake.fail = lambda line: False
    with pytest.raises(ExecutionError, match="load the program again"):
        loaded.method()(x)


def test_a_failed_capture_runs_step_by_step_and_says_why(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE, fail=lambda line: line.startswith("capture"))
    np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["y"], 2)
    assert "the capture failed: capture 3" in loaded.method().no_graph_reason


def test_failed_load_gives_memory_back(doubler: Any) -> None:
    fake = RecordingBackend(CUDA, fail=lambda line: line == "allocate cuda:0 512")
    with pytest.raises(ExecutionError, match="on purpose"):
        LoadedProgram(doubler.planned(), {}, {CUDA: fake, CPU: CpuBackend()})
    assert fake.blocks.count == 0
    assert fake.closed


def test_an_error_of_the_work_itself_is_wrapped(doubler: Any) -> None:
    def broken(operands: Mapping[str, Operand]) -> None:
        raise ZeroDivisionError("no")

    loaded, _ = load(doubler, {"double": broken})
    with pytest.raises(ExecutionError, match="method `forward` failed: ZeroDivisionError: no"):
        loaded.method()(np.ones(4, np.float32))


def dynamic(program: Any, symbolic: Any) -> Any:
    method = program.method()
    n = symbolic(method, "s0", 1, 64, "x", 0)
    x = method.input("x", (n, 2))
    method.input("mask", (Expr("s0 * 2"),))
    y = method.tensor("y", (n, 2))
    method.launch("double", [x], [y], grid=(Expr("(s0 + 7) // 8"), 1, 1))
    method.output("y", y)
    program.kernel("double")
    return {"double": elementwise(lambda x: x + x, "x_device", "y")}


def test_dynamic_shapes_below_the_bound(program: Any, symbolic: Any) -> None:
    loaded, fake = load(program, dynamic(program, symbolic))
    for size in (1, 9, 64, 9):
        x = np.random.default_rng(size).random((size, 2), np.float32)
        result = loaded.method()(x, np.ones(2 * size, np.float32))["y"]
        np.testing.assert_array_equal(result, 2 * x)
    captures = [line for line in fake.trace if line.startswith("capture")]
    assert len(captures) == 3
    assert "launch double[2,1,1](%x_device, %y) -> y" in fake.trace


def test_dynamic_shapes_are_checked(program: Any, symbolic: Any) -> None:
    loaded, _ = load(program, dynamic(program, symbolic))
    call = loaded.method()
    with pytest.raises(UsageError, match=r"input `x` has size 65 in dimension 0: .* for 1 to 64"):
        call(np.ones((65, 2), np.float32), np.ones(130, np.float32))
    with pytest.raises(UsageError, match="input `mask` has size 5 in dimension 0 instead of 6"):
        call(np.ones((3, 2), np.float32), np.ones(5, np.float32))
    with pytest.raises(UsageError, match="input `x` has size 3 in dimension 1 instead of 2"):
        call(np.ones((3, 3), np.float32), np.ones(6, np.float32))


def test_bindings_are_bounded_and_only_what_comes_again_is_captured(program: Any, symbolic: Any) -> None:
    loaded, fake = load(program, dynamic(program, symbolic))
    for size in range(1, 40):
        loaded.method()(np.ones((size, 2), np.float32), np.ones(2 * size, np.float32))
    assert len(loaded.method()._caller._cache) == 16
    assert sum(line.startswith("capture") for line in fake.trace) == 4
    assert "captured when they come again" in loaded.method().no_graph_reason
    loaded.method()(np.ones((39, 2), np.float32), np.ones(78, np.float32))
    assert loaded.method().no_graph_reason == ""
    assert sum(line.startswith("capture") for line in fake.trace) == 5
    assert loaded.copies.counts[CopyKind.H2D] == 2 * 40


def test_copies_are_counted(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    for _ in range(3):
        loaded.method()(np.ones(4, np.float32))
    assert loaded.copies.counts == {CopyKind.H2D: 3, CopyKind.D2H: 3, CopyKind.D2D: 0, CopyKind.LOCAL: 0}
    assert loaded.copies.nbytes[CopyKind.H2D] == 48
    assert loaded.copies != CopyTally()


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
    loaded, _ = load(program, work, static=static)
    x = np.ones(4, np.float32)
    for flag, expected in ((True, 2), (False, 0), (True, 2)):
        np.testing.assert_array_equal(loaded.method()(np.array(flag), x)["y"], expected)
    if static:
        assert loaded.method().no_graph_reason == "the method branches"


def test_host_calls_split_the_graph(program: Any) -> None:
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
            return lambda: view(operands["g"]).__setitem__(..., -view(operands["h"]))

    fake = RecordingBackend(CUDA, DOUBLE)
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


def test_unplanned_programs_allocate_and_free_as_they_go(doubler: Any) -> None:
    loaded, fake = load(doubler, DOUBLE, static=False)
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
    loaded, fake = load(program, device_io(program), static=static)
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
    loaded, fake = load(program, device_io(program))
    tensor = loaded.to_device(np.arange(4, dtype=np.float32))
    for _ in range(10):
        loaded.method()(tensor)
    assert sum(line.startswith("capture") for line in fake.trace) == 1


def test_a_returned_input_is_the_callers_tensor(program: Any) -> None:
    work = device_io(program)
    program.methods[0].outputs.append(Port("same", "x", ("input", "x")))
    loaded, _ = load(program, work)
    tensor = loaded.to_device(np.arange(4, dtype=np.float32))
    assert loaded.method()(tensor)["same"] is tensor


def test_bfloat16_comes_and_goes_as_host_tensor(program: Any) -> None:
    method = program.method()
    x = method.input("x", (4,), DType.BFLOAT16)
    method.output("y", x)
    loaded, _ = load(program)
    x16 = HostTensor.from_float32([1, 2.5, -3, np.inf], DType.BFLOAT16)
    result = loaded.method()(x16)["y"]
    assert isinstance(result, HostTensor)
    np.testing.assert_array_equal(result.float32(), [1, 2.5, -3, np.inf])
    with pytest.raises(UsageError, match="`uint16` instead of `bfloat16`"):
        loaded.method()(np.zeros(4, np.uint16))


def test_literal_ports(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    method.inputs.append(Port("training", "", literal=False))
    method.output("y", x)
    method.outputs.append(Port("scale", "", literal=2.5))
    loaded, _ = load(program)
    one = np.ones(4, np.float32)
    assert loaded.method()(one)["scale"] == 2.5
    assert loaded.method()(one, False)["scale"] == 2.5
    with pytest.raises(UsageError, match="input `training` is True: it was False at export"):
        loaded.method()(one, True)


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
        seen.append(view(operands["a"])[0])  # dead by now
        view(operands["c"])[...] = view(operands["b"])

    work = {
        "to_a": elementwise(lambda x: x + 1, "x_device", "a"),
        "to_b": elementwise(lambda a: a + 1, "a", "b"),
        "to_c": to_c,
    }
    loaded, _ = load(program, work, scrub=True, poison=True, packed=False)
    for _ in range(2):
        np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["y"], 3)
    assert np.isnan(seen).all()


def test_values_must_stay_in_their_storage(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    method.view("tail", x, (4,), (1,), offset=4)
    method.output("y", x)
    loaded, _ = load(program)
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
    loaded, fake = load(program, counting_loop(program), static=static)
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
    loaded, _ = load(program)
    x = np.arange(8, dtype=np.float32)[::2]
    np.testing.assert_array_equal(loaded.method()(x)["y"], x)


def test_planned_device_outputs_are_copied_for_the_caller(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    y = method.tensor("y", role=Role.OUTPUT)
    method.launch("double", [x], [y])
    method.outputs.append(Port("y", y))
    program.kernel("double")
    loaded, _ = load(program, DOUBLE)
    first = loaded.method()(np.ones(4, np.float32))["y"]
    borrowed = loaded.method()(np.zeros(4, np.float32), borrow=True)["y"]
    np.testing.assert_array_equal(first.numpy(), 2)
    np.testing.assert_array_equal(borrowed.numpy(), 0)
    np.testing.assert_array_equal(borrowed.device_array().numpy(), 0)
    loaded.method()(np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="used too late"):
        borrowed.device_array()


def test_outputs_that_are_state(program: Any) -> None:
    method = program.method()
    x = method.input("x", to=CPU)
    total = program.variable(method, "total", (4,), device=CPU)
    method.copy(x, total, CopyKind.LOCAL)
    method.outputs.append(Port("y", total, ("state", "total")))
    loaded, _ = load(program)
    first = loaded.method()(np.ones(4, np.float32))["y"]
    loaded.method()(np.zeros(4, np.float32))
    np.testing.assert_array_equal(first, 1)
    np.testing.assert_array_equal(loaded.state.get("total"), 0)
    assert loaded.method().no_graph_reason == "nothing runs on a device"


def test_interrupted_calls_leave_state_unknown(program: Any) -> None:
    def interrupted(operands: Mapping[str, Operand]) -> None:
        raise KeyboardInterrupt

    counter(program)
    loaded, _ = load(program, {"add": interrupted})
    with pytest.raises(KeyboardInterrupt):
        loaded.method()(np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.method()(np.ones(4, np.float32))
    assert loaded.state.unknown == ("total",)
    loaded.state.set("total", np.zeros(4, np.float32))
    assert loaded.state.unknown == ()


def test_a_failure_to_bind_changes_nothing(program: Any) -> None:
    failing = [True]
    loaded, _ = load(program, counter(program), fail=lambda line: line.startswith("bind") and failing[0])
    with pytest.raises(ExecutionError, match="on purpose"):
        loaded.method()(np.ones(4, np.float32))
    failing[0] = False
    assert loaded.method()(np.ones(4, np.float32))["y"][0] == 1


def test_state_of_bfloat16_is_saved_and_loaded(program: Any, tmp_path: Any) -> None:
    method = program.method()
    program.variable(method, "cache", (2, 2), DType.BFLOAT16)
    loaded, _ = load(program)
    loaded.state.set("cache", HostTensor.from_float32([[1, 2], [3, 4.5]], DType.BFLOAT16))
    loaded.state.save(tmp_path / "state.npz")
    loaded.state.reset()
    np.testing.assert_array_equal(np.asarray(loaded.state.get("cache")), 0)
    loaded.state.load(tmp_path / "state.npz")
    np.testing.assert_array_equal(np.asarray(loaded.state.get("cache")), [[1, 2], [3, 4.5]])
    np.savez(tmp_path / "other.npz", wrong=np.zeros(3))
    with pytest.raises(UsageError, match="does not hold this program's state"):
        loaded.state.load(tmp_path / "other.npz")
    with pytest.raises(UsageError, match="cannot read state"):
        loaded.state.load(tmp_path / "missing.npz")


def test_methods_keep_their_program_alive(doubler: Any) -> None:
    def method() -> Any:
        return load(doubler, DOUBLE)[0].method()

    np.testing.assert_array_equal(method()(np.ones(4, np.float32))["y"], 2)


def test_a_dropped_program_gives_its_memory_back_at_once(doubler: Any) -> None:
    loaded, fake = load(doubler, DOUBLE)
    loaded.method()(np.ones(4, np.float32))
    del loaded
    assert fake.blocks.count == 0
    assert fake.closed


def test_a_callers_stream_goes_to_the_one_device_that_takes_it(doubler: Any) -> None:
    loaded, _ = load(doubler, DOUBLE)
    with pytest.raises(UsageError, match="the program runs on 0"):
        loaded.use_stream(7)

    class Streaming(RecordingBackend):
        streams: ClassVar[list[Any]] = []

        def use_stream(self, stream: object) -> None:
            self.streams.append(stream)

    fake = Streaming(CUDA, DOUBLE)
    loaded = LoadedProgram(doubler.planned(), {}, {CUDA: fake, CPU: CpuBackend()})
    loaded.use_stream(7)
    loaded.use_stream(None)
    assert fake.streams == [7, None]

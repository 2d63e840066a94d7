"""The engine on a fake device that records: what is allocated, bound, captured and run, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devplan.runtime.calls.binding import CopyTally
from devplan.runtime.calls.outputs import BorrowedTensor
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, ExecutionError, UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import CopyKind, Device, Port
from devplan.runtime.recording import elementwise, operand_view
from devplan.runtime.tensors.host import HostTensor

CUDA = Device("cuda", 0)


def test_trace_of_a_call(doubler: Any, double: Any) -> None:
    loaded, fake = doubler.load(double)
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


def test_close_gives_everything_back(doubler: Any, double: Any) -> None:
    loaded, fake = doubler.load(double)
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
def test_wrong_inputs_are_refused(doubler: Any, value: Any, message: str, double: Any) -> None:
    loaded, _ = doubler.load(double)
    with pytest.raises(UsageError) as caught:
        loaded.method()(value)
    assert message in str(caught.value)


def test_wrong_names_are_refused(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
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


def test_strided_inputs_are_normalised(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
    strided = np.arange(8, dtype=np.float32)[::-2]
    np.testing.assert_array_equal(loaded.method()(strided)["y"], 2 * strided)


def test_dlpack_and_array_interface_inputs(doubler: Any, double: Any) -> None:
    class Interface:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.__array_interface__ = array, array.__array_interface__

    class Capsule:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    loaded, _ = doubler.load(double)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(loaded.method()(Interface(x))["y"], 2 * x)
    np.testing.assert_array_equal(loaded.method()(Capsule(x))["y"], 2 * x)


def test_outputs_are_the_callers_own(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
    first = loaded.method()(np.ones(4, np.float32))["y"]
    loaded.method()(np.zeros(4, np.float32))
    np.testing.assert_array_equal(first, 2)
    first[0] = 7
    assert first.flags.owndata


def test_borrowed_outputs_raise_once_overwritten(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
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
        "add": lambda operands: operand_view(operands["y"]).__setitem__(
            ...,
            operand_view(operands["x_device"])
            + operand_view(next(o for n, o in operands.items() if "weight" in n)),
        )
    }
    loaded, fake = program.load(work)
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
        program.load()


def test_methods_share_the_largest_arena(program: Any) -> None:
    for name, size in (("small", 4), ("large", 400)):
        method = program.method(name)
        x = method.input("x", (size,))
        method.output("y", x)
    loaded, fake = program.load()
    assert "allocate cuda:0 1792" in fake.trace
    assert (loaded.memory.arena, loaded.memory.staging) == (1792, 2 * 1792)
    for name, size in (("small", 4), ("large", 400), ("small", 4)):
        x = np.random.default_rng(0).random(size, np.float32)
        np.testing.assert_array_equal(loaded.method(name)(x)["y"], x)


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
    loaded, fake = program.load(dynamic(program, symbolic))
    for size in (1, 9, 64, 9):
        x = np.random.default_rng(size).random((size, 2), np.float32)
        result = loaded.method()(x, np.ones(2 * size, np.float32))["y"]
        np.testing.assert_array_equal(result, 2 * x)
    captures = [line for line in fake.trace if line.startswith("capture")]
    assert len(captures) == 3
    assert "launch double[2,1,1](%x_device, %y) -> y" in fake.trace


def test_dynamic_shapes_are_checked(program: Any, symbolic: Any) -> None:
    loaded, _ = program.load(dynamic(program, symbolic))
    call = loaded.method()
    with pytest.raises(UsageError, match=r"input `x` has size 65 in dimension 0: .* for 1 to 64"):
        call(np.ones((65, 2), np.float32), np.ones(130, np.float32))
    with pytest.raises(UsageError, match="input `mask` has size 5 in dimension 0 instead of 6"):
        call(np.ones((3, 2), np.float32), np.ones(5, np.float32))
    with pytest.raises(UsageError, match="input `x` has size 3 in dimension 1 instead of 2"):
        call(np.ones((3, 3), np.float32), np.ones(6, np.float32))


def test_bindings_are_bounded_and_only_what_comes_again_is_captured(program: Any, symbolic: Any) -> None:
    loaded, fake = program.load(dynamic(program, symbolic))
    for size in range(1, 40):
        loaded.method()(np.ones((size, 2), np.float32), np.ones(2 * size, np.float32))
    assert len(loaded.method()._caller._cache) == 16
    assert sum(line.startswith("capture") for line in fake.trace) == 4
    assert "captured when they come again" in loaded.method().no_graph_reason
    loaded.method()(np.ones((39, 2), np.float32), np.ones(78, np.float32))
    assert loaded.method().no_graph_reason == ""
    assert sum(line.startswith("capture") for line in fake.trace) == 5
    assert loaded.copies.counts[CopyKind.H2D] == 2 * 40


def test_copies_are_counted(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double)
    for _ in range(3):
        loaded.method()(np.ones(4, np.float32))
    assert loaded.copies.counts == {CopyKind.H2D: 3, CopyKind.D2H: 3, CopyKind.D2D: 0, CopyKind.LOCAL: 0}
    assert loaded.copies.nbytes[CopyKind.H2D] == 48
    assert loaded.copies != CopyTally()


def test_bfloat16_comes_and_goes_as_host_tensor(program: Any) -> None:
    method = program.method()
    x = method.input("x", (4,), DType.BFLOAT16)
    method.output("y", x)
    loaded, _ = program.load()
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
    loaded, _ = program.load()
    one = np.ones(4, np.float32)
    assert loaded.method()(one)["scale"] == 2.5
    assert loaded.method()(one, False)["scale"] == 2.5
    with pytest.raises(UsageError, match="input `training` is True: it was False at export"):
        loaded.method()(one, True)


def test_methods_keep_their_program_alive(doubler: Any, double: Any) -> None:
    def method() -> Any:
        return doubler.load(double)[0].method()

    np.testing.assert_array_equal(method()(np.ones(4, np.float32))["y"], 2)


def test_a_dropped_program_gives_its_memory_back_at_once(doubler: Any, double: Any) -> None:
    loaded, fake = doubler.load(double)
    loaded.method()(np.ones(4, np.float32))
    del loaded
    assert fake.blocks.count == 0
    assert fake.closed

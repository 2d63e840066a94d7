"""Programs of ATen operators on a planned host arena, through torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load_planned
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, DeviceError, ExecutionError, UsageError
from devplan.runtime.program import CPU, Ref

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def host_program(program: Any) -> Any:
    """y = softmax(x @ w + b), the weight a constant and the product in place of nothing."""
    method = program.method()
    x = method.input("x", (3, 4), to=CPU)
    w = program.constant(method, "w", np.arange(8, dtype=np.float32).reshape(4, 2) / 10, CPU)
    b = program.constant(method, "b", np.array([1, -1], np.float32), CPU)
    method.tensor("h", (3, 2), device=CPU)
    method.tensor("y", (3, 2), device=CPU)
    method.host("aten::addmm.out", [b, x, w], ["h"], 1, 1)
    method.host("aten::_softmax.out", ["h"], ["y"], -1, False)
    method.outputs.append(program_port("y"))
    return program


def program_port(name: str) -> Any:
    from devplan.runtime.program import Port

    return Port(name, name)


@pytest.mark.parametrize("static", [True, False])
def test_operators_run_on_the_planned_arena(program: Any, static: bool) -> None:
    planned = host_program(program).planned(packed=True, static=static)
    loaded = load_planned(planned, program.bytes)
    x = np.random.default_rng(0).random((3, 4), np.float32)
    w, b = np.arange(8, dtype=np.float32).reshape(4, 2) / 10, np.array([1, -1], np.float32)
    for _ in range(3):
        scores = np.exp(x @ w + b)
        got = loaded.method()(x)["y"]
        np.testing.assert_allclose(got, scores / scores.sum(1, keepdims=True), rtol=1e-6)
    assert loaded.devices == {CPU: "cpu"}


def test_literals_are_converted_by_the_schema(program: Any) -> None:
    method = program.method()
    x = method.input("x", (2, 6), to=CPU)
    for name, shape, dtype in (
        ("s", (2,), DType.FLOAT64),
        ("c", (2, 6), DType.FLOAT32),
        ("d", (2, 6), DType.FLOAT32),
    ):
        method.tensor(name, shape, dtype, CPU)
        method.outputs.append(program_port(name))
    method.host("aten::sum.IntList_out", [x], ["s"], (1,), False, DType.FLOAT64)
    method.host("aten::clone.out", [x], ["c"], "contiguous_format")
    method.host("aten::div.out_mode", [x, "c"], ["d"], "floor")
    x = np.random.default_rng(0).random((2, 6), np.float32) + 1
    got = load_planned(program.planned(), {}).method()(x)
    np.testing.assert_allclose(got["s"], x.astype(float).sum(1))
    np.testing.assert_array_equal(got["c"], x)
    np.testing.assert_array_equal(got["d"], 1)


def test_lists_of_tensors_and_operators_without_out_variant(program: Any) -> None:
    method = program.method()
    x = method.input("x", (2, 3), to=CPU)
    method.tensor("c", (4, 3), device=CPU)
    method.tensor("n", (2, 3), device=CPU)
    method.outputs += [program_port("c"), program_port("n")]
    method.host("aten::cat.out", [], ["c"], (Ref(x), Ref(x)), 0)
    method.host("aten::neg.default", [x], ["n"])
    x = np.random.default_rng(0).random((2, 3), np.float32)
    got = load_planned(program.planned(), {}).method()(x)
    np.testing.assert_array_equal(got["c"], np.concatenate([x, x]))
    np.testing.assert_array_equal(got["n"], -x)


def test_results_of_another_shape_are_refused(program: Any) -> None:
    method = program.method()
    x = method.input("x", (6,), to=CPU)
    method.tensor("n", (6, 1), DType.INT64, CPU)
    method.outputs.append(program_port("n"))
    method.host("aten::nonzero.out", [x], ["n"])
    loaded = load_planned(program.planned(), {})
    loaded.method()(np.ones(6, np.float32))
    with pytest.raises(ExecutionError, match=r"made a result of shape \(3, 1\)"):
        loaded.method()(np.array([1, 0, 1, 0, 1, 0], np.float32))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("aten::nothing.out", "torch has no operator `aten::nothing.out`"),
        ("aten::add.out", "does not take these"),
    ],
)
def test_unknown_operators_and_wrong_arguments(program: Any, target: str, message: str) -> None:
    method = program.method()
    x = method.input("x", to=CPU)
    method.tensor("y", device=CPU)
    method.outputs.append(program_port("y"))
    method.host(target, [x, x, x, x], ["y"])
    with pytest.raises(ArtifactError, match=message):
        load_planned(program.planned(), {}).method().prepare()


def test_an_operators_own_error_names_it(program: Any) -> None:
    method = program.method()
    x = method.input("x", to=CPU)
    method.tensor("y", device=CPU)
    method.outputs.append(program_port("y"))
    method.host("aten::select_copy.int_out", [x], ["y"], 0, 99)
    with pytest.raises(ExecutionError, match=r"`aten::select_copy.int_out` failed on the host"):
        load_planned(program.planned(), {}).method()(np.ones(4, np.float32))


def test_without_torch_there_is_a_clear_error(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="needs torch"):
        load_planned(host_program(program).planned(), program.bytes).method().prepare()


def test_the_runtime_imports_no_torch_until_an_operator_is_bound() -> None:
    code = (
        "import sys, devplan.runtime, devplan.runtime.engine, devplan.runtime.loading, devplan.runtime.emulator;"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_tensors_are_inputs_as_they_are(program: Any) -> None:
    method = program.method()
    x = method.input("x", (2, 3), DType.BFLOAT16, to=CPU)
    method.outputs.append(program_port(x))
    loaded = load_planned(program.planned(), {})
    given = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).T
    for _ in range(3):
        got = loaded.method()(given)["x_host"]
        np.testing.assert_array_equal(np.asarray(got), [[0, 2, 4], [1, 3, 5]])
    with pytest.raises(UsageError, match="input `x` has dtype `float32` instead of `bfloat16`"):
        loaded.method()(torch.zeros(2, 3))
    with pytest.raises(
        UsageError, match="cannot be read as a host tensor: Can't export tensors that require"
    ):
        loaded.method()(torch.zeros(2, 3, requires_grad=True))

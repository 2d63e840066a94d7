"""Conditions and loops from torch to the emulator, through an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._higher_order_ops.scan import scan  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

from devplan.passes.export import ExportResult, export  # noqa: E402
from devplan.passes.options import ExportOptions, PlacementRule  # noqa: E402
from devplan.passes.placed.ledger import ledger  # noqa: E402
from devplan.passes.source.model import MethodSource, ModelSource  # noqa: E402
from devplan.runtime import load  # noqa: E402
from devplan.runtime.artifact import write  # noqa: E402
from devplan.runtime.errors import UnsupportedOperatorError  # noqa: E402
from devplan.runtime.program import Jump  # noqa: E402

pytestmark = pytest.mark.torch


class Condition(torch.nn.Module):  # type: ignore[misc]
    """A condition whose bodies share a weight; one result comes from either, one is read on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        def positive(x: Any, y: Any) -> Any:
            return torch.sin(self.linear(x)), y + 1

        def negative(x: Any, y: Any) -> Any:
            return x.abs().sqrt(), torch.tanh(y)

        a, b = torch.cond(x.sum() > 0, positive, negative, (x, x[:, 0].clone()))
        return a @ a.t(), b


class Nested(torch.nn.Module):  # type: ignore[misc]
    """A condition within a condition."""

    def forward(self, x: Any) -> Any:
        def small(x: Any) -> Any:
            return torch.cond(x.sum() > 1, lambda x: x * 10, lambda x: x - 10, (x,))

        return torch.cond(x.sum() > 5, lambda x: x.clone(), small, (x,))


class Fibonacci(torch.nn.Module):  # type: ignore[misc]
    """A loop that swaps what it carries, with an operand that stays."""

    def forward(self, n: Any, step: Any) -> Any:
        def go_on(i: Any, a: Any, b: Any) -> Any:
            return i < n.sum()

        def body(i: Any, a: Any, b: Any) -> Any:
            return i + 1, b.clone(), a + b * step

        i = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(go_on, body, (i, torch.zeros(2), torch.ones(2)))


class Mapped(torch.nn.Module):  # type: ignore[misc]
    """A function of each row, with a weight and an operand that all rows share; two results a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Any, bias: Any) -> Any:
        def row(x: Any, bias: Any) -> Any:
            return torch.sin(self.linear(x)) + bias, x.sum()

        return torch._higher_order_ops.map(row, x, bias)


class Scanned(torch.nn.Module):  # type: ignore[misc]
    """A recurrence with a condition in every step; its last value becomes the state of the next call."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.reverse = torch.nn.Linear(3, 3), reverse
        self.register_buffer("held", torch.zeros(2, 3))

    def forward(self, x: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = torch.tanh(self.linear(x) + h)
            h = torch.cond(h.sum() > 0, lambda h: h - 0.5, lambda h: h * 2, (h,))
            return h, (h + 1).clone()

        last, rows = scan(step, self.held.clone(), x, reverse=self.reverse)
        self.held.copy_(last)
        return rows, last


class LoopInBranch(torch.nn.Module):  # type: ignore[misc]
    """A loop within one branch of a condition."""

    def forward(self, x: Any) -> Any:
        def doubled(x: Any) -> Any:
            return torch.while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x.clone(),))[0]

        return torch.cond(x.sum() > 0, doubled, lambda x: x.abs(), (x,))


class ScanInScan(torch.nn.Module):  # type: ignore[misc]
    """A recurrence over columns within one over rows."""

    def forward(self, x: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return total + x, total * x

        def row(total: Any, x: Any) -> Any:
            last, products = scan(add, total, x)
            return last / 2, products

        return scan(row, torch.ones(3), x)


class Flexible(torch.nn.Module):  # type: ignore[misc]
    """A higher-order operator that is not supported."""

    def forward(self, x: Any) -> Any:
        return flex_attention(x, x, x)


def exported(module: Any, *inputs: Any, dynamic: Any = None, **options: Any) -> ExportResult:
    method = MethodSource("forward", module.eval(), inputs, dynamic_shapes=dynamic)
    return export(ModelSource("model", (method,)), ExportOptions(architectures=("sm_90",), **options))


def check(result: ExportResult, module: Any, cases: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    write(path, result.planned, result.constants, producer="test")
    module.eval()
    with load(path, "emulator", allow_torch_ops=True, poison=True) as program:
        for inputs in cases:
            outputs = program.method("forward")(*(tensor.numpy() for tensor in inputs))
            with torch.no_grad():
                expected = module(*inputs)
            expected = expected if isinstance(expected, tuple | list) else (expected,)
            for got, want in zip(outputs.values(), expected, strict=True):
                np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ["h2d", "d2h", "d2h", "d2h"]),
        ({"device": "cpu"}, []),
        (
            {"placement": (PlacementRule("cpu", operator="tanh"),)},
            ["h2d", "d2h", "d2h", "h2d", "d2h", "d2h"],
        ),
    ],
    ids=["on the GPU", "on the cpu", "a body's operator on the host"],
)
def test_a_condition(options: dict[str, Any], kinds: list[str], tmp_path: Path) -> None:
    result = exported(Condition(), X, **options)
    entries = ledger(result.placed[0])
    assert [entry.kind for entry in entries] == kinds
    assert all(
        "test_control_flow.py" in entry.reason for entry in entries if "decided on the host" in entry.reason
    )
    check(result, Condition(), [(X,), (-X,), (X,)], tmp_path)


@pytest.mark.slow
def test_a_condition_of_dynamic_size(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=8)
    result = exported(Condition(), X, dynamic=({0: rows},))
    check(result, Condition(), [(X,), (-torch.ones(5, 3),), (torch.ones(8, 3),)], tmp_path)


@pytest.mark.slow
def test_a_condition_in_a_condition(tmp_path: Path) -> None:
    result = exported(Nested(), X)
    cases = [(X,), (X / 10,), (-X,)]
    check(result, Nested(), cases, tmp_path)
    assert sum(isinstance(i, Jump) for i in result.planned.program.methods[0].instructions) == 4


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_loop(device: str, tmp_path: Path) -> None:
    step = torch.tensor(1.0)
    result = exported(Fibonacci(), torch.tensor([3, 4]), step, device=device)
    check(result, Fibonacci(), [(torch.tensor([3, n]), step) for n in (4, -3, -2, 7)], tmp_path)


ROWS = torch.arange(24.0).reshape(4, 2, 3) / 10 - 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_map(device: str, tmp_path: Path) -> None:
    result = exported(Mapped(), X, torch.ones(3), device=device)
    check(result, Mapped(), [(X, torch.ones(3)), (-X, X[1])], tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_scan_with_a_condition_and_state(device: str, tmp_path: Path) -> None:
    result = exported(Scanned(), ROWS, device=device)
    check(result, Scanned().eval(), [(ROWS,), (-ROWS,), (ROWS,)], tmp_path)


def test_a_step_of_a_scan_copies_nothing_but_what_it_is_decided_by() -> None:
    entries = ledger(exported(Scanned(), ROWS).placed[0])
    assert [entry.kind for entry in entries] == ["h2d", "d2h", "d2h", "d2h", "d2h"]
    inside = [
        entry
        for entry in entries
        if "on the host" in entry.reason and "returned as `output" not in entry.reason
    ]
    assert [entry.nbytes for entry in inside] == [1, 1]  # what the loop and the condition are decided by


@pytest.mark.slow
def test_a_scan_in_reverse(tmp_path: Path) -> None:
    check(exported(Scanned(True), ROWS), Scanned(True), [(ROWS,)], tmp_path)


@pytest.mark.slow
def test_a_scan_of_dynamic_length(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=8)
    result = exported(Scanned(), ROWS, dynamic=({0: rows},))
    check(result, Scanned(), [(ROWS,), (ROWS[:2],), (torch.cat([ROWS, ROWS]),)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_scan_in_a_scan(device: str, tmp_path: Path) -> None:
    check(exported(ScanInScan(), ROWS, device=device), ScanInScan(), [(ROWS,), (ROWS + 1,)], tmp_path)


@pytest.mark.slow
def test_a_loop_in_a_condition(tmp_path: Path) -> None:
    check(exported(LoopInBranch(), X), LoopInBranch(), [(X,), (-X,), (X / 9,)], tmp_path)


def test_other_higher_order_operators_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        exported(Flexible(), torch.randn(1, 1, 128, 16))
    assert caught.value.code == 3
    assert "flex_attention" in str(caught.value)
    assert "only `cond`, `while_loop`, `scan` and `map`" in str(caught.value)

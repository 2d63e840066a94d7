"""Copies of real modules, from torch to the emulator: what the ledger says is what the runtime counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from devplan.passes.export import ExportResult, export  # noqa: E402
from devplan.passes.options import ExportOptions, IoRule, PlacementRule  # noqa: E402
from devplan.passes.pipeline import pass_names  # noqa: E402
from devplan.passes.placed.ledger import ledger  # noqa: E402
from devplan.passes.source.model import MethodSource, ModelSource  # noqa: E402
from devplan.runtime.engine import LoadedProgram  # noqa: E402
from devplan.runtime.errors import UnsupportedOperatorError  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.runtime.program import Copy, CopyKind, Role  # noqa: E402

pytestmark = pytest.mark.torch

DEVICE_IO = (IoRule("both", "device"),)


class Mlp(torch.nn.Module):  # type: ignore[misc]
    """Three layers, and a view on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 32)
        self.third = torch.nn.Linear(32, 4)

    def forward(self, x: Any, mask: Any) -> Any:
        h = torch.relu(self.first(x)) * mask
        h = torch.relu(self.second(h.reshape(3, 2, 32).transpose(0, 1)))
        return self.third(h), h


class Running(torch.nn.Module):  # type: ignore[misc]
    """State that grows by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.total.add_(x)
        return self.total * 2


class Picky(torch.nn.Module):  # type: ignore[misc]
    """Eigenvalues, which no CUDA kernel here computes."""

    def forward(self, x: Any) -> Any:
        return torch.linalg.eigvalsh(x + x.T) * 2


def exported(module: Any, inputs: tuple[Any, ...], **options: Any) -> ExportResult:
    source = ModelSource("model", (MethodSource("forward", module.eval(), inputs),))
    return export(source, ExportOptions(architectures=("sm_90",), **options))


def loaded(result: ExportResult) -> LoadedProgram:
    constants = {digest: read() for digest, read in result.constants.items()}
    return load_planned(result.planned, constants, "emulator", allow_torch_ops=True, poison=True)


def call(program: LoadedProgram, inputs: tuple[Any, ...]) -> list[Any]:
    arrays = [tensor.numpy() for tensor in inputs]
    ports = program.planned.program.methods[0].inputs
    storages = [program.planned.program.methods[0].value(port.value).storage for port in ports]
    devices = [program.planned.program.methods[0].storage(name).device for name in storages]
    given = [a if d.kind == "cpu" else program.to_device(a, d) for a, d in zip(arrays, devices, strict=True)]
    outputs = program.method("forward")(*given)
    return [o if isinstance(o, np.ndarray) else o.numpy() for o in outputs.values()]


MLP_INPUTS = (torch.randn(6, 16, generator=torch.Generator().manual_seed(1)), torch.ones(6, 1))


@pytest.mark.parametrize(
    ("options", "kinds", "transfers"),
    [
        ({}, ["h2d", "h2d", "d2h", "d2h"], ["h2d", "d2h", "d2h"]),
        ({"io": DEVICE_IO}, [], []),
        ({"io": (IoRule("h2d", "device"),)}, ["d2h", "d2h"], ["d2h", "d2h"]),
        ({"device": "cpu"}, [], []),
        (
            {"placement": (PlacementRule("cpu", module="second"), PlacementRule("cuda:1", module="third"))},
            ["h2d", "h2d", "d2h", "h2d", "d2d", "d2h", "d2h"],
            ["h2d", "d2h", "h2d", "d2d", "d2h", "d2h"],
        ),
        (
            {"placement": (PlacementRule("cuda:1", module="third"),), "io": DEVICE_IO},
            ["d2d"],
            ["d2d"],
        ),
    ],
    ids=[
        "host io",
        "device io",
        "inputs on the device",
        "all on cpu",
        "split over three devices",
        "two GPUs, device io",
    ],
)
def test_a_chain_of_layers(options: dict[str, Any], kinds: list[str], transfers: list[str]) -> None:
    """``kinds`` is the ledger, ``transfers`` what is left of it when small uploads go together."""
    result = exported(Mlp(), MLP_INPUTS, **options)
    assert sorted(entry.kind for entry in ledger(result.placed[0])) == sorted(kinds)
    instructions = result.planned.program.methods[0].instructions
    made = [i.kind.value for i in instructions if isinstance(i, Copy) and i.kind is not CopyKind.LOCAL]
    program = loaded(result)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in Mlp().eval()(*MLP_INPUTS)]
    for _ in range(3):
        for got, want in zip(call(program, MLP_INPUTS), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    counts = program.copies.counts
    for kind in (CopyKind.H2D, CopyKind.D2H, CopyKind.D2D):
        assert counts[kind] == 3 * made.count(kind.value), f"{kind} per call, as the program says"
    assert made == transfers


def test_device_io_reserves_nothing_for_inputs_and_outputs() -> None:
    method = exported(Mlp(), MLP_INPUTS, io=DEVICE_IO).planned.program.methods[0]
    ports = [storage for storage in method.storages if storage.role in (Role.INPUT, Role.OUTPUT)]
    assert len(ports) == 4
    assert not any(storage.is_planned for storage in ports)


class Add(torch.nn.Module):  # type: ignore[misc]
    """Row 1 of the scenarios."""

    def forward(self, a: Any, b: Any) -> Any:
        return a + b


@pytest.mark.parametrize(
    ("rows", "io", "planned"),
    [
        (2, (), {"cpu": 48, "cuda:0": 48}),
        (2, (IoRule("h2d", "device"),), {"cpu": 16, "cuda:0": 16}),
        (2, (IoRule("d2h", "device"),), {"cpu": 32, "cuda:0": 32}),
        (2, DEVICE_IO, {}),
        (0, (), {}),
    ],
    ids=["row 1", "row 4", "row 5", "row 6", "row 35: no bytes"],
)
def test_buffers_of_an_addition(rows: int, io: tuple[IoRule, ...], planned: dict[str, int]) -> None:
    """Bytes that are planned on each device: what callers own is not among them."""
    names = tuple(name for name in pass_names() if name != "merge-uploads")
    inputs = (torch.ones(rows, 2), torch.ones(rows, 2))
    method = exported(Add(), inputs, io=io, pipeline=names).planned.program.methods[0]
    found = Counter[str]()
    for storage in method.storages:
        found[str(storage.device)] += storage.reserved_nbytes if storage.is_planned else 0
    assert +found == planned


def test_state_stays_on_the_device_between_calls() -> None:
    x = torch.arange(8.0)
    result = exported(Running(), (x,))
    assert [(entry.kind, entry.tensor) for entry in ledger(result.placed[0])] == [
        ("h2d", "x"),
        ("d2h", "output"),
    ]
    program = loaded(result)
    for number in (1, 2, 3):
        np.testing.assert_array_equal(call(program, (x,))[0], 2 * number * x.numpy())


def test_an_operator_without_a_kernel_is_refused_by_name_and_line() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        exported(Picky(), (torch.randn(4, 4),))
    assert caught.value.code == 3
    assert "eigvalsh" in str(caught.value)
    assert "test_copies_end_to_end.py:" in str(caught.value)
    assert "--allow-host-ops" in caught.value.hint


def test_an_operator_without_a_kernel_becomes_a_host_island_where_that_is_allowed() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    result = exported(Picky(), (x,), allow_host_ops=True)
    reasons = [entry.reason for entry in ledger(result.placed[0])]
    assert any("runs on the host" in reason and "eigvalsh" in reason for reason in reasons)
    with torch.no_grad():
        expected = Picky()(x).numpy()
    np.testing.assert_allclose(call(loaded(result), (x,))[0], expected, rtol=1e-4, atol=1e-5)


class TwoReaders(torch.nn.Module):  # type: ignore[misc]
    """Two layers of one tensor, which a pass merges into one product where no rule forbids it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = torch.nn.Linear(16, 8)
        self.key = torch.nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.query(x) * self.key(x)


def test_a_rule_for_one_of_two_layers_keeps_them_apart() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    result = exported(TwoReaders(), (x,), placement=(PlacementRule("cuda:1", module="key"),))
    assert sorted(entry.kind for entry in ledger(result.placed[0])) == ["d2d", "d2h", "h2d", "h2d"]
    with torch.no_grad():
        expected = TwoReaders()(x).numpy()
    np.testing.assert_allclose(call(loaded(result), (x,))[0], expected, rtol=1e-5, atol=1e-5)

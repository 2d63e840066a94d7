"""`--quantize` on experts and on layers that store their weight with the outputs last, against eager."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import devplan
from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.quantized.eager import RoundedWeights
from devplan.passes.quantized.scheme import Scheme, Selection, shortened
from devplan.passes.source.load import resolve
from devplan.runtime import load_planned
from devplan.tests.support.exporting import export_module
from devplan.tests.zoo.measure import without_code

pytestmark = pytest.mark.torch
MODELS = Path(devplan.__file__).parent / "configs" / "models"
E, N, K = 4, 24, 160
SCHEMES = ("int8-weight-only", "int4-weight-only:32")


class Addmm(torch.nn.Module):
    """As transformers' `Conv1D`: the weight is [K, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(K, N) / K**0.5)
        self.bias = torch.nn.Parameter(torch.randn(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, K), self.weight).view(*x.shape[:-1], N)


class Chosen(torch.nn.Module):
    """Two experts a row, by indexing: up [E, N, K] before the vector, down [E, N, K] behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(K, E)
        self.up = torch.nn.Parameter(torch.randn(E, N, K) / K**0.5)
        self.down = torch.nn.Parameter(torch.randn(E, N, K) / N**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).topk(2, -1).indices.reshape(-1)
        rows = x.repeat_interleave(2, 0)
        inner = torch.bmm(self.up[chosen], rows.unsqueeze(-1)).squeeze(-1)
        made = torch.bmm(torch.relu(inner).unsqueeze(1), self.down.index_select(0, chosen))
        return made.squeeze(1).reshape(-1, 2, K).sum(1)


class Grouped(torch.nn.Module):
    """Rows in groups, in bfloat16, which torch's own asks for; `flipped` [E, K, N] is used as it lies."""

    def __init__(self, outer: int = 128, inner: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flipped = torch.nn.Parameter((torch.randn(E, outer, inner) / outer**0.5).bfloat16())
        self.back = torch.nn.Parameter((torch.randn(E, 24, inner) / inner**0.5).bfloat16())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        middle = torch.nn.functional.grouped_mm(x.bfloat16(), self.flipped, offs=ends)
        return torch.nn.functional.grouped_mm(torch.relu(middle), self.back.mT, offs=ends).float()


class Batched(torch.nn.Module):
    """Every expert has as many rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(E, K, N) / K**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.up)


def selection(result: ExportResult) -> Selection:
    """What the method's note says."""
    (found,) = (Selection.parse(note) for note in result.planned.program.method("forward").notes)
    assert found is not None
    return found


def check(module: torch.nn.Module, *inputs: torch.Tensor, scheme: str, limit: float = 2e-4) -> Selection:
    """Both emulators against eager with rounded weights."""
    with mock.patch.object(exporting, "compile_kernels", without_code):
        result = export_module(module, inputs, quantize=scheme)
    notes = result.planned.program.method("forward").notes
    with torch.no_grad(), RoundedWeights(module, notes, None):
        wanted = module(*inputs).numpy()
    with torch.no_grad():
        assert np.abs(wanted - module(*inputs).numpy()).max() > 1e-3  # rounding is seen
    held = {digest: read() for digest, read in result.constants.items()}
    for device in ("emulator", "emulator:triton"):
        with load_planned(result.planned, held, device=device) as program:
            (ours,) = program.method("forward")(*(i.numpy() for i in inputs)).values()
            error = np.abs(np.asarray(ours) - wanted).max() / np.abs(wanted).max()
        assert error <= limit, (device, error)
    return selection(result)


@pytest.mark.parametrize(("scheme", "share"), [("int8-weight-only", 0.505), ("int4-weight-only:128", 0.27)])
def test_constants_shrink_and_so_does_the_plan(scheme: str, share: float) -> None:
    """int8: a byte for two and 4 a row; int4: half a byte, and 4 a group of 128."""
    module, inputs = Grouped(1024, 256), (torch.zeros(8, 1024), torch.tensor([2, 4, 6, 8], dtype=torch.int32))
    with mock.patch.object(exporting, "compile_kernels", without_code):
        plain, packed = (export_module(module, inputs, quantize=q) for q in (None, scheme))
    before, after = (sum(c.nbytes for c in r.planned.program.constants) for r in (plain, packed))
    assert before == 2 * E * 256 * (1024 + 24) and after <= share * before
    arenas = [sum(p.nbytes for p in method_plan.arenas) for method_plan in packed.planned.plan.methods]
    assert max(arenas) < before - after


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_weight_that_is_stored_with_its_outputs_last(scheme: str, rows: int) -> None:
    found = check(Addmm(), torch.randn(1, rows, K), scheme=scheme)
    assert (found.done, dict(found.left), dict(found.kept)) == (1, {}, {})


@pytest.mark.parametrize(("scheme", "rows"), [(SCHEMES[0], 3), (SCHEMES[1], 1)])
def test_experts_that_rows_chose_by_index(scheme: str, rows: int) -> None:
    found = check(Chosen(), torch.randn(rows, K), scheme=scheme)
    assert (found.done, dict(found.experts), dict(found.left)) == (1, {"up": False, "down": True}, {})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [3, 40])
def test_experts_of_groups_of_rows(scheme: str, rows: int) -> None:
    ends = torch.tensor([rows // 3, rows // 3, rows - 1, rows], dtype=torch.int32)
    found = check(Grouped(), torch.randn(rows, 128), ends, scheme=scheme, limit=2e-2)
    assert (found.done, dict(found.experts)) == (0, {"flipped": True, "back": False})


def test_experts_that_have_as_many_rows_each() -> None:
    found = check(Batched(), torch.randn(E, 3, K), scheme="int8-weight-only")
    assert dict(found.experts) == {"up": True}


def test_what_no_kernel_reads_is_left_and_said() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = torch.nn.Parameter(torch.randn(K, N))
            self.several = torch.nn.Parameter(torch.randn(E, K, N))
            self.read_twice = torch.nn.Parameter(torch.randn(E, K, N))
            self.table = torch.nn.Embedding(9, K)

        def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            first = torch.addmm(x[0, :, :1], x[0], self.scaled)
            second = torch.bmm(x, self.several[which])
            third = torch.bmm(x.repeat(E // 2, 1, 1), self.read_twice) + self.read_twice[:, :3] * x.sum()
            return first.sum() + second.sum() + third.sum() + self.table(which).sum()

    result = export_module(Odd(), (torch.randn(2, 3, K), torch.tensor([1, 3])), quantize="int8-weight-only")
    found = selection(result)
    assert dict(found.left) == {
        "scaled": "it is more than a product and a bias",
        "several": "a matrix is chosen for several rows",
        "read_twice": "`aten.slice.Tensor` reads its weight, too",
    }
    assert found.kept["aten.embedding.default"] == (1, 9 * K * 4)
    assert Selection.parse(str(found)) == found


def test_patterns_leave_experts_out() -> None:
    result = export_module(
        Batched(),
        (torch.randn(E, 3, K),),
        quantize="int8-weight-only",
        pass_options={"quantize-weights": {"exclude": ("u*",)}},
    )
    assert dict(selection(result).left) == {"up": "`exclude` names it by `u*`"}


def test_names_that_differ_in_numbers_alone_are_one_pattern() -> None:
    names = {f"layers.{n}.experts.up": False for n in range(12)}
    assert shortened(names, ()) == {"layers.*.experts.up": False}
    assert shortened(names, ("layers.12.experts.up",)) == names
    mixed = {"a.0.w": False, "a.1.w": True}
    assert shortened(mixed, ()) == mixed


def test_a_note_with_experts_is_read_back() -> None:
    told = Selection(
        Scheme(4, 64),
        3,
        {"a": "why (that)"},
        ("table",),
        {"l.*.up": False, "l.*.down": True},
        {"aten.embedding.default": (2, 640), "aten.convolution.default": (1, 9)},
    )
    assert Selection.parse(str(told)) == told


@pytest.mark.slow
def test_a_mixture_of_experts_of_transformers() -> None:
    scheme = "int4-weight-only:32"
    pytest.importorskip("transformers")
    (source,) = resolve(str(MODELS / "qwen3_5_moe.py")).methods
    with mock.patch.object(exporting, "compile_kernels", without_code):
        result = export_module(source.module, source.args, quantize=scheme)
    notes = result.planned.program.method("forward").notes
    found = selection(result)
    experts = "network.model.layers.*.mlp.experts"
    assert dict(found.experts) == {f"{experts}.gate_up_proj": False, f"{experts}.down_proj": False}
    held = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, held, device="emulator") as program:
        (ours,) = program.method("forward")(source.args[0].numpy()).values()
    with torch.no_grad(), RoundedWeights(source.module, notes, None):
        np.testing.assert_allclose(np.asarray(ours), source.module(*source.args), rtol=1e-3, atol=1e-3)

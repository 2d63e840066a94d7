"""Which layers `--quantize` takes, what it says of the others, and whole models with packed weights."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import devplan
from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.options import ExportOptions, PlacementRule
from devplan.passes.quantized.eager import RoundedWeights
from devplan.passes.quantized.scheme import Scheme, Selection
from devplan.passes.source.load import resolve
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.runtime import load_planned
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Launch
from devplan.tests.zoo.measure import load, without_code

pytestmark = pytest.mark.torch
MODELS = Path(devplan.__file__).parent / "configs" / "models"


class Model(torch.nn.Module):
    """Two layers of one input, one behind them, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(48, 160)
        self.query = torch.nn.Linear(160, 64)
        self.key = torch.nn.Linear(160, 32, bias=False)
        self.output = torch.nn.Linear(96, 160)
        self.head = torch.nn.Linear(160, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token)
        made: torch.Tensor = self.head(self.output(torch.cat([self.query(x), self.key(x)], -1)))
        return made


def export(*methods: MethodSource, scheme: str = "int8-weight-only", **options: object) -> ExportResult:
    """Export with kernels as the emulator needs them: their sources alone."""
    chosen = ExportOptions(device="cuda", architectures=("sm_90",), quantize=scheme, **options)  # type: ignore[arg-type]
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return exporting.export(ModelSource("model", methods), chosen)


def selection(result: ExportResult, method: str = "forward") -> Selection:
    """What the method's note says."""
    (found,) = (Selection.parse(note) for note in result.planned.program.method(method).notes)
    assert found is not None
    return found


def forward(count: int = 1) -> MethodSource:
    return MethodSource("forward", Model(), (torch.arange(count)[None],))


@pytest.mark.parametrize("scheme", ["int8-weight-only", "int4-weight-only:32"])
@pytest.mark.parametrize("count", [1, 5])
def test_outputs_are_those_of_eager_with_rounded_weights(scheme: str, count: int) -> None:
    source = forward(count)
    result = export(source, scheme=scheme)
    method = result.planned.program.method("forward")
    with load(result) as program, torch.no_grad(), RoundedWeights(source.module, method.notes, None):
        (ours,) = program.method("forward")(source.args[0].numpy()).values()
        np.testing.assert_allclose(np.asarray(ours), source.module(*source.args), rtol=1e-4, atol=1e-4)
    plain = sum(tensor.nbytes for tensor in source.module.state_dict().values()) - 48 * 160 * 4
    constants = {c.digest: c.nbytes for c in result.planned.program.constants}
    assert sum(constants.values()) < plain * 0.75  # the embedding alone is half of it


@pytest.mark.parametrize("count", [1, 3])
def test_both_emulators_give_the_same_bits(count: int) -> None:
    source = forward(count)
    result = export(source, scheme="int4-weight-only:32")
    held = {digest: read() for digest, read in result.constants.items()}
    made: list[np.ndarray] = []
    for device in ("emulator", "emulator:triton"):
        with load_planned(result.planned, held, device=device) as program:
            (ours,) = program.method("forward")(source.args[0].numpy()).values()
            made.append(np.asarray(ours))
    assert np.array_equal(made[0], made[1])


def test_a_tied_head_is_left_unless_it_is_asked_for() -> None:
    assert dict(selection(export(forward())).left) == {
        "head": "`aten.embedding.default` reads its weight, too"
    }
    asked = export(forward(), pass_options={"quantize-weights": {"tied": True}})
    assert (selection(asked).done, dict(selection(asked).left)) == (4, {})


@pytest.mark.parametrize("count", [1, 3])
def test_embeddings_and_the_head_that_is_tied_to_them_read_one_table_of_bytes(count: int) -> None:
    source = forward(count)
    table = {"quantize-weights": {"embeddings": True}}
    result = export(source, scheme="int4-weight-only:32", pass_options=table)
    found = selection(result)
    assert (found.done, dict(found.left), found.embeddings) == (4, {}, ("embedding",))
    assert Selection.parse(str(found)) == found
    names = {constant.name for constant in result.planned.program.constants}
    assert {"embedding.words", "embedding.scales"} < names and "embedding.weight" not in names
    notes = result.planned.program.method("forward").notes
    with load(result) as program, torch.no_grad(), RoundedWeights(source.module, notes, None):
        (ours,) = program.method("forward")(source.args[0].numpy()).values()
        np.testing.assert_allclose(np.asarray(ours), source.module(*source.args), rtol=1e-4, atol=1e-4)


def test_patterns_choose_modules() -> None:
    table = {"include": ("query", "key", "out*"), "exclude": ("k*",)}
    found = selection(export(forward(), pass_options={"quantize-weights": table}))
    assert found.done == 2
    assert dict(found.left) == {
        "key": "`exclude` names it by `k*`",
        "head": "no pattern of `include` names it",
    }


def test_what_is_placed_on_the_host_stays() -> None:
    rules = (PlacementRule("cpu", module="output"),)
    found = selection(export(forward(), placement=rules))
    assert found.left["output"] == "it is placed on the host"


def test_layers_of_one_input_are_one_product_of_packed_weights() -> None:
    launches = [
        i.kernel
        for i in export(forward()).planned.program.method("forward").instructions
        if isinstance(i, Launch) and i.kernel.startswith("quantized_row")
    ]
    assert len(launches) == 2


def test_methods_share_packed_weights() -> None:
    model = Model()
    methods = [MethodSource(f"m{n}", model, (torch.arange(n)[None],)) for n in (1, 3)]
    result = export(*methods)
    packed = [c for c in result.planned.program.constants if c.dtype is DType.INT32]
    assert len(packed) == len({c.digest for c in packed}) == 2


def test_a_weight_that_is_computed_or_has_no_values_stays() -> None:
    class Computed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight * x.sum())

    found = selection(export(MethodSource("forward", Computed(), (torch.randn(2, 8),))))
    assert list(found.left.values()) == ["its weight is computed"]


def test_a_row_takes_norm_gate_and_residual_along() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm = torch.nn.RMSNorm(64, eps=1e-5)
            self.gate, self.up = (torch.nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(96, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            made: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
            return made

    source = MethodSource("forward", Layer(), (torch.randn(1, 1, 64),))
    result = export(source)
    method = result.planned.program.method("forward")
    kernels = [i.kernel for i in method.instructions if isinstance(i, Launch)]
    assert len(kernels) == 2 and all(kernel.startswith("quantized_row") for kernel in kernels)
    with load(result) as program, torch.no_grad(), RoundedWeights(source.module, method.notes, None):
        (ours,) = program.method("forward")(source.args[0].numpy()).values()
        np.testing.assert_allclose(np.asarray(ours), source.module(*source.args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["int8-weight-only", "int4-weight-only:64"])
def test_a_note_is_read_back(text: str) -> None:
    left = {"head": "`aten.embedding.default` reads its weight, too", "a.b": "why (that), and more"}
    for wanted in (Selection(Scheme.parse(text), 3, left), Selection(Scheme.parse(text), 0)):
        assert Selection.parse(str(wanted)) == wanted
    assert Selection.parse("another note") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8-weight-only", "int4-weight-only:32"])
def test_a_decoder_prefills_and_decodes_with_packed_weights(scheme: str) -> None:
    source = resolve(str(MODELS / "llama_decode.py"))
    eager = copy.deepcopy(source.methods[0].module)
    result = export(*source.methods, scheme=scheme)
    notes = result.planned.program.method("decode").notes
    assert selection(result, "decode").done == 15 and not selection(result, "decode").left
    with load(result) as program, torch.no_grad(), RoundedWeights(eager, notes, None):
        for method, token, position in (
            ("prefill", torch.arange(7, 15), torch.arange(8)),
            *(("decode", torch.tensor([n]), torch.tensor([n])) for n in (8, 9)),
        ):
            (ours,) = program.method(method)(token[None].numpy(), position.numpy()).values()
            wanted = eager(token[None], position).float()
            error = (torch.from_numpy(np.asarray(ours)).float() - wanted).abs().max()
            assert error <= 6e-3 * wanted.abs().max()


def test_a_dynamic_number_of_rows() -> None:
    layer = torch.nn.Linear(200, 96)
    shapes = {"input": {1: torch.export.Dim("n", max=64)}}
    source = MethodSource("forward", layer, (torch.randn(2, 8, 200),), dynamic_shapes=shapes)
    result = export(source, scheme="int4-weight-only:32")
    notes = result.planned.program.method("forward").notes
    with load(result) as program, torch.no_grad(), RoundedWeights(layer, notes, None):
        for rows in (1, 33, 64):
            x = torch.randn(2, rows, 200)
            (ours,) = program.method("forward")(x.numpy()).values()
            np.testing.assert_allclose(np.asarray(ours), layer(x), rtol=1e-4, atol=1e-5)

"""Models exported end to end, run on the emulator and on the cpu, and compared with eager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exporting import assert_close, export_methods, export_module, loaded

from devplan.passes.source.model import MethodSource
from devplan.runtime.errors import BudgetError, UnsupportedOperatorError
from devplan.runtime.program import Copy, CopyKind, HostCall, Launch, LibraryCall

pytestmark = pytest.mark.torch
F = torch.nn.functional
DEVICES = [("cuda", "emulator"), ("cpu", "cpu")]


class Counter(torch.nn.Module):
    """A cache of rows, written at a position, read whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.index_copy_(0, position, self.linear(x))
        return self.cache.sum(0), self.cache[1:3]


@pytest.mark.parametrize(("placed", "device"), DEVICES)
def test_state_is_kept_from_call_to_call(placed: str, device: str) -> None:
    model = Counter()
    result = export_module(model, (torch.randn(1, 8), torch.tensor([0])), device=placed)
    with loaded(result, device) as program:
        for position in range(3):
            x, at = torch.randn(1, 8), torch.tensor([position])
            got = program.method("forward")(x=x.numpy(), position=at.numpy())
            for have, want in zip(got.values(), model(x, at), strict=True):
                assert_close(have, want)


def test_a_cache_is_written_in_place_and_never_copied() -> None:
    result = export_module(Counter(), (torch.randn(1, 8), torch.tensor([0])))
    (method,) = result.planned.program.methods
    local = [i for i in method.instructions if isinstance(i, Copy) and i.kind is CopyKind.LOCAL]
    writers = [i for i in method.instructions if isinstance(i, Launch) and "b_cache" in i.writes]
    assert not local and len(writers) == 1
    assert [v.name for v in result.planned.program.state] == ["cache"]


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(self.linear(x), -1).mean(0), x.flatten()


@pytest.mark.parametrize(("placed", "device"), DEVICES)
def test_dynamic_rows_are_right_below_and_at_the_bound(placed: str, device: str) -> None:
    model, batch = Rows(), torch.export.Dim("batch", min=2, max=64)
    result = export_module(model, (torch.randn(5, 8),), dynamic_shapes={"x": {0: batch}}, device=placed)
    (symbol,) = result.planned.program.methods[0].symbols
    assert (symbol.lower, symbol.upper, symbol.input, symbol.dimension) == (2, 64, "x", 0)
    with loaded(result, device) as program:
        for rows in (2, 7, 64, 33):
            x = torch.randn(rows, 8)
            for have, want in zip(program.method("forward")(x=x.numpy()).values(), model(x), strict=True):
                assert_close(have, want)


def test_a_dimension_without_a_maximum_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperatorError, match="dimension 0 of input `x` has no declared maximum"):
        export_module(
            Rows(), (torch.randn(5, 8),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}}
        )


class Attention(torch.nn.Module):
    """Grouped heads over one projection each, masked or causal."""

    def __init__(self, heads: int, groups: int, depth: int, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.groups, self.depth, self.causal = heads, groups, depth, causal
        self.query = torch.nn.Linear(64, heads * depth)
        self.key, self.value = (torch.nn.Linear(64, groups * depth) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, rows, _ = x.shape
        q = self.query(x).view(batch, rows, self.heads, self.depth).transpose(1, 2)
        k = self.key(x).view(batch, rows, self.groups, self.depth).transpose(1, 2)
        v = self.value(x).view(batch, rows, self.groups, self.depth).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, enable_gqa=self.heads != self.groups
        )
        return y.transpose(1, 2).reshape(batch, rows, self.heads * self.depth)


def _blind_second() -> torch.Tensor:
    mask = torch.rand(2, 1, 1, 33) > 0.3
    mask[1] = False  # the second of the batch may see nothing
    return mask


@pytest.mark.parametrize(
    ("model", "rows", "mask"),
    [
        (Attention(4, 4, 32), 40, None),
        (Attention(4, 2, 16, causal=True), 70, None),
        (Attention(2, 2, 64), 33, _blind_second()),
        (Attention(2, 2, 48), 33, torch.randn(33, 33).half()),
    ],
    ids=["plain", "grouped and causal", "boolean mask", "additive mask"],
)
def test_half_precision_attention_is_one_product_and_one_kernel(
    model: Attention, rows: int, mask: torch.Tensor | None
) -> None:
    model = model.half()
    args = (torch.randn(2, rows, 64).half(), *(() if mask is None else (mask,)))
    result = export_module(model, args)
    work = [i for i in result.planned.program.methods[0].instructions if not isinstance(i, Copy)]
    assert [type(i) for i in work] == [LibraryCall, Launch]
    with loaded(result) as program:
        (got,) = program.method("forward")(*[a.numpy() for a in args]).values()
    wide = [a.float() if a.is_floating_point() else a for a in args]
    assert_close(got, model.float()(*wide), 2e-3)


class SpelledOut(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.25
        return scores.softmax(-1) @ v


def test_attention_that_is_spelled_out_is_recognised() -> None:
    args = tuple(torch.randn(1, 2, 20, 16).half() for _ in range(3))
    result = export_module(SpelledOut(), args)
    (launch,) = [i for i in result.planned.program.methods[0].instructions if isinstance(i, Launch)]
    assert launch.kernel.startswith("attention_")
    with loaded(result) as program:
        (got,) = program.method("forward")(*[a.numpy() for a in args]).values()
    assert_close(got, SpelledOut()(*[a.float() for a in args]), 2e-3)


class Convolutions(torch.nn.Module):
    """Full and depthwise convolutions with batch norms, a shortcut and two kinds of activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(16)
        self.depthwise = torch.nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.last = torch.nn.Conv2d(16, 16, 1)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu6(self.depthwise(F.relu(self.norm(self.first(x)))))
        return F.relu(self.last(y) + y)


def test_half_precision_convolutions_end_with_their_bias_sum_and_activation() -> None:
    model, x = Convolutions().half(), torch.randn(2, 8, 12, 12).half()
    result = export_module(model, (x,))
    instructions = result.planned.program.methods[0].instructions
    calls = [i for i in instructions if isinstance(i, LibraryCall)]
    assert [
        (c.attribute("activation"), c.attribute("has_bias"), c.attribute("has_added")) for c in calls
    ] == [
        ("relu", True, False),
        ("relu", True, True),
    ]
    kernels = [i.kernel for i in instructions if isinstance(i, Launch)]
    assert sum(k.startswith("depthwise_") for k in kernels) == 1
    with loaded(result) as program:
        (got,) = program.method("forward")(x.numpy()).values()
    assert_close(got, model.float()(x.float()), 4e-3)


class AudioStem(torch.nn.Module):
    """A speech encoder's first layers: one-dimensional convolutions, the second with a stride and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv1d(16, 24, 3, padding=1)
        self.second = torch.nn.Conv1d(24, 32, 3, stride=2, padding=2, dilation=2)
        self.third = torch.nn.Conv1d(32, 32, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.second(F.gelu(self.first(x))))
        return F.relu(self.third(y) + y).transpose(1, 2)


def test_half_precision_convolutions_of_one_dimension_run_channels_last() -> None:
    model, x = AudioStem().half(), torch.randn(2, 16, 21).half()
    result = export_module(model, (x,))
    method = result.planned.program.methods[0]
    calls = [i for i in method.instructions if isinstance(i, LibraryCall)]
    assert [c.attribute("padding") for c in calls] == [(0, 1), (0, 2), (0, 0)]
    for call in calls:
        for name in (*call.reads[:2], call.writes[0]):
            value = method.value(name)
            assert len(value.shape) == 4 and value.strides[1] == 1, name
    assert calls[-1].attribute("activation") == "relu" and calls[-1].attribute("has_added")
    with loaded(result) as program:
        (got,) = program.method("forward")(x.numpy()).values()
    assert_close(got, model.float()(x.float()), 4e-3)


@pytest.mark.parametrize(("placed", "device"), DEVICES)
def test_folding_a_batch_norm_changes_nothing_but_rounding(placed: str, device: str) -> None:
    model, x = Convolutions(), torch.randn(2, 8, 12, 12)
    result = export_module(model, (x,), device=placed)
    assert not any("norm" in s.content for s in result.planned.program.methods[0].storages)
    with loaded(result, device) as program:
        assert_close(next(iter(program.method("forward")(x.numpy()).values())), model(x))


class Perceptron(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8, bias=False)
        self.activation = torch.nn.ReLU() if form == "relu" else torch.nn.GELU(approximate=form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.last(self.activation(self.first(x))))


@pytest.mark.parametrize(
    ("form", "epilogues"),
    [("relu", ["relu", "relu"]), ("tanh", ["gelu_tanh", "relu"]), ("none", ["none", "relu"])],
)
def test_products_end_with_the_bias_and_the_activation_that_cublas_has(
    form: str, epilogues: list[str]
) -> None:
    model, x = Perceptron(form), torch.randn(2, 5, 16)
    result = export_module(model, (x,))
    instructions = result.planned.program.methods[0].instructions
    calls = [i for i in instructions if isinstance(i, LibraryCall)]
    assert [c.attribute("epilogue") for c in calls] == epilogues
    assert sum(isinstance(i, Launch) for i in instructions) == (1 if "none" in epilogues else 0)
    with loaded(result) as program:
        assert_close(next(iter(program.method("forward")(x.numpy()).values())), model(x))


class Shared(torch.nn.Module):
    """Two methods over one weight and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(1, 8))


class Write(torch.nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared.linear(x)
        self.shared.last.copy_(y)
        return y.sum()


class Read(torch.nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return self.shared.linear(self.shared.last) * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), ("float16", 4e-3)])
def test_methods_share_weights_once_and_state_by_memory(dtype: str | None, tolerance: float) -> None:
    shared = Shared()
    methods = [
        MethodSource("write", Write(shared), (torch.randn(1, 8),)),
        MethodSource("read", Read(shared), (torch.ones(1),)),
    ]
    result = export_methods(methods, dtype=dtype)
    program = result.planned.program
    assert len({c.digest for c in program.constants}) == 2
    assert [s.name for s in program.state] == ["shared.last"]
    x, number = torch.randn(1, 8), np.dtype(dtype or "float32")
    with loaded(result) as running:
        running.method("write")(x=x.numpy().astype(number))
        (got,) = running.method("read")(scale=np.full(1, 2, number)).values()
    assert_close(got, shared.linear(shared.linear(x)) * 2, tolerance)


def test_float32_products_stay_float32_unless_asked() -> None:
    for allow in (False, True):
        result = export_module(Rows(), (torch.randn(5, 8),), allow_tf32=allow)
        (call,) = [i for i in result.planned.program.methods[0].instructions if isinstance(i, LibraryCall)]
        assert call.attribute("allow_tf32") is allow


class Eigen(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x + x.T) * 2


def test_an_operator_without_a_kernel_is_named_with_the_line_that_uses_it() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.linalg_eigvalsh.*test_export\.py:\d+"):
        export_module(Eigen(), (torch.randn(4, 4),))


def test_an_operator_without_a_kernel_runs_on_the_host_where_that_is_allowed() -> None:
    x = torch.randn(4, 4)
    result = export_module(Eigen(), (x,), allow_host_ops=True)
    kinds = [i.kind for i in result.planned.program.methods[0].instructions if isinstance(i, Copy)]
    assert kinds.count(CopyKind.D2H) == 2 and kinds.count(CopyKind.H2D) == 2
    with loaded(result, allow_torch_ops=True) as program:
        assert_close(next(iter(program.method("forward")(x.numpy()).values())), Eigen()(x))


def test_a_memory_budget_refuses_with_what_is_live() -> None:
    with pytest.raises(BudgetError, match=r"memory budget of 1024 bytes.*at the peak of `forward` are live"):
        export_module(Rows(), (torch.randn(64, 8),), memory_budget=1024)


def test_planned_and_unplanned_programs_give_the_same() -> None:
    model, x = Rows(), torch.randn(6, 8)
    results = [export_module(model, (x,), device_planning=planning) for planning in (True, False)]
    outputs: list[list[Any]] = []
    for result in results:
        with loaded(result) as program:
            outputs.append([np.asarray(v) for v in program.method("forward")(x=x.numpy()).values()])
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


def test_programs_for_the_cpu_are_host_calls_alone() -> None:
    result = export_module(Rows(), (torch.randn(5, 8),), device="cpu")
    (method,) = result.planned.program.methods
    assert all(isinstance(i, HostCall) for i in method.instructions)
    assert not result.planned.program.kernels and not result.planned.program.architectures


def test_the_same_model_gives_the_same_program_twice() -> None:
    torch.manual_seed(3)
    model, x = Convolutions().half(), torch.randn(2, 8, 12, 12).half()
    assert export_module(model, (x,)).planned.program == export_module(model, (x,)).planned.program

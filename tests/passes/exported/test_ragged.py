"""Sizes that depend on data: masks of every kind against eager, on the host and on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from devplan.runtime.errors import UnsupportedOperatorError  # noqa: E402

pytestmark = pytest.mark.torch


class Function(torch.nn.Module):  # type: ignore[misc]
    """A function as a module, which has a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.function(self.layer, x)


def reductions(layer: Any, x: Any) -> Any:
    chosen = x[x > 0]
    return chosen.sum(), (chosen > 1).any(), (chosen > 0).all(), chosen.cumsum(0).sum()


def rows(layer: Any, x: Any) -> Any:
    chosen = F.layer_norm(torch.relu(layer(x[x[:, 0] > 0])), (4,))
    return chosen.sum(0), chosen.view(-1, 2, 2).transpose(1, 2).sum((0, 1)), torch.softmax(chosen, 0).sum()


def framed(layer: Any, x: Any) -> Any:
    """Rows are padded each by itself, written to by column, and read by place."""
    chosen = F.pad(x[x[:, 0] > 0], (1, 2), value=3.0)
    chosen[..., 0] = 5
    chosen[:, 1:3] = chosen[:, 2:4] * 2
    place = (chosen > 0).sum(1, keepdim=True) - 1
    return chosen.sum(0), chosen.gather(1, place).sum()


def experts(layer: Any, x: Any) -> Any:
    """A mixture of two experts, each on the rows that chose it."""
    result = torch.zeros_like(x)
    for expert in range(2):
        (row,) = torch.where((x[:, 1] > 0) == bool(expert))
        result = result.index_add(0, row, layer(x[row]) * (expert + 1))
    return result


def in_place(layer: Any, x: Any) -> Any:
    mask, made = x > 0, x.clone()
    made[mask] = x[mask] * 3
    put = torch.zeros_like(x).index_put(mask.nonzero().unbind(1), x[mask] + 1)
    twice = put.index_put((mask.any(1).nonzero()[:, 0],), layer(x[mask.any(1)]), accumulate=True)
    rows = (x[:, 0] > 0).unsqueeze(1)
    replaced = x.masked_scatter(rows, layer(x[rows[:, 0]])).masked_scatter(x > 1, x[x > 1] - 1)
    steps, which = x * 1, x[:, 1] > 0
    added, others = layer(steps[which]), layer(steps[~which])
    steps[~which] += others
    steps[which] += added
    return made, put, twice, replaced, steps


def counted(layer: Any, x: Any) -> Any:
    found = (x > 0).nonzero()
    torch._check(found.shape[0] <= 24)
    return (x[found[:, 0], found[:, 1]] * 2).sum() / found.shape[0], torch.masked_select(x, x > 0).sum()


def from_the_end(layer: Any, x: Any) -> Any:
    (row,) = torch.where(x[:, 0] > 0)
    (column,) = torch.where(x[0] > 9)
    made = x.index_put((row - 6, torch.full_like(row, -1)), x[row, 1])
    return made, x.index_put((column, column), x[column, column])


def extremes(layer: Any, x: Any) -> Any:
    chosen = x[x[:, 0] > 0]
    return chosen.mean(0), chosen.amax(0), chosen.amin(), chosen.max(), chosen[:, 0].argmax(), chosen.mean()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
CASES = [X, -X, X.abs() + 1, X[torch.tensor([5, 0, 1, 1, 2, 4])]]
EMPTY = -X.abs() - 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "function", [reductions, rows, framed, experts, in_place, counted, from_the_end, extremes]
)
def test_masks_equal_eager(function: Callable[..., Any], device: str) -> None:
    module = Function(function).eval()
    result = export_module(module, (X,), device=device)
    with loaded(result, "emulator" if device == "cuda" else "cpu") as program:
        for x in CASES if function is extremes else [*CASES, EMPTY]:
            with torch.no_grad():
                expected = module(x)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for got, want in zip(program.method("forward")(x.numpy()).values(), expected, strict=True):
                np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda layer, x: x[x[:, 0] > 0][::2].sum(), "aten.slice.Tensor"),
        (lambda layer, x: x[:, x[0] > 0].argmax(), "aten.argmax.default"),
    ],
)
def test_what_cannot_be_padded_is_refused_by_name(function: Callable[..., Any], operator: str) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        export_module(Function(function), (X,), device="cuda")
    assert caught.value.code == 3
    assert f"`{operator}`" in str(caught.value)


def test_a_number_made_of_such_a_size_is_refused() -> None:
    def larger(layer: Any, x: Any) -> Any:
        return x * ((x > 0).nonzero().shape[0] + 0.5)

    with pytest.raises(UnsupportedOperatorError, match=r"`aten\.mul\.Tensor`"):
        export_module(Function(larger), (X,), device="cpu")


@pytest.mark.parametrize("function", [experts, in_place])
def test_masks_of_dynamic_size_equal_eager(function: Callable[..., Any]) -> None:
    rows = torch.export.Dim("rows", min=2, max=6)
    module = Function(function).eval()
    result = export_module(module, (X,), dynamic_shapes=(({0: rows}),), device="cuda")
    with loaded(result) as program:
        for x in (X, -X[:2], X[3:], EMPTY[:4]):
            with torch.no_grad():
                expected = module(x)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for got, want in zip(program.method("forward")(x.numpy()).values(), expected, strict=True):
                np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)

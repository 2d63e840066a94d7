"""Operators over dynamic dimensions, at the ends of their range and between, against eager on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F

from devplan.passes import export as exporting
from devplan.passes.options import ExportOptions
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.runtime.errors import UnsupportedOperatorError, UsageError
from devplan.tests.support.exporting import assert_close
from devplan.tests.zoo.measure import load, without_code

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class One(torch.nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Two(torch.nn.Module):
    """A function of two tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def exported(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], shapes: Any
) -> exporting.ExportResult:
    source = ModelSource("dynamic", (MethodSource("forward", module.eval(), inputs, dynamic_shapes=shapes),))
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return exporting.export(source, ExportOptions(architectures=("sm_90",)))


def check(module: torch.nn.Module, shapes: Any, *cases: tuple[torch.Tensor, ...]) -> None:
    """The first case is the example; all of them must give what eager gives."""
    with load(exported(module, cases[0], shapes)) as program, torch.no_grad():
        for inputs in cases:
            wanted = module(*inputs)
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            outputs = program.method("forward")(*(x.numpy() for x in inputs)).values()
            for ours, theirs in zip(outputs, wanted, strict=True):
                assert_close(ours, theirs, 1e-4)


def images(*sizes: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
    return [(rand(1, 3, *size),) for size in sizes]


HEIGHT, WIDTH, LONG = Dim("height", min=2, max=32), Dim("width", min=2, max=32), Dim("long", min=3, max=1000)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2, "mode": "nearest"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True},
        {"size": (9, 5), "mode": "bilinear"},
    ],
    ids=str,
)
def test_images_of_any_size_are_resized(options: dict[str, Any]) -> None:
    resize = One(lambda x: F.interpolate(x, **options))
    check(resize, ({2: HEIGHT, 3: WIDTH},), *images((6, 7), (2, 2), (32, 9)))


def test_features_are_resized_to_another_input_and_in_batches() -> None:
    batch = Dim("batch", min=1, max=8)
    to_the_other = Two(lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bilinear") + y)
    cases = [(rand(n, 3, 6, 7), rand(n, 3, *size)) for n, size in ((2, (12, 14)), (1, (15, 9)), (8, (2, 32)))]
    check(to_the_other, ({0: batch}, {0: batch, 2: HEIGHT, 3: WIDTH}), *cases)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sort(x, dim=-1, stable=True),
        lambda x: torch.sort(x, dim=1, stable=True, descending=True),
        lambda x: x.topk(3, -1),
        lambda x: x.kthvalue(2, -1)[0],
    ],
    ids=["sort", "descending", "topk", "kthvalue"],
)
def test_rows_are_sorted_that_may_be_longer_than_one_kernel_sorts(function: Callable[..., Any]) -> None:
    cases = [(rand(2, length),) for length in (6, 3, 512, 513, 1000)]
    check(One(function), ({1: LONG},), *cases)


def test_a_recurrence_and_a_map_over_any_number_of_rows() -> None:
    from torch._higher_order_ops.map import map as over_rows
    from torch._higher_order_ops.scan import scan

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last, rows = scan(lambda h, xy: (h * 0.5 + xy[0], h + xy[1]), torch.zeros(3), (x, y))
        return last, rows, over_rows(lambda row: row.cumsum(0) * 2, x)

    rows = Dim("rows", min=2, max=8)
    check(Two(function), ({0: rows}, {0: rows}), *[(rand(n, 3), rand(n, 3) * 2) for n in (4, 2, 8)])


def test_dimensions_that_derive_from_others() -> None:
    n = Dim("n", min=1, max=16)
    double = Two(lambda x, y: x.repeat_interleave(2, 0) + y)
    check(double, ({0: n}, {0: 2 * n}), *[(rand(k, 6), rand(2 * k, 6)) for k in (4, 1, 16)])


def test_a_multiple_of_what_is_no_dimension_itself() -> None:
    blocks = One(lambda x: x.view(-1, 4, 6).sum(1))
    shapes = ({0: 4 * Dim("blocks", min=1, max=8)},)
    check(blocks, shapes, *[(rand(4 * k, 6),) for k in (2, 1, 8)])
    with load(exported(blocks, (rand(8, 6),), shapes)) as program:
        for wrong in (6, 36):
            with pytest.raises(UsageError, match=f"input `x` has size {wrong} in dimension 0"):
                program.method("forward")(rand(wrong, 6).numpy())


@pytest.mark.parametrize("dim", [Dim("rows"), 2 * Dim("rows"), Dim.AUTO, Dim.DYNAMIC], ids=str)
def test_a_dimension_without_a_maximum_is_refused_by_name(dim: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match="dimension 0 of input `x` has no declared maximum"):
        exported(One(lambda x: x * 2), (rand(4, 6),), ({0: dim},))


@pytest.mark.parametrize(
    "function",
    [lambda x: F.adaptive_avg_pool2d(x, (2, 3)), lambda x: F.interpolate(x, size=(4, 4), mode="area")],
    ids=["pool", "area"],
)
def test_what_was_made_for_some_sizes_only_is_refused_and_not_wrong_for_the_others(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        exported(One(function), *images((6, 7)), ({2: HEIGHT, 3: WIDTH},))
    assert caught.value.code == 3
    assert "dimension 2 of input `x` (`height`) cannot be dynamic here" in str(caught.value)

"""Detection: non-maximum suppression and regions of feature maps, against torchvision where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402

from devplan.runtime import LoadedProgram  # noqa: E402
from devplan.runtime.errors import ExecutionError, UnsupportedOperatorError  # noqa: E402
from devplan.tests.support.detection import HAS_TORCHVISION, torchvision_operators  # noqa: E402
from devplan.tests.support.functions import Function  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning")]
OPERATORS = torchvision_operators()
nms = OPERATORS.nms
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")


def boxes(count: int, seed: int = 0, size: float = 100.0) -> tuple[Any, Any]:
    """Boxes that often cover each other, and their scores."""
    made = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=made) * size
    return torch.cat([corner, corner + torch.rand(count, 2, generator=made) * size / 3], 1), torch.rand(
        count, generator=made
    )


def regions(count: int, items: int, seed: int = 0) -> Any:
    """Regions of several items; some reach beyond the maps, some are empty."""
    found, _ = boxes(count, seed, 90.0)
    found[0, 2:] = found[0, :2]
    return torch.cat([torch.arange(count)[:, None] % items, found - 10], 1)


def equal(program: LoadedProgram, function: Callable[..., Any], *inputs: Any, tolerance: float = 0) -> None:
    """One call gives what eager gives."""
    results = program.method()(*(each.numpy() for each in inputs)).values()
    for got, want in zip(results, function(*inputs), strict=True):
        assert np.asarray(got).shape == tuple(want.shape)
        np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=tolerance, atol=tolerance)


EMULATED = {"cuda": "emulator", "cpu": "cpu"}
DEVICES = pytest.mark.parametrize("device", EMULATED)
COUNT = 70
"""Boxes in more than one block."""


def kept(found: Any, scores: Any) -> tuple[Any, ...]:
    places = nms(found, scores, 0.5)
    return places, found[places], scores[places]


@pytest.fixture(scope="module", params=EMULATED)
def program(request: pytest.FixtureRequest) -> Iterator[LoadedProgram]:
    with loaded(
        export_module(Function(kept), boxes(COUNT), device=request.param), EMULATED[request.param]
    ) as made:
        yield made


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 20), cells=st.sampled_from([2, 4, 9, 40]), levels=st.sampled_from([1, 3, 1000])
)
def test_any_boxes_with_equal_scores_equal_overlaps_and_empty_ones(
    seed: int, cells: int, levels: int, program: LoadedProgram
) -> None:
    """Whole numbers, so that many intersections are just the threshold, which does not cover."""
    made = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, cells, (COUNT, 2), generator=made)
    found = torch.cat([corner, corner + torch.randint(0, 5, (COUNT, 2), generator=made)], 1).float()
    scores = torch.randint(0, levels, (COUNT,), generator=made).float()
    equal(program, kept, found, scores)


def test_a_chain_in_which_each_covers_the_next(program: LoadedProgram) -> None:
    """Whether a box is kept depends on all in front of it, through both blocks."""
    left = torch.arange(COUNT) * 0.25
    found = torch.stack([left, torch.zeros(COUNT), left + 1, torch.ones(COUNT)], 1)
    equal(program, kept, found, -torch.arange(COUNT).float())


@DEVICES
@pytest.mark.parametrize("count", [1, 64, 65, 400])
def test_any_number_of_boxes(device: str, count: int) -> None:
    def function(found: Any, scores: Any) -> tuple[Any, ...]:
        return nms(found, scores, 0.3), nms(found.double(), scores.double(), 0.3)

    with loaded(export_module(Function(function), boxes(count), device=device), EMULATED[device]) as program:
        for seed in (1, 2):
            equal(program, function, *boxes(count, seed))


def detected(found: Any, scores: Any) -> tuple[Any, ...]:
    """A detector's end: those that are sure enough, of them the best that nothing covers, at most ten."""
    (sure,) = torch.where(scores > 0.3)
    found, scores = found[sure], scores[sure]
    places = nms(found, scores, 0.4)[:10]
    return found[places], scores[places], sure[places], scores[places].sum(0)


@DEVICES
def test_boxes_whose_number_depends_on_data(device: str) -> None:
    with loaded(export_module(Function(detected), boxes(90), device=device), EMULATED[device]) as program:
        for seed in range(3):
            equal(program, detected, *boxes(90, seed), tolerance=1e-6)
        found, scores = boxes(90)
        equal(program, detected, found, scores * 0)
        equal(program, detected, found, scores + 1, tolerance=1e-6)


def test_a_declared_bound_shrinks_the_plan_and_is_checked() -> None:
    def function(found: Any, scores: Any) -> Any:
        places = nms(found, scores, 0.5)
        torch._check(places.shape[0] <= 4)
        return (places,)

    one, scores = torch.tensor([0.0, 0, 1, 1]).expand(50, 4).contiguous(), torch.rand(50)
    with loaded(export_module(Function(function), (one, scores), device="cuda"), "emulator") as program:
        (output,) = program.planned.program.methods[0].outputs
        assert output.count
        assert {c.upper for c in program.planned.program.methods[0].counts} == {4}
        equal(program, function, one, scores)
        with pytest.raises(ExecutionError, match="declared is at most 4"):
            program.method()(boxes(50)[0].numpy(), scores.numpy())


@DEVICES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_compared_in_float32(device: str, dtype: str) -> None:
    kind = getattr(torch, dtype)

    def function(found: Any, scores: Any) -> tuple[Any, ...]:
        return (nms(found.to(kind), scores.to(kind), 0.5),)

    def exact(seed: int) -> tuple[Any, Any]:
        """Boxes and scores that these types hold as they are."""
        return boxes(60, seed)[0].round(), torch.randperm(60) / 64

    with loaded(export_module(Function(function), exact(0), device=device), EMULATED[device]) as program:
        found, scores = exact(1)
        (got,) = program.method()(found.numpy(), scores.numpy()).values()
        np.testing.assert_array_equal(np.asarray(got), nms(found, scores, 0.5).numpy())


MAPS = torch.randn(2, 5, 14, 17, generator=torch.Generator().manual_seed(5))


@DEVICES
@pytest.mark.parametrize("ratio", [2, 0])
@pytest.mark.parametrize("aligned", [True, False])
def test_regions_are_averaged(device: str, ratio: int, aligned: bool) -> None:
    def function(maps: Any, found: Any) -> tuple[Any, ...]:
        last = maps.to(memory_format=torch.channels_last) * 1
        return (
            OPERATORS.roi_align(maps, found, 0.25, 3, 4, ratio, aligned),
            OPERATORS.roi_align(last, found, 0.3, 2, 2, ratio, aligned),
        )

    given = MAPS, regions(9, 2)
    with loaded(export_module(Function(function), given, device=device), EMULATED[device]) as program:
        for seed in (0, 1):
            equal(program, function, MAPS, regions(9, 2, seed), tolerance=2e-6)


@DEVICES
@pytest.mark.parametrize("ratio", [2, 0])
def test_regions_whose_bins_have_channels_of_their_own(device: str, ratio: int) -> None:
    maps = torch.randn(2, 12, 14, 17, generator=torch.Generator().manual_seed(5))
    found = regions(9, 2)[1:]

    def function(maps: Any, found: Any) -> tuple[Any, ...]:
        return (OPERATORS.ps_roi_align(maps, found, 0.25, 3, 2, ratio)[0],)

    with loaded(export_module(Function(function), (maps, found), device=device), EMULATED[device]) as program:
        equal(program, function, maps, found, tolerance=2e-6)


@DEVICES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_regions_in_other_types(device: str, dtype: str) -> None:
    kind = getattr(torch, dtype)

    def function(maps: Any, found: Any) -> tuple[Any, ...]:
        return (OPERATORS.roi_align(maps.to(kind), found.to(kind), 0.25, 3, 3, 2, True).float(),)

    given = MAPS, regions(9, 2)
    with loaded(export_module(Function(function), given, device=device), EMULATED[device]) as program:
        (got,) = program.method()(*(each.numpy() for each in given)).values()
    maps, found = (each.to(kind).double() for each in given)
    want = OPERATORS.roi_align(maps, found, 0.25, 3, 3, 2, True)
    limit = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 2e-7}[dtype]
    np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=limit, atol=limit)


@DEVICES
def test_regions_whose_number_depends_on_data(device: str) -> None:
    def function(maps: Any, found: Any, scores: Any) -> tuple[Any, ...]:
        places = nms(found, scores, 0.3)
        chosen = torch.cat([torch.zeros_like(found[places][:, :1]), found[places]], 1)
        pooled = OPERATORS.roi_align(maps, chosen, 0.2, 2, 2, 2, False)
        return pooled.flatten(1) @ torch.ones(20, 3), pooled.mean((1, 2, 3))

    given = (MAPS[:1], *boxes(30))
    with loaded(
        export_module(Function(function), given, device=device), EMULATED[device], poison=True
    ) as program:
        for seed in (0, 1):
            equal(program, function, MAPS[:1], *boxes(30, seed), tolerance=1e-5)


def test_triton_s_own_interpreter_keeps_the_same_boxes() -> None:
    with loaded(export_module(Function(kept), boxes(COUNT), device="cuda"), "emulator:triton") as program:
        equal(program, kept, *boxes(COUNT, 3))


@needs_torchvision
@DEVICES
def test_boxes_of_several_classes(device: str) -> None:
    from torchvision.ops import batched_nms

    def function(found: Any, scores: Any, classes: Any) -> tuple[Any, ...]:
        (sure,) = torch.where(scores > 0.2)
        whole = batched_nms(found, scores, classes, 0.3)
        return whole, sure[batched_nms(found[sure], scores[sure], classes[sure], 0.3)]

    classes = torch.arange(120) % 3
    given = (*boxes(120), classes)
    with loaded(export_module(Function(function), given, device=device), EMULATED[device]) as program:
        for seed in (1, 2):
            equal(program, function, *boxes(120, seed), classes)


@needs_torchvision
def test_other_operators_of_torchvision_are_refused_by_name() -> None:
    def function(maps: Any, found: Any) -> tuple[Any, ...]:
        return (OPERATORS.roi_pool(maps, found, 0.25, 3, 3)[0],)

    with pytest.raises(UnsupportedOperatorError, match=r"torchvision\.roi_pool\.default"):
        export_module(Function(function), (MAPS, regions(9, 2)), device="cuda")

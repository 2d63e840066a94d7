"""Different elements: as many as data has, against eager on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from devplan.passes.api import export
from devplan.runtime.errors import UnsupportedOperatorError
from devplan.tests.support.functions import Function, against_eager

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    row = against_eager(function, *inputs)
    assert row.status == "right", row.error


TABLE = torch.tensor([[1, 2], [0, 5], [1, 2], [1, 0], [0, 5], [1, 2], [1, 2]])
ASKED: dict[str, Any] = {"return_inverse": True, "return_counts": True}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool], ids=str)
def test_of_all_elements(dtype: torch.dtype) -> None:
    check(lambda x: [*torch.unique(x, **ASKED), *torch.unique_consecutive(x, **ASKED)], TABLE.to(dtype))


@pytest.mark.parametrize("dim", [0, 1])
def test_of_slices(dim: int) -> None:
    def different(x: torch.Tensor) -> list[torch.Tensor]:
        made = [torch.unique(x, dim=dim, **ASKED), torch.unique_consecutive(x, dim=dim, **ASKED)]
        return [tensor for triple in made for tensor in triple]

    check(different, TABLE)


def test_values_that_are_no_numbers_are_all_different() -> None:
    x = torch.tensor([1.0, float("nan"), 1.0, float("nan"), float("-inf"), -0.0, 0.0])
    check(
        lambda x: [x.isnan().sum(), x.unique(return_counts=True)[1], x.unique_consecutive().nan_to_num()], x
    )


def test_what_follows_heeds_how_many_there_are() -> None:
    def voxels(points: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        cells, cell, counts = torch.unique(points, dim=0, **ASKED)
        sums = torch.zeros_like(values).index_add(0, cell, values)
        return [cells * 2, cell, counts.sum(), cells.sum(0), sums, counts.max()]

    check(voxels, TABLE, torch.arange(7.0))


def test_more_than_can_be_sorted_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"`aten\.unique_dim\.default` cannot work on a size"):
        export(Function(lambda x: torch.unique(x, dim=0)), (torch.ones(4, 33),))

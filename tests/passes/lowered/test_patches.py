"""Convolutions of patches that do not overlap are products; others are convolutions; both equal eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from devplan.runtime.program import LibraryCall
from devplan.tests.support.exporting import assert_close, export_module, loaded

pytestmark = pytest.mark.torch


def case(layer: nn.Module, *sizes: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer.to(dtype), torch.randn(sizes).to(dtype)


def calls(layer: nn.Module, x: Any, **options: Any) -> list[str]:
    """The library functions that a layer became, after its result was compared with eager's."""
    result = export_module(layer, (x,), **options)
    with loaded(result) as program, torch.no_grad():
        for batch in (x, x.flip(0)):
            (ours,) = program.method()(batch).values()
            assert_close(ours, layer(batch), 2e-3 if x.dtype == torch.float16 else 1e-5)
    return [i.function for i in result.planned.program.methods[0].instructions if isinstance(i, LibraryCall)]


PATCHES = {
    "an image": case(nn.Conv2d(3, 16, 4, 4), 2, 3, 32, 36),
    "edges that no whole patch covers": case(nn.Conv2d(3, 16, 4, 4), 2, 3, 33, 35),
    "half precision, an odd patch": case(nn.Conv2d(1, 8, 7, 7), 1, 1, 28, 28, dtype=torch.float16),
    "no bias": case(nn.Conv2d(3, 8, (2, 4), (2, 4), bias=False), 3, 3, 8, 8),
    "a signal": case(nn.Conv1d(2, 8, 5, 5), 3, 2, 52),
    "a video": case(nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), 1, 3, 5, 8, 9),
    "one patch": case(nn.Conv2d(3, 8, 8, 8), 2, 3, 8, 8),
}
CONVOLUTIONS = {
    "patches that overlap": case(nn.Conv2d(3, 8, 4, 2), 2, 3, 16, 16),
    "gaps between patches": case(nn.Conv2d(3, 8, 2, 4), 2, 3, 16, 16),
    "a frame around the image": case(nn.Conv2d(3, 8, 4, 4, padding=2), 2, 3, 16, 16),
    "pixels apart": case(nn.Conv2d(3, 8, 2, 2, dilation=2), 2, 3, 16, 16),
    "many channels": case(nn.Conv2d(8, 8, 2, 2), 2, 8, 16, 16),
    "groups": case(nn.Conv2d(4, 8, 2, 2, groups=2), 2, 4, 16, 16),
    "single pixels": case(nn.Conv2d(3, 8, 1), 2, 3, 16, 16),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_multiplied(name: str) -> None:
    assert calls(*PATCHES[name]) == ["matmul"]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_reads_a_pixel_twice_or_not_at_all_is_a_convolution(name: str) -> None:
    assert calls(*CONVOLUTIONS[name]) == ["convolution"]


def test_the_batch_may_be_dynamic() -> None:
    layer, x = PATCHES["an image"]
    batch = torch.export.Dim("batch", min=1, max=4)
    assert calls(layer, x, dynamic_shapes=({0: batch},)) == ["matmul"]


def test_without_libraries_it_is_one_of_our_products() -> None:
    layer, x = PATCHES["half precision, an odd patch"]
    assert calls(layer, x, library_calls=False) == []

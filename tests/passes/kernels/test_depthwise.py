"""Depthwise convolutions: which blocks, how weights are stored, and the same as eager's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from devplan.passes.kernels.depthwise import Blocks, blocks_for
from devplan.runtime.expr import Expr
from devplan.tests.support.exporting import assert_close, export_module, loaded

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("channels", "blocks"),
    [
        (32, Blocks(64, 32)),
        (96, Blocks(64, 32)),
        (144, Blocks(128, 16)),
        (192, Blocks(32, 64)),
        (960, Blocks(32, 64)),
        (120, Blocks(32, 64)),
        (Expr("c"), Blocks(32, 64)),
    ],
)
def test_blocks_leave_few_lanes_without_a_channel(channels: Any, blocks: Blocks) -> None:
    assert blocks_for(channels) == blocks


CASES = {
    "more channels than a block": (nn.Conv2d(72, 72, 3, padding=1, groups=72), (2, 72, 9, 7)),
    "strides and a large kernel": (nn.Conv2d(32, 32, 5, stride=2, padding=2, groups=32), (1, 32, 13, 17)),
    "dilation, no bias": (
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16, bias=False),
        (3, 16, 10, 10),
    ),
    "uneven sizes": (nn.Conv2d(64, 64, (1, 5), stride=(1, 2), padding=(0, 2), groups=64), (2, 64, 6, 11)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_eager(name: str) -> None:
    layer, sizes = CASES[name]
    torch.manual_seed(0)
    layer, x = layer.half(), torch.randn(sizes).half()
    result = export_module(nn.Sequential(layer, nn.ReLU6()), (x,))
    kernels = [kernel for kernel in result.planned.program.kernels if "depthwise" in kernel.name]
    (known,) = (dict(kernel.constants) for kernel in kernels if "KERNEL_H" in dict(kernel.constants))
    assert known["weight_c"] == 1, "neighbouring channels have neighbouring weights"
    with loaded(result) as program, torch.no_grad():
        (ours,) = program.method()(x).values()
        assert_close(ours, nn.functional.relu6(layer(x)), 2e-3)

"""Projections of one tensor become one product, in all methods that share their weights or in none."""

from __future__ import annotations

import pytest
import torch

from devplan.passes.exported.capture import export_method
from devplan.passes.exported.contents import name_contents
from devplan.passes.exported.method import ExportedMethod, analyse
from devplan.passes.rewrites.merge_linears import MergeLinears
from devplan.passes.source.model import MethodSource

pytestmark = pytest.mark.torch


class Gated(torch.nn.Module):
    """Two layers of one input, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 6)
        self.up = torch.nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gate(x)) * self.up(x)


class Up(torch.nn.Module):
    """One of the layers alone."""

    def __init__(self, gated: Gated) -> None:
        super().__init__()
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gated.up(x)


def merged(*modules: torch.nn.Module) -> list[ExportedMethod]:
    """A method for each module, after the pass ran on all of them."""
    sources = [MethodSource(f"m{i}", module, (torch.ones(i + 1, 4),)) for i, module in enumerate(modules)]
    methods = [analyse(source, export_method(source)) for source in sources]
    ready = MergeLinears(contents=name_contents(methods)).prepared(methods)
    return [ready.run(method).subject for method in methods]


def products(method: ExportedMethod) -> int:
    """How many linear layers are left."""
    return sum(n.target is torch.ops.aten.linear.default for n in method.graph.graph.nodes)


def test_methods_that_agree_share_the_merged_weight() -> None:
    torch.manual_seed(0)
    gated = Gated()
    first, second = merged(gated, gated)
    assert products(first) == products(second) == 1
    assert set(first.contents.values()) == set(second.contents.values())
    x = torch.randn(1, 4)
    operands = [
        x if n.name not in first.contents else first.tensors[first.contents[n.name]]
        for n in first.graph.graph.nodes
        if n.op == "placeholder"
    ]
    (result,) = first.graph(*operands)
    torch.testing.assert_close(result, gated(x))


def test_methods_that_disagree_keep_the_layers_apart() -> None:
    gated = Gated()
    first, second = merged(gated, Up(gated))
    assert (products(first), products(second)) == (2, 1)

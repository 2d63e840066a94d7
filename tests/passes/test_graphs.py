"""Layers over graphs as libraries write them, with self loops that a mask finds, against eager on both devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402

from devplan.tests.support.functions import Function  # noqa: E402

pytestmark = pytest.mark.torch
NODES, EDGES, COLUMNS = 6, 11, 3


def graph(seed: int) -> tuple[Any, ...]:
    """Nodes with features, edges of which some are loops, and their weights."""
    made = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, NODES, (2, EDGES), generator=made)
    edges[1, :seed] = edges[0, :seed]
    return torch.randn(NODES, COLUMNS, generator=made), edges, torch.rand(EDGES, generator=made) + 0.1


def places(index: Any, source: Any) -> Any:
    return index.view(-1, *(1,) * (source.dim() - 1)).expand_as(source)


def summed(source: Any, index: Any, size: int) -> Any:
    return source.new_zeros(size, *source.shape[1:]).scatter_add_(0, places(index, source), source)


def extreme(source: Any, index: Any, size: int, how: str) -> Any:
    made = source.new_zeros(size, *source.shape[1:])
    return made.scatter_reduce_(0, places(index, source), source, how, include_self=False)


def softmax(source: Any, index: Any, size: int) -> Any:
    """Over the edges that end at one node."""
    shifted = (source - extreme(source.detach(), index, size, "amax").index_select(0, index)).exp()
    return shifted / (summed(shifted, index, size) + 1e-16).index_select(0, index)


def looped(edges: Any, weight: Any) -> tuple[Any, Any]:
    """Each node with one loop, which keeps the weight of a loop that is there."""
    keeps = edges[0] != edges[1]
    loops = torch.arange(NODES).unsqueeze(0).repeat(2, 1)
    weights = torch.ones(NODES)
    found = ~keeps
    weights[edges[0][found]] = weight[found]
    return torch.cat([edges[:, keeps], loops], 1), torch.cat([weight[keeps], weights])


def convolved(x: Any, edges: Any, weight: Any) -> tuple[Any, ...]:
    edges = torch.cat([edges[:, edges[0] != edges[1]], torch.arange(NODES).repeat(2, 1)], 1)
    weight = torch.ones(edges.size(1))
    row, column = edges[0], edges[1]
    scale = summed(weight, column, NODES).pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    weight = scale[row] * weight * scale[column]
    return (summed(weight.view(-1, 1) * x.index_select(0, row), column, NODES),)


def weighted(x: Any, edges: Any, weight: Any) -> tuple[Any, ...]:
    edges, weight = looped(edges, weight)
    row, column = edges
    scale = summed(weight, column, NODES).rsqrt()
    messages = x[row] * (scale[row] * weight * scale[column]).unsqueeze(-1)
    return (torch.zeros_like(x).index_add(0, column, messages), weight, edges)


def attended(x: Any, edges: Any, weight: Any) -> tuple[Any, ...]:
    """Two heads of attention along edges."""
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(NODES).repeat(2, 1)], 1)
    row, column = edges[0], edges[1]
    heads = torch.stack([x, x.flip(1) * 2], 1)
    score = torch.nn.functional.leaky_relu((heads * 0.7).sum(-1)[row] + (heads * 0.3).sum(-1)[column], 0.2)
    alpha = softmax(score, column, NODES)
    return summed(heads[row] * alpha.unsqueeze(-1), column, NODES).flatten(1), alpha


def reduced(x: Any, edges: Any, weight: Any) -> tuple[Any, ...]:
    """Other ways in which messages come together, among them into what is there already."""
    kept = weight > 0.5
    row, column = edges[:, kept]
    messages = x[row] * weight[kept].unsqueeze(-1)
    at = places(column, messages)
    return (
        *(extreme(messages, column, NODES, how) for how in ("amax", "amin", "mean", "prod", "sum")),
        x.scatter_reduce(0, at, messages, "mean"),
        x.scatter_add(0, at, messages),
        x.t().scatter_add(1, at.t(), messages.t()),
        x.index_add(0, column, messages, alpha=2),
    )


def known(x: Any, edges: Any, weight: Any) -> tuple[Any, ...]:
    """Without loops the number of edges is known."""
    row, column = edges
    messages = x[row] * weight.unsqueeze(-1)
    more = torch.cat([x, x[:1]])
    given = 0, places(column, messages), messages
    several = (more.scatter_reduce(*given, how, include_self=False) for how in ("amax", "amin", "prod"))
    return summed(messages, column, NODES), softmax(x[row], column, NODES), *several


@pytest.mark.parametrize("function", [convolved, weighted, attended, reduced, known])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_messages_along_edges(function: Callable[..., Any], device: str) -> None:
    program = export_module(Function(function), graph(2), device=device)
    with loaded(program, "emulator" if device == "cuda" else "cpu", poison=True) as running:
        for seed in (0, 1, 4, EDGES):
            results = running.method()(*(each.numpy() for each in graph(seed))).values()
            for got, want in zip(results, function(*graph(seed)), strict=True):
                assert np.asarray(got).shape == tuple(want.shape)
                np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=1e-5, atol=1e-5)

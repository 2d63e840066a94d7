"""Replace a node of an exported graph by what a function of its operands does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .inductor.interfaces import make_fx


def inline(
    run: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[torch.fx.Node], origin: torch.fx.Node
) -> list[torch.fx.Node]:
    """Trace ``run`` on the fake tensors of ``inputs``; put its operators before ``origin``, with its lines.

    Returns the nodes of the results, in order.
    """
    graph: Any = origin.graph
    fakes = [n.meta["val"] for n in inputs]
    mode = next((f.fake_mode for f in (*fakes, origin.meta.get("val")) if hasattr(f, "fake_mode")), None)
    with mode or contextlib.nullcontext(), torch.no_grad():
        traced = make_fx(lambda *tensors: _flat(run(*tensors)), tracing_mode="real")(*fakes)
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    found: list[torch.fx.Node] = []
    placeholders = iter(inputs)
    meta = {k: v for k, v in origin.meta.items() if k in ("stack_trace", "nn_module_stack")}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(placeholders)
        elif node.op == "output":
            found = [env[n] for n in node.args[0]]
        else:
            with graph.inserting_before(origin):
                env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = {**node.meta, **meta}
    return found


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]

"""Replace a node of an exported graph by what a function of its operands does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..inductor.interfaces import make_fx

if TYPE_CHECKING:
    from .method import ExportedMethod


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


def stand_in(method: ExportedMethod, node: torch.fx.Node, made: Sequence[torch.fx.Node]) -> None:
    """Let the nodes of the results be read in place of a node, which is erased."""
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(made[0])
        method.rename_ends(node.name, made[0].name)
    for user in list(node.users):  # several results
        index: int = user.args[1]  # type: ignore[assignment]
        part = made[index]
        user.replace_all_uses_with(part)
        method.rename_ends(user.name, part.name)
        method.graph.graph.erase_node(user)
    method.graph.graph.erase_node(node)


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]

"""Compute once what a graph computes several times from the same operands."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from ..inductor.overloads import is_mutable, is_overload

if TYPE_CHECKING:
    from .method import ExportedMethod


def share_equal(method: ExportedMethod, numbers: Collection[torch.fx.Node] = ()) -> int:
    """Let readers of a repeated operator read its first result, in place; returns how many were repeated.

    Operators with random results or effects are left alone, and so are results of the method: callers get
    memory of their own for each, but for those that stand for ``numbers``.
    """
    graph = method.graph.graph
    (output,) = [node for node in graph.nodes if node.op == "output"]
    counted = {node for node in output.all_input_nodes if node.name in {c.node for c in method.counts}}
    returned = {n for n in output.all_input_nodes if n not in numbers and n not in counted}
    first: dict[Any, torch.fx.Node] = {}
    shared = 0
    for node in list(graph.nodes):
        if not _is_pure(node):
            continue
        known = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if known is not node and node not in returned:
            node.replace_all_uses_with(known)
            method.rename_ends(node.name, known.name)
            graph.erase_node(node)
            shared += 1
    return shared


def _is_pure(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not is_overload(target):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return not is_mutable(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _key(value: Any) -> Any:
    """Arguments as something to compare by: nodes by identity, literals with their types."""
    if isinstance(value, torch.fx.Node):
        return value
    if isinstance(value, dict):
        return tuple(sorted((str(key), _key(each)) for key, each in value.items()))  # pyright: ignore
    if isinstance(value, list | tuple):
        return tuple(_key(each) for each in value)  # pyright: ignore
    return type(value).__name__, repr(value)

"""The bodies of `torch.cond` and `torch.while_loop` in an exported graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.interfaces import is_higher_order, rename_node
from .origins import origin_of, source_line


@dataclass(frozen=True)
class ControlFlow:
    """A control-flow node taken apart.

    ``own`` are operands that the operator itself reads (the predicate of a condition); ``operands`` are what
    the placeholders of every body stand for, in order; ``bodies`` are (name, graph).
    """

    own: tuple[torch.fx.Node, ...]
    operands: tuple[Any, ...]
    bodies: tuple[tuple[str, torch.fx.GraphModule], ...]


def is_control_flow(node: torch.fx.Node) -> bool:
    """Whether a node is a higher-order operator."""
    return node.op == "call_function" and is_higher_order(node.target)


def take_apart(node: torch.fx.Node) -> ControlFlow:
    """The parts of a `cond` or `while_loop`; UnsupportedOperatorError for other operators and for scalars."""
    kind, args = str(node.target), node.args
    own: tuple[Any, ...]
    if kind == "cond":
        own, bodies, operands = (args[0],), args[1:3], _listed(args[3])
    elif kind == "while_loop":
        own, bodies, operands = (), args[:2], (*_listed(args[2]), *_listed(args[3]))
    else:
        raise UnsupportedOperatorError(
            f"operator `{kind}` at {origin_of([node])} is not supported",
            why="of the higher-order operators only `cond`, `while_loop`, `scan` and `map` are",
        )
    if not all(_is_a(value, torch.Tensor) for value in own) or not all(
        _is_a(value, torch.Tensor, torch.SymInt) for value in operands
    ):
        raise UnsupportedOperatorError(
            f"`{kind}` at {origin_of([node])} depends on a Python number", hint="pass it as a tensor"
        )
    owner: Any = node.graph.owning_module
    graphs = tuple((str(body.target), getattr(owner, str(body.target))) for body in _nodes(bodies))
    return ControlFlow(_nodes(own), operands, graphs)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value)


def _nodes(values: tuple[Any, ...]) -> tuple[torch.fx.Node, ...]:
    return tuple(value for value in values if isinstance(value, torch.fx.Node))


def _is_a(value: Any, *kinds: type) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), kinds)


def placeholders(graph: torch.fx.GraphModule) -> tuple[torch.fx.Node, ...]:
    """The inputs of a body."""
    return tuple(node for node in graph.graph.nodes if node.op == "placeholder")


def all_nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph and of all bodies in it."""
    for node in graph.graph.nodes:
        yield node
        if is_control_flow(node):
            for _, body in take_apart(node).bodies:
                yield from all_nodes(body)


def name_apart(graph: torch.fx.GraphModule, prefix: str = "") -> None:
    """Rename the nodes of all bodies, so that no two nodes of a method have one name.

    A body is traced apart and has lost the user's lines; it gets that of its operator.
    """
    for node in graph.graph.nodes:
        if is_control_flow(node):
            for name, body in take_apart(node).bodies:
                for inner in body.graph.nodes:
                    rename_node(inner, f"{prefix}{name}_{inner.name}")
                    if source_line(inner) is None and "stack_trace" in node.meta:
                        inner.meta["stack_trace"] = node.meta["stack_trace"]
                name_apart(body, f"{prefix}{name}_")

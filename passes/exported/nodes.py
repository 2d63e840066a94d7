"""What passes ask of a node of a torch.fx graph."""

from __future__ import annotations

from typing import Any

import torch


def is_call(node: Any, target: Any) -> bool:
    """Whether something is a node that calls this operator."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target is target


def as_node(value: Any) -> torch.fx.Node | None:
    """An argument, if it is a node."""
    return value if isinstance(value, torch.fx.Node) else None


def rank(node: Any) -> int:
    """The number of dimensions of a node's tensor; 0 for anything else."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0

"""Linear layers of a region with the activation that follows them: one matrix product with an epilogue.

cuBLASLt adds the bias and applies ReLU or the tanh form of GELU while it writes the result, so that the
activation costs no pass over memory. The exact (erf) form of GELU is none of its epilogues and stays a
kernel.
"""

from __future__ import annotations

import torch

from ..kernels.own_operators import own_operator

aten = torch.ops.aten


@own_operator("linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor")
def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The operator on rows: leading dimensions are one, and the weight is read transposed, as it lies."""
    rows = x.reshape(-1, x.shape[-1])
    made: torch.Tensor = torch.ops.devplan.linear(rows, weight.transpose(0, 1), bias, activation)
    return made.reshape(*x.shape[:-1], weight.shape[0])


def fuse_linears(module: torch.fx.GraphModule) -> None:
    """Rewrite a region's linear layers in place, where an activation is all that reads their result."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.linear.default:
            continue
        after = next(iter(node.users)) if len(node.users) == 1 else None
        activation = _activation(after)
        if after is None or not activation or not _is_floating(node):
            continue
        x, weight, bias = (*node.args, None)[:3]
        with module.graph.inserting_before(after):
            made = module.graph.call_function(_fused, (x, weight, bias, activation))
        made.meta = dict(after.meta)
        after.replace_all_uses_with(made)
    module.graph.eliminate_dead_code()
    module.recompile()


def _activation(node: torch.fx.Node | None) -> str:
    """The epilogue that a node is, or nothing."""
    if node is None or node.op != "call_function":
        return ""
    if node.target in (aten.relu.default, aten.relu_.default):
        return "relu"
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return "gelu_tanh"
    return ""


def _is_floating(node: torch.fx.Node) -> bool:
    """A type that cuBLASLt has epilogues for, and at least one row and column."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return value.dtype in (torch.float16, torch.bfloat16, torch.float32)

"""Fold a batch norm in evaluation into the convolution before it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..base import Pass, PassResult, Stage
from ..exported.contents import Contents
from ..exported.method import ExportedMethod

_CONVOLUTIONS = (
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.default,
)
_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


@dataclass(frozen=True)
class FoldBatchNorms(Pass[ExportedMethod]):
    """Scale a convolution's weights and shift its bias, so that the batch norm behind it is gone.

    The arithmetic is done once, in float64. Only where the convolution's result has no other reader and all
    parameters are constants that nothing else reads.
    """

    name: ClassVar[str] = "fold-batch-norms"
    stage: ClassVar[Stage] = Stage.EXPORTED

    contents: Contents = field(default_factory=Contents, repr=False)

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Fold in one method, in place."""
        folded = 0
        for node in list(subject.graph.graph.nodes):
            if node.op == "call_function" and node.target is _NORM:
                folded += _fold(subject, self.contents, node)
        if folded:
            subject.graph.graph.eliminate_dead_code()
            subject.drop_unused()
            subject.graph.recompile()
        return PassResult(subject, folded > 0)


def _fold(method: ExportedMethod, contents: Contents, norm: torch.fx.Node) -> bool:
    convolution, *parameters = norm.args[:5]
    if not isinstance(convolution, torch.fx.Node) or convolution.target not in _CONVOLUTIONS:
        return False
    if len(convolution.users) != 1 or not _reads_result_alone(norm):
        return False
    weight, bias = convolution.args[1], convolution.args[2] if len(convolution.args) > 2 else None
    values = [_constant(method, contents, node) for node in (weight, bias, *parameters)]
    if values[0] is None or values[3] is None or values[4] is None:
        return False
    if any(
        value is None and node is not None
        for value, node in zip(values, (weight, bias, *parameters), strict=True)
    ):
        return False
    epsilon = float(str(norm.args[6]))
    new_weight, new_bias = _folded(values, epsilon)
    made = [
        method.add_constant(contents, f"{convolution.name}_folded_{what}", value)
        for what, value in (("weight", new_weight), ("bias", new_bias))
    ]
    convolution.args = (convolution.args[0], *made, *convolution.args[3:])
    for user in list(norm.users):
        user.replace_all_uses_with(convolution)
        method.rename_ends(user.name, convolution.name)
    return True


def _reads_result_alone(norm: torch.fx.Node) -> bool:
    """Whether only the normalised tensor is used, not the saved statistics."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in norm.users)


def _constant(method: ExportedMethod, contents: Contents, node: Any) -> torch.Tensor | None:
    if not isinstance(node, torch.fx.Node) or node.name not in method.contents:
        return None
    name = method.contents[node.name]
    value = contents.tensors[name]
    return None if name in contents.state or value.is_meta else value


def _folded(values: list[torch.Tensor | None], epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, bias, gamma, beta, mean, variance) to the folded weight and bias."""
    weight, bias, gamma, beta, mean, variance = (v if v is None else v.double() for v in values)
    assert weight is not None and mean is not None and variance is not None
    scale = torch.rsqrt(variance + epsilon)
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if bias is None else (bias - mean) * scale
    shift = shift if beta is None else shift + beta
    held = values[0]
    assert held is not None
    scaled = weight * scale.reshape(-1, *(1,) * (weight.dim() - 1))
    return scaled.to(held.dtype), shift.to(held.dtype)

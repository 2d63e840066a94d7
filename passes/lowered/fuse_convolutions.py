"""Convolutions of a region with what follows them: bias, a sum and an activation in one library call.

Half-precision convolutions run channels-last, which the tensor cores want; their weights are stored that way.
One-dimensional ones become two-dimensional ones of height 1: cuDNN's engine for a Whisper encoder's second
convolution, 32 at once, took 3.3 ms with the channels first. Depthwise ones of two dimensions get a kernel of
ours, since libraries treat them as general grouped convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.own_operators import own_operator

aten = torch.ops.aten


@own_operator(
    "depthwise_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? added, int[] stride, "
    "int[] padding, int[] dilation, str activation) -> Tensor"
)
@own_operator(
    "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? added, int[] stride, int[] padding, "
    "int[] dilation, int groups, str activation) -> Tensor"
)
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
) -> torch.Tensor:
    """A channels-last tensor of a convolution's shape."""
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    ]
    return x.new_empty(x.shape[0], sizes[0], sizes[1], weight.shape[0]).permute(0, 3, 1, 2)


def _fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> torch.Tensor:
    """The operator on channels-last operands; those that are not so yet are converted first."""
    if x.dim() == 3:
        flat = None if added is None else added.unsqueeze(2)
        wide = _fused(
            x.unsqueeze(2), weight.unsqueeze(2), bias, flat, stride, padding, dilation, groups, activation
        )
        return wide.squeeze(2)
    x = _channels_last(x)
    added = None if added is None else _channels_last(added)
    sizes = (stride, padding, dilation)
    made: torch.Tensor
    if groups == 1:
        made = torch.ops.devplan.convolution(x, weight, bias, added, *sizes, groups, activation)
    else:
        made = torch.ops.devplan.depthwise_convolution(x, weight, bias, added, *sizes, activation)
    return made


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    made: torch.Tensor = aten.clone.default(x, memory_format=torch.channels_last)
    return made


_TARGETS = (aten.conv1d.default, aten.conv2d.default)


def fuse_convolutions(module: torch.fx.GraphModule, lay_out: Callable[[str, int], bool]) -> None:
    """Rewrite a region's convolutions in place.

    ``lay_out`` is told the placeholder of a weight and its dimension of channels, stores it with that one the
    densest, and says whether it could.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _TARGETS and _is_fusable(node):
            weight = node.args[1]
            dimension = 1 if _operands(node)[-1] == 1 else 0
            if weight.op == "placeholder" and lay_out(weight.name, dimension):
                _fuse(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_fusable(node: torch.fx.Node) -> bool:
    """Half precision, and channel counts that cuDNN's fused engines take (or a depthwise convolution)."""
    x, weight = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dim() != weight.dim() or x.dim() not in (3, 4):
        return False
    groups = node.args[6] if len(node.args) > 6 else 1
    if isinstance(node.args[4] if len(node.args) > 4 else 0, str):
        return False
    if groups == x.shape[1] == weight.shape[0] and x.dim() == 4:
        return True
    return bool(groups == 1 and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0)


def _fuse(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    x, weight, bias, stride, padding, dilation, groups = _operands(node)
    last, added, activation = node, None, "none"
    after = _only_user(last)
    if after is not None and after.target is aten.add.Tensor and len(after.args) == 2:
        other = after.args[0] if after.args[1] is last else after.args[1]
        if _is_like(other, last) and other is not last:
            last, added, after = after, other, _only_user(after)
    if after is not None and _activation(after, groups):
        last, activation = after, _activation(after, groups)
    with graph.inserting_before(last):
        made = graph.call_function(
            _fused, (x, weight, bias, added, stride, padding, dilation, groups, activation)
        )
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)


def _operands(node: torch.fx.Node) -> tuple[Any, Any, Any, list[int], list[int], list[int], int]:
    """What the operator takes; a one-dimensional convolution's sizes get those of height 1 in front."""
    defaults: list[Any] = [None, None, None, 1, 0, 1, 1]
    given = [*node.args, *defaults[len(node.args) :]]
    many = 1 if node.target is aten.conv1d.default else 2
    numbers = [[v] * many if isinstance(v, int) else list(v) * (many // len(v)) for v in given[3:6]]
    if many == 1:
        numbers = [[neutral, *n] for neutral, n in zip((1, 0, 1), numbers, strict=True)]
    return given[0], given[1], given[2], numbers[0], numbers[1], numbers[2], given[6]


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_like(node: Any, other: torch.fx.Node) -> bool:
    """Whether two nodes are tensors of one shape and type."""
    if not isinstance(node, torch.fx.Node):
        return False
    value, like = node.meta.get("val"), other.meta["val"]
    return isinstance(value, torch.Tensor) and value.shape == like.shape and value.dtype == like.dtype


def _activation(node: torch.fx.Node, groups: int) -> str:
    """The activation that a node is, if the convolution can end with it.

    cuDNN's engines with a clipped ReLU were 40 times slower on an H200 than a launch of their own.
    """
    if node.target in (aten.relu.default, aten.relu_.default):
        return "relu"
    if groups == 1:
        return ""
    if node.target is aten.relu6.default:
        return "relu6"
    if node.target in (aten.hardtanh.default, aten.hardtanh_.default, aten.clamp.default):
        return "relu6" if tuple(node.args[1:3]) == (0, 6) else ""
    return ""

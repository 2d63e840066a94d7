"""Linear layers of one to four rows, with the norm in front and what follows, as one operator of ours.

Taken is every linear layer of a static number of rows up to `row_product.MOST_ROWS`, in float16, bfloat16 or
float32, whose weight's rows begin at multiples of 16 bytes. It takes along

- a root-mean-square norm whose readers are all such layers (`rms_norm`, or spelled out as models do);
- an activation, or one half of the result activated times the other half (SwiGLU, GeGLU);
- a tensor of the same shape that is added (the residual).

Layers of one row whose weights are quantised take the same along (`quantized_row`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from ..exported.nodes import is_call
from ..kernels.row_product import MOST_ROWS
from ..quantized.linear import on_rows
from ..quantized.row import fused

aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.type_as.default)
_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    added: torch.Tensor | None,
    activation: str,
    is_gated: bool,
) -> torch.Tensor:
    """The operator on rows: leading dimensions are one."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if added is not None:
        added = added.reshape(-1, added.shape[-1])
        added = added if added.stride(-1) == 1 else added.contiguous()
    made: torch.Tensor = torch.ops.devplan.row_product(
        rows, weight, bias, norm, eps, added, activation, is_gated
    )
    return made.reshape(*x.shape[:-1], made.shape[-1])


def fuse_row_products(module: torch.fx.GraphModule) -> None:
    """Rewrite a region's linear layers of few rows in place."""
    layers = [node for node in module.graph.nodes if is_row_product(node) or is_packed(node)]
    for node in layers:
        x, *weight = node.args if is_packed(node) else (*node.args, None)[:3]
        norm = _norm(x, layers)
        end = _end(node)
        with module.graph.inserting_before(end.last):
            operands = (x if norm is None else norm.x, *weight)
            before = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            after = (end.added, end.activation, end.is_gated)
            product = fused if is_packed(node) else _product
            made = module.graph.call_function(product, (*operands, *before, *after))
        made.meta = {**node.meta, "val": end.last.meta["val"]}
        end.last.replace_all_uses_with(made)
    module.graph.eliminate_dead_code()
    module.recompile()


def is_row_product(node: torch.fx.Node) -> bool:
    """Whether a node is a linear layer for the kernel, by sizes and types alone."""
    if node.op != "call_function" or node.target is not aten.linear.default:
        return False
    x, weight = (_value(each) for each in node.args[:2])
    if x is None or weight is None or x.dtype not in _DTYPES or weight.dim() != 2 or x.dim() == 0:
        return False
    sizes: tuple[Any, ...] = (*x.shape, *weight.shape, weight.stride(0))
    if not all(isinstance(size, int) for size in sizes):
        return False
    columns = x.shape[-1]
    is_aligned = weight.stride(1) == 1 and weight.stride(0) * weight.element_size() % 16 == 0
    return 0 < x.numel() <= MOST_ROWS * columns and is_aligned


def is_packed(node: torch.fx.Node) -> bool:
    """Whether a node is a linear layer of one row whose weight is quantised."""
    x = _value(node.args[0]) if node.op == "call_function" and node.target is on_rows else None
    if x is None or x.dtype not in _DTYPES or not all(isinstance(size, int) for size in x.shape):
        return False
    return x.dim() > 0 and x.numel() == x.shape[-1]


@dataclass(frozen=True)
class _Norm:
    x: torch.fx.Node
    weight: torch.fx.Node
    eps: float


@dataclass(frozen=True)
class _End:
    """The node whose result the operator gives, and what stands between it and the layer."""

    last: torch.fx.Node
    activation: str = "none"
    is_gated: bool = False
    added: torch.fx.Node | None = None


def _norm(node: Any, layers: list[torch.fx.Node]) -> _Norm | None:
    """The norm that a layer reads, if nothing but such layers does."""
    if not isinstance(node, torch.fx.Node) or not all(user in layers for user in node.users):
        return None
    while _is_whole(node):  # the last position of one, say
        node = node.args[0]
        if len(node.users) > 1:
            return None
    found = _rms_norm(node) or _spelled_out(node)
    if found is None or not _is_row(found.weight, node):
        return None
    x, value = _value(found.x), _value(node)
    return found if x is not None and value is not None and x.dtype == value.dtype else None


def _rms_norm(node: torch.fx.Node) -> _Norm | None:
    """PyTorch's operator, over the last dimension."""
    arguments = _arguments(node, aten.rms_norm.default)
    if arguments is None or len(arguments) < 3 or len(arguments[1]) != 1 or arguments[2] is None:
        return None
    eps = arguments[3] if len(arguments) > 3 else None
    return _Norm(arguments[0], arguments[2], torch.finfo(node.meta["val"].dtype).eps if eps is None else eps)


def _spelled_out(node: torch.fx.Node) -> _Norm | None:
    """``x * rsqrt(mean(x ** 2, -1) + eps) * weight``, with casts anywhere between."""
    outer = _arguments(node, aten.mul.Tensor) or ()
    for weight, scaled in (outer, outer[::-1]) if outer else ():
        inner = _arguments(scaled, aten.mul.Tensor) or ()
        for x, factor in (inner, inner[::-1]) if inner else ():
            eps = _eps(factor, x)
            if eps is not None and isinstance(weight, torch.fx.Node):
                return _Norm(_through_casts(x), weight, eps)
    return None


def _eps(factor: Any, x: Any) -> float | None:
    """What is added to the mean square of ``x`` of which ``factor`` is the inverse root."""
    root = _arguments(factor, aten.rsqrt.default)
    added = _arguments(root[0], aten.add.Tensor) if root else None
    mean = _arguments(added[0], aten.mean.dim) if added else None
    square = _arguments(mean[0], aten.pow.Tensor_Scalar) if mean else None
    if not added or not mean or not square or square[1] != 2 or not isinstance(added[1], float):
        return None
    is_of_rows = list(mean[1]) == [-1] and mean[2:3] == (True,)
    return added[1] if is_of_rows and _through_casts(square[0]) is _through_casts(x) else None


def _end(node: torch.fx.Node) -> _End:
    """What follows a layer as far as the operator takes it along."""
    end = _gated(node)
    after = _only_user(end.last)
    if not end.is_gated and after is not None and (activation := _activation(after)):
        end = _End(after, activation)
        after = _only_user(after)
    if after is None or not is_call(after, aten.add.Tensor) or len(after.args) != 2 or after.kwargs:
        return end
    (added,) = [each for each in after.args if each is not end.last] or (None,)
    ours, theirs = _value(end.last), _value(added)
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return end
    assert isinstance(added, torch.fx.Node)
    return _End(after, end.activation, end.is_gated, added)


def _gated(node: torch.fx.Node) -> _End:
    """``activation(first half) * second half``, where that is all that reads the layer."""
    halves = _halves(node)
    if halves is None:
        return _End(node)
    activated, product = (_only_user(half) for half in halves)
    activation = "" if activated is None else _activation(activated)
    is_product = activated is not None and _only_user(activated) is product
    if not activation or product is None or not is_product or not is_call(product, aten.mul.Tensor):
        return _End(node)
    return _End(product, activation, True)


def _halves(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The nodes that are the first and the second half of a layer's result."""
    value, users = _value(node), list(node.users)
    if value is None or value.shape[-1] % 2:
        return None
    half, last = value.shape[-1] // 2, (-1, value.dim() - 1)
    if len(users) == 1 and is_call(users[0], aten.split.Tensor) and users[0].args[1] == half:
        parts = {part.args[1]: part for part in users[0].users if part.target is operator.getitem}
        if (*users[0].args, 0)[2] in last and len(parts) == 2:
            return parts[0], parts[1]
    if len(users) == 2 and all(is_call(user, aten.slice.Tensor) and len(user.args) == 4 for user in users):
        by_begin = {user.args[2]: user for user in users if user.args[1] in last}
        if set(by_begin) == {0, half} and by_begin[0].args[3] == half:
            return by_begin[0], by_begin[half]
    return None


def _activation(node: torch.fx.Node) -> str:
    """The operator's word for an activation, or nothing."""
    if is_call(node, aten.gelu.default):
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    target: Any = node.target
    return _ACTIVATIONS.get(target, "")


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether a node is a slice that leaves nothing out."""
    value, of = _value(node), _value(node.args[0]) if is_call(node, aten.slice.Tensor) else None
    return value is not None and of is not None and value.shape == of.shape


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _arguments(node: Any, target: Any) -> tuple[Any, ...] | None:
    """Arguments of the call that a node is, casts apart."""
    node = _through_casts(node)
    return tuple(node.args) if is_call(node, target) else None


def _through_casts(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in _CASTS:
        node = node.args[0]
    return node


def _is_row(weight: torch.fx.Node, like: torch.fx.Node) -> bool:
    """Whether a norm's weight has one factor for each column."""
    given, value = _value(weight), _value(like)
    return given is not None and value is not None and tuple(given.shape) == tuple(value.shape[-1:])


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None

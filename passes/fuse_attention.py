"""Recognise attention that a model spells out, and write it as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .base import Pass, PassResult, Stage
from .exported import ExportedMethod

aten = torch.ops.aten
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_TRANSPOSES = (aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class FuseAttention(Pass[ExportedMethod]):
    """``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``.

    So that models that do not call the operator get the fused kernel, too. Operands of the operator lose
    copies that only made them dense, and a factor on the queries becomes part of the scale: the kernel reads
    heads where the projections left them. Matched are products of four
    dimensions whose intermediate results have no other reader; the scale is a number, before or after the
    product of queries and keys, and a mask is what is added to the scores.
    """

    name: ClassVar[str] = "fuse-attention"
    stage: ClassVar[Stage] = Stage.EXPORTED

    device: str = "cuda"

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Rewrite one method, in place; programs for the cpu stay as they are."""
        if self.device == "cpu":
            return PassResult(subject, False)
        found = 0
        for node in list(subject.graph.graph.nodes):
            match = _match(node)
            if match is not None:
                _rewrite(subject, node, match)
                found += 1
        for node in list(subject.graph.graph.nodes):
            if _is_call(node, aten.scaled_dot_product_attention.default):
                found += _read_in_place(node)
        if found:
            subject.graph.graph.eliminate_dead_code()
            subject.graph.recompile()
        return PassResult(subject, found > 0)


@dataclass(frozen=True)
class _Match:
    query: torch.fx.Node
    key: torch.fx.Node
    value: torch.fx.Node
    mask: torch.fx.Node | None
    scale: float


def _match(node: torch.fx.Node) -> _Match | None:
    if not _is_call(node, aten.matmul.default) or _rank(node) != 4:
        return None
    weights, value = _nodes(node, 2)
    weights = _through(
        weights, aten.dropout.default, aten.clone.default, aten.to.dtype, aten._to_copy.default
    )
    if weights is None or value is None or not any(_is_call(weights, s) for s in _SOFTMAX):
        return None
    if weights.args[1] not in (-1, 3):
        return None
    scores = _through(_node(weights.args[0]), aten.to.dtype, aten._to_copy.default)
    mask: torch.fx.Node | None = None
    if scores is not None and _is_call(scores, aten.add.Tensor) and len(scores.args) == 2:
        left, right = _nodes(scores, 2)
        if left is None or right is None or len(scores.users) != 1:
            return None
        scores, mask = left, right
    scale, product = _scaled(scores)
    if product is None or not _is_call(product, aten.matmul.default) or _rank(product) != 4:
        return None
    query, transposed = _nodes(product, 2)
    key = _transposed(transposed)
    if query is None or key is None or not _alone(node, product):
        return None
    if mask is not None and (_rank(mask) > 4 or mask.meta["val"].dtype != product.meta["val"].dtype):
        return None
    before, scaled_query = _scaled(query)
    if before != 1.0 and scaled_query is not None:
        query = scaled_query
    heads = (query.meta["val"].shape[1], key.meta["val"].shape[1], value.meta["val"].shape[1])
    if len(set(heads)) != 1 or any(_rank(n) != 4 for n in (query, key, value)):
        return None
    return _Match(query, key, value, mask, scale * before)


def _rewrite(method: ExportedMethod, node: torch.fx.Node, match: _Match) -> None:
    graph = method.graph.graph
    with graph.inserting_before(node):
        made = graph.call_function(
            aten.scaled_dot_product_attention.default,
            (match.query, match.key, match.value, match.mask, 0.0, False),
            {"scale": match.scale},
        )
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    method.rename_ends(node.name, made.name)


_RESHAPING = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
)
_COPIES = (aten.clone.default, aten.contiguous.default)


def _read_in_place(attention: torch.fx.Node) -> bool:
    """Let attention's operands be views of what they were copied from; whether anything changed."""
    scale, changed = attention.kwargs.get("scale"), False
    if not isinstance(attention.meta.get("val"), torch.Tensor) or _rank(attention) != 4:
        return False
    for position in range(3):
        operand = attention.args[position]
        assert isinstance(operand, torch.fx.Node)
        chain, base = _chain(operand)
        factor, inner = _scaled(base) if position == 0 and isinstance(scale, float) else (1.0, base)
        if inner is None or (factor == 1.0 and not any(n.target in _COPIES for n in chain)):
            continue
        made = _again(attention, inner, [n for n in chain if n.target not in _COPIES])
        if made is None:
            continue
        attention.update_arg(position, made)
        if factor != 1.0:
            scale = float(str(scale)) * factor
            attention.update_kwarg("scale", scale)
        changed = True
    return changed


def _chain(node: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node]:
    """The reshaping operators and copies above a node, outermost last, and what they start from."""
    chain: list[torch.fx.Node] = []
    while node.op == "call_function" and node.target in (*_RESHAPING, *_COPIES):
        source = _node(node.args[0])
        if source is None:
            break
        chain.insert(0, node)
        node = source
    return chain, node


def _again(before: torch.fx.Node, base: torch.fx.Node, chain: list[torch.fx.Node]) -> torch.fx.Node | None:
    """The chain's operators once more, from another base; None if that would need a copy of its own."""
    node, graph = base, before.graph
    made: list[torch.fx.Node] = []
    with graph.inserting_before(before), base.meta["val"].fake_mode:
        for link in chain:
            try:
                value = link.target(node.meta["val"], *_values(link.args[1:]))  # type: ignore[operator]
            except (RuntimeError, ValueError):
                value = None
            if value is None:
                for new in reversed(made):
                    graph.erase_node(new)
                return None
            node = graph.call_function(link.target, (node, *link.args[1:]))  # type: ignore[arg-type]
            node.meta = {**link.meta, "val": value}
            made.append(node)
    if node.meta["val"].stride(-1) == 1:
        return node
    for new in reversed(made):
        graph.erase_node(new)
    return None


def _values(args: Any) -> Any:
    return torch.fx.map_arg(args, lambda n: n.meta["val"])


def _scaled(node: torch.fx.Node | None) -> tuple[float, torch.fx.Node | None]:
    """What a node is a multiple of: (factor, node). The node itself if it is no scaling."""
    if node is None:
        return 1.0, None
    inner = _node(node.args[0]) if node.args else None
    if len(node.args) == 2 and isinstance(node.args[1], int | float) and inner is not None:
        if _is_call(node, aten.mul.Tensor) or _is_call(node, aten.mul.Scalar):
            return float(node.args[1]), inner
        if _is_call(node, aten.div.Tensor) or _is_call(node, aten.div.Scalar):
            return 1.0 / float(node.args[1]), inner
    return 1.0, node


def _transposed(node: torch.fx.Node | None) -> torch.fx.Node | None:
    """The keys, if a node is their transposition of the last two dimensions."""
    if node is None or not any(_is_call(node, t) for t in _TRANSPOSES):
        return None
    if node.target is aten.permute.default:
        matches = node.args[1] in ([0, 1, 3, 2], (0, 1, 3, 2))
    else:
        matches = {int(str(d)) % 4 for d in node.args[1:3]} == {2, 3}
    return _node(node.args[0]) if matches else None


def _alone(last: torch.fx.Node, first: torch.fx.Node) -> bool:
    """Whether nothing but the path between them reads what lies between two nodes."""
    node: torch.fx.Node = first
    while node is not last:
        if len(node.users) != 1:
            return False
        node = next(iter(node.users))
    return True


def _through(node: torch.fx.Node | None, *operators: Any) -> torch.fx.Node | None:
    """Skip operators that change nothing here (dropout in evaluation, casts)."""
    while node is not None and any(_is_call(node, o) for o in operators):
        node = _node(node.args[0])
    return node


def _is_call(node: torch.fx.Node, target: Any) -> bool:
    return node.op == "call_function" and node.target is target


def _node(value: Any) -> torch.fx.Node | None:
    return value if isinstance(value, torch.fx.Node) else None


def _nodes(node: torch.fx.Node, count: int) -> list[torch.fx.Node | None]:
    return [_node(a) for a in node.args[:count]]


def _rank(node: torch.fx.Node) -> int:
    return int(node.meta["val"].dim())

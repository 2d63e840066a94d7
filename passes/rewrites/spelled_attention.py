"""Attention as models spell it out: products, masks, caps and sinks around a softmax."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..exported.nodes import as_node, is_call, rank

aten = torch.ops.aten
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_TRANSPOSES = (aten.transpose.int, aten.permute.default)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_UNCHANGED = (aten.dropout.default, aten.clone.default, aten.contiguous.default, aten.alias.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_HIDDEN = -1e4
"""A score so low or lower has no weight in a softmax beside any that was not masked."""

Number = Callable[[torch.fx.Node], float | None]
"""What a tensor holds if it is a constant of one element."""


@dataclass
class Spelled:
    """Operands of one attention; masks as the model has them, outermost first."""

    value: torch.fx.Node
    query: torch.fx.Node | None = None
    key: torch.fx.Node | None = None
    key_is_transposed: bool = False
    added: list[torch.fx.Node] = field(default_factory=list[torch.fx.Node])
    """What is added to the scores."""
    hidden: list[tuple[torch.fx.Node, bool, float]] = field(
        default_factory=list[tuple[torch.fx.Node, bool, float]]
    )
    """(mask, which of its values hides a score, the score's value then)."""
    scale: float = 1.0
    cap: float = 0.0
    """Scores are ``cap * tanh(score / cap)`` before masks; 0 for none."""
    sinks: torch.fx.Node | None = None
    """One score per head that takes part in the softmax and has no value."""
    split: tuple[int, int] | None = None
    """(batch, heads), where the products are three-dimensional and the softmax is of four dimensions."""


def spelled(node: torch.fx.Node, number: Number) -> Spelled | None:
    """The attention whose result a node is, or None. Nothing else may read what lies between."""
    if node.op != "call_function" or node.target not in _PRODUCTS or rank(node) < 3:
        return None
    weights, value = as_node(node.args[0]), as_node(node.args[1])
    if weights is None or value is None or rank(value) != rank(node):
        return None
    return _Walk(Spelled(value), number).down(weights, node)


class _Walk:
    """From the weights down to the product of queries and keys."""

    def __init__(self, found: Spelled, number: Number) -> None:
        self._found, self._number = found, number

    def down(self, weights: torch.fx.Node, last: torch.fx.Node) -> Spelled | None:
        node = self._only(weights, *_UNCHANGED, *_CASTS, *_VIEWS)
        is_cut = node is not None and is_call(node, aten.slice.Tensor)
        if node is not None and is_cut:
            if not self._drops_last(node):
                return None
            node = self._only(as_node(node.args[0]), *_CASTS)
        if node is None or node.target not in _SOFTMAX or not _alone(node):
            return None
        if node.args[1] not in (-1, rank(node) - 1):
            return None
        scores = self._only(as_node(node.args[0]), *_CASTS)
        if is_cut:
            scores = self._without_sinks(scores)
        if scores is None or not self._scores(scores):
            return None
        return self._found if self._fits(last, node) else None

    def _only(self, node: torch.fx.Node | None, *operators: Any) -> torch.fx.Node | None:
        """Skip operators that have one reader each."""
        while node is not None and node.op == "call_function" and node.target in operators and _alone(node):
            node = as_node(node.args[0])
        return node

    @staticmethod
    def _drops_last(node: torch.fx.Node) -> bool:
        source = as_node(node.args[0])
        if source is None or len(node.args) < 4 or node.args[2] not in (0, None) or not _alone(node):
            return False
        length = source.meta["val"].shape[-1]
        return node.args[1] in (-1, rank(node) - 1) and bool(node.args[3] == -1 or node.args[3] == length - 1)

    def _without_sinks(self, node: torch.fx.Node | None) -> torch.fx.Node | None:
        """The scores to which a sink is appended, perhaps less the largest of all."""
        if node is not None and is_call(node, aten.sub.Tensor) and _alone(node):
            whole, most = as_node(node.args[0]), as_node(node.args[1])
            most = as_node(most.args[0]) if most is not None and most.target is operator.getitem else most
            if whole is None or most is None or as_node(most.args[0]) is not whole or len(whole.users) != 2:
                return None
            if most.target not in (aten.max.dim, aten.amax.default):
                return None
            node = whole
        elif node is None or not _alone(node):
            return None
        if not is_call(node, aten.cat.default) or node.args[1:] not in ((-1,), (3,)):
            return None
        parts: Any = node.args[0]
        if len(parts) != 2:
            return None
        sinks = parts[1]
        while sinks.op == "call_function" and sinks.target in (*_VIEWS, aten.expand.default, *_CASTS):
            sinks = sinks.args[0]
        if rank(sinks) != 1 or rank(node) != 4 or sinks.meta["val"].shape[0] != node.meta["val"].shape[1]:
            return None
        self._found.sinks = sinks
        return as_node(parts[0])

    def _scores(self, node: torch.fx.Node) -> bool:
        """Take masks, a cap and factors off the scores; whether that ends at a product."""
        found = self._found
        while _alone(node) and node.op == "call_function":
            if node.target in (*_PRODUCTS, aten.baddbmm.default):
                return self._product(node)
            inner = self._masked(node)
            if inner is None and is_call(node, aten.mul.Tensor) and isinstance(node.args[1], int | float):
                tanh = as_node(node.args[0])
                if tanh is not None and is_call(tanh, aten.tanh.default) and _alone(tanh):
                    if found.cap or found.scale != 1.0 or node.args[1] <= 0:
                        return False
                    found.cap, inner = float(node.args[1]), as_node(tanh.args[0])
            if inner is None and node.target in (*_CASTS, *_UNCHANGED, *_VIEWS):
                inner = as_node(node.args[0])
                if node.target in _VIEWS and inner is not None and not self._splits(node, inner):
                    return False
            if inner is None:
                factor, inner = scaled(node)
                if factor == 1.0:
                    return False
                found.scale *= factor
            if inner is None:
                return False
            node = inner
        return False

    def _masked(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The scores under a mask, which is noted; None if the node is no mask's."""
        found = self._found
        if found.scale != 1.0 or found.cap:
            return None
        if is_call(node, aten.add.Tensor) and len(node.args) == 2 and not node.kwargs:
            left, right = as_node(node.args[0]), as_node(node.args[1])
            if left is None or right is None:
                return None
            if not _leads_to_product(left):
                left, right = right, left
            found.added.append(right)
            return left
        if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            scores, mask, fill = node.args
            return self._hides(as_node(scores), mask, True, fill)
        if node.target in _CHOICES:
            mask, first, second = node.args
            if self._value(second) is not None:
                return self._hides(as_node(first), mask, False, second)
            return self._hides(as_node(second), mask, True, first)
        return None

    def _hides(
        self, scores: torch.fx.Node | None, mask: Any, hiding: bool, fill: Any
    ) -> torch.fx.Node | None:
        value = self._value(fill)
        if scores is None or value is None or value > _HIDDEN or not isinstance(mask, torch.fx.Node):
            return None
        if mask.meta["val"].dtype != torch.bool:
            return None
        self._found.hidden.append((mask, hiding, value))
        return scores

    def _value(self, given: Any) -> float | None:
        return self._number(given) if isinstance(given, torch.fx.Node) else float(given)

    def _splits(self, node: torch.fx.Node, inner: torch.fx.Node) -> bool:
        """Note that a view makes [batch, heads, rows, keys] of [batch * heads, rows, keys]."""
        shape, flat = node.meta["val"].shape, inner.meta["val"].shape
        if not all(isinstance(extent, int) for extent in (*shape, *flat)):
            return False
        if len(shape) != 4 or len(flat) != 3 or tuple(shape[2:]) != tuple(flat[1:]):
            return False
        self._found.split = (int(shape[0]), int(shape[1]))
        return True

    def _product(self, node: torch.fx.Node) -> bool:
        found, operands = self._found, node.args
        if node.target is aten.baddbmm.default:
            beta, alpha = float(node.kwargs.get("beta", 1)), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            added = as_node(operands[0])
            if found.scale != 1.0 or found.cap or added is None or beta not in (0.0, 1.0):
                return False
            found.added += [added] if beta else []
            found.scale, operands = alpha, operands[1:]
        query, key = as_node(operands[0]), as_node(operands[1])
        if query is None or key is None or rank(query) != rank(node) or rank(key) != rank(node):
            return False
        factor, key = _all_scaled(key)
        found.scale *= factor
        transposed = _transposed(key)
        found.key, found.key_is_transposed = (key, True) if transposed is None else (transposed, False)
        factor, found.query = _all_scaled(query)
        found.scale *= factor
        factor, found.key = _all_scaled(found.key)
        found.scale *= factor
        return True

    def _fits(self, last: torch.fx.Node, softmax: torch.fx.Node) -> bool:
        """Whether the operands have what the operator asks of them; casts to float32 are taken off."""
        found, ranks = self._found, (rank(last), rank(softmax))
        assert found.query is not None and found.key is not None
        if ranks != ((3, 4) if found.split else (ranks[0], ranks[0])):
            return False
        query, key = (_narrow(n, found.value.meta["val"].dtype) for n in (found.query, found.key))
        if query.meta["val"].dtype != key.meta["val"].dtype:
            return False
        found.query, found.key = query, key
        leads = {str(tuple(n.meta["val"].shape[:-2])) for n in (query, key, found.value)}
        if query.meta["val"].dtype != found.value.meta["val"].dtype or len(leads) != 1:
            return False
        return all(rank(mask) <= ranks[1] for mask in (*found.added, *(m for m, _, _ in found.hidden)))


def _narrow(node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """What a node widens, if that has the given type."""
    inner = as_node(node.args[0]) if node.op == "call_function" and node.target in _CASTS else None
    return inner if inner is not None and inner.meta["val"].dtype == dtype else node


def scaled(node: torch.fx.Node | None) -> tuple[float, torch.fx.Node | None]:
    """What a node is a multiple of: (factor, node). The node itself if it is no scaling."""
    if node is None:
        return 1.0, None
    inner = as_node(node.args[0]) if node.args else None
    if len(node.args) == 2 and isinstance(node.args[1], int | float) and inner is not None:
        if is_call(node, aten.mul.Tensor) or is_call(node, aten.mul.Scalar):
            return float(node.args[1]), inner
        if (is_call(node, aten.div.Tensor) or is_call(node, aten.div.Scalar)) and node.args[1]:
            return 1.0 / float(node.args[1]), inner
    return 1.0, node


def _all_scaled(node: torch.fx.Node) -> tuple[float, torch.fx.Node]:
    factor, inner = scaled(node)
    return (1.0, node) if factor == 1.0 or inner is None else (factor, inner)


def _transposed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The keys, if a node is their transposition of the last two dimensions."""
    if node.op != "call_function" or node.target not in _TRANSPOSES:
        return None
    last = rank(node)
    if node.target is aten.permute.default:
        matches = tuple(d % last for d in node.args[1]) == (*range(last - 2), last - 1, last - 2)  # type: ignore[union-attr, operator]
    else:
        matches = {int(str(d)) % last for d in node.args[1:3]} == {last - 1, last - 2}
    return as_node(node.args[0]) if matches else None


def _leads_to_product(node: torch.fx.Node, depth: int = 12) -> bool:
    """Whether a product lies under a node, along first operands, or a choice's, that are read once."""
    if node.op != "call_function" or not _alone(node) or depth == 0:
        return False
    if node.target in (*_PRODUCTS, aten.baddbmm.default):
        return True
    under = node.args[1:3] if node.target in _CHOICES else node.args[:1]
    return any(isinstance(n, torch.fx.Node) and _leads_to_product(n, depth - 1) for n in under)


def _alone(node: torch.fx.Node) -> bool:
    return len(node.users) == 1

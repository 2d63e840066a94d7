"""Recognise attention that a model spells out, and write it as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..base import Pass, PassResult, Stage
from ..exported.method import ExportedMethod
from ..exported.nodes import as_node, is_call, rank
from ..kernels.attention import CAPPED
from .known_masks import Shown, shown
from .spelled_attention import Number, Spelled, scaled, spelled

aten = torch.ops.aten
_SAME = (aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True)
class FuseAttention(Pass[ExportedMethod]):
    """``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``.

    So that models that do not call the operator get the fused kernel, too. Operands of the operator lose
    copies that only made them dense or repeated heads for query heads, and a factor on the queries becomes
    part of the scale: the kernel reads heads where the projections left them. What is matched has no other
    reader of intermediate results; scales are numbers. Masks are added to the scores (ALiBi, positions) or
    hide some of them (``masked_fill``, ``where``); scores may be capped by a tanh, and heads may have sinks.
    A mask that a model makes of places, and that shows all keys or the past, is left out (`known_masks`).
    """

    name: ClassVar[str] = "fuse-attention"
    stage: ClassVar[Stage] = Stage.EXPORTED

    device: str = "cuda"

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Rewrite one method, in place; programs for the cpu stay as they are."""
        if self.device == "cpu":
            return PassResult(subject, False)
        for node in list(subject.graph.graph.nodes):
            if is_call(node, aten._assert_tensor_metadata.default):  # a reader of what is to be replaced
                subject.graph.graph.erase_node(node)
        found, number = 0, _number(subject)
        for node in list(subject.graph.graph.nodes):
            match = spelled(node, number)
            if match is not None:
                _rewrite(subject, node, match)
                found += 1
        for node in list(subject.graph.graph.nodes):
            if node.op == "call_function" and node.target in _ATTENTION:
                found += _share_heads(node)
                found += _read_in_place(node)
                found += _know_mask(node, number)
        if found:
            subject.graph.graph.eliminate_dead_code()
            subject.graph.recompile()
        return PassResult(subject, found > 0)


def _number(method: ExportedMethod) -> Number:
    """Reads constants of one element, and operators that make them."""

    def number(node: torch.fx.Node) -> float | None:
        if node.name in method.contents:
            held = method.tensors[method.contents[node.name]]
            is_known = (
                held.numel() == 1 and not held.is_meta and method.contents[node.name] not in method.state
            )
            return float(held) if is_known else None
        if node.op == "call_function" and node.target in (aten.full.default, aten.scalar_tensor.default):
            fill = node.args[-1]
            return float(fill) if isinstance(fill, int | float) and not fill_varies(node) else None
        if node.op == "call_function" and node.target in _SAME and isinstance(node.args[0], torch.fx.Node):
            return number(node.args[0])
        return None

    return number


def fill_varies(node: torch.fx.Node) -> bool:
    """Whether a factory makes more than one element, which masks do by way of broadcasting only."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() > 0


def _rewrite(method: ExportedMethod, node: torch.fx.Node, found: Spelled) -> None:
    assert found.query is not None and found.key is not None
    make = _Maker(node)
    query, key, value, split = found.query, found.key, found.value, found.split
    if found.key_is_transposed:
        key = make(aten.transpose.int, key, -2, -1)
    mask = _mask(make, found, query)
    while mask is not None and rank(mask) < 2:
        mask = make(aten.unsqueeze.default, mask, 0)
    if split:
        query, key, value = (make(aten.unflatten.int, n, 0, list(split)) for n in (query, key, value))
    if found.cap or found.sinks is not None:
        given = (query, key, value, mask, found.sinks, found.scale, found.cap, False)
        made = make(CAPPED, *given)
    else:
        sdpa = aten.scaled_dot_product_attention.default
        made = make(sdpa, query, key, value, mask, 0.0, False, scale=found.scale)
    made = make(aten.flatten.using_ints, made, 0, 1) if split else made
    node.replace_all_uses_with(made)
    method.rename_ends(node.name, made.name)


def _mask(make: _Maker, found: Spelled, query: torch.fx.Node) -> torch.fx.Node | None:
    """All masks as one: boolean where scores are only hidden, else what is added to the scores."""
    dtype, mask = query.meta["val"].dtype, None
    lowest = torch.finfo(dtype).min

    def placed(part: torch.fx.Node) -> torch.fx.Node:
        if found.split and rank(part) == 3:
            batches = part.meta["val"].shape[0]
            return make(aten.unflatten.int, part, 0, list(found.split) if batches != 1 else [1, 1])
        return part

    if not found.added and all(value == float("-inf") for _, _, value in found.hidden):
        for part, hides, _ in found.hidden:
            shown = placed(make(aten.logical_not.default, part) if hides else part)
            mask = shown if mask is None else make(aten.logical_and.default, mask, shown)
        return mask
    parts = [make(aten.to.dtype, part, dtype) for part in found.added]
    for part, hides, value in found.hidden:
        numbers = (max(value, lowest), 0.0) if hides else (0.0, max(value, lowest))
        parts.append(make(aten.to.dtype, make(aten.where.Scalar, part, *numbers), dtype))
    for part in map(placed, parts):
        mask = part if mask is None else make(aten.add.Tensor, mask, part)
    return mask


class _Maker:
    """Makes nodes in front of one, with their fake values."""

    def __init__(self, before: torch.fx.Node) -> None:
        self._before = before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if target is aten.to.dtype and args[0].meta["val"].dtype == args[1]:
            return args[0]  # type: ignore[no-any-return]
        graph = self._before.graph
        with graph.inserting_before(self._before), self._before.meta["val"].fake_mode:
            node = graph.call_function(target, args, kwargs)
            value = target(*_values(args), **kwargs)
        node.meta = {**self._before.meta, "val": value}
        return node


_RESHAPING = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default)


_ATTENTION = (aten.scaled_dot_product_attention.default, CAPPED)


def _share_heads(call: torch.fx.Node) -> bool:
    """Let query heads share keys and values that were repeated for each of them; whether anything changed."""
    shared = [_unrepeated(operand) for operand in call.args[1:3]]
    (key, groups), (value, others) = shared
    if key is None or value is None or groups != others or _has_groups(call):
        return False
    call.update_arg(1, key)
    call.update_arg(2, value)
    if call.target is aten.scaled_dot_product_attention.default:
        call.update_kwarg("enable_gqa", True)
    else:
        call.update_arg(7, True)
    return True


def _has_groups(call: torch.fx.Node) -> bool:
    return bool(call.kwargs.get("enable_gqa", False) or (len(call.args) > 7 and call.args[7]))


def _unrepeated(node: Any) -> tuple[torch.fx.Node | None, int]:
    """(heads, how often each stands there), where a node repeats heads in place; (None, 1) where not."""
    if not isinstance(node, torch.fx.Node) or rank(node) != 4:
        return None, 1
    while node.op == "call_function" and node.target in _COPIES:
        node = node.args[0]
    if is_call(node, aten.repeat_interleave.self_int) and node.args[2:3] in ((1,), (-3,)):
        return node.args[0], int(node.args[1])
    if node.op != "call_function" or node.target not in _VIEWS:
        return None, 1
    repeated = node.args[0]
    while repeated.op == "call_function" and repeated.target in _COPIES:
        repeated = repeated.args[0]
    if not is_call(repeated, aten.expand.default):
        return None, 1
    single = repeated.args[0]
    heads = single.args[0] if is_call(single, aten.unsqueeze.default) and single.args[1] in (2, -3) else None
    if heads is None or rank(heads) != 4:
        return None, 1
    batch, count, *rest = heads.meta["val"].shape
    groups = repeated.meta["val"].shape[2]
    wanted, given = [batch, count * groups, *rest], list(node.meta["val"].shape)
    if list(map(str, repeated.meta["val"].shape)) != list(map(str, [batch, count, groups, *rest])):
        return None, 1
    if list(map(str, wanted)) != list(map(str, given)) or not isinstance(groups, int):
        return None, 1
    return heads, groups


def _know_mask(call: torch.fx.Node, number: Number) -> bool:
    """Leave out a mask that shows all keys or the past, which the kernel knows; whether anything changed."""
    is_capped = call.target is not aten.scaled_dot_product_attention.default
    names = ("attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, call.args[3:], strict=False)) | call.kwargs
    mask = as_node(given.get("attn_mask"))
    found = shown(mask, number) if mask is not None else None
    if found is None or (found is Shown.PAST and is_capped):
        return False
    if is_capped:
        call.update_arg(3, None)
        return True
    is_causal = bool(given.get("is_causal")) or found is Shown.PAST
    call.args = (*call.args[:3], None, given.get("dropout_p", 0.0), is_causal)
    call.kwargs = {name: value for name, value in call.kwargs.items() if name not in names}
    return True


def _read_in_place(call: torch.fx.Node) -> bool:
    """Let attention's operands be views of what they were copied from; whether anything changed."""
    is_capped = call.target is not aten.scaled_dot_product_attention.default
    scale, changed = call.args[5] if is_capped else call.kwargs.get("scale"), False
    if not isinstance(call.meta.get("val"), torch.Tensor) or rank(call) != 4:
        return False
    for position in range(3):
        operand = call.args[position]
        assert isinstance(operand, torch.fx.Node)
        chain, base = _chain(operand)
        factor, inner = scaled(base) if position == 0 and isinstance(scale, float) else (1.0, base)
        if inner is None or (factor == 1.0 and not any(n.target in _COPIES for n in chain)):
            continue
        made = _again(call, inner, [n for n in chain if n.target not in _COPIES])
        if made is None:
            continue
        call.update_arg(position, made)
        if factor != 1.0:
            scale = float(str(scale)) * factor
            if is_capped:
                call.update_arg(5, scale)
            else:
                call.update_kwarg("scale", scale)
        changed = True
    return changed


def _chain(node: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node]:
    """The reshaping operators and copies above a node, outermost last, and what they start from."""
    chain: list[torch.fx.Node] = []
    while node.op == "call_function" and node.target in (*_RESHAPING, *_COPIES):
        source = as_node(node.args[0])
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

"""Merge linear layers that read the same tensor into one product with concatenated weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from .base import Pass, PassResult, Stage
from .contents import Contents
from .exported import ExportedMethod
from .options import PlacementRule
from .origins import module_path
from .placement_rules import speaks_of

_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class MergeLinears(Pass[ExportedMethod]):
    """Compute query, key and value (or gate and up) projections in one matrix product.

    Their weights are concatenated once, at export, and the results are slices of one: fewer launches, and
    one larger product fills the GPU better. Only weights that nothing else reads, of one element type.
    """

    name: ClassVar[str] = "merge-linears"
    stage: ClassVar[Stage] = Stage.EXPORTED

    contents: Contents = field(default_factory=Contents, repr=False)
    device: str = "cuda"
    placement: tuple[PlacementRule, ...] = ()
    """Layers that different rules speak of stay apart."""

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Merge in one method, in place; programs for the cpu stay as they are."""
        if self.device == "cpu":
            return PassResult(subject, False)
        groups = [group for group in _groups(subject, self.contents, self.placement) if len(group) > 1]
        for group in groups:
            _merge(subject, self.contents, group)
        subject.graph.recompile()
        return PassResult(subject, bool(groups))


def _groups(
    method: ExportedMethod, contents: Contents, rules: Sequence[PlacementRule]
) -> list[list[torch.fx.Node]]:
    found: dict[tuple[Any, ...], list[torch.fx.Node]] = {}
    for node in method.graph.graph.nodes:
        if node.op != "call_function" or node.target is not _LINEAR:
            continue
        operands = [*node.args[1:], None][:2]
        if not all(o is None or _is_own(method, contents, o) for o in operands):
            continue
        spoken_of = tuple(speaks_of(rule, module_path(node), str(node.target), method.name) for rule in rules)
        key = (node.args[0], node.meta["val"].dtype, spoken_of)
        found.setdefault(key, []).append(node)
    return list(found.values())


def _is_own(method: ExportedMethod, contents: Contents, node: Any) -> bool:
    """Whether a node is a constant that one reader in one method reads."""
    if not isinstance(node, torch.fx.Node) or node.name not in method.contents:
        return False
    name = method.contents[node.name]
    is_constant = name not in contents.state and not contents.tensors[name].is_meta
    return is_constant and len(node.users) == 1 and contents.readers.get(name) == 1


def _merge(method: ExportedMethod, contents: Contents, group: Sequence[torch.fx.Node]) -> None:
    graph, first = method.graph.graph, group[0]
    x = first.args[0]
    assert isinstance(x, torch.fx.Node)
    weights = [_held(method, contents, n.args[1]) for n in group]
    biases = [_held(method, contents, n.args[2] if len(n.args) > 2 else None) for n in group]
    weight = method.add_constant(
        contents, f"{first.name}_merged_weight", torch.cat([w for w in weights if w is not None])
    )
    bias: torch.fx.Node | None = None
    if any(b is not None for b in biases):  # a layer without one adds zeros
        rows = [
            w.new_zeros(len(w)) if b is None else b
            for w, b in zip(weights, biases, strict=True)
            if w is not None
        ]
        bias = method.add_constant(contents, f"{first.name}_merged_bias", torch.cat(rows))
    with graph.inserting_before(first), first.meta["val"].fake_mode:
        operands = (x, weight) if bias is None else (x, weight, bias)
        merged = graph.call_function(_LINEAR, operands)
        merged.meta = dict(first.meta)
        merged.meta["val"] = _LINEAR(*(o.meta["val"] for o in operands))
        begin = 0
        for node in group:
            end = begin + node.meta["val"].shape[-1]
            piece = graph.call_function(torch.ops.aten.slice.Tensor, (merged, -1, begin, end))
            piece.meta = dict(node.meta)
            piece.meta["val"] = torch.ops.aten.slice.Tensor(merged.meta["val"], -1, begin, end)
            node.replace_all_uses_with(piece)
            method.rename_ends(node.name, piece.name)
            begin = end
    for node in group:
        graph.erase_node(node)
    for node in [o for n in group for o in n.args[1:] if isinstance(o, torch.fx.Node)]:
        del method.contents[node.name]
        graph.erase_node(node)


def _held(method: ExportedMethod, contents: Contents, node: Any) -> torch.Tensor | None:
    """The constant behind a placeholder; None for no operand."""
    return contents.tensors[method.contents[node.name]] if isinstance(node, torch.fx.Node) else None

"""Merge linear layers that read the same tensor into one product with concatenated weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..runtime.recipes import Part
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
    one larger product fills the GPU better. Only weights of one element type that nothing else reads;
    where methods share them, every method must merge the same ones, so that no weight is kept twice.
    """

    name: ClassVar[str] = "merge-linears"
    stage: ClassVar[Stage] = Stage.EXPORTED

    contents: Contents = field(default_factory=Contents, repr=False)
    device: str = "cuda"
    placement: tuple[PlacementRule, ...] = ()
    """Layers that different rules speak of stay apart."""

    agreed: frozenset[tuple[str, ...]] | None = field(default=None, repr=False)
    """Set by `prepared`: contents that every method which reads one of them can merge."""

    def prepared(self, subjects: Sequence[ExportedMethod]) -> MergeLinears:
        """Find what all methods agree on."""
        found = [(set(m.contents.values()), _groups(m, self.placement)) for m in subjects]
        agreed = {names for _, groups in found for names in groups}
        for read, groups in found:
            agreed = {names for names in agreed if names in groups or read.isdisjoint(names)}
        return replace(self, agreed=frozenset(agreed))

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Merge in one method, in place; programs for the cpu stay as they are."""
        if self.device == "cpu":
            return PassResult(subject, False)
        agreed = self.prepared((subject,)).agreed if self.agreed is None else self.agreed
        groups = [g for names, g in _groups(subject, self.placement).items() if names in (agreed or ())]
        for group in groups:
            _merge(subject, self.contents, group)
        subject.graph.recompile()
        return PassResult(subject, bool(groups))


def _groups(
    method: ExportedMethod, rules: Sequence[PlacementRule]
) -> dict[tuple[str, ...], list[torch.fx.Node]]:
    """Two or more layers with one input, by the names of their weights and biases."""
    found: dict[tuple[Any, ...], list[torch.fx.Node]] = {}
    readers = Counter(method.contents.values())
    for node in method.graph.graph.nodes:
        if node.op != "call_function" or node.target is not _LINEAR:
            continue
        operands = [*node.args[1:], None][:2]
        if not all(o is None or _is_own(method, readers, o) for o in operands):
            continue
        hollow = {method.tensors[method.contents[o.name]].is_meta for o in operands if o is not None}
        if len(hollow) > 1:
            continue
        spoken_of = tuple(speaks_of(rule, module_path(node), str(node.target), method.name) for rule in rules)
        key = (node.args[0], node.meta["val"].dtype, spoken_of, *hollow)
        found.setdefault(key, []).append(node)
    return {
        tuple(method.contents[o.name] for node in group for o in _operands(node)): group
        for group in found.values()
        if len(group) > 1
    }


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A layer's weight and, if it has one, its bias."""
    return [o for o in node.args[1:] if isinstance(o, torch.fx.Node)]


def _is_own(method: ExportedMethod, readers: Mapping[str, int], node: Any) -> bool:
    """Whether a node is a constant that one layer of the method reads."""
    if not isinstance(node, torch.fx.Node) or node.name not in method.contents:
        return False
    name = method.contents[node.name]
    return name not in method.state and len(node.users) == 1 and readers[name] == 1


def _merge(method: ExportedMethod, contents: Contents, group: Sequence[torch.fx.Node]) -> None:
    graph, first = method.graph.graph, group[0]
    x = first.args[0]
    assert isinstance(x, torch.fx.Node)
    names = tuple(method.contents[o.name] for n in group for o in _operands(n))
    if names not in contents.merged:
        contents.merged[names] = _concatenated(method, contents, group)
    whole, added = contents.merged[names]
    weight = method.add_constant(contents, f"{first.name}_merged_weight", whole)
    bias = None if added is None else method.add_constant(contents, f"{first.name}_merged_bias", added)
    if whole.is_meta:
        _give_up(method, contents, group, weight, bias)
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
    for node in [o for n in group for o in _operands(n)]:
        del method.contents[node.name]
        graph.erase_node(node)


def _concatenated(
    method: ExportedMethod, contents: Contents, group: Sequence[torch.fx.Node]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All weights, one below the other, and all biases; a layer without one adds zeros."""
    weights = [_held(method, contents, n.args[1]) for n in group]
    biases = [_held(method, contents, n.args[2]) if len(_operands(n)) > 1 else None for n in group]
    whole = torch.cat(weights)
    if all(b is None for b in biases):
        return whole, None
    rows = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return whole, torch.cat(rows)


def _give_up(
    method: ExportedMethod,
    contents: Contents,
    group: Sequence[torch.fx.Node],
    weight: torch.fx.Node,
    bias: torch.fx.Node | None,
) -> None:
    """The same of weights that come from files at load: say what to put one below the other."""
    for made, position in ((weight, 0), (bias, 1)):
        parts: list[Part] = []
        for node in group:
            operands, rows = _operands(node), node.meta["val"].shape[-1]
            if position < len(operands):
                parts += contents.parts[method.contents[operands[position].name]]
            else:
                parts.append(Part((), (rows,)))
        if made is not None:
            name = method.contents[made.name]
            contents.give_up(name, contents.tensors[name], tuple(parts))


def _held(method: ExportedMethod, contents: Contents, node: Any) -> torch.Tensor:
    """The constant behind a placeholder."""
    return contents.tensors[method.contents[node.name]]

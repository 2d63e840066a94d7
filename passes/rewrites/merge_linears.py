"""Merge linear layers that read the same tensor into one product with concatenated weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ...runtime.weights.recipes import Part
from ..base import Pass, PassResult, Stage
from ..exported.contents import Contents
from ..exported.method import ExportedMethod
from ..exported.origins import module_path
from ..options import PlacementRule
from ..placed.placement_rules import speaks_of
from ..quantized.linear import OPERATOR as _QUANTIZED

_LINEAR = torch.ops.aten.linear.default
_NAMES = {True: ("weight", "bias"), False: ("words", "scales", "zeros", "bias")}
"""Operands after x of a linear layer, and of one whose weight is quantised."""


@dataclass(frozen=True)
class MergeLinears(Pass[ExportedMethod]):
    """Compute query, key and value (or gate and up) projections in one matrix product.

    Their weights are concatenated once, at export, and the results are slices of one: fewer launches, and
    one larger product fills the GPU better. Only weights of one element type that nothing else reads;
    where methods share them, every method must merge the same ones, so that no weight is kept twice. Packed
    weights are merged likewise: they lie row by row, with their scales.
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
        if node.op != "call_function" or not (node.target is _LINEAR or str(node.target) == _QUANTIZED):
            continue
        operands, rest = _parts(node)
        if not all(o is None or _is_own(method, readers, o) for o in operands):
            continue
        hollow = {method.tensors[method.contents[o.name]].is_meta for o in operands if o is not None}
        if len(hollow) > 1:
            continue
        spoken_of = tuple(speaks_of(rule, module_path(node), str(node.target), method.name) for rule in rules)
        types = tuple(None if o is None else o.meta["val"].dtype for o in operands[:-1])
        key = (node.target, node.args[0], node.meta["val"].dtype, types, rest, spoken_of, *hollow)
        found.setdefault(key, []).append(node)
    return {
        tuple(method.contents[o.name] for node in group for o in _operands(node)): group
        for group in found.values()
        if len(group) > 1
    }


def _parts(node: torch.fx.Node) -> tuple[list[Any], tuple[Any, ...]]:
    """A layer's tensors after x, the last of them its bias, None where it has none; and its numbers."""
    if node.target is _LINEAR:
        return [*node.args[1:], None][:2], ()
    return list(node.args[1:5]), tuple(node.args[5:])


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A layer's weight (or what it is made of) and, if it has one, its bias."""
    return [o for o in _parts(node)[0] if isinstance(o, torch.fx.Node)]


def _is_own(method: ExportedMethod, readers: Mapping[str, int], node: Any) -> bool:
    """Whether a node is a constant that one layer of the method reads."""
    if not isinstance(node, torch.fx.Node) or node.name not in method.contents:
        return False
    name = method.contents[node.name]
    return name not in method.state and len(node.users) == 1 and readers[name] == 1


def _merge(method: ExportedMethod, contents: Contents, group: Sequence[torch.fx.Node]) -> None:
    graph, first = method.graph.graph, group[0]
    x, target = first.args[0], first.target
    assert isinstance(x, torch.fx.Node) and callable(target)
    names = tuple(method.contents[o.name] for n in group for o in _operands(n))
    if names not in contents.merged:
        contents.merged[names] = _concatenated(method, contents, group)
    operands = [
        None if whole is None else method.add_constant(contents, f"{first.name}_merged_{what}", whole)
        for what, whole in zip(_NAMES[first.target is _LINEAR], contents.merged[names], strict=True)
    ]
    if any(whole is not None and whole.is_meta for whole in contents.merged[names]):
        _give_up(method, contents, group, operands)
    with graph.inserting_before(first), first.meta["val"].fake_mode:
        arguments = (x, *operands, *_parts(first)[1])
        merged = graph.call_function(target, arguments)
        merged.meta = dict(first.meta)
        merged.meta["val"] = target(*torch.fx.map_arg(arguments, lambda n: n.meta["val"]))
        begin = 0
        for node in group:
            end = begin + node.meta["val"].shape[-1]
            piece = graph.call_function(torch.ops.aten.slice.Tensor, (merged, -1, begin, end))
            piece.meta = dict(node.meta)
            piece.meta["val"] = torch.ops.aten.slice.Tensor(merged.meta["val"], -1, begin, end)
            node.replace_all_uses_with(piece)
            method.rename_ends(node.name, piece.name)
            begin = end
    old = [o for n in group for o in _operands(n)]
    for node in group:
        graph.erase_node(node)
    for node in old:
        del method.contents[node.name]
        graph.erase_node(node)


def _concatenated(
    method: ExportedMethod, contents: Contents, group: Sequence[torch.fx.Node]
) -> tuple[torch.Tensor | None, ...]:
    """All weights, one below the other, and all biases; a layer without one adds zeros."""
    columns = zip(*(_parts(n)[0] for n in group), strict=True)
    *weights, biases = [[_held(method, contents, o) for o in column] for column in columns]
    made = [_stacked(column) for column in weights]
    given = next((b for b in biases if b is not None), None)
    if given is None:
        return (*made, None)
    widths = [n.meta["val"].shape[-1] for n in group]
    rows = [given.new_zeros(n) if b is None else b for b, n in zip(biases, widths, strict=True)]
    return (*made, torch.cat(rows))


def _give_up(
    method: ExportedMethod,
    contents: Contents,
    group: Sequence[torch.fx.Node],
    merged: Sequence[torch.fx.Node | None],
) -> None:
    """The same of weights that come from files at load: say what to put one below the other."""
    for position, made in enumerate(merged):
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


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """All of them, one below the other, or none."""
    given = [t for t in tensors if t is not None]
    return torch.cat(given) if given else None


def _held(method: ExportedMethod, contents: Contents, node: Any) -> torch.Tensor | None:
    """The constant behind a placeholder."""
    return None if node is None else contents.tensors[method.contents[node.name]]

"""Compute at export what depends on constants alone."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..base import Pass, PassResult, Stage
from ..exported.contents import Contents
from ..exported.method import ExportedMethod
from ..inductor.interfaces import is_view
from ..inductor.overloads import is_mutable, is_overload, returns


@dataclass(frozen=True)
class FoldConstants(Pass[ExportedMethod]):
    """Replace operators whose operands are all constants by constants.

    Random and mutating operators stay. Views of constants stay too: they are free. A result may be at most
    ``growth`` bytes larger than what it is computed from; more would bloat the artifact.
    """

    name: ClassVar[str] = "fold-constants"
    stage: ClassVar[Stage] = Stage.EXPORTED

    contents: Contents = field(default_factory=Contents, repr=False)
    growth: int = 1 << 20

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Fold one method, in place."""
        return PassResult(subject, fold_constants(subject, self.contents, self.growth) > 0)


def fold_constants(method: ExportedMethod, contents: Contents, growth: int) -> int:
    """Fold what depends on constants alone; returns how many operators became constants."""
    graph = method.graph.graph
    known: dict[torch.fx.Node, Any] = {
        node: contents.tensors[method.contents[node.name]]
        for node in graph.nodes
        if node.op == "placeholder" and _is_constant(method, node)
    }
    folded: list[torch.fx.Node] = []
    with torch.no_grad():
        for node in graph.nodes:
            value = _evaluate(node, known, growth) if _is_foldable(node, known) else None
            if any(v.is_meta for v in _tensors(value)) or not _tensors(value):
                continue
            known[node] = value
            if isinstance(value, torch.Tensor):
                folded.append(node)
    count = 0
    for node in folded:
        if _is_boundary(node, known) and not _is_free_view(node, known):
            _become_constant(method, contents, node, known[node])
            count += 1
    graph.eliminate_dead_code()
    method.drop_unused()
    method.graph.recompile()
    return count


def _is_constant(method: ExportedMethod, node: torch.fx.Node) -> bool:
    content = method.contents.get(node.name)
    return content is not None and content not in method.state and not method.tensors[content].is_meta


def _tensors(value: Any) -> list[torch.Tensor]:
    """A tensor, or what an operator with several results gave; nothing where one of them is no tensor."""
    values = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore
    return values if all(isinstance(v, torch.Tensor) for v in values) else []


def _is_foldable(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if not all(n in known for n in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    if not is_overload(target) or is_mutable(target):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and bool(_tensors(node.meta.get("val")))


def _evaluate(node: torch.fx.Node, known: dict[torch.fx.Node, Any], growth: int) -> Any:
    if node.target is operator.getitem:
        return known[node.all_input_nodes[0]][node.args[1]]
    before = sum(_nbytes(known[n]) for n in node.all_input_nodes)
    expected = node.meta["val"]
    if any(isinstance(s, torch.SymInt) for each in _tensors(expected) for s in each.shape):
        return None
    if _nbytes(expected) > before + growth and not _aliases(node):
        return None
    args = torch.fx.map_arg(node.args, lambda n: known[n])
    kwargs = torch.fx.map_arg(node.kwargs, lambda n: known[n])
    target: Any = node.target
    return target(*args, **kwargs)


def _nbytes(value: Any) -> int:
    return sum(v.numel() * v.element_size() for v in _tensors(value))


def _aliases(node: torch.fx.Node) -> bool:
    """Whether a result is a window onto an operand; one of several results is taken from where they are."""
    target: Any = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return any(a.alias_info is not None for a in returns(target))


def _is_boundary(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    return any(user not in known for user in node.users)


def _is_free_view(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """Whether the value is a window onto a stored constant: every step down to it is a view."""
    while node.op != "placeholder":
        if not _aliases(node):
            return False
        node = node.all_input_nodes[0]
    return True


def _become_constant(
    method: ExportedMethod, contents: Contents, node: torch.fx.Node, value: torch.Tensor
) -> None:
    value = value.clone() if is_view(value) else value
    made = method.add_constant(contents, f"folded_{node.name}", value)
    node.replace_all_uses_with(made)
    method.rename_ends(node.name, made.name)

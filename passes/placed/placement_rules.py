"""Which operators a placement rule speaks of."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ...runtime.errors import UsageError
from ...runtime.program import Device
from ..options import PlacementRule
from .graph import Node, NodeKind, PlacedGraph


def parse_device(text: str) -> Device:
    """Read the device of a rule or of the whole graph; UsageError says what is wrong."""
    try:
        return Device.parse(text)
    except ValueError as error:
        raise UsageError("a device of the placement is not valid", why=str(error)) from error


def matches(rule: PlacementRule, node: Node, method: str) -> bool:
    """Whether a rule speaks of this operator; see `speaks_of`."""
    return speaks_of(rule, node.origin.module, node.operator, method)


def speaks_of(rule: PlacementRule, module: str, operator: str, method: str) -> bool:
    """Whether a rule speaks of an operator in a module of a method.

    A module pattern matches the module's dotted path or any module that holds it; an operator pattern the
    full name or its parts without namespace or overload (``aten.add.Tensor``, ``aten.add``, ``add``).
    """
    if rule.method and not fnmatchcase(method, rule.method):
        return False
    if rule.module and not (fnmatchcase(module, rule.module) or fnmatchcase(module, f"{rule.module}.*")):
        return False
    if rule.operator:
        packet = operator.rpartition(".")[0] or operator
        names = (operator, packet, packet.rpartition(".")[2])
        return any(fnmatchcase(name, rule.operator) for name in names)
    return True


def words(rule: PlacementRule) -> str:
    """The rule as `--explain` and messages name it."""
    parts = [f"{key} `{text}`" for key in ("module", "operator", "method") if (text := getattr(rule, key))]
    return "rule for " + ", ".join(parts) if parts else "rule for everything"


def check_rules(graphs: Sequence[PlacedGraph], rules: Sequence[PlacementRule]) -> None:
    """Refuse a rule that speaks of nothing in any method: UsageError with the nearest names there are."""
    operators = [(node, graph.name) for graph in graphs for node in _operators(graph)]
    for rule in rules:
        if any(matches(rule, node, method) for node, method in operators):
            continue
        names = {node.origin.module for node, _ in operators if node.origin.module}
        if rule.operator:
            names = {node.operator for node, _ in operators}
        elif not rule.module:
            names = {graph.name for graph in graphs}
        wish = rule.module or rule.operator or rule.method
        near = difflib.get_close_matches(wish, sorted(names), n=3, cutoff=0.4)
        listed = "nearest: " + ", ".join(f"`{name}`" for name in near)
        raise UsageError(
            f"the placement {words(rule)} matches no operator",
            hint=f"{listed if near else '`--explain` lists the operators'}; constants are folded before",
        )


def _operators(graph: PlacedGraph) -> Iterator[Node]:
    for node in graph.nodes:
        if node.kind is NodeKind.CALL:
            yield node
        for body in node.branches:
            yield from _operators(body)

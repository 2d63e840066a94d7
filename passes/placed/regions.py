"""Group operators that run together on one device into regions, and order the graph by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...runtime.program import Device
from ..base import Pass, PassResult, Stage
from .graph import Node, NodeKind, PlacedGraph
from .ledger import with_reasons

_Unit = int | str
"""A group by number, or a node outside all groups by name."""


@dataclass(frozen=True)
class PlacedRegion:
    """Operators that are lowered as one unit. ``nodes`` are in execution order.

    ``body`` is empty for the method's own regions, else the name of the control-flow body they are in.
    """

    index: int
    device: Device
    nodes: tuple[str, ...]
    body: str = ""


@dataclass(frozen=True)
class GroupRegions(Pass[PlacedGraph]):
    """Number the regions that are lowered as units, as `assign_regions` does. No options."""

    name: ClassVar[str] = "group-regions"
    stage: ClassVar[Stage] = Stage.PLACED

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        """Number and order one method."""
        graph, _ = assign_regions(subject)
        return PassResult(graph, graph != subject)


def assign_regions(graph: PlacedGraph) -> tuple[PlacedGraph, tuple[PlacedRegion, ...]]:
    """Number the regions of a graph with copies, and put its nodes in an order that runs them whole.

    A region is a maximal convex group of calls, elements and views on one device: no path leaves it and comes
    back, and no two regions of a device could be joined. Leaves, copies and control flow (with its elements)
    are in none. Regions are numbered through all bodies, in execution order; the listing has them in that
    order. Groups are first cut by how many device changes precede a node, then joined while that makes no
    cycle. A graph whose regions are assigned comes back as it is.
    """
    graph, regions, _ = _assign(graph, 0, "")
    return with_reasons(graph), tuple(regions)


def list_regions(graph: PlacedGraph, body: str = "") -> tuple[PlacedRegion, ...]:
    """The regions that a graph's nodes are already numbered with."""
    found: list[PlacedRegion] = []
    members: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.region >= 0:
            members.setdefault(node.region, []).append(node)
        for inner in node.branches:
            found.extend(list_regions(inner, inner.name))
    for index, nodes in members.items():
        device = nodes[0].device
        assert device is not None
        found.append(PlacedRegion(index, device, tuple(node.name for node in nodes), body))
    return tuple(sorted(found, key=lambda region: region.index))


def _assign(graph: PlacedGraph, first: int, body: str) -> tuple[PlacedGraph, list[PlacedRegion], int]:
    nodes = {node.name: node for node in graph.nodes}
    members = [name for name, node in nodes.items() if _is_member(node, nodes)]
    if members and all(nodes[name].region >= 0 for name in members):
        listed = list_regions(graph, body)
        return graph, list(listed), max(region.index for region in listed) + 1
    groups = _Groups(graph, members)
    regions: list[PlacedRegion] = []
    ordered: list[Node] = []
    for unit in groups.units():
        node = nodes[unit[0]]
        if unit[0] in groups.group_of:
            assert node.device is not None
            regions.append(PlacedRegion(first, node.device, tuple(unit), body))
            ordered.extend(replace(nodes[name], region=first) for name in unit)
            first += 1
            continue
        bodies: list[PlacedGraph] = []
        for inner in node.branches:
            inner, found, first = _assign(inner, first, inner.name)
            bodies.append(inner)
            regions.extend(found)
        ordered.append(replace(node, branches=tuple(bodies)))
    return replace(graph, nodes=tuple(ordered)), regions, first


def _is_member(node: Node, nodes: dict[str, Node]) -> bool:
    if node.kind is NodeKind.ELEMENT:
        return not nodes[node.operands[0]].branches
    return node.kind is NodeKind.CALL and not node.branches


class _Groups:
    """Groups of members, kept acyclic; every other node is a unit of its own."""

    def __init__(self, graph: PlacedGraph, members: list[str]) -> None:
        self._order = [node.name for node in graph.nodes]
        self._nodes = {node.name: node for node in graph.nodes}
        self._position = {name: index for index, name in enumerate(self._order)}
        self.group_of: dict[str, int] = {}
        self._members: dict[int, list[str]] = {}
        self._by_level(members)
        self._join()
        while self._sink_views():
            self._join()

    def _by_level(self, members: list[str]) -> None:
        """Cut by the number of device changes on the way: such groups are convex and acyclic."""
        level: dict[str, int] = {}
        keys: dict[tuple[Device | None, int], int] = {}
        chosen = set(members)
        for name in self._order:
            node = self._nodes[name]
            own = 0
            for operand in node.operands:
                computed = operand in chosen or bool(self._nodes[operand].branches)
                leaves = computed and not (name in chosen and self._nodes[operand].device == node.device)
                own = max(own, level[operand] + (1 if leaves else 0))
            level[name] = own
            if name in chosen:
                group = keys.setdefault((node.device, own), len(keys))
                self.group_of[name] = group
                self._members.setdefault(group, []).append(name)

    def _unit(self, name: str) -> _Unit:
        return self.group_of.get(name, name)

    def _successors(self) -> dict[_Unit, set[_Unit]]:
        found: dict[_Unit, set[_Unit]] = {self._unit(name): set() for name in self._order}
        for name in self._order:
            for operand in self._nodes[name].operands:
                if self._unit(operand) != self._unit(name):
                    found[self._unit(operand)].add(self._unit(name))
        return found

    def _join(self) -> None:
        """Join two groups of one device while no path from one to the other runs outside both."""
        while pair := self._joinable():
            left, right = pair
            for name in self._members.pop(right):
                self.group_of[name] = left
                self._members[left].append(name)
            self._members[left].sort(key=self._position.__getitem__)

    def _joinable(self) -> tuple[int, int] | None:
        successors = self._successors()
        reached = _reached(successors)

        def has_detour(start: int, goal: int) -> bool:
            return any(goal in reached[unit] for unit in successors[start] if unit != goal)

        groups = [(group, self._nodes[names[0]].device) for group, names in self._members.items()]
        for index, (left, device) in enumerate(groups):
            for right, other in groups[index + 1 :]:
                if device == other and not has_detour(left, right) and not has_detour(right, left):
                    return left, right
        return None

    def _sink_views(self) -> bool:
        """Move views that only one later region reads into that region: only the windows move."""
        readers: dict[str, list[str]] = {name: [] for name in self._order}
        for name in self._order:
            for operand in self._nodes[name].operands:
                readers[operand].append(name)
        moved = False
        for name in reversed(self._order):
            node = self._nodes[name]
            if node.kind is not NodeKind.CALL or not node.is_view or node.type is None:
                continue
            targets = {self.group_of.get(reader, -1) for reader in readers[name]}
            if any(self._nodes[reader].device != node.device for reader in readers[name]):
                continue  # no bytes, so it may be read anywhere
            if len(targets) == 1 and not targets & {-1, self.group_of[name]}:
                self._move(name, targets.pop())
                moved = True
        return moved

    def _move(self, name: str, target: int) -> None:
        source = self.group_of[name]
        self.group_of[name] = target
        self._members[source].remove(name)
        self._members[target].append(name)
        self._members[target].sort(key=self._position.__getitem__)
        if not self._members[source]:
            del self._members[source]

    def units(self) -> list[list[str]]:
        """Regions and single nodes in an order that executes, as close to the given order as that allows."""
        successors = self._successors()
        waiting = {unit: 0 for unit in successors}
        for followers in successors.values():
            for unit in followers:
                waiting[unit] += 1
        first = {unit: self._position[self._names(unit)[0]] for unit in successors}
        ready = sorted((unit for unit, count in waiting.items() if not count), key=first.__getitem__)
        ordered: list[list[str]] = []
        while ready:
            unit = ready.pop(0)
            ordered.append(self._names(unit))
            for after in successors[unit]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
            ready.sort(key=first.__getitem__)
        return ordered

    def _names(self, unit: _Unit) -> list[str]:
        return [unit] if isinstance(unit, str) else self._members[unit]


def _reached(successors: dict[_Unit, set[_Unit]]) -> dict[_Unit, set[_Unit]]:
    """All units that a path leads to, from each unit of an acyclic graph."""
    found: dict[_Unit, set[_Unit]] = {}
    stack = list(successors)
    while stack:
        unit = stack[-1]
        missing = [after for after in successors[unit] if after not in found]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        found[unit] = successors[unit].union(*(found[after] for after in successors[unit]))
    return found

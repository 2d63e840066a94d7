"""Which tensors of a placed graph share memory: every view hangs below the tensor whose bytes it shows.

Views are free wherever their base is, so residency is a matter of whole trees: a copy of any common ancestor
of the views that a device reads serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...runtime.program import CPU, Device
from .graph import Node, NodeKind, PlacedGraph


@dataclass(frozen=True)
class Use:
    """A place where a tensor must be on ``device``: ``reader`` is a node's name, or empty.

    ``slot`` is the operand's position, the output's or the update's; ``role`` says which of these.
    """

    tensor: str
    device: Device
    role: str
    reader: str
    slot: int


class ViewTrees:
    """Parents and roots of all nodes of one graph."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._parent = {name: self._parent_of(node) for name, node in self.nodes.items()}

    def _parent_of(self, node: Node) -> str:
        if node.kind is NodeKind.CALL and node.is_view and node.operands:
            return node.operands[0]
        if node.kind is NodeKind.ELEMENT and self.nodes[node.operands[0]].is_view:
            return node.operands[0]
        return ""

    def parent(self, name: str) -> str:
        """The node that ``name`` is a view of; empty when it has memory of its own."""
        return self._parent[name]

    def chain(self, name: str) -> tuple[str, ...]:
        """From the root down to ``name``, both included."""
        found = [name]
        while parent := self._parent[found[-1]]:
            found.append(parent)
        return tuple(reversed(found))

    def root(self, name: str) -> str:
        """The node whose memory ``name`` shows: itself unless it is a view."""
        while parent := self._parent[name]:
            name = parent
        return name


def body_inputs(node: Node) -> tuple[tuple[Node, ...], ...]:
    """The INPUT nodes of each body of a control-flow operator."""
    return tuple(tuple(n for n in body.nodes if n.kind is NodeKind.INPUT) for body in node.branches)


def operand_devices(node: Node) -> tuple[Device | None, ...]:
    """Where an operator wants each operand: its own device, or its bodies' for control flow.

    The operands that precede the bodies' inputs (the predicate) are read on the host.
    """
    if not node.branches:
        return (node.device,) * len(node.operands)
    inputs = body_inputs(node)[0]
    own = len(node.operands) - len(inputs)
    return (CPU,) * own + tuple(n.device for n in inputs)


def uses(graph: PlacedGraph) -> Iterator[Use]:
    """Every requirement of a placed graph; a view requires nothing of its base, a copy neither."""
    trees = ViewTrees(graph.nodes)
    for node in graph.nodes:
        if node.kind is not NodeKind.CALL:
            continue
        for slot, (operand, device) in enumerate(zip(node.operands, operand_devices(node), strict=True)):
            if device is not None and not (slot == 0 and trees.parent(node.name)):
                yield Use(operand, device, "operand", node.name, slot)
    for slot, output in enumerate(graph.outputs):
        if output.node and output.device is not None:
            yield Use(output.node, output.device, "output", "", slot)
    for slot, (target, source) in enumerate(graph.updates):
        device = trees.nodes[target].device
        if device is not None:
            yield Use(source, device, "update", target, slot)


def by_root(trees: ViewTrees, found: Iterable[Use]) -> dict[str, list[Use]]:
    """Uses of each root's tree, in the order given."""
    grouped: dict[str, list[Use]] = {}
    for use in found:
        grouped.setdefault(trees.root(use.tensor), []).append(use)
    return grouped


def first_gpu(devices: Sequence[Device]) -> Device | None:
    """The first device that is not the host; None if there is none."""
    return next((device for device in devices if device.kind != "cpu"), None)

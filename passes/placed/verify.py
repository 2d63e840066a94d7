"""The independent check of a placed graph: nothing is read where it is not."""

from __future__ import annotations

from collections.abc import Iterator

from ...runtime.errors import PassError
from ...runtime.program import CPU
from .graph import Node, NodeKind, PlacedGraph
from .view_trees import operand_devices

_LEAVES = (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.STATE)


def verify_structure(graph: PlacedGraph) -> None:
    """Check what holds before placement, too; PassError says which node breaks what.

    Names are unique, operands come before their readers, leaves have no operands, an element belongs to a
    call and a copy has one operand, outputs and updates name nodes.
    """
    _raise(_structure(graph), graph)


def verify(graph: PlacedGraph) -> None:
    """Check a graph whose copies are inserted; PassError says which node breaks what.

    On top of `verify_structure`: every node has a device; an operator's operands, an output and the new
    content of state are on the device that reads them; a view is where its base is; a copy changes the
    device, keeps the type and has a reader; no tensor is copied twice to one device; ports of control-flow
    bodies agree with the operands and results outside. Tensors of no bytes may be read anywhere.
    """
    verify_structure(graph)
    _raise(_residency(graph), graph)
    for node in graph.nodes:
        for body in node.branches:
            verify(body)


def _raise(faults: Iterator[str], graph: PlacedGraph) -> None:
    first = next(faults, None)
    if first is not None:
        raise PassError(f"the placement of method `{graph.name}` is broken", why=first)


def _structure(graph: PlacedGraph) -> Iterator[str]:
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        if node.name in seen:
            yield f"there are two nodes `{node.name}`"
        for operand in node.operands:
            if operand not in seen:
                yield f"`{node.name}` reads `{operand}`, which does not come before it"
        yield from _arity(node, seen)
        seen[node.name] = node
    for output in graph.outputs:
        if output.node and output.node not in seen:
            yield f"output `{output.name}` names `{output.node}`, which does not exist"
    for target, source in graph.updates:
        if target not in seen or seen[target].kind not in (NodeKind.STATE, NodeKind.INPUT):
            yield f"the update of `{target}` is of neither state nor an input"
        if source not in seen:
            yield f"the update of `{target}` names `{source}`, which does not exist"


def _arity(node: Node, seen: dict[str, Node]) -> Iterator[str]:
    if node.kind in _LEAVES and node.operands:
        yield f"`{node.name}` is a leaf and has operands"
    if node.kind is NodeKind.COPY and len(node.operands) != 1:
        yield f"copy `{node.name}` has {len(node.operands)} operands"
    if node.kind is NodeKind.ELEMENT and [seen[name].kind for name in node.operands] != [NodeKind.CALL]:
        yield f"element `{node.name}` does not belong to a call"


def _residency(graph: PlacedGraph) -> Iterator[str]:
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.device is None:
            yield f"`{node.name}` has no device"
    for node in graph.nodes:
        yield from _operands(node, nodes)
    yield from _copies(graph, nodes)
    for output in graph.outputs:
        if output.node and not _is_at(nodes[output.node], output.device):
            yield f"output `{output.name}` is wanted on {output.device} and is on {nodes[output.node].device}"
    for target, source in graph.updates:
        if not _is_at(nodes[source], nodes[target].device):
            yield f"`{target}` on {nodes[target].device} is updated from {nodes[source].device}"


def _operands(node: Node, nodes: dict[str, Node]) -> Iterator[str]:
    if node.kind is NodeKind.COPY:
        return
    if node.kind is NodeKind.ELEMENT:
        call = nodes[node.operands[0]]
        expected = call.device if not call.branches else call.branches[-1].outputs[node.index].device
        if node.device != expected:
            yield f"element `{node.name}` is on {node.device}, its call leaves it on {expected}"
        return
    for operand, device in zip(node.operands, operand_devices(node), strict=True):
        if not _is_at(nodes[operand], device):
            yield f"`{node.name}` reads `{operand}` on {device}, which is on {nodes[operand].device}"
    if node.branches:
        yield from _bodies(node)


def _bodies(node: Node) -> Iterator[str]:
    if node.device != CPU:
        yield f"control flow `{node.name}` is on {node.device}, not on the host"
    wanted = operand_devices(node)
    for body in node.branches:
        inputs = tuple(n.device for n in body.nodes if n.kind is NodeKind.INPUT)
        if inputs != wanted[len(wanted) - len(inputs) :]:
            yield f"the bodies of `{node.name}` want their inputs on different devices"
        results = tuple(output.device for output in body.outputs)
        if (
            results != tuple(output.device for output in node.branches[-1].outputs)
            and "while" not in node.operator
        ):
            yield f"the bodies of `{node.name}` leave their results on different devices"


def _copies(graph: PlacedGraph, nodes: dict[str, Node]) -> Iterator[str]:
    read = {name for node in graph.nodes for name in node.operands}
    read |= {output.node for output in graph.outputs} | {source for _, source in graph.updates}
    made: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        if node.kind is not NodeKind.COPY:
            continue
        source = nodes[node.operands[0]]
        if source.device == node.device:
            yield f"copy `{node.name}` stays on {node.device}"
        if source.type != node.type or node.type is None:
            yield f"copy `{node.name}` changes its type"
        if node.type is not None and node.type.max_nbytes == 0:
            yield f"copy `{node.name}` moves no bytes"
        if source.kind is NodeKind.CONSTANT:
            yield f"copy `{node.name}` copies a constant at each call"
        if node.name not in read:
            yield f"copy `{node.name}` has no reader"
        key = (_base(source, nodes), str(node.device))
        if key in made:
            yield f"copies `{made[key]}` and `{node.name}` bring `{key[0]}` to {key[1]} twice"
        made[key] = node.name


def _base(node: Node, nodes: dict[str, Node]) -> str:
    """The node whose memory this one shows, found again here: the check shares no code with the pass."""
    while True:
        owner = nodes[node.operands[0]] if node.kind is NodeKind.ELEMENT else node
        if owner.kind is not NodeKind.CALL or not owner.is_view or not owner.operands:
            return node.name
        node = nodes[owner.operands[0]]


def _is_at(node: Node, device: object) -> bool:
    return node.device == device or node.type is None or node.type.max_nbytes == 0

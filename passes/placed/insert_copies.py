"""Insert exactly the copies that a placed graph needs: propagate devices along its edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...runtime.errors import PassError
from ...runtime.program import Device
from ..base import Pass, PassResult, Stage
from .graph import GraphOutput, Node, NodeKind, PlacedGraph
from .ledger import with_reasons
from .view_trees import Use, ViewTrees, by_root, operand_devices, uses


@dataclass(frozen=True)
class InsertCopies(Pass[PlacedGraph]):
    """Make every tensor resident where it is read, with one copy per tensor and device. No options.

    Works on view trees: for each device that reads a tree of views but does not hold it, one common ancestor
    of the views read there is copied and the views below it are made again from the copy, for free. Of the
    common ancestors the one with the fewest bytes is taken; among equals the base on the way to a GPU and
    the view on the way to the host, so that reshapes stay in the GPU's kernels. A view with fewer bytes than
    its base may have gaps; its copy is packed.

    Copies go straight from the device that made the tensor, between GPUs as well. A constant becomes resident
    on every device that reads it instead (one upload each when the program is loaded). Tensors of no bytes
    are everywhere. Views and copies that nothing reads are dropped; copies that exist already are used.
    """

    name: ClassVar[str] = "insert-copies"
    stage: ClassVar[Stage] = Stage.PLACED

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        """Insert what is missing in a method and in the bodies of its control flow."""
        graph = with_reasons(_insert(subject))
        return PassResult(graph, graph != subject)


def _insert(graph: PlacedGraph) -> PlacedGraph:
    nodes = tuple(
        replace(n, branches=tuple(_insert(b) for b in n.branches)) if n.branches else n for n in graph.nodes
    )
    graph = replace(graph, nodes=nodes)
    return _drop_unread(_Residency(graph).rewritten())


class _Residency:
    """By which name each device knows each tensor."""

    def __init__(self, graph: PlacedGraph) -> None:
        self._graph = graph
        self._trees = ViewTrees(graph.nodes)
        self._nodes = self._trees.nodes
        _refuse_unplaced(self._trees)
        self._taken = set(self._nodes)
        self._copies = {(n.operands[0], _device(n)): n.name for n in graph.nodes if n.kind is NodeKind.COPY}
        self._twins: dict[tuple[str, Device], str] = {}
        for root, found in by_root(self._trees, uses(graph)).items():
            self._settle(root, found)

    def _settle(self, root: str, found: Sequence[Use]) -> None:
        home = _device(self._nodes[root])
        wanted: dict[Device, list[str]] = {}
        for use in found:
            if use.device != home and self._nbytes(use.tensor):
                wanted.setdefault(use.device, []).append(use.tensor)
        for device, tensors in wanted.items():
            top = ""
            if self._nodes[root].kind is not NodeKind.CONSTANT:
                top = self._cheapest(tensors, device)
                if (top, device) not in self._copies:
                    self._copies[top, device] = self._fresh(f"{top}_to_{_tag(device)}")
            for tensor in tensors:
                chain = self._trees.chain(tensor)
                for name in chain[chain.index(top) + 1 :] if top else chain:
                    if (name, device) not in self._twins:
                        self._twins[name, device] = self._fresh(f"{name}_on_{_tag(device)}")

    def _cheapest(self, tensors: Sequence[str], device: Device) -> str:
        """The common ancestor of the tensors whose copy moves the fewest bytes (or is made already)."""
        chains = [self._trees.chain(tensor) for tensor in tensors]
        common = [name for name in chains[0] if self._nbytes(name) and all(name in chain for chain in chains)]
        common = [name for name in common if (name, device) in self._copies] or common
        if device.kind == "cpu":
            common.reverse()
        return min(common, key=self._nbytes)

    def _nbytes(self, name: str) -> int:
        type_ = self._nodes[name].type
        return 0 if type_ is None else type_.max_nbytes

    def _fresh(self, wish: str) -> str:
        name, number = wish, 1
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name

    def _on(self, name: str, device: Device | None) -> str:
        """What a reader on the device reads for ``name``."""
        assert device is not None
        key = (name, device)
        if device == self._nodes[name].device:
            return name
        return self._copies.get(key) or self._twins.get(key, name)

    def rewritten(self) -> PlacedGraph:
        """The graph with every reader reading on its own device; each copy right behind its source."""
        made: dict[str, list[Node]] = {}
        for (name, device), copy in self._copies.items():
            if copy not in self._nodes:
                made.setdefault(name, []).append(_copy_of(self._nodes[name], copy, device))
        for (name, device), twin in self._twins.items():
            made.setdefault(name, []).append(self._twin(self._nodes[name], twin, device))
        emitted: list[Node] = []
        for node in self._graph.nodes:
            emitted += [self._rewired(node), *made.get(node.name, ())]
        outputs = tuple(self._output(output) for output in self._graph.outputs)
        updates = tuple(
            (target, self._on(source, self._nodes[target].device)) for target, source in self._graph.updates
        )
        return replace(self._graph, nodes=tuple(emitted), outputs=outputs, updates=updates)

    def _rewired(self, node: Node) -> Node:
        if node.kind is not NodeKind.CALL:
            return node
        pairs = zip(node.operands, operand_devices(node), strict=True)
        return replace(node, operands=tuple(self._on(operand, device) for operand, device in pairs))

    def _twin(self, node: Node, twin: str, device: Device) -> Node:
        operands = tuple(self._on(operand, device) for operand in node.operands)
        reason = node.reason if node.operands else f"it is read on {device}, too"
        return replace(node, name=twin, operands=operands, device=device, twin_of=node.name, reason=reason)

    def _output(self, output: GraphOutput) -> GraphOutput:
        return replace(output, node=self._on(output.node, output.device)) if output.node else output


def _copy_of(node: Node, name: str, device: Device) -> Node:
    return Node(name, NodeKind.COPY, operands=(node.name,), type=node.type, device=device, origin=node.origin)


def _refuse_unplaced(trees: ViewTrees) -> None:
    for node in trees.nodes.values():
        if node.device is None:
            raise PassError(
                f"`{node.name}` has no device", hint="run `place-operators` before `insert-copies`"
            )
        parent = trees.parent(node.name)
        if parent and trees.nodes[parent].device != node.device:
            raise PassError(
                f"view `{node.name}` is on {node.device}", why=f"its base `{parent}` is not there"
            )


def _drop_unread(graph: PlacedGraph) -> PlacedGraph:
    """Drop views and copies without readers, and constants that only live on as twins."""
    trees = ViewTrees(graph.nodes)
    read = {output.node for output in graph.outputs} | {source for _, source in graph.updates}
    twinned = {node.twin_of for node in graph.nodes}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        is_free = node.kind is NodeKind.COPY or bool(trees.parent(node.name))
        is_free = is_free or (node.kind is NodeKind.CONSTANT and node.name in twinned)
        if is_free and node.name not in read:
            continue
        read.update(node.operands)
        kept.append(node)
    return _renamed(replace(graph, nodes=tuple(reversed(kept))))


def _renamed(graph: PlacedGraph) -> PlacedGraph:
    """Give the first twin of a node that is gone the node's own name: it has moved, not doubled."""
    names = {node.name for node in graph.nodes}
    new: dict[str, str] = {}
    for node in graph.nodes:
        if node.twin_of and node.twin_of not in names and node.twin_of not in new.values():
            new[node.name] = node.twin_of

    def rename(node: Node) -> Node:
        operands = tuple(new.get(operand, operand) for operand in node.operands)
        if node.name in new:
            return replace(node, name=new[node.name], operands=operands, twin_of="")
        return replace(node, operands=operands)

    outputs = tuple(replace(output, node=new.get(output.node, output.node)) for output in graph.outputs)
    updates = tuple((target, new.get(source, source)) for target, source in graph.updates)
    return replace(graph, nodes=tuple(rename(n) for n in graph.nodes), outputs=outputs, updates=updates)


def _device(node: Node) -> Device:
    assert node.device is not None
    return node.device


def _tag(device: Device) -> str:
    return device.kind if device.kind == "cpu" else f"{device.kind}{device.index}"

"""Give every operator, constant, state and port of a method its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.program import CPU, Device
from ..base import Pass, PassResult, Stage
from ..options import IoRule, PlacementRule
from .graph import Node, NodeKind, PlacedGraph
from .io_rules import check_io, resolve_io, signature
from .placement_rules import check_rules, matches, parse_device, words
from .view_trees import ViewTrees, by_root, first_gpu, uses

Supports = Callable[[str, Device], str | None]
"""Told an operator (``aten.add.Tensor``) and a device: None if it runs there, else why it does not."""


def everything(operator: str, device: Device) -> str | None:
    """A backend that runs every operator."""
    return None


@dataclass(frozen=True)
class PlaceOperators(Pass[PlacedGraph]):
    """Place operators by rules, constants and state by their readers, ports by the io rules.

    Options (all may be set by the export's flags): ``device`` for what no rule names, ``placement`` rules of
    which the last match wins, ``io`` rules, ``allow_host_ops`` for operators that the device cannot run.

    Views are where their base is and cost nothing. A constant is on the device of its first reader (the copy
    pass makes it resident on the others, too), state on the device that computes its update, so that it is
    never copied for its own sake. Control flow is decided on the host and its bodies are placed like the
    rest; the condition of a loop answers on the host.

    Raises `UnsupportedOperatorError` naming every operator that cannot run where it belongs.
    """

    name: ClassVar[str] = "place-operators"
    stage: ClassVar[Stage] = Stage.PLACED

    device: str = "cuda"
    placement: tuple[PlacementRule, ...] = ()
    io: tuple[IoRule, ...] = ()
    allow_host_ops: bool = False
    device_planning: bool = True
    supports: Supports = field(default=everything, repr=False)
    state_devices: Mapping[str, Device] = field(default_factory=dict[str, Device], repr=False)
    """Homes of state variables by content name, where methods must agree; see `state_homes`."""

    def prepared(self, subjects: Sequence[PlacedGraph]) -> PlaceOperators:
        """Check rules against all methods, and let them agree on where shared state lives."""
        check_io({g.name: signature(g) for g in subjects}, self.io, device_planning=self.device_planning)
        check_rules(subjects, self.placement)
        return replace(self, state_devices=state_homes(subjects, self))

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        """Place one method."""
        default = parse_device(self.device)
        rules = [(rule, parse_device(rule.device)) for rule in self.placement]
        placer = _Placer(subject.name, default, rules, self.supports, self.allow_host_ops, self.state_devices)
        graph = placer.place(subject)
        placer.refuse_unsupported()
        graph = resolve_io(graph, self.io, default=default)
        return PassResult(graph, graph != subject)


def state_homes(graphs: Sequence[PlacedGraph], placing: PlaceOperators) -> dict[str, Device]:
    """One device for each state variable of all methods: that of the first method that updates it.

    Run `PlaceOperators` again with these as ``state_devices``, so that methods agree on where state lives.
    """
    updated: dict[str, Device] = {}
    read: dict[str, Device] = {}
    for graph in graphs:
        placed = placing.run(graph).subject
        targets = {target for target, _ in graph.updates}
        for node in placed.nodes:
            if node.kind is NodeKind.STATE and node.device is not None:
                (updated if node.name in targets else read).setdefault(node.content, node.device)
    return read | updated


class _Placer:
    """Places one method, bodies of control flow included."""

    def __init__(
        self,
        method: str,
        default: Device,
        rules: Sequence[tuple[PlacementRule, Device]],
        supports: Supports,
        allow_host_ops: bool,
        homes: Mapping[str, Device],
    ) -> None:
        self._method, self._default, self._rules = method, default, rules
        self._supports, self._allow_host_ops, self._homes = supports, allow_host_ops, homes
        self._refused: list[tuple[Node, Device, str]] = []

    def place(self, graph: PlacedGraph) -> PlacedGraph:
        """Everything but inputs, views and outputs."""
        trees = ViewTrees(graph.nodes)
        placed: dict[str, Node] = {}
        for node in graph.nodes:
            if node.kind is NodeKind.CALL and node.branches:
                node = self._control_flow(node)
            elif node.kind is NodeKind.CALL and not trees.parent(node.name):
                node = self._operator(node)
            elif node.kind is NodeKind.ELEMENT and not trees.parent(node.name):
                node = _element(node, placed[node.operands[0]])
            placed[node.name] = node
        graph = _factories_follow(replace(graph, nodes=tuple(placed.values())), self)
        return self._residents(graph)

    def refuse_unsupported(self) -> None:
        """Raise for all operators that `place` could not place."""
        if not self._refused:
            return
        listed = "; ".join(
            f"`{node.operator}` at {_where(node)} on {device}: {why}" for node, device, why in self._refused
        )
        names = ", ".join(dict.fromkeys(f"`{node.operator}`" for node, _, _ in self._refused))
        raise UnsupportedOperatorError(
            f"the device cannot run {names}",
            why=listed,
            hint="`--allow-host-ops` runs them on the host, with copies; a placement rule can do the same",
        )

    def wish(self, node: Node) -> tuple[Device, str]:
        """Where the configuration wants an operator, and in which words it says so."""
        device, reason = self._default, "default device"
        for rule, target in self._rules:
            if matches(rule, node, self._method):
                device, reason = target, words(rule)
        return device, reason

    def runs(self, node: Node, device: Device) -> bool:
        """Whether the device's backend has the operator."""
        return self._supports(node.operator, device) is None

    def _operator(self, node: Node) -> Node:
        device, reason = self.wish(node)
        why = self._supports(node.operator, device)
        if why is None:
            return node.on(device, reason)
        if device == CPU or not self._allow_host_ops or self._supports(node.operator, CPU) is not None:
            self._refused.append((node, device, why))
            return node.on(device, reason)
        return node.on(CPU, f"{device} cannot run it: {why}")

    def _control_flow(self, node: Node) -> Node:
        bodies = [self.place(body) for body in node.branches]
        wished = [_body_wishes(body) for body in bodies]
        carried = "while_loop" in node.operator
        results = [_body_results(body, self._default) for body in (bodies[1:] if carried else bodies)]
        agreed = tuple(first_gpu(column) or column[0] for column in zip(*results, strict=True))
        inputs = list(_agree(column, self._default) for column in zip(*wished, strict=True))
        if carried:
            inputs[: len(agreed)] = agreed
        condition = (CPU,) * len(bodies[0].outputs)
        bodies = [
            _finish_body(body, inputs, condition if carried and position == 0 else agreed)
            for position, body in enumerate(bodies)
        ]
        return replace(node, branches=tuple(bodies)).on(CPU, "control flow is decided on the host")

    def _residents(self, graph: PlacedGraph) -> PlacedGraph:
        trees = ViewTrees(graph.nodes)
        readers = by_root(trees, uses(replace(graph, outputs=(), updates=())))
        changes = {target: trees.root(source) for target, source in graph.updates}
        placed: list[Node] = []
        for node in graph.nodes:
            found = [use.device for use in readers.get(node.name, [])]
            if node.kind is NodeKind.CONSTANT:
                node = (
                    node.on(found[0], "its first reader is there")
                    if found
                    else node.on(CPU, "nothing reads it")
                )
            elif node.kind is NodeKind.STATE:
                node = self._state(node, trees.nodes.get(changes.get(node.name, "")), found)
            placed.append(node)
        return replace(graph, nodes=tuple(placed))

    def _state(self, node: Node, update: Node | None, readers: Sequence[Device]) -> Node:
        if node.content in self._homes:
            return node.on(self._homes[node.content], "the methods agreed on it")
        if update is not None and update.kind in (NodeKind.CALL, NodeKind.ELEMENT) and update.device:
            return node.on(update.device, f"`{update.name}` updates it there")
        if readers:
            return node.on(readers[0], "its first reader is there")
        return node.on(self._default, "default device")


def _where(node: Node) -> str:
    return f"{node.origin.file}:{node.origin.line}" if node.origin.file else f"`{node.name}`"


def _element(node: Node, call: Node) -> Node:
    if not call.branches:
        assert call.device is not None
        return node.on(call.device, f"a result of `{call.name}`")
    device = call.branches[-1].outputs[node.index].device
    assert device is not None
    return node.on(device, "the bodies leave it there")


def _factories_follow(graph: PlacedGraph, placer: _Placer) -> PlacedGraph:
    """Operators without operands go where their only reading device is, unless a rule says otherwise."""
    trees = ViewTrees(graph.nodes)
    readers = by_root(trees, uses(replace(graph, outputs=(), updates=())))
    placed: list[Node] = []
    for node in graph.nodes:
        devices = {use.device for use in readers.get(node.name, [])}
        is_free = node.kind is NodeKind.CALL and not node.operands and node.reason == "default device"
        if is_free and node.type is not None and len(devices) == 1:
            (device,) = devices
            if device != node.device and placer.runs(node, device):
                node = node.on(device, "all its readers are there")
        placed.append(node)
    return replace(graph, nodes=tuple(placed))


def _body_wishes(body: PlacedGraph) -> list[Device | None]:
    """Where a body reads each of its inputs first (a GPU before the host); None where it does not."""
    readers = by_root(ViewTrees(body.nodes), uses(replace(body, outputs=())))
    found: list[Device | None] = []
    for node in body.nodes:
        if node.kind is NodeKind.INPUT:
            devices = [use.device for use in readers.get(node.name, [])]
            found.append(first_gpu(devices) or (devices[0] if devices else None))
    return found


def _body_results(body: PlacedGraph, default: Device) -> list[Device]:
    """Where a body makes each of its outputs; ``default`` for what it only passes on."""
    trees = ViewTrees(body.nodes)
    return [trees.nodes[trees.root(output.node)].device or default for output in body.outputs]


def _agree(wishes: Sequence[Device | None], default: Device) -> Device:
    stated = [wish for wish in wishes if wish is not None]
    return first_gpu(stated) or (stated[0] if stated else default)


def _finish_body(body: PlacedGraph, inputs: Sequence[Device], results: Sequence[Device]) -> PlacedGraph:
    """Set a body's ports and let its views follow."""
    trees = ViewTrees(body.nodes)
    ports = dict(zip((n.name for n in body.nodes if n.kind is NodeKind.INPUT), inputs, strict=True))
    placed: dict[str, Node] = {}
    for node in body.nodes:
        if node.name in ports:
            node = node.on(ports[node.name], "handed in there")
        elif parent := trees.parent(node.name):
            node = replace(node, device=placed[parent].device, reason=f"a view of `{parent}`")
        placed[node.name] = node
    outputs = tuple(replace(output, device=d) for output, d in zip(body.outputs, results, strict=True))
    return replace(body, nodes=tuple(placed.values()), outputs=outputs)

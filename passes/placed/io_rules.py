"""Where callers keep inputs and outputs: `--io`, `--skip-h2d` and `--skip-d2h` as one list of rules."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...runtime.errors import UsageError
from ...runtime.program import CPU, Device
from ..options import IoRule
from .graph import GraphOutput, Node, NodeKind, PlacedGraph
from .view_trees import Use, ViewTrees, by_root, first_gpu, uses


@dataclass(frozen=True)
class Signature:
    """The names that rules may speak of in one method."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def public_name(node: Node) -> str:
    """What callers call an input: its name in the program, where that is not the node's."""
    return node.content or node.name


def signature(graph: PlacedGraph) -> Signature:
    """The tensor inputs and outputs of a method by name."""
    inputs = tuple(public_name(n) for n in graph.nodes if n.kind is NodeKind.INPUT and n.type is not None)
    return Signature(inputs, tuple(output.name for output in graph.outputs if not output.is_count))


def check_io(
    methods: Mapping[str, Signature], rules: Iterable[IoRule], *, device_planning: bool = True
) -> None:
    """Refuse rules that contradict each other's premises.

    UsageError names the method or tensor that does not exist and lists the valid ones, and refuses device
    memory for callers when device planning is off (nothing would then be planned that could be left out).
    """
    for rule in rules:
        if rule.location == "device" and not device_planning:
            raise UsageError(
                f"copies of `{rule.method}.{rule.tensor}` cannot be skipped",
                why="device planning is off, so no device memory is planned that a caller could replace",
                hint="remove `--no-device-planning`, or `--io`, `--skip-h2d` and `--skip-d2h`",
            )
        if rule.method != "*" and rule.method not in methods:
            owners = [name for name, found in methods.items() if rule.method in _names(found, rule)]
            meant = [f"`{name}.{rule.method}`" for name in owners if rule.tensor == "*"]
            hint = f"write {' or '.join(meant)}" if meant else _choices(rule.method, methods)
            raise UsageError(f"there is no method `{rule.method}`", hint=hint)
        chosen = [s for name, s in methods.items() if rule.method in ("*", name)]
        names = dict.fromkeys(name for s in chosen for name in _names(s, rule))
        if rule.tensor != "*" and rule.tensor not in names:
            noun = {"h2d": "input", "d2h": "output", "both": "input or output"}[rule.direction]
            where = f" of method `{rule.method}`" if rule.method != "*" else ""
            raise UsageError(f"there is no {noun} `{rule.tensor}`{where}", hint=_choices(rule.tensor, names))


def _names(found: Signature, rule: IoRule) -> tuple[str, ...]:
    inputs = found.inputs if rule.direction in ("h2d", "both") else ()
    return inputs + (found.outputs if rule.direction in ("d2h", "both") else ())


def _choices(name: str, valid: Iterable[str]) -> str:
    known = list(valid)
    near = difflib.get_close_matches(name, known, n=1)
    listed = "valid names: " + ", ".join(f"`{n}`" for n in known) if known else "there are no valid names"
    return f"did you mean `{near[0]}`? {listed}" if near else listed


def wants_device(rules: Sequence[IoRule], direction: str, method: str, tensor: str) -> bool:
    """Whether the caller keeps this tensor in device memory; the last rule that matches decides."""
    location = "host"
    for rule in rules:
        if rule.direction in (direction, "both") and rule.method in ("*", method):
            location = rule.location if rule.tensor in ("*", tensor) else location
    return location == "device"


def resolve_io(graph: PlacedGraph, rules: Sequence[IoRule], *, default: Device = CPU) -> PlacedGraph:
    """Give inputs, views and outputs of a graph with placed operators their devices.

    An input in device memory is on the first GPU that reads it; one that only the host reads stays there,
    and one that nothing reads is on ``default``. An output in device memory is where it is made.
    """
    trees = ViewTrees(graph.nodes)
    readers = by_root(trees, uses(replace(graph, outputs=())))
    placed: dict[str, Node] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT:
            node = _place_input(node, rules, graph.name, readers.get(node.name, []), default)
        elif parent := trees.parent(node.name):
            device = placed[parent].device
            node = replace(node, device=device, reason=f"a view of `{parent}`")
        placed[node.name] = node
    outputs = tuple(
        _place_output(output, rules, graph.name, placed, trees, default) for output in graph.outputs
    )
    return replace(graph, nodes=tuple(placed.values()), outputs=outputs)


def _place_input(
    node: Node, rules: Sequence[IoRule], method: str, readers: Sequence[Use], default: Device
) -> Node:
    if not wants_device(rules, "h2d", method, public_name(node)):
        return node.on(CPU, "the caller keeps it on the host")
    if not readers:
        return node.on(default, "the caller keeps it on the device; no operator reads it")
    device = first_gpu([use.device for use in readers])
    if device is None:
        return node.on(CPU, "only the host reads it")
    return node.on(device, "the caller keeps it on the device that reads it")


def _place_output(
    output: GraphOutput,
    rules: Sequence[IoRule],
    method: str,
    placed: Mapping[str, Node],
    trees: ViewTrees,
    default: Device,
) -> GraphOutput:
    if not output.node:
        return output
    if output.is_count or not wants_device(rules, "d2h", method, output.name):
        return replace(output, device=CPU)
    is_constant = placed[trees.root(output.node)].kind is NodeKind.CONSTANT
    return replace(output, device=default if is_constant else placed[output.node].device)

"""The ledger of copies: what is copied, how many bytes, from where to where, and why, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...runtime.program import Device
from .graph import Node, NodeKind, PlacedGraph
from .view_trees import ViewTrees


@dataclass(frozen=True)
class LedgerEntry:
    """One copy of one method, made at each call. ``nbytes`` is taken at the bound of every symbol."""

    kind: str
    """``h2d``, ``d2h`` or ``d2d``."""
    tensor: str
    """The name a person knows: an output's, where the copy is one; else that of what is copied."""
    nbytes: int
    source: Device
    destination: Device
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.kind} `{self.tensor}` {self.nbytes} B {self.source} -> {self.destination}: {self.reason}"
        )


def ledger(graph: PlacedGraph) -> tuple[LedgerEntry, ...]:
    """Every copy of a method in execution order, those in the bodies of its control flow included."""
    return tuple(_entries(graph))


def _entries(graph: PlacedGraph) -> Iterator[LedgerEntry]:
    nodes = {node.name: node for node in graph.nodes}
    returned = {output.node: output.name for output in reversed(graph.outputs)}
    for node in graph.nodes:
        for body in node.branches:
            yield from _entries(body)
        if node.kind is NodeKind.COPY:
            source = nodes[node.operands[0]]
            assert source.device is not None and node.device is not None
            nbytes = node.type.max_nbytes if node.type else 0
            kind = copy_kind(source.device, node.device)
            label = returned.get(node.name) or source.content or source.name
            yield LedgerEntry(kind, label, nbytes, source.device, node.device, node.reason)


def copy_kind(source: Device, destination: Device) -> str:
    """``h2d``, ``d2h`` or ``d2d`` for two different devices."""
    if source.kind == "cpu":
        return "h2d"
    return "d2h" if destination.kind == "cpu" else "d2d"


def with_reasons(graph: PlacedGraph) -> PlacedGraph:
    """The graph with each copy's reason written from its source and its readers (regions, once known)."""
    trees = ViewTrees(graph.nodes)
    readers = _readers(graph, trees)
    written: list[Node] = []
    for node in graph.nodes:
        if node.kind is NodeKind.COPY:
            node = replace(node, reason=_reason(node, trees, readers[node.name]))
        elif node.branches:
            node = replace(node, branches=tuple(with_reasons(body) for body in node.branches))
        written.append(node)
    return replace(graph, nodes=tuple(written))


@dataclass(frozen=True)
class _Reader:
    role: str
    name: str
    node: Node | None = None


def _readers(graph: PlacedGraph, trees: ViewTrees) -> Mapping[str, Sequence[_Reader]]:
    """Who reads each node, seen through views, in execution order and then outputs and updates."""
    found: dict[str, list[_Reader]] = {node.name: [] for node in graph.nodes}

    def note(tensor: str, reader: _Reader) -> None:
        for name in trees.chain(tensor):
            found[name].append(reader)

    for node in graph.nodes:
        if node.kind is NodeKind.CALL and not trees.parent(node.name):
            for operand in dict.fromkeys(node.operands):
                note(operand, _Reader("operator", node.name, node))
    for output in graph.outputs:
        if output.node:
            note(output.node, _Reader("count" if output.is_count else "output", output.name))
    for target, source in graph.updates:
        content = trees.nodes[target].content or target
        note(source, _Reader("update", content))
    return found


def _reason(copy: Node, trees: ViewTrees, readers: Sequence[_Reader]) -> str:
    source = trees.nodes[copy.operands[0]]
    operators = [reader.node for reader in readers if reader.node is not None]
    host = next((node for node in operators if copy.device is not None and copy.device.kind == "cpu"), None)
    if host is not None:
        return _on_host(host)
    made_on_host = _maker(source, trees)
    if source.device is not None and source.device.kind == "cpu" and made_on_host is not None:
        return f"{_on_host(made_on_host)}, and {_read_by(operators, readers, copy)}"
    return f"{_described(source, trees)} {_verb(operators, readers, copy)}"


def _on_host(node: Node) -> str:
    at = f" at {node.origin.file}:{node.origin.line}" if node.origin.file else ""
    if node.branches:
        return f"`{node.operator}`{at} is decided on the host"
    return f"`{node.operator}`{at} runs on the host"


def _maker(source: Node, trees: ViewTrees) -> Node | None:
    """The operator that computed the bytes, seen through views; None for inputs, constants and state."""
    root = trees.nodes[trees.root(source.name)]
    if root.kind is NodeKind.ELEMENT:
        return trees.nodes[root.operands[0]]
    return root if root.kind is NodeKind.CALL else None


def _read_by(operators: Sequence[Node], readers: Sequence[_Reader], copy: Node) -> str:
    return f"its result {_verb(operators, readers, copy)}"


def _verb(operators: Sequence[Node], readers: Sequence[_Reader], copy: Node) -> str:
    if operators:
        return f"is read by {_places(operators)} on {copy.device}"
    roles = {reader.role: reader.name for reader in reversed(readers)}
    if "output" in roles:
        names = [f"`{reader.name}`" for reader in readers if reader.role == "output"]
        where = (
            "on the host" if copy.device is not None and copy.device.kind == "cpu" else f"on {copy.device}"
        )
        return f"is returned as {_listed(names)} {where}"
    if "count" in roles:
        return f"is {roles['count']}, which depends on data, and is read by the caller"
    if "update" in roles:
        return f"is the new content of `{roles['update']}` on {copy.device}"
    return "has no reader"


def _places(operators: Sequence[Node]) -> str:
    regions = list(dict.fromkeys(node.region for node in operators))
    if -1 not in regions:
        return ("region " if len(regions) == 1 else "regions ") + _listed([str(r) for r in regions])
    names = [f"`{node.operator}`" + (f" at {node.origin.file}:{node.origin.line}" if node.origin.file else "")
             for node in operators]  # fmt: skip
    return _listed(list(dict.fromkeys(names)))


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _described(source: Node, trees: ViewTrees) -> str:
    root = trees.nodes[trees.root(source.name)]
    if root.kind is NodeKind.INPUT:
        return f"input `{root.content or root.name}`"
    if root.kind is NodeKind.STATE:
        return f"state `{root.content or root.name}`"
    where = f" of region {source.region}" if source.region >= 0 else ""
    return f"`{source.name}`{where}"


def explain(graph: PlacedGraph) -> tuple[str, ...]:
    """One line per operator: where it runs and why, then one per copy; bodies are indented."""
    lines: list[str] = []
    for node in graph.nodes:
        if node.kind is NodeKind.CALL:
            region = f"region {node.region} " if node.region >= 0 else ""
            at = f" {node.origin.file}:{node.origin.line}" if node.origin.file else ""
            lines.append(f"{node.name}: {node.operator}{at} {region}on {node.device} ({node.reason})")
            for body in node.branches:
                lines.append(f"  {body.name}:")
                lines.extend(f"    {line}" for line in explain(body))
        elif node.kind in (NodeKind.CONSTANT, NodeKind.STATE):
            lines.append(f"{node.name}: {node.kind.value} `{node.content}` on {node.device} ({node.reason})")
    lines.extend(str(entry) for entry in ledger(replace(graph, nodes=tuple(
        replace(node, branches=()) for node in graph.nodes))))  # fmt: skip
    return tuple(lines)

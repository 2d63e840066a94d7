"""The placed graph as text, one node a line, for goldens and for `--print-after`."""

from __future__ import annotations

from ...runtime.program import Device
from .graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType


def placed_text(graph: PlacedGraph, *, reasons: bool = True) -> str:
    """Print a method; ``reasons`` adds why each node is where it is, behind a ``;``."""
    return "\n".join(_lines(graph, "method", reasons)) + "\n"


def _lines(graph: PlacedGraph, head: str, reasons: bool) -> list[str]:
    lines = [f"{head} {graph.name}"]
    for node in graph.nodes:
        reason = f"  ; {node.reason}" if reasons and node.reason else ""
        lines.append(f"  {_node(node)}{reason}")
        for body in node.branches:
            lines.extend("    " + line for line in _lines(body, "body", reasons))
    lines.extend(f"  update %{target} <- %{source}" for target, source in graph.updates)
    lines.append("  return " + ", ".join(_output(output) for output in graph.outputs))
    return lines


def _node(node: Node) -> str:
    parts = [f"%{node.name} ="]
    operands = ", ".join(f"%{name}" for name in node.operands)
    if node.kind is NodeKind.CALL:
        parts.append(f"{'view ' if node.is_view else ''}{node.operator}({operands})")
    elif node.kind is NodeKind.ELEMENT:
        parts.append(f"element {node.index} of {operands}")
    elif node.kind is NodeKind.COPY:
        parts.append(f"copy({operands})")
    else:
        parts.append(node.kind.value + (f" `{node.content}`" if node.content else ""))
    if node.type is not None:
        parts.append(_type(node.type))
    parts.append(_on(node.device))
    if node.region >= 0:
        parts.append(f"region {node.region}")
    if node.twin_of:
        parts.append(f"twin of %{node.twin_of}")
    if node.origin.file:
        parts.append(f"at {node.origin.file}:{node.origin.line}")
    return " ".join(part for part in parts if part)


def _type(type_: TensorType) -> str:
    return f"{type_.dtype}[{','.join(str(extent) for extent in type_.shape)}]"


def _on(device: Device | None) -> str:
    return f"on {device}" if device is not None else ""


def _output(output: GraphOutput) -> str:
    tensor = f"{output.name}=%{output.node}" if output.node else f"{output.name}=literal"
    return " ".join(part for part in (tensor, _on(output.device)) if part)

"""An exported method as a `PlacedGraph` that nobody placed yet."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.program import SourceLocation
from ..exported.control_flow import is_control_flow, take_apart
from ..exported.method import ExportedMethod, InputSpec
from ..exported.origins import module_path, source_line
from ..exported.sizes import bound_of, to_dtype, to_size
from ..inductor.interfaces import depends_on_data
from .graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType

_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice",
    "select", "alias", "detach", "as_strided", "diagonal", "split", "split_with_sizes", "chunk", "unbind",
    "unfold", "flatten", "unflatten", "narrow", "view_as", "expand_as", "numpy_T", "mT", "movedim",
    "swapaxes",
}  # fmt: skip


def to_placed(method: ExportedMethod) -> PlacedGraph:
    """The exported graph without torch: what the placement and copy passes work on."""
    nodes: list[Node] = []
    known: set[str] = set()
    inputs = {spec.node: spec for spec in method.inputs}
    for node in method.graph.graph.nodes:
        is_input = node.op == "placeholder"
        made = _placeholder(method, node, inputs) if is_input else _operator(node, known)
        if made is not None:
            nodes.append(made)
            known.add(node.name)
    outputs = [GraphOutput(spec.name, spec.node) for spec in method.outputs]
    outputs += [GraphOutput(f"size {spec.name}", spec.node, is_count=True) for spec in method.counts]
    return PlacedGraph(method.name, tuple(nodes), tuple(outputs), method.updates, method.symbols)


def _operator(node: torch.fx.Node, known: set[str]) -> Node | None:
    """A call as a placed node; None for what makes no tensor."""
    if is_control_flow(node):
        return _control_flow(node)
    return _call(node, known) if node.op == "call_function" and _is_tensor_node(node) else None


def _control_flow(node: torch.fx.Node) -> Node:
    """A condition or loop with its bodies, whose inputs are the tensors among its operands."""
    parts = take_apart(node)
    operands = (*parts.own, *(operand for operand in parts.operands if _is_tensor_node(operand)))
    bodies = tuple(_body(name, body) for name, body in parts.bodies)
    origin = SourceLocation(module_path(node), str(node.target), *(source_line(node) or ("", 0)))
    names = tuple(operand.name for operand in operands)
    return Node(node.name, NodeKind.CALL, str(node.target), operands=names, origin=origin, branches=bodies)


def _body(name: str, body: torch.fx.GraphModule) -> PlacedGraph:
    nodes: list[Node] = []
    known: set[str] = set()
    outputs: tuple[GraphOutput, ...] = ()
    for node in body.graph.nodes:
        made: Node | None = None
        if node.op == "placeholder" and _is_tensor_node(node):
            made = Node(node.name, NodeKind.INPUT, type=tensor_type(node.meta["val"]))
        elif node.op == "output":
            results: Any = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            outputs = tuple(GraphOutput(f"result {i}", result.name) for i, result in enumerate(results))
        elif node.op == "call_function":
            made = _operator(node, known)
        if made is not None:
            nodes.append(made)
            known.add(node.name)
    return PlacedGraph(name, tuple(nodes), outputs)


def tensor_type(value: Any) -> TensorType | None:
    """The type of a fake tensor; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(to_size(s) for s in value.shape)
    most = 1
    for extent in value.shape:
        most *= bound_of(None, extent)[1] or 1 if isinstance(extent, torch.SymInt) else int(extent)
    return TensorType(to_dtype(value.dtype), shape, most * value.dtype.itemsize)


def _is_tensor_node(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)


def _placeholder(method: ExportedMethod, node: torch.fx.Node, inputs: Mapping[str, InputSpec]) -> Node | None:
    kind = tensor_type(node.meta.get("val"))
    if node.name in method.contents:
        content = method.contents[node.name]
        role = NodeKind.STATE if content in method.state else NodeKind.CONSTANT
        return Node(node.name, role, type=kind, content=content)
    if kind is None:
        return None
    return Node(node.name, NodeKind.INPUT, type=kind, content=inputs[node.name].name)


def _call(node: torch.fx.Node, known: set[str]) -> Node:
    operands = tuple(dict.fromkeys(n.name for n in node.all_input_nodes if n.name in known))
    origin = SourceLocation(module_path(node), str(node.target), *(source_line(node) or ("", 0)))
    _refuse_unbounded(node, origin)
    kind = tensor_type(node.meta.get("val"))
    if node.target is operator.getitem:
        index = node.args[1]
        assert isinstance(index, int)
        if kind is None:
            raise UnsupportedOperatorError(
                f"operator `{node.all_input_nodes[0].target}` returns a list among its results",
                why=str(origin),
                hint="use operators that return tensors",
            )
        return Node(node.name, NodeKind.ELEMENT, operands=operands, type=kind, origin=origin, index=index)
    name = str(node.target)
    is_view = name.startswith("aten.") and name.split(".")[1] in _VIEWS and _stays_in_place(node)
    return Node(
        node.name, NodeKind.CALL, operator=name, operands=operands, type=kind, is_view=is_view, origin=origin
    )


def _refuse_unbounded(node: torch.fx.Node, origin: SourceLocation) -> None:
    """A result whose size depends on data has no place in a plan."""
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else (values,):
        for extent in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(extent, torch.SymInt) and depends_on_data(extent):
                raise UnsupportedOperatorError(
                    f"operator `{node.target}` makes a result whose size depends on data",
                    why=str(origin),
                    hint="use an operator with a fixed size, such as `torch.nonzero_static` or `torch.where`",
                )


def _stays_in_place(node: torch.fx.Node) -> bool:
    """Whether a view operator really is one: ``reshape`` copies when the strides demand it."""
    value, base = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if isinstance(value, list | tuple):
        return True
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return False
    if str(node.target).startswith(("aten.reshape", "aten.flatten")):
        return bool(base.is_contiguous())
    return True

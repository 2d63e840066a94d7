"""Round the weights of linear layers to 8 or 4 bits, packed for kernels that read them so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from .base import Pass, PassResult, Stage
from .contents import Contents
from .control_flow import all_nodes
from .exported import ExportedMethod
from .options import PlacementRule
from .origins import module_path
from .placement_rules import speaks_of
from .quantize_scheme import Scheme, Selection
from .quantized_weight import QuantizedWeight, quantized

_LINEAR = torch.ops.aten.linear.default
_EMBEDDING = torch.ops.aten.embedding.default
_CAST = torch.ops.aten._to_copy.default
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class QuantizeWeights(Pass[ExportedMethod]):
    """Store the weights of linear layers in 8 or 4 bits, as ``--quantize`` asks for.

    ``aten.linear`` becomes an operator of ours that reads packed weights; bias and activations keep their
    type. A layer is left as it is where its weight is no constant of the program, is read by something else
    as well (unless ``tied``), or where the layer is placed on the host; the method's notes say which.
    """

    name: ClassVar[str] = "quantize-weights"
    stage: ClassVar[Stage] = Stage.EXPORTED

    contents: Contents = field(default_factory=Contents, repr=False)
    device: str = "cuda"
    placement: tuple[PlacementRule, ...] = ()
    quantize: str | None = None
    include: tuple[str, ...] = ("*",)
    """Patterns of modules (dotted paths) whose layers are quantised."""
    exclude: tuple[str, ...] = ()
    """Patterns of those that are not."""
    tied: bool = False
    """Quantise a weight that an embedding reads, too, which keeps it twice."""
    embeddings: bool = False
    """Keep tables of embeddings in 8 bits, and the layers that are tied to them, whatever the scheme."""

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Quantise one method's layers, in place."""
        if self.quantize is None:
            return PassResult(subject, False)
        scheme = Scheme.parse(self.quantize)
        done, left = list[str](), dict[str, str]()
        tables = self._tables(subject)
        for node in _linears(subject):
            name = _name(subject, node)
            if reason := self._why_not(subject, node, name, tables):
                left[name] = reason
            else:
                self._replace(subject, node, Scheme(8, 0) if node.args[1] in tables else scheme)
                done.append(name)
        names = tuple(_stem(subject.contents[table.name]) for table in tables)
        for table in tables:
            self._replace_table(subject, table)
        subject.notes = (*subject.notes, str(Selection(scheme, len(done), left, names)))
        if done or tables:
            subject.drop_unused()
            subject.graph.recompile()
        return PassResult(subject, bool(done or tables))

    def _tables(self, method: ExportedMethod) -> list[torch.fx.Node]:
        """Constants that embeddings read, and nothing but embeddings and linear layers."""
        if not self.embeddings:
            return []
        found: dict[torch.fx.Node, None] = {}
        for node in method.graph.graph.nodes:
            table = node.args[0] if node.op == "call_function" and node.target is _EMBEDDING else None
            if isinstance(table, torch.fx.Node) and table.name in method.contents:
                content = method.contents[table.name]
                is_free = {user.target for user in table.users} <= {_EMBEDDING, _LINEAR}
                is_on_host = any(self._is_on_host(method, user) for user in table.users)
                if is_free and not is_on_host and not self._what_it_is(content):
                    found[table] = None
        return list(found)

    def _what_it_is(self, content: str) -> str:
        """Why a constant cannot be rounded, or nothing."""
        tensor = self.contents.tensors[content]
        if content in self.contents.state:
            return "its weight changes"
        if tensor.is_meta:
            return "its weight has no values here"
        return "" if tensor.dtype in _TYPES else f"its weight is {str(tensor.dtype).removeprefix('torch.')}"

    def _is_on_host(self, method: ExportedMethod, node: torch.fx.Node) -> bool:
        rules = [r for r in self.placement if speaks_of(r, module_path(node), str(node.target), method.name)]
        return bool(rules) and rules[-1].device == "cpu"

    def _why_not(
        self, method: ExportedMethod, node: torch.fx.Node, name: str, tables: Sequence[torch.fx.Node]
    ) -> str:
        """Why a layer stays as it is, or nothing."""
        weight = node.args[1]
        if node.graph is not method.graph.graph:
            return "it is in a body of control flow"
        if not any(_speaks_of(pattern, name) for pattern in self.include):
            return "no pattern of `include` names it"
        for pattern in self.exclude:
            if _speaks_of(pattern, name):
                return f"`exclude` names it by `{pattern}`"
        if not isinstance(weight, torch.fx.Node) or weight.name not in method.contents:
            return "its weight is computed"
        content = method.contents[weight.name]
        if reason := self._what_it_is(content):
            return reason
        others = sorted({str(user.target) for user in weight.users if user.target is not _LINEAR})
        if others and not self.tied and weight not in tables:
            return f"`{others[0]}` reads its weight, too"
        return "it is placed on the host" if self._is_on_host(method, node) else ""

    def _replace_table(self, method: ExportedMethod, table: torch.fx.Node) -> None:
        """Let embeddings read the packed table; the result is cast, as float32 comes out."""
        graph, content = method.graph.graph, method.contents[table.name]
        weight = self._quantized(content, Scheme(8, 0))
        columns = self.contents.tensors[content].shape[1]
        words, scales = (
            _constant(method, self.contents, f"{_stem(content)}.{what}", value)
            for what, value in (("words", weight.words), ("scales", weight.scales))
        )
        target = torch.ops.devplan.quantized_embedding.default
        for node in [user for user in table.users if user.target is _EMBEDDING]:
            value = node.meta["val"]
            with graph.inserting_before(node), value.fake_mode:
                rows = graph.call_function(target, (node.args[1], words, scales, columns))
                rows.meta = {**node.meta, "val": value.float()}
                made = graph.call_function(_CAST, (rows,), {"dtype": value.dtype})
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            method.rename_ends(node.name, made.name)
            graph.erase_node(node)

    def _replace(self, method: ExportedMethod, node: torch.fx.Node, scheme: Scheme) -> None:
        weight: Any = node.args[1]
        content = method.contents[weight.name]
        replace_linear(method, self.contents, node, content, self._quantized(content, scheme))

    def _quantized(self, content: str, scheme: Scheme) -> QuantizedWeight:
        key = (content, scheme.bits, scheme.group)
        if key not in self.contents.quantized:
            tensor = self.contents.tensors[content].detach()
            self.contents.quantized[key] = quantized(tensor, scheme.bits, scheme.group)
        return self.contents.quantized[key]


def replace_linear(
    method: ExportedMethod, contents: Contents, node: torch.fx.Node, name: str, weight: QuantizedWeight
) -> None:
    """Let a linear layer read a quantised weight; ``name`` is what the constants are called after."""
    stem = _stem(name)
    named = {"words": weight.words, "scales": weight.scales, "zeros": weight.zeros}
    made = {
        what: None if value is None else _constant(method, contents, f"{stem}.{what}", value)
        for what, value in named.items()
    }
    x, bias = node.args[0], node.args[2] if len(node.args) > 2 else None
    target = torch.ops.devplan.quantized_linear.default
    graph = method.graph.graph
    arguments: tuple[Any, ...] = (x, *made.values(), bias, weight.bits, weight.group)
    with graph.inserting_before(node):
        product = graph.call_function(target, arguments)
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    method.rename_ends(node.name, product.name)
    graph.erase_node(node)


def _constant(method: ExportedMethod, contents: Contents, name: str, value: torch.Tensor) -> torch.fx.Node:
    """The placeholder of a constant; layers that share a weight share it."""
    for node in method.graph.graph.nodes:
        content = method.contents.get(node.name)
        if content is not None and contents.tensors[content] is value:
            found: torch.fx.Node = node
            return found
    return method.add_constant(contents, name, value)


def _linears(method: ExportedMethod) -> Iterator[torch.fx.Node]:
    for node in list(all_nodes(method.graph)):
        if node.op == "call_function" and node.target is _LINEAR:
            yield node


def _name(method: ExportedMethod, node: torch.fx.Node) -> str:
    """The module's path; that of its parameter where a module has several."""
    weight, module = node.args[1], module_path(node)
    content = method.contents.get(weight.name, "") if isinstance(weight, torch.fx.Node) else ""
    return _stem(content) if content.startswith(module) else module or node.name


def _stem(content: str) -> str:
    """A weight's name without its last part."""
    return content.removesuffix(".weight")


def _speaks_of(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")

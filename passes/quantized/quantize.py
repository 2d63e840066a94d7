"""Round the weights of linear layers and experts to 8 or 4 bits, packed for kernels that read them so."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import torch

from ..base import Pass, PassResult, Stage
from ..exported.contents import Contents
from ..exported.method import ExportedMethod
from ..exported.origins import module_path
from ..options import PlacementRule
from ..placed.placement_rules import speaks_of
from .products import LINEAR, Kind, Product, products
from .scheme import Scheme, Selection, shortened
from .weight import QuantizedWeight, quantized

aten = torch.ops.aten
_EMBEDDING = aten.embedding.default
_CAST = aten._to_copy.default
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALES = re.compile(r"\.(scales|zeros)$")


@dataclass(frozen=True)
class QuantizeWeights(Pass[ExportedMethod]):
    """Store the weights of linear layers and of experts in 8 or 4 bits, as ``--quantize`` asks for.

    They become operators of ours that read packed weights; bias and activations keep their type. A layer is
    left as it is where its weight is no constant of the program, is read by something else as well (unless
    ``tied``), or where the layer is placed on the host; the method's notes say which.
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
        tables = self._tables(subject)
        found = list(products(subject))
        ways = {node for product in found for node in product.way}
        done, left = list[Product](), dict[str, str]()
        for product in found:
            name = _name(subject, product)
            if reason := self._why_not(subject, product, name, tables, ways):
                left[name] = reason
            else:
                done.append(product)
        experts = [p for p in done if p.kind is not Kind.LINEAR]
        told = Selection(
            scheme,
            len(done) - len(experts),
            left,
            tuple(_stem(subject.contents[table.name]) for table in tables),
            shortened({_name(subject, p): p.is_flipped for p in experts}, left),
        )
        for product in done:
            self._replace(subject, product, Scheme(8, 0) if product.weight in tables else scheme)
        for table in tables:
            self._replace_table(subject, table)
        if done or tables:
            subject.graph.graph.eliminate_dead_code()
            subject.drop_unused()
            subject.graph.recompile()
        subject.notes = (*subject.notes, str(replace(told, kept=_kept(subject, self.contents))))
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
                is_free = {user.target for user in table.users} <= {_EMBEDDING, LINEAR}
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
        self,
        method: ExportedMethod,
        product: Product,
        name: str,
        tables: Sequence[torch.fx.Node],
        ways: Container[torch.fx.Node],
    ) -> str:
        """Why a product stays as it is, or nothing."""
        node, weight = product.node, product.weight
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
        if reason := product.obstacle or self._what_it_is(content):
            return reason
        readers = {user for step in (weight, *product.way[:-1]) for user in step.users}
        others = sorted({str(user.target) for user in readers if user not in ways})
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

    def _replace(self, method: ExportedMethod, product: Product, scheme: Scheme) -> None:
        content = method.contents[product.weight.name]
        weight = self._quantized(content, scheme, is_flipped=product.is_flipped)
        if product.kind is Kind.LINEAR:
            replace_linear(method, self.contents, product, content, weight)
        else:
            replace_experts(method, self.contents, product, content, weight)

    def _quantized(self, content: str, scheme: Scheme, *, is_flipped: bool = False) -> QuantizedWeight:
        key = (f"{content}, flipped" if is_flipped else content, scheme.bits, scheme.group)
        if key not in self.contents.quantized:
            tensor = self.contents.tensors[content].detach()
            outputs_first = tensor.mT if is_flipped else tensor
            self.contents.quantized[key] = quantized(outputs_first, scheme.bits, scheme.group)
        return self.contents.quantized[key]


def replace_linear(
    method: ExportedMethod, contents: Contents, product: Product, name: str, weight: QuantizedWeight
) -> None:
    """Let a linear layer read a quantised weight; ``name`` is what the constants are called after."""
    made = _operands(method, contents, name, weight)
    with _Call(method, product.node) as call:
        target = torch.ops.devplan.quantized_linear.default
        call.give(call(target, product.x, *made, product.bias, weight.bits, weight.group))


def replace_experts(
    method: ExportedMethod, contents: Contents, product: Product, name: str, weight: QuantizedWeight
) -> None:
    """The same of rows that each have one of several matrices."""
    made = _operands(method, contents, name, weight)
    matrices, shape = product.weight.meta["val"].shape[0], product.x.meta["val"].shape
    kind, which, x = product.kind, product.which, product.x
    if kind is Kind.BATCHES:
        ends = torch.arange(1, matrices + 1, dtype=torch.int32) * shape[1]
        which = method.add_constant(contents, f"{_stem(name)}.ends", ends)
    dim = 2 if product.x_at == 1 else 1  # a column behind its matrix, or a row in front of it
    with _Call(method, product.node) as call:
        if kind is Kind.CHOICE:
            x = call(aten.squeeze.dim, x, dim)
        elif kind is Kind.BATCHES:
            x = call(aten.reshape.default, x, [matrices * shape[1], shape[2]])
        rest = (which, weight.bits, weight.group, matrices, kind is not Kind.CHOICE)
        rows = call(torch.ops.devplan.quantized_experts.default, x, *made, *rest)
        if kind is Kind.CHOICE:
            rows = call(aten.unsqueeze.default, rows, dim)
        elif kind is Kind.BATCHES:
            rows = call(aten.reshape.default, rows, [matrices, shape[1], rows.meta["val"].shape[1]])
        call.give(rows)


class _Call:
    """Puts operators in the place of a node."""

    def __init__(self, method: ExportedMethod, node: torch.fx.Node) -> None:
        self._method, self._node, self._stack = method, node, ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._node.graph.inserting_before(self._node))
        self._stack.enter_context(self._node.meta["val"].fake_mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, target: Any, *arguments: Any) -> torch.fx.Node:
        """A new node with what it would give."""
        made = self._node.graph.call_function(target, arguments)
        values = torch.fx.map_arg(arguments, lambda node: node.meta["val"])
        made.meta = {**self._node.meta, "val": target(*values)}
        return made

    def give(self, made: torch.fx.Node) -> None:
        """Let readers of the old node read this one."""
        self._node.replace_all_uses_with(made)
        self._method.rename_ends(self._node.name, made.name)
        self._node.graph.erase_node(self._node)


def _operands(
    method: ExportedMethod, contents: Contents, name: str, weight: QuantizedWeight
) -> list[torch.fx.Node | None]:
    """Words, scales and zeros as placeholders."""
    named = {"words": weight.words, "scales": weight.scales, "zeros": weight.zeros}
    return [
        None if value is None else _constant(method, contents, f"{_stem(name)}.{what}", value)
        for what, value in named.items()
    ]


def _kept(method: ExportedMethod, contents: Contents) -> Mapping[str, tuple[int, int]]:
    """Weights of two or more dimensions that are still in floating point: how many, and bytes, by reader."""
    found: dict[str, tuple[int, int]] = {}
    for node in method.graph.graph.nodes:
        tensor = contents.tensors[method.contents[node.name]] if node.name in method.contents else None
        if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point() or not node.users:
            continue
        if _SCALES.search(method.contents[node.name]):
            continue
        reader = str(next(iter(node.users)).target)
        count, nbytes = found.get(reader, (0, 0))
        found[reader] = count + 1, nbytes + tensor.numel() * tensor.element_size()
    return found


def _constant(method: ExportedMethod, contents: Contents, name: str, value: torch.Tensor) -> torch.fx.Node:
    """The placeholder of a constant; layers that share a weight share it."""
    for node in method.graph.graph.nodes:
        content = method.contents.get(node.name)
        if content is not None and contents.tensors[content] is value:
            found: torch.fx.Node = node
            return found
    return method.add_constant(contents, name, value)


def _name(method: ExportedMethod, product: Product) -> str:
    """The module's path; that of its parameter where a module has several."""
    weight, module = product.weight, module_path(product.node)
    content = method.contents.get(weight.name, "") if isinstance(weight, torch.fx.Node) else ""
    return _stem(content) if content.startswith(module) else module or product.node.name


def _stem(content: str) -> str:
    """A weight's name without its last part."""
    return content.removesuffix(".weight")


def _speaks_of(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")

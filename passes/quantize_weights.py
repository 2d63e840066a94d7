"""Round the weights of linear layers to 8 or 4 bits, packed for kernels that read them so."""

from __future__ import annotations

from collections.abc import Iterator
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

    def run(self, subject: ExportedMethod) -> PassResult[ExportedMethod]:
        """Quantise one method's layers, in place."""
        if self.quantize is None:
            return PassResult(subject, False)
        scheme = Scheme.parse(self.quantize)
        done, left = list[str](), dict[str, str]()
        for node in _linears(subject):
            name = _name(subject, node)
            if reason := self._why_not(subject, node, name):
                left[name] = reason
            else:
                self._replace(subject, node, scheme)
                done.append(name)
        subject.notes = (*subject.notes, str(Selection(scheme, len(done), left)))
        if done:
            subject.drop_unused()
            subject.graph.recompile()
        return PassResult(subject, bool(done))

    def _why_not(self, method: ExportedMethod, node: torch.fx.Node, name: str) -> str:
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
        tensor = self.contents.tensors[content]
        if content in self.contents.state:
            return "its weight changes"
        if tensor.is_meta:
            return "its weight has no values here"
        if tensor.dtype not in _TYPES or node.meta["val"].dtype != tensor.dtype:
            return f"its weight is {str(tensor.dtype).removeprefix('torch.')}"
        others = sorted({str(user.target) for user in weight.users if user.target is not _LINEAR})
        if others and not self.tied:
            return f"`{others[0]}` reads its weight, too"
        rules = [r for r in self.placement if speaks_of(r, module_path(node), str(node.target), method.name)]
        return "it is placed on the host" if rules and rules[-1].device == "cpu" else ""

    def _replace(self, method: ExportedMethod, node: torch.fx.Node, scheme: Scheme) -> None:
        weight: Any = node.args[1]
        content = method.contents[weight.name]
        key = (content, scheme.bits, scheme.group)
        if key not in self.contents.quantized:
            self.contents.quantized[key] = quantized(
                self.contents.tensors[content].detach(), scheme.bits, scheme.group
            )
        replace_linear(method, self.contents, node, content, self.contents.quantized[key])


def replace_linear(
    method: ExportedMethod, contents: Contents, node: torch.fx.Node, name: str, weight: QuantizedWeight
) -> None:
    """Let a linear layer read a quantised weight; ``name`` is what the constants are called after."""
    stem = name.removesuffix(".weight")
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
    return content.removesuffix(".weight") if content.startswith(module) else module or node.name


def _speaks_of(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")

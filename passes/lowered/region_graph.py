"""A region of the placed graph as a torch graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.errors import DevplanError, UnsupportedOperatorError
from ..exported.control_flow import all_nodes
from ..exported.method import ExportedMethod
from ..exported.origins import origin_of
from ..placed.graph import Node


@dataclass
class RegionGraph:
    """A graph module with the examples of its placeholders.

    ``inputs`` are the placed nodes whose tensors the first placeholders take; symbolic integers follow.
    """

    module: torch.fx.GraphModule
    examples: list[Any]
    inputs: tuple[str, ...]


def extract(
    method: ExportedMethod,
    nodes: Sequence[Node],
    outputs: Sequence[str],
    updates: Sequence[tuple[str, str]],
    device: torch.device,
    examples: Mapping[str, Any],
    replacements: Mapping[Any, Callable[..., Any]],
) -> RegionGraph:
    """Copy the nodes of a region out of the method's graph.

    ``outputs`` are nodes of the region to return; ``updates`` (target, source) end as ``copy_`` into the
    target, which is an input. ``examples`` give the fake tensor of every input node. Factories are
    retargeted to ``device``, and operators in ``replacements`` become calls of those functions.
    """
    maker = _Extraction(method, device, replacements)
    inputs = _inputs(nodes, updates)
    values = [maker.placeholder(name, examples[name]) for name in inputs]
    for node in nodes:
        maker.copy(node)
    for target, source in updates:
        maker.graph.call_function(torch.ops.aten.copy_.default, (maker.env[target], maker.env[source]))
    maker.graph.output(tuple(maker.env[name] for name in outputs))
    module = torch.fx.GraphModule(torch.nn.Module(), maker.graph)
    return RegionGraph(module, [*values, *maker.symbol_values], inputs)


def _inputs(nodes: Sequence[Node], updates: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    inside = {node.name for node in nodes}
    read = [name for node in nodes for name in node.operands if name not in inside]
    return tuple(
        dict.fromkeys([*read, *(t for t, _ in updates), *(s for _, s in updates if s not in inside)])
    )


class NamingInterpreter(torch.fx.Interpreter):
    """Runs a region's graph; what fails becomes an UnsupportedOperatorError with operator and user's line."""

    def __init__(
        self, module: torch.fx.GraphModule, check: Callable[[str], None] = lambda where: None
    ) -> None:
        super().__init__(module)
        self.extra_traceback, self._check = False, check

    def run_node(self, n: torch.fx.Node) -> Any:
        """One operator."""
        try:
            made = super().run_node(n)
        except DevplanError:
            raise
        except Exception as error:
            raise cannot_lower(n, error) from error
        self._check(f"operator `{_name(n)}` {origin_of([n])}")
        return made


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def cannot_lower(node: torch.fx.Node | None, error: Exception) -> UnsupportedOperatorError:
    """The refusal for a node at which tracing or lowering failed."""
    name = "the graph" if node is None else f"operator `{_name(node)}`"
    first = (str(error).strip() or "no message").splitlines()[0]
    where = "" if node is None else f" {origin_of([node])}"
    why = f"{type(error).__name__}: {first}{where}"
    return UnsupportedOperatorError(f"{name} cannot be lowered", why=why)


class _Extraction:
    def __init__(
        self, method: ExportedMethod, device: torch.device, replacements: Mapping[Any, Callable[..., Any]]
    ) -> None:
        self._replacements = replacements
        self.graph = torch.fx.Graph()
        self.env: dict[str, torch.fx.Node] = {}
        self.symbol_values: list[Any] = []
        self._source = {n.name: n for n in all_nodes(method.graph)}
        self._tensors = {name for name, n in self._source.items() if _has_tensor(n)}
        self._symbols: dict[str, torch.fx.Node] = {}
        self._device = device
        self._last_placeholder: torch.fx.Node | None = None

    def placeholder(self, name: str, example: Any) -> Any:
        """An input of the region."""
        self.env[name] = self._new_placeholder(name, example)
        return example

    def _new_placeholder(self, name: str, example: Any) -> torch.fx.Node:
        with self.graph.inserting_after(self._last_placeholder) if self._last_placeholder else _here():
            made = self.graph.placeholder(name)
        made.meta["val"] = example
        self._last_placeholder = made
        return made

    def copy(self, node: Node) -> None:
        """Copy one node; its tensor operands are taken from ``node.operands`` by position."""
        original = self._source[node.twin_of or node.name]
        tensors = [n for n in dict.fromkeys(original.all_input_nodes) if n.name in self._tensors]
        renamed = dict(zip([n.name for n in tensors], node.operands, strict=True))

        def mapped(argument: torch.fx.Node) -> torch.fx.Node:
            if argument.name in renamed:
                return self.env[renamed[argument.name]]
            return self._symbol(argument)

        made = self.graph.node_copy(original, mapped)
        made.target = self._replacements.get(made.target, made.target)
        if "device" in made.kwargs and made.kwargs["device"] is not None:
            made.kwargs = {**made.kwargs, "device": self._device}
        made.args = tuple(self._device if isinstance(a, torch.device) else a for a in made.args)
        self.env[node.name] = made

    def _symbol(self, argument: torch.fx.Node) -> torch.fx.Node:
        """A symbolic integer from outside the region becomes a placeholder of its own."""
        if argument.name not in self._symbols:
            value = argument.meta["val"]
            self._symbols[argument.name] = self._new_placeholder(argument.name, value)
            self.symbol_values.append(value)
        return self._symbols[argument.name]


def _has_tensor(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor)


def _here() -> Any:
    import contextlib

    return contextlib.nullcontext()

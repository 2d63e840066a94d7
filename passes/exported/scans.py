"""`scan` and `map` as loops that count: a `while_loop` over the rows of their inputs.

The loop carries a counter, the results so far and what `scan` hands on; its body takes a row of each input,
runs the user's function, and puts the row of each result in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..inductor.interfaces import higher_order, pytree

aten = torch.ops.aten
_HOST = torch.device("cpu")
"""What an exported graph says of every factory; placement decides."""


def scans_to_loops(module: torch.fx.GraphModule) -> None:
    """Rewrite every `scan` and `map` of a graph, and of the bodies in it, in place."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(
            getattr(module, str(node.target), None), torch.fx.GraphModule
        ):
            scans_to_loops(getattr(module, str(node.target)))
    for node in list(module.graph.nodes):
        if node.op == "call_function" and str(node.target) in ("scan", "map_impl"):
            _Rewriting(module, node).run()
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_symbolic(extent: Any) -> bool:
    """Whether a size is only known at run time."""
    return isinstance(extent, torch.SymInt)


@dataclass(frozen=True)
class _Parts:
    """A `scan` or `map` taken apart; a `map` hands nothing on."""

    function: torch.fx.GraphModule
    carried: tuple[torch.fx.Node, ...]
    rows: tuple[torch.fx.Node, ...]
    others: tuple[Any, ...]


def _parts(module: torch.fx.GraphModule, node: torch.fx.Node) -> _Parts:
    args: list[Any] = list(node.args)
    function = getattr(module, str(args[0].target))
    if str(node.target) == "map_impl":
        return _Parts(function, (), tuple(args[1]), tuple(args[2]))
    return _Parts(function, tuple(args[1]), tuple(args[2]), tuple(args[3]))


class _Rewriting:
    """Replaces one node."""

    def __init__(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        self._module, self._node = module, node
        self._parts = _parts(module, node)
        results = list(node.meta["val"])
        self._kept = results[len(self._parts.carried) :]
        self._mode: Any = self._parts.rows[0].meta["val"].fake_mode

    def run(self) -> None:
        """Put a loop before the node, and let its users read from that."""
        graph, parts = self._module.graph, self._parts
        with graph.inserting_before(self._node):
            counter = self._call(graph, aten.full.default, ([], 0), dtype=torch.int64, device=_HOST)
            blocks = [self._block(graph, kept) for kept in self._kept]
            operands = (counter, *blocks, *parts.carried)
            given = (*operands, *parts.rows, *parts.others)
            bodies = [self._attribute("condition", self._condition(given))]
            bodies.append(self._attribute("body", self._body(given)))
            loop = graph.call_function(
                higher_order("while_loop"), (*bodies, operands, (*parts.rows, *parts.others))
            )
        loop.meta = {**self._node.meta, "val": tuple(value.meta["val"] for value in operands)}
        self._hand_over(loop)

    def _hand_over(self, loop: torch.fx.Node) -> None:
        carried, kept = len(self._parts.carried), len(self._kept)
        for user in list(self._node.users):
            index = user.args[1]
            assert isinstance(index, int)
            user.args = (loop, 1 + kept + index if index < carried else 1 + index - carried)
        self._module.graph.erase_node(self._node)

    def _block(self, graph: torch.fx.Graph, kept: torch.Tensor) -> torch.fx.Node:
        """Memory for the results of all rows."""
        if not any(_is_symbolic(extent) for extent in kept.shape):
            return self._call(graph, aten.full.default, (list(kept.shape), 0), dtype=kept.dtype, device=_HOST)
        rows = self._parts.rows[0]
        extent = self._call(graph, aten.sym_size.int, (rows, 0))
        sizes = [extent, *kept.shape[1:]]
        return self._call(graph, aten.full.default, (sizes, 0), dtype=kept.dtype, device=_HOST)

    def _attribute(self, word: str, body: torch.fx.GraphModule) -> torch.fx.Node:
        name = f"{self._node.name}_{word}"
        setattr(self._module, name, body)
        return self._module.graph.get_attr(name)

    def _call(
        self, graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], **kwargs: Any
    ) -> torch.fx.Node:
        """A call whose result is known by running it on what stands for its operands."""
        made = graph.call_function(target, args, kwargs)
        made.meta = {
            key: self._node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self._node.meta
        }
        values, keywords = pytree.tree_map_only(torch.fx.Node, lambda node: node.meta["val"], (args, kwargs))
        with self._mode:
            made.meta["val"] = target(*values, **keywords)
        return made

    def _placeholders(self, graph: torch.fx.Graph, given: Sequence[Any]) -> list[torch.fx.Node]:
        made: list[torch.fx.Node] = []
        for index, outside in enumerate(given):
            inside = graph.placeholder(f"operand{index}")
            inside.meta["val"] = outside.meta["val"]
            made.append(inside)
        return made

    def _condition(self, given: Sequence[Any]) -> torch.fx.GraphModule:
        """Whether the counter is below the number of rows."""
        graph = torch.fx.Graph()
        inside = self._placeholders(graph, given)
        rows = inside[1 + len(self._kept) + len(self._parts.carried)]
        extent: Any = rows.meta["val"].shape[0]
        if _is_symbolic(extent):
            extent = self._call(graph, aten.sym_size.int, (rows, 0))
        graph.output(self._call(graph, aten.lt.Scalar, (inside[0], extent)))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def _body(self, given: Sequence[Any]) -> torch.fx.GraphModule:
        """One row: the user's function between taking the inputs' rows and putting the results' in place."""
        graph, parts = torch.fx.Graph(), self._parts
        counter, *inside = self._placeholders(graph, given)
        kept, inside = inside[: len(self._kept)], inside[len(self._kept) :]
        carried, inside = inside[: len(parts.carried)], inside[len(parts.carried) :]
        at = self._call(graph, aten.reshape.default, (counter, [1]))
        rows = [self._row(graph, row, at) for row in inside[: len(parts.rows)]]
        results = self._inline(graph, [*carried, *rows, *inside[len(parts.rows) :]])
        after = self._call(graph, aten.add.Tensor, (counter, 1))
        placed = [
            self._call(
                graph,
                aten.index_copy.default,
                (block, 0, at, self._call(graph, aten.unsqueeze.default, (row, 0))),
            )
            for block, row in zip(kept, results[len(carried) :], strict=True)
        ]
        graph.output((after, *placed, *results[: len(carried)]))
        return torch.fx.GraphModule(parts.function, graph)

    def _row(self, graph: torch.fx.Graph, block: torch.fx.Node, at: torch.fx.Node) -> torch.fx.Node:
        chosen = self._call(graph, aten.index_select.default, (block, 0, at))
        return self._call(graph, aten.squeeze.dim, (chosen, 0))

    def _inline(self, graph: torch.fx.Graph, inputs: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """The user's function within another graph; its results."""
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        given = iter(inputs)
        for node in self._parts.function.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                results: Any = node.args[0]
                return [env[result] for result in results]
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
        raise AssertionError("a graph without an output")

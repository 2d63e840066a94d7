"""Sizes that depend on data, as padded tensors with a count: `nonzero`, `x[mask]`, and what is made of them.

How many elements of a mask are true is known on the device alone, but never more than the mask has. So what
depends on it is computed at that size: rows behind the count hold something, and whatever would mix them with
the others (a sum, a mean, a scatter) leaves them out. What leaves a method must have a size of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.errors import UnsupportedOperatorError
from .inductor.interfaces import depends_on_data, pytree
from .inline import inline
from .origins import origin_of
from .ragged_rules import Ragged, ragged_axes, refusal, rule_of, tensors

if TYPE_CHECKING:
    from .exported import ExportedMethod


def pad_ragged(method: ExportedMethod) -> bool:
    """Rewrite a method's graph in place; says whether a size in it depended on data.

    Raises UnsupportedOperatorError, naming the operator, where there is no rule for such a size.
    """
    nodes = list(method.graph.graph.nodes)
    if not any(_is_ragged(node) for node in nodes):
        return False
    padding = _Padding()
    for node in nodes:
        if node.op == "output":
            padding.check_output(node)
        elif node.op == "call_function":
            padding.rewrite(node, method)
    for node in reversed(padding.replaced):
        if not node.users:
            node.graph.erase_node(node)
    method.graph.graph.eliminate_dead_code()
    method.graph.recompile()
    return True


def _is_ragged(node: torch.fx.Node) -> bool:
    return any(ragged_axes(value) for value in tensors(node))


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node is a number that depends on data."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and depends_on_data(value)


class _Padding:
    """The rewriting of one graph."""

    def __init__(self) -> None:
        self.known: dict[torch.fx.Node, Any] = {}
        """What stands for a node: a `Ragged` of nodes, a list of them, or the node of a count."""
        self.replaced: list[torch.fx.Node] = []

    def check_output(self, node: torch.fx.Node) -> None:
        """Nothing that leaves the method has a size that depends on data."""
        for value in node.all_input_nodes:
            if value in self.known:
                raise UnsupportedOperatorError(
                    f"the size of a result of `{value.target}` depends on data and leaves the method",
                    why=str(origin_of([value])),
                    hint="return `torch.nonzero_static(mask, size=...)` or the masked tensor, and the count",
                )

    def rewrite(self, node: torch.fx.Node, method: ExportedMethod) -> None:
        """Replace a node that makes or reads what depends on data."""
        name = str(node.target)
        reads = [n for n in node.all_input_nodes if n in self.known]
        if name.startswith("aten._assert_scalar") or name.startswith("aten.sym_constrain"):
            self.replaced.append(node)
        elif name == "aten.sym_size.int" and reads and _is_number(node):
            self._stands_for(node, self.known[reads[0]].count)
        elif name == "<built-in function getitem>" and reads:
            self._stands_for(node, self.known[reads[0]][node.args[1]])
        elif node.meta.get("val") is None or not tensors(node):
            if reads:
                self._stands_for(node, None)  # comparisons of sizes, for the assertions
        elif reads or _is_ragged(node):
            self._apply(node, method)

    def _stands_for(self, node: torch.fx.Node, value: Any) -> None:
        self.known[node] = value
        self.replaced.append(node)

    def _apply(self, node: torch.fx.Node, method: ExportedMethod) -> None:
        rule = rule_of(node)
        if not any(tensors(n) for n in node.all_input_nodes):
            raise refusal(node)
        flat: list[torch.fx.Node] = []

        def slot(inner: torch.fx.Node) -> Any:
            known = self.known.get(inner, inner)
            if known is None:
                raise refusal(node)
            places = [_place(flat, part) for part in _parts(known)]
            return _Slot(places, known.axis if isinstance(known, Ragged) else None)

        map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
        arguments = map_arg((list(node.args), dict(node.kwargs)), slot)
        shape: list[Any] = []

        def run(*values: Any) -> Any:
            args, kwargs = _released(arguments, values)
            made = rule(*args, **kwargs)
            shape.append(pytree.tree_map_only(Ragged, lambda r: r.axis, made))
            leaves: list[Any] = pytree.tree_leaves(made)
            return tuple(part for leaf in leaves for part in _parts(leaf))

        made = inline(run, flat, node)
        self._keep(node, shape[-1], made, method)

    def _keep(
        self, node: torch.fx.Node, shape: Any, made: list[torch.fx.Node], method: ExportedMethod
    ) -> None:
        if isinstance(shape, int):
            self._stands_for(node, Ragged(made[0], made[1], shape))
        elif isinstance(shape, list | tuple):
            axes: list[int] = list(shape)  # pyright: ignore
            pairs = zip(axes, made[::2], made[1::2], strict=True)
            self._stands_for(node, [Ragged(data, count, axis) for axis, data, count in pairs])
        else:
            node.replace_all_uses_with(made[0])
            method.rename_ends(node.name, made[0].name)
            self.replaced.append(node)


@dataclass(frozen=True)
class _Slot:
    """Where the values of an argument are among the traced ones."""

    places: list[int]
    axis: int | None


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.data, value.count) if isinstance(value, Ragged) else (value,)


def _place(flat: list[torch.fx.Node], node: torch.fx.Node) -> int:
    if node not in flat:
        flat.append(node)
    return flat.index(node)


def _released(value: Any, values: Sequence[Any]) -> Any:
    """Arguments with what their slots stand for."""
    if isinstance(value, _Slot):
        held = [values[place] for place in value.places]
        return held[0] if value.axis is None else Ragged(held[0], held[1], value.axis)
    if isinstance(value, dict):
        return {key: _released(each, values) for key, each in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [_released(each, values) for each in value]  # pyright: ignore
    return value

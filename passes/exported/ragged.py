"""Sizes that depend on data, as padded tensors with a count: `nonzero`, `x[mask]`, and what is made of them.

How many elements of a mask are true is known on the device alone, but never more than the mask has, or than
the user declares with `torch._check(n <= bound)`. So what depends on it is computed at that size: rows behind
the count hold something, and whatever would mix them with the others (a sum, a mean, a scatter) leaves them
out. A result of such a size leaves the method at its bound, together with the count, and the runtime cuts it.
A declared bound is a promise: the count is then handed to the runtime, too, which checks it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.interfaces import depends_on_data, pytree
from .inline import inline
from .method import CountSpec
from .origins import origin_of
from .ragged_rules import (
    Ragged,
    bounds_of,
    counted_by,
    filled_by_mask,
    finds,
    note_bounds,
    note_equal,
    ragged_axes,
    refusal,
    rule_of,
    size_key,
    symbols_of,
    tensors,
    unbounded,
)
from .share_equal import share_equal

if TYPE_CHECKING:
    from .method import ExportedMethod


def pad_ragged(method: ExportedMethod) -> bool:
    """Rewrite a method's graph in place; says whether a size in it depended on data.

    Raises UnsupportedOperatorError, naming the operator, where there is no rule for such a size, or no bound.
    """
    graph = method.graph.graph
    if not any(_is_ragged(node) or finds(node) for node in graph.nodes):
        return False
    share_equal(method)
    note_bounds(graph.nodes)
    note_equal(graph.nodes)
    padding = _Padding(method)
    for node in list(graph.nodes):
        if node.op == "output":
            padding.leave(node)
        elif node.op == "call_function":
            padding.rewrite(node)
    for node in reversed(padding.replaced):
        if not node.users:
            graph.erase_node(node)
    share_equal(method, padding.numbers)
    _merge_counts(method)
    graph.eliminate_dead_code()
    method.graph.recompile()
    return True


def _is_ragged(node: torch.fx.Node) -> bool:
    return any(ragged_axes(value) for value in tensors(node))


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node is a number that depends on data."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and depends_on_data(value)


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)


def _arithmetic(node: torch.fx.Node) -> Any:
    """The same of tensors, which counts are."""

    def run(*counts: Any) -> Any:
        known = dict(zip(node.all_input_nodes, counts, strict=True))
        target: Any = node.target
        return target(*(known[a] if isinstance(a, torch.fx.Node) else a for a in node.args))

    return run


def _merge_counts(method: ExportedMethod) -> None:
    """One count for each node that computes one: what is found twice has both declarations' bounds."""
    by_node: dict[str, CountSpec] = {}
    names: dict[str, str] = {}
    for spec in method.counts:
        first = by_node.setdefault(spec.node, spec)
        lower, upper = max(first.lower, spec.lower), min(first.upper, spec.upper)
        both = first.is_difference and spec.is_difference
        by_node[spec.node] = replace(first, lower=min(lower, upper), upper=upper, is_difference=both)
        names[spec.name] = first.name
    method.counts = tuple(by_node.values())
    method.outputs = tuple(replace(o, count=names.get(o.count, "")) for o in method.outputs)
    (output,) = [n for n in method.graph.graph.nodes if n.op == "output"]
    given: Any = output.args[0]
    results = list[Any](given)
    kept = len(results) - len(names)
    nodes = {n.name: n for n in method.graph.graph.nodes}
    output.args = (tuple([*results[:kept], *(nodes[name] for name in by_node)]),)


class _Padding:
    """The rewriting of one graph."""

    def __init__(self, method: ExportedMethod) -> None:
        self.method = method
        self.known: dict[torch.fx.Node, Any] = {}
        """What stands for a node: a `Ragged` of nodes, a list of them, or the node of a count."""
        self.replaced: list[torch.fx.Node] = []
        self.counts: dict[torch.fx.Node, CountSpec] = {}
        """Every count that was made, by its node."""
        self.wanted: dict[torch.fx.Node, None] = {}
        """Those that have to leave the method: for a result, or for the check of a declared bound."""
        self.origins: dict[torch.fx.Node, torch.fx.Node] = {}
        """The mask that a count is of; counts of one mask are equal."""
        self.numbers: set[torch.fx.Node] = set()
        """Counts that are results themselves."""
        self.symbols = {
            s for n in method.graph.graph.nodes for value in tensors(n) for s in symbols_of(value)
        }

    def leave(self, node: torch.fx.Node) -> None:
        """Results leave at their bounds, and all counts that are wanted behind them."""
        given: Any = node.args[0]
        results = list[Any](given)
        for index, value in enumerate(results):
            if isinstance(value, torch.fx.Node) and value in self.known:
                results[index] = self._result(value, self.known[value])
        self.method.counts = tuple(self.counts[count] for count in self.wanted)
        node.args = (tuple([*results, *self.wanted]),)

    def _result(self, value: torch.fx.Node, known: Any) -> torch.fx.Node:
        made, count, axis = known, "", 0
        if isinstance(known, Ragged):
            made, axis = known.data, known.axis + known.data.meta["val"].dim()
            count = self.counts[known.count].name
            self.wanted[known.count] = None
        if not isinstance(made, torch.fx.Node):
            raise UnsupportedOperatorError(
                f"result `{value.target}` is computed from a size that depends on data",
                why=str(origin_of([value])),
                hint="return the size itself",
            )
        if not count:
            self.numbers.add(made)
        self.method.outputs = tuple(
            replace(o, node=made.name, count=count, axis=axis) if o.node == value.name else o
            for o in self.method.outputs
        )
        return made

    def rewrite(self, node: torch.fx.Node) -> None:
        """Replace a node that makes or reads what depends on data."""
        name = str(node.target)
        reads = [n for n in node.all_input_nodes if n in self.known]
        if name.startswith("aten._assert_scalar") or name.startswith("aten.sym_constrain"):
            self.replaced.append(node)
        elif name in ("aten.item.default", "aten._local_scalar_dense.default") and self._is_size(node):
            self._read_size(node)
        elif name == "aten.sym_size.int" and reads and _is_number(node):
            self._stands_for(node, self.known[reads[0]].count)
        elif node.target is operator.getitem and reads:
            part = self.known[reads[0]][node.args[1]]
            self._stands_for(node, part) if isinstance(part, Ragged) else self._take_over(node, part)
        elif node.target in _ARITHMETIC and _is_number(node) and self._are_counts(node.all_input_nodes):
            self._stands_for(
                node, *inline(_arithmetic(node), [self.known[n] for n in node.all_input_nodes], node)
            )
        elif node.target is torch.sym_min and _is_number(node) and reads:
            (most,) = [a for a in node.args if not isinstance(a, torch.fx.Node)]
            self._stands_for(node, *inline(lambda x: x.clamp(max=most), [self.known[reads[0]]], node))
        elif node.meta.get("val") is None or not tensors(node):
            if reads:
                self._stands_for(node, None)  # comparisons of sizes, for the assertions
        elif reads or _is_ragged(node) or finds(node):
            self._apply(node)

    def _are_counts(self, nodes: Sequence[torch.fx.Node]) -> bool:
        return all(isinstance(self.known.get(node), torch.fx.Node) for node in nodes)

    def _is_size(self, node: torch.fx.Node) -> bool:
        return _is_number(node) and str(node.meta["val"]) in self.symbols

    def _read_size(self, node: torch.fx.Node) -> None:
        """A number read from a tensor that sizes are made of: the tensor is the count."""
        (count,) = inline(lambda x: x.reshape(()).to(torch.int64), [node.all_input_nodes[0]], node)
        self._stands_for(node, count)
        self._note(node, count, node.meta["val"], None)

    def _stands_for(self, node: torch.fx.Node, value: Any) -> None:
        self.known[node] = value
        self.replaced.append(node)

    def _note(self, node: torch.fx.Node, count: torch.fx.Node, extent: Any, most: int | None) -> None:
        """Remember a new count; it must be checked where less is planned than it can be (``most``)."""
        lower, upper = bounds_of(extent)
        upper = most if upper is None else min(upper, most or upper)
        if upper is None:
            raise unbounded(node)
        is_symbol = isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol
        name = str(extent) if is_symbol else node.name
        taken = {spec.name for spec in self.counts.values()}
        unique = next(n for n in (name, *(f"{name}.{i}" for i in range(2, 1 << 20))) if n not in taken)
        self.counts[count] = CountSpec(unique, count.name, lower, upper, origin_of([node]))
        self.origins[count] = finds(node) or count
        if most is None or upper < most or lower > 0:
            self.wanted[count] = None

    def _apply(self, node: torch.fx.Node) -> None:
        rule = rule_of(node)
        self._require_equal(node)
        if not any(tensors(n) or n in self.known for n in node.all_input_nodes):
            raise refusal(node)
        flat: list[torch.fx.Node] = []

        def slot(inner: torch.fx.Node) -> Any:
            known = self.known.get(inner, inner)
            if known is None:
                raise refusal(node)
            places = [_place(flat, part) for part in _parts(known)]
            return _Slot(places, replace(known, data=None, count=None) if isinstance(known, Ragged) else None)

        map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
        arguments = map_arg((list(node.args), dict(node.kwargs)), slot)
        shape: list[Any] = []

        def run(*values: Any) -> Any:
            args, kwargs = _released(arguments, values)
            made = rule(*args, **kwargs)
            shape.append(pytree.tree_map_only(Ragged, lambda r: replace(r, data=None, count=None), made))
            leaves: list[Any] = pytree.tree_leaves(made)
            return tuple(part for leaf in leaves for part in _parts(leaf))

        self._keep(node, shape, inline(run, flat, node))

    def _require_equal(self, node: torch.fx.Node) -> None:
        """Torch takes sizes for one where an operator needs that: check it where they are counted apart."""
        alike: dict[Any, torch.fx.Node] = {}
        for given in node.all_input_nodes:
            known = self.known.get(given)
            if isinstance(known, Ragged):
                first = alike.setdefault(size_key(counted_by(tensors(given)[0]), node), known.count)
                if self.origins[first] is not self.origins[known.count]:
                    self._check_difference(node, *inline(_difference, [first, known.count], node))
        if (mask := filled_by_mask(node)) is not None:
            counts = [count for count in alike.values() if self.origins[count] is not mask]
            for count in counts:
                self._check_difference(node, *inline(_difference_to_mask, [mask, count], node))

    def _check_difference(self, node: torch.fx.Node, count: torch.fx.Node) -> None:
        origin = origin_of([node])
        name = f"{count.name} difference"
        self.counts[count] = CountSpec(name, count.name, 0, 0, origin, is_difference=True)
        self.wanted[count] = None

    def _keep(self, node: torch.fx.Node, shape: list[Any], made: list[torch.fx.Node]) -> None:
        kind = shape[-1]
        if isinstance(kind, Ragged):
            self._keep_ragged(node, replace(kind, data=made[0], count=made[1]))
        elif isinstance(kind, list | tuple):
            kinds: list[Any] = list(kind)  # pyright: ignore
            self._stands_for(node, found := _joined(kinds, made))
            for each in found:
                if isinstance(each, Ragged) and each.count not in self.counts:
                    self._note(node, each.count, counted_by(tensors(node)[0]), each.most)
        else:
            self._take_over(node, made[0])

    def _keep_ragged(self, node: torch.fx.Node, made: Ragged) -> None:
        (value,) = tensors(node)
        if made.count not in self.counts:
            self._note(node, made.count, counted_by(value), made.most)
        if ragged_axes(value):
            self._stands_for(node, made)
        else:  # so many, by declaration
            self._take_over(node, made.data)

    def _take_over(self, node: torch.fx.Node, made: torch.fx.Node) -> None:
        node.replace_all_uses_with(made)
        self.method.rename_ends(node.name, made.name)
        self.replaced.append(node)


def _difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first - second).abs()


def _difference_to_mask(mask: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return ((mask != 0).sum() - count).abs()


@dataclass(frozen=True)
class _Slot:
    """Where the values of an argument are among the traced ones, and what they are of a ragged one."""

    places: list[int]
    kind: Ragged | None


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.data, value.count) if isinstance(value, Ragged) else (value,)


def _joined(kinds: Sequence[Any], made: Sequence[torch.fx.Node]) -> list[Any]:
    """Several results, of which those of a size that depends on data have a count behind them."""
    parts = iter(made)
    return [
        replace(each, data=next(parts), count=next(parts)) if isinstance(each, Ragged) else next(parts)
        for each in kinds
    ]


def _place(flat: list[torch.fx.Node], node: torch.fx.Node) -> int:
    if node not in flat:
        flat.append(node)
    return flat.index(node)


def _released(value: Any, values: Sequence[Any]) -> Any:
    """Arguments with what their slots stand for."""
    if isinstance(value, _Slot):
        held = [values[place] for place in value.places]
        return held[0] if value.kind is None else replace(value.kind, data=held[0], count=held[1])
    if isinstance(value, dict):
        return {key: _released(each, values) for key, each in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [_released(each, values) for each in value]  # pyright: ignore
    return value

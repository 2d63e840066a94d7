"""Numbers that a model reads from tensors and computes with, ``x * scale.item()``: tensors take their place.

A number that sizes are made of is a count (`ragged.py`). Any other is a tensor without dimensions here, in
float64 or int64, so that types are promoted, and results rounded, as they are beside a Python number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.interfaces import unknowns
from ..inductor.overloads import is_overload
from .inline import inline
from .origins import origin_of
from .ragged_rules import tensors

if TYPE_CHECKING:
    from .method import ExportedMethod

aten = torch.ops.aten


def read_numbers(method: ExportedMethod) -> None:
    """Rewrite a method's graph in place; UnsupportedOperatorError where an operator takes numbers alone."""
    graph = method.graph.graph
    shapes = [value.shape for node in graph.nodes for value in tensors(node)]
    reading = _Reading(method, {s for shape in shapes for size in shape for s in unknowns(size)})
    for node in list(graph.nodes):
        if node.op == "output":
            reading.leave(node)
        else:
            reading.rewrite(node)
    if not reading.tensors:
        return
    for node in reversed(reading.replaced):
        if node.users:
            user = next(iter(node.users))
            raise UnsupportedOperatorError(
                f"operator `{user.target}` takes a number that is read from a tensor",
                why=str(origin_of([user])),
                hint="compute with the tensor: leave out `.item()`",
            )
        graph.erase_node(node)
    graph.eliminate_dead_code()
    method.graph.recompile()


class _Reading:
    def __init__(self, method: ExportedMethod, sizes: set[str]) -> None:
        self._method, self._sizes = method, sizes
        self.tensors: dict[torch.fx.Node, torch.fx.Node] = {}
        self.replaced: list[torch.fx.Node] = []
        self._asserted: set[torch.fx.Node] = set()

    def rewrite(self, node: torch.fx.Node) -> None:
        """Make a tensor of a number, or give it to an operator."""
        value = node.meta.get("val")
        reads = [n for n in node.all_input_nodes if n in self.tensors or n in self._asserted]
        if node.target in (aten.item.default, aten._local_scalar_dense.default):
            if self._is_read(value):
                self._stands_for(node, _scalar(value), list(node.all_input_nodes))
        elif reads and isinstance(value, torch.SymInt | torch.SymFloat):
            self._stands_for(node, _rule(_ARITHMETIC.get(node.target), node), list(node.all_input_nodes))
        elif reads and isinstance(value, Tensor):
            self._take(node, value)
        elif reads and (value is None or isinstance(value, torch.SymBool)):
            self.replaced.append(node)  # an assertion about the number, and what it says
            self._asserted.add(node)

    def leave(self, node: torch.fx.Node) -> None:
        """Numbers among the results are tensors, too."""
        for number in [n for n in node.all_input_nodes if n in self.tensors]:
            node.replace_input_with(number, self.tensors[number])
            self._method.rename_ends(number.name, self.tensors[number].name)

    def _is_read(self, value: Any) -> TypeGuard[torch.SymInt | torch.SymFloat]:
        return isinstance(value, torch.SymFloat | torch.SymInt) and self._sizes.isdisjoint(unknowns(value))

    def _stands_for(
        self, node: torch.fx.Node, run: Callable[..., Tensor] | None, nodes: list[torch.fx.Node]
    ) -> None:
        self.replaced.append(node)
        if run is not None:
            (self.tensors[node],) = inline(run, [self.tensors.get(n, n) for n in nodes], node)

    def _take(self, node: torch.fx.Node, value: Tensor) -> None:
        rule = _rule(_OPERATORS.get(node.target, _packet(node.target)), node)
        direct = {id(a) for a in (*node.args, *node.kwargs.values())}
        if rule is None or not all(id(n) in direct for n in node.all_input_nodes if n in self.tensors):
            return
        nodes = list(node.all_input_nodes)
        try:
            made = inline(lambda *t: rule(*t).to(value.dtype), [self.tensors.get(n, n) for n in nodes], node)
        except (RuntimeError, TypeError):  # it has no overload for tensors: refused as a user of the number
            return
        if made[0].meta["val"].shape == value.shape:
            node.replace_all_uses_with(made[0])
            self._method.rename_ends(node.name, made[0].name)
            self.replaced.append(node)


def _rule(how: Callable[..., Any] | None, node: torch.fx.Node) -> Callable[..., Any] | None:
    """``how`` with the node's own arguments, of which tensors stand for the nodes."""
    if how is None:
        return None
    nodes = list(node.all_input_nodes)

    def run(*given: Tensor) -> Any:
        known = dict(zip(nodes, given, strict=True))
        map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
        return how(*args, **kwargs)

    return run


def _packet(target: Any) -> Callable[..., Any] | None:
    """An operator under all its overloads, of which one may take a tensor for the number."""
    return target.overloadpacket if is_overload(target) else None


def _scalar(value: torch.SymInt | torch.SymFloat) -> Callable[[Tensor], Tensor]:
    dtype = torch.float64 if isinstance(value, torch.SymFloat) else torch.int64
    return lambda x: x.reshape(()).to(dtype)


def _divided(x: Any, y: Any) -> Tensor:
    wide: Tensor = torch.as_tensor(x, dtype=torch.float64) / y
    return wide


def _selected(x: Tensor, dim: int, at: Tensor) -> Tensor:
    found: Tensor = aten.index(x, [*[None] * (dim % x.dim()), at])
    return found


def _filled(size: list[int], value: Tensor, **how: Any) -> Tensor:
    return value.expand(size).clone(memory_format=torch.contiguous_format)


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: _divided,
    operator.floordiv: operator.floordiv,
    operator.mod: operator.mod,
    operator.pow: operator.pow,
    operator.neg: operator.neg,
    round: lambda x, ndigits=0: torch.round(x, decimals=ndigits),
    torch.sym_float: lambda x: x.to(torch.float64),
    torch.sym_int: lambda x: x.to(torch.int64),
    torch.sym_max: lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y))),
    torch.sym_min: lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y))),
}

_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.select.int: _selected,
    aten.full.default: _filled,
    aten.scalar_tensor.default: lambda value, **how: value,
}
"""Operators that take another form with a tensor."""

"""Turns of a loop that depends on data, between their markers in a graph: what they write is selected."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.overloads import arguments, is_overload, returns
from .data_loops import loop_refusal
from .inline import inline

aten: Any = torch.ops.aten


def close_turns(exported: torch.export.ExportedProgram) -> None:
    """Make the turns that `unrolled_loops` marked conditional, in place; other programs are left alone.

    Works on a program straight from `torch.export.export`, in which what is written in place still is.
    Raises UnsupportedOperatorError, naming the line, for what a turn leaves behind in any other way, and for
    a loop that is left early.
    """
    graph = exported.graph_module.graph
    turns = list(_turns(graph))
    for turn in turns:
        _close(turn)
    for turn in turns:
        graph.erase_node(turn.end)
        graph.erase_node(turn.begin)
    if turns:
        graph.eliminate_dead_code()
        exported.graph_module.recompile()


@dataclass
class _Turn:
    begin: torch.fx.Node
    end: torch.fx.Node
    order: dict[torch.fx.Node, int] = field(default_factory=dict[torch.fx.Node, int])
    """The graph before this turn is closed: what was inserted since is not in it."""

    def has(self, node: torch.fx.Node) -> bool:
        """Whether a node stands between the markers, in inner turns included."""
        return self.order[self.begin] < self.order.get(node, -1) < self.order[self.end]

    def later(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The node's users behind the turn."""
        return [user for user in node.users if self.order.get(user, -1) > self.order[self.end]]

    def refusal(self, why: str, hint: str) -> UnsupportedOperatorError:
        """The error that names the loop."""
        return loop_refusal(str(self.begin.args[3]), why, hint)


def _turns(graph: torch.fx.Graph) -> Iterator[_Turn]:
    """All turns, inner ones before those around them."""
    begun: list[torch.fx.Node] = []
    for node in graph.nodes:
        if _is(node, "turn_begin"):
            begun.append(node)
        elif _is(node, "turn_end"):
            yield _Turn(begun.pop(), node)
    if begun:
        raise loop_refusal(str(begun[0].args[3]), "it is left early", "let it turn to its end")


def _is(node: torch.fx.Node, marker: str) -> bool:
    return str(node.target) == f"devplan.{marker}.default"


def _close(turn: _Turn) -> None:
    turn.order = {node: at for at, node in enumerate(turn.begin.graph.nodes)}
    condition = _condition(turn)
    for root in _written(turn):
        _keep_old(turn, condition, root)
    before: Any = turn.end.args[0]
    after: Any = turn.end.args[1]
    for old, new in zip(before, after, strict=True):
        _select(turn, condition, old, new)
    for node in filter(turn.has, turn.order):
        if _uses(turn, node) and turn.has(root_of(node)):
            why = f"what `{node.target}` makes in one turn is used after it"
            raise turn.refusal(why, "write it into a tensor from before the loop")


def _uses(turn: _Turn, node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node's users behind the turn; markers, which only name it, are none."""
    return [user for user in turn.later(node) if not _is(user, "turn_end")]


def _condition(turn: _Turn) -> torch.fx.Node:
    """Whether the turn takes place: the element of the mask, read where the mask was searched."""
    listed: Any = turn.begin.args[0]
    at: Any = turn.begin.args[1]
    while str(listed.target).partition(".")[2].split(".")[0] in _SAME_ORDER:
        listed = listed.args[0]
    if listed.target is operator.getitem and listed.args[1] == 0:
        listed = listed.args[0]
    mask: Any = listed.args[0]
    if str(listed.target) not in _SEARCHES or mask.meta["val"].dim() != 1:
        raise turn.refusal(f"it is over the result of `{listed.target}`", "loop over a mask's `nonzero()`")
    if mask.meta["val"].shape[0] != turn.begin.args[2]:
        raise turn.refusal("its mask has a dynamic size or a declared bound", "use `torch.where`")
    return inline(lambda m: m[at] != 0, [mask], listed)[0]


_SEARCHES = ("aten.nonzero.default", "aten.where.default", "aten.argwhere.default")
_SAME_ORDER = ("squeeze", "view", "reshape", "flatten", "detach", "alias", "select", "clone", "to")
"""Operators behind a search of one dimension that leave its indices in their order."""


def _written(turn: _Turn) -> list[torch.fx.Node]:
    """Tensors from outside that the turn writes to."""
    found: dict[torch.fx.Node, None] = {}
    for node in filter(turn.has, turn.order):
        for argument, value in _arguments(node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found |= {root: None for root in map(root_of, _listed(value)) if not turn.has(root)}
    return list(found)


def _arguments(node: torch.fx.Node) -> Iterator[tuple[Any, Any]]:
    """(argument of the operator's schema, what is given for it)."""
    if is_overload(node.target):
        for index, argument in enumerate(arguments(node.target)):
            if index < len(node.args):
                yield argument, node.args[index]
            elif argument.name in node.kwargs:
                yield argument, node.kwargs[argument.name]


def _keep_old(turn: _Turn, condition: torch.fx.Node, root: torch.fx.Node) -> None:
    graph = turn.begin.graph
    (old,) = inline(lambda t: t.clone(), [root], turn.begin)
    (kept,) = inline(torch.where, [condition, root, old], turn.end)
    with graph.inserting_before(turn.end):
        made = graph.call_function(aten.copy_.default, (root, kept))
    made.meta = {**kept.meta, "val": root.meta["val"]}


def _select(turn: _Turn, condition: torch.fx.Node, old: torch.fx.Node, new: torch.fx.Node) -> None:
    """A name that is bound anew in the turn stands for a selection after it."""
    if root_of(new) is root_of(old):
        return
    if not turn.has(root_of(new)):
        raise turn.refusal(f"it binds a name to `{new}` from outside of it", "bind it to a copy")
    values: list[Tensor] = [node.meta["val"] for node in (old, new)]
    kinds = [(value.dtype, [str(extent) for extent in value.shape]) for value in values]
    if kinds[0] == kinds[1]:
        (kept,) = inline(torch.where, [condition, new, old], turn.end)
        for user in turn.later(new):
            user.replace_input_with(new, kept)


def root_of(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a chain of views and of operators that work in place goes back to."""
    source = node
    if node.target is operator.getitem:  # one of the views that `split` makes
        source = cast(torch.fx.Node, node.args[0])
    aliased = _aliased(source)
    return node if aliased is None else root_of(aliased)


def _aliased(node: torch.fx.Node) -> torch.fx.Node | None:
    """The operand that the node's result is, or is a view of."""
    target: Any = node.target
    results: list[Any] = list(returns(target)) if is_overload(target) else []
    shared: Any = results[0].alias_info if results else None
    for argument, value in _arguments(node) if shared is not None else ():
        info: Any = argument.alias_info
        if info is not None and info.before_set & shared.before_set and isinstance(value, torch.fx.Node):
            return value
    return None


def _listed(value: Any) -> Sequence[torch.fx.Node]:
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore
    return [each for each in values if isinstance(each, torch.fx.Node)]

"""Attention of one query row over a cache of keys and values, with what a decoder does just before it.

The newest key and value are written to their position of the cache, and queries and the key are turned by a
rotary embedding (Su et al., 2021): a launch of its own per layer, which the kernel of `split_attention` saves
by doing both itself. Each of its programs turns the few query heads that it needs, and the one whose span of
the cache has the position writes there.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from ..exported.nodes import is_call
from ..lowered.decompositions import attention
from .attention import is_fusable
from .own_operators import own_operator
from .split_attention import FEWEST_KEYS

aten = torch.ops.aten

OPERATOR = "devplan.cached_attention.default"


@own_operator(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor? cosine, Tensor? sine, Tensor position, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor? mask, float scale) -> Tensor"
)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


def _cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    """The operator on tensors whose last dimension is dense."""
    tables = (None if each is None else each.reshape(-1).contiguous() for each in (cosine, sine))
    given = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    made: torch.Tensor = torch.ops.devplan.cached_attention(*given, *tables, *others)
    return made


_VIEWS = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class _Update:
    """A cache with the newest row written, ``of`` the state that it is written back to."""

    node: torch.fx.Node
    of: torch.fx.Node
    position: torch.fx.Node
    newest: torch.fx.Node
    back: torch.fx.Node
    """The `copy_` into the state."""


def fuse_cached_attention(module: torch.fx.GraphModule) -> None:
    """Rewrite a region's attention of one row over caches that it has just updated, in place."""
    for node in list(module.graph.nodes):
        if is_call(node, attention):
            _fuse(module.graph, node)
    module.recompile()


def _fuse(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    given: Any = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
    query, key, value, mask, dropout, is_causal = given
    keys, values = _update(key, node), _update(value, node)
    if keys is None or values is None or dropout or is_causal or not _fits(query, keys, values, mask):
        return
    turned = _turned(query), _turned(keys.newest)
    tables: tuple[torch.fx.Node | None, torch.fx.Node | None] = (None, None)
    newest = keys.newest
    if turned[0] is not None and turned[1] is not None and turned[0][1:] == turned[1][1:]:
        query, newest, tables = turned[0][0], turned[1][0], turned[0][1:]
    scale = node.kwargs.get("scale")
    scale = _value(query).shape[-1] ** -0.5 if scale is None else scale
    with graph.inserting_before(node):
        operands = (query, newest, values.newest, *tables, keys.position, keys.of, values.of, mask, scale)
        made = graph.call_function(_cached, operands)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    for each in (node, keys.back, values.back, keys.node, values.node):
        graph.erase_node(each)


def _update(node: Any, reader: torch.fx.Node) -> _Update | None:
    """What writes one row of a state that nothing but ``reader`` reads, or None."""
    if is_call(node, aten.index_copy.default) and node.args[1] in (2, -2):
        of, _, position, newest = node.args
    elif (
        is_call(node, aten.index_put.default)
        and len(node.args) == 3
        and list(node.args[1][:-1]) == [None, None]
    ):
        of, (_, _, position), newest = node.args[0], node.args[1], node.args[2]
        while _is_static(newest) and _value(newest).dim() < 4 and newest.target in _VIEWS:
            newest = newest.args[0]  # an assignment drops leading dimensions of one
    else:
        return None
    backs = [user for user in node.users if is_call(user, aten.copy_.default) and user.args == (of, node)]
    is_state = of.op == "placeholder" and {*of.users} == {node, *backs}
    if len(backs) != 1 or {*node.users} != {reader, *backs} or not is_state:
        return None
    return _Update(node, of, position, newest, backs[0])


def _fits(query: torch.fx.Node, keys: _Update, values: _Update, mask: torch.fx.Node | None) -> bool:
    """Whether the kernel is made for these operands."""
    nodes = (query, keys.of, values.of, keys.newest, values.newest, keys.position)
    if not all(_is_static(node) for node in nodes):
        return False
    q, k, v, new_k, new_v, position = (_value(node) for node in nodes)
    if keys.position is not values.position or keys.of is values.of:
        return False
    if position.numel() != 1 or position.dtype not in (torch.int64, torch.int32):
        return False
    if not is_fusable(q, k, v, None if mask is None else _value(mask)):
        return False
    if any(new.shape != (*of.shape[:2], 1, of.shape[3]) for new, of in ((new_k, k), (new_v, v))):
        return False
    has_one_type = len({each.dtype for each in (q, k, v, new_k, new_v)}) == 1
    return q.shape[2] == 1 and q.shape[0] == k.shape[0] and has_one_type and k.shape[2] >= FEWEST_KEYS


# --- rotary embeddings, by what they compute -----------------------------------------------------------

_POINTWISE = (
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.unsqueeze.default),
    *(aten._to_copy.default, aten.to.dtype),
)
_ALONG_A_DIMENSION: dict[Any, int] = {
    aten.cat.default: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
"""Operators, and which of their arguments is the dimension."""
_MOST_NODES = 24


def _turned(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node] | None:
    """The tensor, cosines and sines that ``node`` turns its pairs (i, i + D / 2) by, or None.

    Models spell this out in many ways, so what they wrote is run on small whole numbers, which half precision
    computes exactly, and its result compared.
    """
    body, leaves = _between(node)
    head = int(_value(node).shape[-1])
    if len(leaves) != 3 or len(body) > _MOST_NODES or head % 2:
        return None
    chance = torch.Generator().manual_seed(0)
    if any(not _is_static(leaf) for leaf in leaves):
        return None
    numbers = {leaf: torch.randint(-4, 5, _value(leaf).shape, generator=chance).float() for leaf in leaves}
    numbers = {leaf: each.to(_value(leaf).dtype) for leaf, each in numbers.items()}
    try:
        wanted = _run(node, body, numbers)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    for x, cosine, sine in permutations(leaves):
        tables = [numbers[each].float().reshape(-1) for each in (cosine, sine)]
        if numbers[x].shape != wanted.shape or any(len(each) not in (head, head // 2) for each in tables):
            continue
        c, s = (each.repeat(head // len(each)) for each in tables)
        low, high = numbers[x].float().chunk(2, -1)
        if len(tables[0]) == len(tables[1]) and torch.equal(
            numbers[x].float() * c + torch.cat([-high, low], -1) * s, wanted.float()
        ):
            return x, cosine, sine
    return None


def _is_of_a_row(node: torch.fx.Node) -> bool:
    """Whether an operator computes each row of its result from the same rows of its operands."""
    target: Any = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:
        return _is_of_a_row(node.all_input_nodes[0])
    if target in _ALONG_A_DIMENSION:
        at = _ALONG_A_DIMENSION[target]
        dimension = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
        made: Any = node.meta.get("val")
        first: Any = made if isinstance(made, torch.Tensor) else made[0] if made else None
        return isinstance(first, torch.Tensor) and dimension in (-1, first.dim() - 1)
    return target in _POINTWISE


def _between(node: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The pointwise operators above a node, in order, and the other nodes that they read."""
    body, leaves = dict[torch.fx.Node, None](), dict[torch.fx.Node, None]()

    def visit(each: torch.fx.Node) -> None:
        if each in body or each in leaves:
            return
        if not _is_of_a_row(each) or len(body) > _MOST_NODES:
            leaves[each] = None
            return
        for operand in each.all_input_nodes:
            visit(operand)
        body[each] = None

    visit(node)
    return list(body), list(leaves)


def _run(
    node: torch.fx.Node, body: list[torch.fx.Node], numbers: dict[torch.fx.Node, torch.Tensor]
) -> torch.Tensor:
    """What a node is for these values of what it reads."""
    known: dict[torch.fx.Node, Any] = dict(numbers)
    for each in body:
        args, kwargs = torch.fx.map_arg((each.args, each.kwargs), known.__getitem__)
        target: Any = each.target
        known[each] = target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    made: torch.Tensor = known[node]
    return made


def _is_static(node: torch.fx.Node) -> bool:
    """Whether a node is a tensor whose sizes are numbers."""
    value: Any = node.meta.get("val")
    sizes: Any = value.shape if isinstance(value, torch.Tensor) else (None,)
    return all(isinstance(size, int) for size in sizes)


def _value(node: torch.fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value

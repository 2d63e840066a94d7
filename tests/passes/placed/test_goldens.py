"""Methods before and after the passes, as text to review."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from devplan.passes.options import IoRule
from devplan.passes.placed.graph import GraphOutput, Node, NodeKind, PlacedGraph
from devplan.passes.placed.ledger import explain, ledger
from devplan.passes.placed.place import PlaceOperators
from devplan.passes.placed.text import placed_text

SPLIT_MODEL = """\
input tokens mask
const table w1 w2
state cache
e = embedding(table, tokens) cpu
h = mm(e, w1) c0
r = view(h)
n = add(r, cache) c0
m = mul(n, mask) c0
i = nonzero(m) cpu
g = gather(m, i) c1
k = mm(g, w1) c1
o = mm(k, w2) c1
cache <- n
return logits=o hidden=n ids=i"""

VIEWS = """\
input x:64
r:64 = view(x)
s:16 = slice(r)
t = sin(s) c0
u = cos(s) c0
a, b = split(t)
c = neg(a) cpu
d = neg(b) cpu
return c d u view_of_t=a"""


@pytest.mark.parametrize(("name", "text"), [("split_model", SPLIT_MODEL), ("views", VIEWS)])
def test_before_and_after(
    name: str,
    text: str,
    parse: Callable[..., PlacedGraph],
    propagate: Callable[..., PlacedGraph],
    golden: Callable[..., None],
) -> None:
    before = parse(text)
    after = propagate(before)
    listed = "\n".join(str(entry) for entry in ledger(after))
    golden(f"{placed_text(before)}\n{placed_text(after)}\n{listed}\n", f"copies/{name}.txt")


def test_device_io_leaves_no_copy_between_caller_and_program(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph], golden: Callable[..., None]
) -> None:
    after = propagate(parse(SPLIT_MODEL), PlaceOperators(io=(IoRule("both", "device"),)))
    golden(placed_text(after), "copies/split_model_device_io.txt")


def test_explain_says_where_and_why(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph], golden: Callable[..., None]
) -> None:
    outer = parse(SPLIT_MODEL)
    bodies = (
        parse("input x\nt = sin(x) c0\nreturn t", "then"),
        parse("input x\nt = neg(x) cpu\nreturn t", "else"),
    )
    test = Node("p", NodeKind.CALL, "aten.any.default", ("o",), outer.nodes[0].type)
    call = Node("cond", NodeKind.CALL, "cond", ("p", "n"), branches=bodies)
    result = Node("y", NodeKind.ELEMENT, operands=("cond",), type=outer.nodes[0].type)
    graph = replace(outer, nodes=(*outer.nodes, test, call, result), outputs=(GraphOutput("y", "y"),))
    golden("\n".join(explain(propagate(graph))) + "\n", "copies/explain.txt")

"""A few lines of text as a method, and the copy pipeline on it.

One statement a line::

    input a b            inputs (also: const w, state s, none n for an input that is no tensor)
    t = add(a, b) c0     an operator that a rule places on cuda:0 (c1: cuda:1, cpu: the host, nothing: default)
    r = view(t)          a view, wherever its base is
    p, q = sort(t) c0    an operator with two results
    s <- t               the new content of state
    return t r           outputs, by the names of their nodes (NAME=NODE gives another name)

Types are 2x2 float32 (16 bytes) unless a name carries bytes: ``x:64``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from devplan.passes.options import PlacementRule
from devplan.passes.placed.graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType
from devplan.passes.placed.insert_copies import InsertCopies
from devplan.passes.placed.place import PlaceOperators
from devplan.passes.placed.regions import assign_regions
from devplan.passes.placed.verify import verify
from devplan.runtime.dtypes import DType
from devplan.runtime.program import SourceLocation

LEAVES = {"input": NodeKind.INPUT, "const": NodeKind.CONSTANT, "state": NodeKind.STATE}
VIEWS = ("view", "slice", "t", "split")
RULES = (
    PlacementRule("cuda:0", module="c0"),
    PlacementRule("cuda:1", module="c1"),
    PlacementRule("cpu", module="cpu"),
)


def tensor(nbytes: int) -> TensorType:
    shape = (2, 2) if nbytes == 16 else (nbytes // 4,)
    return TensorType(DType.FLOAT32, shape, nbytes)


def parse(text: str, name: str = "forward") -> PlacedGraph:
    """Read a method; see the module's docstring."""
    nodes: list[Node] = []
    outputs: list[GraphOutput] = []
    updates: list[tuple[str, str]] = []
    for number, line in enumerate(text.strip().splitlines(), start=1):
        words = line.split()
        if words[0] in LEAVES or words[0] == "none":
            kind = LEAVES.get(words[0], NodeKind.INPUT)
            for word in words[1:]:
                leaf, _, nbytes = word.partition(":")
                type_ = None if words[0] == "none" else tensor(int(nbytes or 16))
                content = leaf if kind is not NodeKind.INPUT else ""
                nodes.append(Node(leaf, kind, type=type_, content=content))
        elif words[0] == "return":
            for word in words[1:]:
                label, _, node = word.rpartition("=")
                outputs.append(GraphOutput(label or node, node))
        elif words[1] == "<-":
            updates.append((words[0], words[2]))
        else:
            nodes.extend(_call(line, number))
    return PlacedGraph(name, tuple(nodes), tuple(outputs), tuple(updates))


def _call(line: str, number: int) -> list[Node]:
    found = re.fullmatch(r"\s*(.+?) = (\w+)\((.*)\)\s*(\w*)", line)
    assert found, line
    results, operator, operands, module = found.groups()
    names = [name.partition(":") for name in results.split(", ")]
    origin = SourceLocation(module, operator, "model.py", number)
    call = Node(
        names[0][0] if len(names) == 1 else "_".join(name for name, _, _ in names),
        NodeKind.CALL,
        f"aten.{operator}.default",
        tuple(word for word in operands.split(", ") if word),
        tensor(int(names[0][2] or 16)) if len(names) == 1 else None,
        is_view=operator in VIEWS,
        origin=origin,
    )
    elements = [
        Node(name, NodeKind.ELEMENT, operands=(call.name,), type=tensor(int(n or 16)), index=i, origin=origin)
        for i, (name, _, n) in enumerate(names)
    ]
    return [call, *elements] if len(names) > 1 else [call]


def propagate(graph: PlacedGraph, placing: PlaceOperators | None = None) -> PlacedGraph:
    """Place, copy, group; the verifier passes and a second run of the copy pass changes nothing."""
    placing = replace(placing or PlaceOperators(), placement=RULES)
    copied = InsertCopies().run(placing.run(graph).subject).subject
    verify(copied)
    grouped, _ = assign_regions(copied)
    verify(grouped)
    for done in (copied, grouped):
        again = InsertCopies().run(done)
        assert not again.changed, "the copy pass is not idempotent"
        assert again.subject == done
    assert assign_regions(grouped)[0] == grouped
    return grouped


Parse = Callable[..., PlacedGraph]
Propagate = Callable[..., PlacedGraph]


@pytest.fixture(scope="session", name="parse")
def parse_fixture() -> Parse:
    return parse


@pytest.fixture(scope="session", name="propagate")
def propagate_fixture() -> Propagate:
    return propagate

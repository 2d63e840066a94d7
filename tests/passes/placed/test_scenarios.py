"""The 47 scenarios of device propagation that were measured on the reference, adapted.

A region stands for a delegate. The bar is the fewest copies that a scheme of one copy per tensor and device
needs; a copy between GPUs counts once (the reference: a download and an upload).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from devplan.passes.base import Stage
from devplan.passes.options import ExportOptions, IoRule
from devplan.passes.pipeline import build_pipeline, pass_names, run_stage
from devplan.passes.placed.graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType
from devplan.passes.placed.insert_copies import InsertCopies
from devplan.passes.placed.io_rules import check_io, signature
from devplan.passes.placed.ledger import ledger
from devplan.passes.placed.place import PlaceOperators
from devplan.passes.placed.verify import verify
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import Symbol

PURE = pass_names()[pass_names().index("place-operators") :]
"""The built-in passes that need no torch."""
H2D = (IoRule("h2d", "device"),)
D2H = (IoRule("d2h", "device"),)
BOTH = (IoRule("both", "device"),)


@dataclass(frozen=True)
class Scenario:
    row: str
    text: str
    copies: str
    """Numbers of h2d, d2h and d2d copies."""
    ports: str
    """Devices of the inputs -> devices of the outputs (0: cuda:0, 1: cuda:1, c: cpu)."""
    regions: str = ""
    """Devices of the regions in execution order."""
    io: tuple[IoRule, ...] = ()
    device: str = "cuda"


CHAIN_6 = "\n".join(f"t{i} = add(t{i - 1}, b) c0" for i in range(1, 7))

SCENARIOS = [
    Scenario("1", "input a b\nt = add(a, b) c0\nreturn t", "2 1 0", "cc -> c", "0"),
    Scenario("2 nothing on a device", "input a b\nt = add(a, b) cpu\nreturn t", "0 0 0", "cc -> c", "c"),
    Scenario("4 skip h2d", "input a b\nt = add(a, b) c0\nreturn t", "0 1 0", "00 -> c", "0", H2D),
    Scenario("5 skip d2h", "input a b\nt = add(a, b) c0\nreturn t", "2 0 0", "cc -> 0", "0", D2H),
    Scenario("6 skip both", "input a b\nt = add(a, b) c0\nreturn t", "0 0 0", "00 -> 0", "0", BOTH),
    Scenario(
        "8 chain", "input a b c\nt = add(a, b) c0\nu = add(t, c) c0\nreturn u", "3 1 0", "ccc -> c", "0"
    ),
    Scenario(
        "9 two GPUs", "input a b c\nt = add(a, b) c0\nu = add(t, c) c1\nreturn u", "3 1 1", "ccc -> c", "01"
    ),
    Scenario(
        "10 shared inputs",
        "input a b\nt = add(a, b) c0\nu = add(t, a) c0\nw = add(t, b) c0\ny = add(u, w) c0\nreturn y",
        "2 1 0",
        "cc -> c",
        "0",
    ),
    Scenario(
        "11 a host reader beside",
        "input a b\nt = add(a, b) c0\nu = add(t, a) c0\nv = relu(t) cpu\nreturn u v",
        "2 2 0",
        "cc -> cc",
        "0c",
    ),
    Scenario(
        "12 readers on both GPUs",
        "input a b\nt = add(a, b) c0\nu = add(t, a) c0\nv = add(t, b) c1\nreturn u v",
        "3 2 1",
        "cc -> cc",
        "01",
    ),
    Scenario(
        "13 skip h2d, one input read on the host only",
        "input a b\ns = sin(a) cpu\nt = add(s, b) c0\nreturn t",
        "1 1 0",
        "c0 -> c",
        "c0",
        H2D,
    ),
    Scenario(
        "14 skip h2d, an input read on both sides",
        "input a b\nt = add(a, b) c0\nu = relu(a) cpu\nreturn t u",
        "0 2 0",
        "00 -> cc",
        "0c",
        H2D,
    ),
    Scenario(
        "15 skip h2d, an input with two readers",
        "input a b\nt = add(a, b) c0\nu = sin(a) c0\nreturn t u",
        "0 2 0",
        "00 -> cc",
        "0",
        H2D,
    ),
    Scenario(
        "16 skip h2d, one input twice", "input a\nt = add(a, a) c0\nreturn t", "0 1 0", "0 -> c", "0", H2D
    ),
    Scenario(
        "17 host region between",
        "input a b c d\nt = add(a, b) c0\nu = add(t, c) cpu\nv = add(u, d) c0\nreturn v",
        "4 2 0",
        "cccc -> c",
        "0c0",
    ),
    Scenario(
        "18 weight of the graph", "input a\nconst w\nt = add(a, w) c0\nreturn t", "1 1 0", "c -> c", "0"
    ),
    Scenario(
        "19 weight, skip h2d", "input a\nconst w\nt = add(a, w) c0\nreturn t", "0 1 0", "0 -> c", "0", H2D
    ),
    Scenario(
        "20 weight shown by a view",
        "input a\nconst w\nr = t(w)\nt = add(a, r) c0\nreturn t",
        "1 1 0",
        "c -> c",
        "0",
    ),
    Scenario(
        "21 state updated on the host",
        "input a\nstate s\nt = add(a, s) c0\nn = neg(s) cpu\ns <- n\nreturn t",
        "2 1 0",
        "c -> c",
        "0c",
    ),
    Scenario(
        "22 the same, skip h2d",
        "input a\nstate s\nt = add(a, s) c0\nn = neg(s) cpu\ns <- n\nreturn t",
        "1 1 0",
        "0 -> c",
        "0c",
        H2D,
    ),
    Scenario(
        "23 two results, skip d2h",
        "input a b\np, q = sort(a, b) c0\nu = relu(q) cpu\nreturn p u",
        "2 1 0",
        "cc -> 0c",
        "0c",
        D2H,
    ),
    Scenario(
        "24 returned and read again, skip d2h",
        "input a b c\nt = add(a, b) c0\nu = add(t, c) c0\nreturn t u",
        "3 0 0",
        "ccc -> 00",
        "0",
        D2H,
    ),
    Scenario(
        "25 returned and read again",
        "input a b c\nt = add(a, b) c0\nu = add(t, c) c0\nreturn t u",
        "3 2 0",
        "ccc -> cc",
        "0",
    ),
    Scenario(
        "26 returned twice, skip d2h",
        "input a b\nt = add(a, b) c0\nreturn t u=t",
        "2 0 0",
        "cc -> 00",
        "0",
        D2H,
    ),
    Scenario("26 returned twice", "input a b\nt = add(a, b) c0\nreturn t u=t", "2 1 0", "cc -> cc", "0"),
    Scenario(
        "27 an input returned, skip h2d",
        "input a b\nt = add(a, b) c0\nreturn t u=a",
        "0 2 0",
        "00 -> cc",
        "0",
        H2D,
    ),
    Scenario("27 an input returned", "input a b\nt = add(a, b) c0\nreturn t u=a", "2 1 0", "cc -> cc", "0"),
    Scenario(
        "27 an input returned, skip both",
        "input a b\nt = add(a, b) c0\nreturn t u=a",
        "0 0 0",
        "00 -> 00",
        "0",
        BOTH,
    ),
    Scenario(
        "28 host operator between",
        "input a b c\nt = add(a, b) c0\nu = relu(t) cpu\nv = add(u, c) c0\nreturn v",
        "4 2 0",
        "ccc -> c",
        "0c0",
    ),
    Scenario(
        "29 reshape between",
        "input a b c\nt = add(a, b) c0\nr = view(t)\nv = add(r, c) c0\nreturn v",
        "3 1 0",
        "ccc -> c",
        "0",
    ),
    Scenario(
        "31 one input on two GPUs",
        "input a b c\nt = add(a, b) c0\nu = add(a, c) c1\nreturn t u",
        "4 2 0",
        "ccc -> cc",
        "01",
    ),
    Scenario(
        "32 one input through six operators", f"input t0 b\n{CHAIN_6}\nreturn t6", "2 1 0", "cc -> c", "0"
    ),
    Scenario(
        "33 two readers on the other GPU",
        "input a b c d\nt = add(a, b) c0\nu = add(t, c) c1\nv = add(t, d) c1\nreturn u v",
        "4 2 1",
        "cccc -> cc",
        "01",
    ),
    Scenario(
        "34 there and back",
        "input a b c d\nt = add(a, b) c0\nu = add(t, c) c1\nv = add(u, d) c0\nreturn v",
        "4 1 2",
        "cccc -> c",
        "010",
    ),
    Scenario("35 no bytes", "input a:0 b:0\nt:0 = add(a, b) c0\nreturn t", "0 0 0", "cc -> c", "0"),
    Scenario(
        "38 an input that is no tensor",
        "none n\ninput a b\nt = add(a, b) c0\nreturn t",
        "2 1 0",
        "ccc -> c",
        "0",
    ),
    Scenario(
        "39 everything on cpu", "input a b\nt = add(a, b)\nreturn t", "0 0 0", "cc -> c", "c", device="cpu"
    ),
    Scenario(
        "43 skip both, chain",
        "input a b c\nt = add(a, b) c0\nu = add(t, c) c0\nreturn u",
        "0 0 0",
        "000 -> 0",
        "0",
        BOTH,
    ),
    Scenario(
        "44 skip both, two GPUs",
        "input a b c\nt = add(a, b) c0\nu = add(t, c) c1\nreturn u",
        "0 0 1",
        "001 -> 1",
        "01",
        BOTH,
    ),
    Scenario(
        "45 skip h2d, an input of the host",
        "input a b c\nt = add(a, b) c0\nu = relu(c) cpu\nreturn t u",
        "0 1 0",
        "00c -> cc",
        "0c",
        H2D,
    ),
]


def letters(devices: list[str]) -> str:
    return "".join({"cpu": "c", "cuda:0": "0", "cuda:1": "1"}[device] for device in devices)


def counts(graph: PlacedGraph) -> str:
    found = Counter(entry.kind for entry in ledger(graph))
    return f"{found['h2d']} {found['d2h']} {found['d2d']}"


def ports(graph: PlacedGraph) -> str:
    inputs = [str(node.device) for node in graph.nodes if node.kind is NodeKind.INPUT]
    return f"{letters(inputs)} -> {letters([str(output.device) for output in graph.outputs])}"


def region_devices(graph: PlacedGraph) -> str:
    devices = {node.region: str(node.device) for node in graph.nodes if node.region >= 0}
    return letters([devices[region] for region in sorted(devices)])


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: f"row {case.row}")
def test_scenario(
    case: Scenario, parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = propagate(parse(case.text), PlaceOperators(device=case.device, io=case.io))
    assert (counts(graph), ports(graph), region_devices(graph)) == (case.copies, case.ports, case.regions)


ADD = "input a b\nt = add(a, b) c0\nreturn t"


def test_row_3_without_device_planning_the_copies_stay(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = propagate(parse(ADD), PlaceOperators(device_planning=False))
    assert (counts(graph), ports(graph)) == ("2 1 0", "cc -> c")


@pytest.mark.parametrize("io", [H2D, D2H, BOTH])
def test_row_7_skipping_without_device_planning_is_refused(
    io: tuple[IoRule, ...], parse: Callable[..., PlacedGraph]
) -> None:
    with pytest.raises(UsageError, match="device planning is off") as caught:
        run_stage(
            build_pipeline(ExportOptions(pipeline=PURE, io=io, device_planning=False)),
            Stage.PLACED,
            [parse(ADD)],
        )
    assert caught.value.code == 2
    assert "--no-device-planning" in caught.value.hint


def test_row_30_a_dynamic_batch_is_copied_once_and_counted_at_its_bound(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = parse(ADD)
    dynamic = TensorType(DType.FLOAT32, (Expr("s0"), 4), 128)
    nodes = tuple(replace(node, type=dynamic) for node in graph.nodes)
    graph = replace(graph, nodes=nodes, symbols=(Symbol("s0", 1, 8, "a", 0),))
    done = propagate(graph)
    assert counts(done) == "2 1 0"
    assert {entry.nbytes for entry in ledger(done)} == {128}
    assert done.symbols == graph.symbols


def conditional(inside: str, parse: Callable[..., PlacedGraph]) -> PlacedGraph:
    """``y = cond(p, [inside] or [negate on the host], a)`` with `p` computed on cuda:0."""
    outer = parse("input a\np = any(a) c0\nreturn p")
    bodies = (
        parse(f"input x\n{inside}\nreturn t", "then"),
        parse("input x\nt = neg(x) cpu\nreturn t", "else"),
    )
    call = Node("cond", NodeKind.CALL, "cond", ("p", "a"), branches=bodies)
    result = Node("y", NodeKind.ELEMENT, operands=("cond",), type=outer.nodes[0].type)
    return replace(outer, nodes=(*outer.nodes, call, result), outputs=(GraphOutput("y", "y"),))


def test_row_36_bodies_of_a_condition_are_placed_and_get_their_copies(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = propagate(conditional("t = sin(x) c0", parse))
    cond = next(node for node in graph.nodes if node.branches)
    assert [
        letters([str(n.device) for n in body.nodes if n.kind is NodeKind.CALL]) for body in cond.branches
    ] == [
        "0",
        "c",
    ]
    described = [(entry.kind, entry.tensor) for entry in ledger(graph)]
    assert described == [("h2d", "a"), ("d2h", "p"), ("d2h", "x"), ("h2d", "t"), ("d2h", "y")]
    assert region_devices(graph) == "0", "the operators before the condition"
    assert [region_devices(body) for body in cond.branches] == ["0", "c"]


def test_row_36_bodies_on_the_host_need_only_the_predicate(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = propagate(conditional("t = sin(x) cpu", parse))
    assert [(entry.kind, entry.tensor) for entry in ledger(graph)] == [("h2d", "a"), ("d2h", "p")]


def test_row_37_a_number_among_the_operands_is_not_copied(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    graph = parse("input a b\nn = sym_size(a) c0\nt = add(a, b, n) c0\nreturn t")
    nodes = tuple(replace(node, type=None) if node.name == "n" else node for node in graph.nodes)
    assert counts(propagate(replace(graph, nodes=nodes))) == "2 1 0"


@pytest.mark.parametrize("text", [" CUDA ", "cuda", "cuda:0"])
def test_row_40_devices_are_read_with_any_case_and_blanks(
    text: str, parse: Callable[..., PlacedGraph]
) -> None:
    placed = PlaceOperators(device=text).run(parse("input a\nt = sin(a)\nreturn t")).subject
    assert str(placed.nodes[1].device) == "cuda:0"


@pytest.mark.parametrize("text", ["tpu:0", "cuda:x", "cuda:-1", "cuda:200", "cpu:1", ""])
def test_row_40_other_devices_are_refused(text: str, parse: Callable[..., PlacedGraph]) -> None:
    with pytest.raises(UsageError) as caught:
        PlaceOperators(device=text).run(parse(ADD))
    assert caught.value.code == 2
    assert f"`{text}`" in str(caught.value)


@pytest.mark.parametrize("direction", ["h2d", "d2h", "both"])
def test_rows_41_and_42_one_method_skips_and_the_other_does_not(
    direction: str, parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    placing = PlaceOperators(io=(IoRule(direction, "device", "m1"),))  # type: ignore[arg-type]
    first, second = (propagate(parse(ADD, name), placing) for name in ("m1", "m2"))
    assert counts(first) == {"h2d": "0 1 0", "d2h": "2 0 0", "both": "0 0 0"}[direction]
    assert counts(second) == "2 1 0"


def test_row_46_methods_share_state_on_one_device(parse: Callable[..., PlacedGraph]) -> None:
    read = parse("state s\ninput a\nt = add(a, s) c0\nreturn t", "read")
    write = parse("state s\ninput a\nt = add(a, s) c0\ns <- t\nreturn t", "write")
    graphs = run_stage(
        build_pipeline(ExportOptions(pipeline=PURE, device="cuda:1")), Stage.PLACED, [read, write]
    )
    homes = {str(node.device) for graph in graphs for node in graph.nodes if node.kind is NodeKind.STATE}
    assert homes == {"cuda:1"}
    assert all(entry.tensor != "s" for graph in graphs for entry in ledger(graph))


def test_row_47_every_device_has_one_pool_and_no_option_says_otherwise() -> None:
    options = ExportOptions(pipeline=PURE, pass_options={"insert-copies": {"pool": 2}})
    with pytest.raises(UsageError, match="pass `insert-copies` has no option `pool`"):
        build_pipeline(options)


def test_a_method_or_tensor_that_does_not_exist_is_refused_with_the_valid_names(
    parse: Callable[..., PlacedGraph],
) -> None:
    methods = {"forward": signature(parse(ADD))}
    for rule, text, hint in [
        (IoRule("h2d", "device", "forwrd"), "there is no method `forwrd`", "did you mean `forward`?"),
        (IoRule("h2d", "device", "forward", "c"), "there is no input `c` of method `forward`", "`a`, `b`"),
        (IoRule("d2h", "device", "*", "a"), "there is no output `a`", "valid names: `t`"),
        (IoRule("both", "device", "*", "z"), "there is no input or output `z`", "`a`, `b`, `t`"),
        (IoRule("both", "device", "a", "*"), "there is no method `a`", "write `forward.a`"),
    ]:
        with pytest.raises(UsageError) as caught:
            check_io(methods, [rule])
        assert str(caught.value) == text
        assert hint in caught.value.hint


def test_single_tensors_skip_and_the_last_rule_wins(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    io = (*BOTH, IoRule("both", "host", "forward", "b"), IoRule("d2h", "host", "*", "t"))
    graph = propagate(parse(ADD), PlaceOperators(io=io))
    assert (counts(graph), ports(graph)) == ("1 1 0", "0c -> c")


def test_the_copy_pass_asks_for_placement_first(parse: Callable[..., PlacedGraph]) -> None:
    with pytest.raises(Exception, match="`a` has no device"):
        InsertCopies().run(parse(ADD))


def test_the_verifier_is_not_fooled(
    parse: Callable[..., PlacedGraph], propagate: Callable[..., PlacedGraph]
) -> None:
    good = propagate(parse("input a b\nt = add(a, b) c0\nr = view(t)\nu = relu(r) cpu\nreturn t u"))
    first, *rest = good.nodes
    by_name = {node.name: node for node in good.nodes}
    copy = by_name["a_to_cuda0"]

    def swapped(name: str, **changes: object) -> PlacedGraph:
        return replace(good, nodes=tuple(replace(n, **changes) if n.name == name else n for n in good.nodes))  # type: ignore[arg-type]

    broken = {
        "reads `a` on cuda:0, which is on cpu": swapped("t", operands=("a", "b_to_cuda0")),
        "`t` reads `a_to_cuda0` on cuda:0, which is on cpu": swapped("a_to_cuda0", device=first.device),
        "copy `t_to_cpu` stays on cpu": swapped("t_to_cpu", operands=("a",)),
        "changes its type": swapped("a_to_cuda0", type=TensorType(DType.FLOAT32, (3,), 12)),
        "does not come before it": replace(good, nodes=(*rest, first)),
        "there are two nodes": replace(good, nodes=(first, *good.nodes)),
        "has no reader": replace(
            good, nodes=(*good.nodes, replace(copy, name="more", device=by_name["t"].device))
        ),
        "is wanted on cpu": replace(good, outputs=(GraphOutput("t", "t", first.device),)),
        "has no device": swapped("u", device=None),
    }
    for text, graph in broken.items():
        with pytest.raises(Exception, match=text):
            verify(graph)

"""Random methods on up to three devices: correct, minimal and repeatable copies, and the right numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.passes.options import IoRule, PlacementRule
from devplan.passes.placed.graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType
from devplan.passes.placed.insert_copies import InsertCopies
from devplan.passes.placed.ledger import ledger
from devplan.passes.placed.place import PlaceOperators
from devplan.passes.placed.regions import assign_regions
from devplan.passes.placed.verify import verify
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Device, SourceLocation

Array = npt.NDArray[np.float32]
MODULES = ("c0", "c1", "cpu")
RULES = tuple(PlacementRule(d, module=m) for d, m in zip(("cuda:0", "cuda:1", "cpu"), MODULES, strict=True))

# --- a small language of operators: all on vectors of floats -------------------------------------------

COMPUTE: Mapping[str, Callable[..., Array]] = {
    "neg": lambda x: -x,
    "sum": lambda x: x.sum(keepdims=True),
    "outer": lambda x, y: (
        x[: max(1, 24 // max(1, len(y)))][:, None] + y[None, :24] if len(x) and len(y) else x[:0]
    ).ravel(),
    "add": lambda x, y: x + y[0] if len(y) else x * 2,
    "scale": lambda x, y, z: x * (y[0] if len(y) else 1) + (z[-1] if len(z) else 0),
}
VIEW: Mapping[str, Callable[[Array], Array]] = {
    "same": lambda x: x[:],
    "reverse": lambda x: x[::-1],
    "half": lambda x: x[: len(x) // 2],
    "rest": lambda x: x[1:],
    "twice": lambda x: (
        np.lib.stride_tricks.as_strided(x, (2, len(x)), (0, x.strides[0])).reshape(-1) if len(x) else x
    ),
}
SPLIT = "split"  # two results, both views: the halves
SORT = "sort"  # two results of their own: sorted, and sorted downward


def run_operator(operator: str, operands: list[Array]) -> Array | tuple[Array, Array]:
    name = operator.split(".")[1]
    if name in VIEW:
        return VIEW[name](operands[0])
    if name == SPLIT:
        half = len(operands[0]) // 2
        return operands[0][:half], operands[0][half:]
    if name == SORT:
        return np.sort(operands[0]), np.sort(operands[0])[::-1].copy()
    return COMPUTE[name](*operands)


class Missing(Exception):
    """A tensor was read on a device whose memory does not hold it."""


@dataclass
class Machine:
    """Memories of all devices. Constants and state are where their nodes say; a copy is the only way between."""

    inputs: Mapping[str, Array]
    constants: Mapping[str, Array]
    state: dict[str, Array]
    transfers: int = 0

    def call(self, graph: PlacedGraph, *, placed: bool) -> dict[str, Array]:
        memory: dict[str, tuple[object, Array | tuple[Array, Array]]] = {}

        def read(name: str, device: object) -> Array:
            where, value = memory[name]
            assert isinstance(value, np.ndarray)
            if placed and where != device and len(value):
                raise Missing(f"{name} is on {where} and read on {device}")
            return value

        for node in graph.nodes:
            device = node.device if placed else None
            if node.kind is NodeKind.INPUT:
                value: Array | tuple[Array, Array] = self.inputs[node.name]
            elif node.kind is NodeKind.CONSTANT:
                value = self.constants[node.content]
            elif node.kind is NodeKind.STATE:
                value = self.state[node.content]
            elif node.kind is NodeKind.COPY:
                value = read(node.operands[0], memory[node.operands[0]][0]).copy()
                self.transfers += 1
            elif node.kind is NodeKind.ELEMENT:
                where, pair = memory[node.operands[0]]
                assert isinstance(pair, tuple)
                value = pair[node.index]
                assert where == device
            else:
                value = run_operator(node.operator, [read(name, device) for name in node.operands])
            memory[node.name] = (device, value)
        results = {
            output.name: read(output.node, output.device if placed else None) for output in graph.outputs
        }
        homes = {node.name: (node.content, node.device if placed else None) for node in graph.nodes}
        news = {homes[t][0]: read(s, homes[t][1]).copy() for t, s in graph.updates}
        self.state |= news
        return results


def sizes(graph: PlacedGraph) -> PlacedGraph:
    """Give every node the type that running it shows, so that bytes are true."""
    lengths: dict[str, int] = {}
    values: dict[str, Array | tuple[Array, Array]] = {}
    for node in graph.nodes:
        if node.type is not None and not node.operands:
            values[node.name] = np.zeros(node.type.max_nbytes // 4, np.float32)
        elif node.kind is NodeKind.ELEMENT:
            pair = values[node.operands[0]]
            assert isinstance(pair, tuple)
            values[node.name] = pair[node.index]
        else:
            values[node.name] = run_operator(node.operator, [values[name] for name in node.operands])  # type: ignore[misc]
        value = values[node.name]
        if isinstance(value, np.ndarray):
            lengths[node.name] = len(value)

    def typed(node: Node) -> Node:
        length = lengths.get(node.name)
        type_ = None if length is None else TensorType(DType.FLOAT32, (length,), 4 * length)
        return replace(node, type=type_)

    return replace(graph, nodes=tuple(typed(node) for node in graph.nodes))


@st.composite
def methods(draw: st.DrawFn) -> PlacedGraph:
    """Up to 40 operators on up to three devices, with views, sharing, state, constants and outputs."""
    nodes: list[Node] = []
    leaves = [(NodeKind.INPUT, "x"), (NodeKind.CONSTANT, "w"), (NodeKind.STATE, "s")]
    for kind, letter in leaves:
        for number in range(draw(st.integers(1 if kind is NodeKind.INPUT else 0, 3))):
            length = draw(st.sampled_from((0, 1, 2, 5, 8)))
            content = f"{letter}{number}" if kind is not NodeKind.INPUT else ""
            nodes.append(
                Node(
                    f"{letter}{number}",
                    kind,
                    type=TensorType(DType.FLOAT32, (length,), 4 * length),
                    content=content,
                )
            )
    tensors = [node.name for node in nodes]
    device_count = draw(st.integers(1, 3))
    names = [*COMPUTE, *VIEW, SPLIT, SORT]
    for number in range(draw(st.integers(1, 40))):
        operator = draw(st.sampled_from(names))
        arity = {"outer": 2, "add": 2, "scale": 3}.get(operator, 1)
        operands = tuple(draw(st.sampled_from(tensors[-12:] + tensors[:4])) for _ in range(arity))
        module = draw(st.sampled_from(MODULES[:device_count]))
        is_view = operator in VIEW or operator == SPLIT
        origin = SourceLocation(module, operator, "model.py", number)
        call = Node(
            f"v{number}", NodeKind.CALL, f"aten.{operator}.default", operands, is_view=is_view, origin=origin
        )
        nodes.append(call)
        if operator in (SPLIT, SORT):
            for index in range(2):
                nodes.append(
                    Node(f"{call.name}_{index}", NodeKind.ELEMENT, operands=(call.name,), index=index)
                )
                tensors.append(nodes[-1].name)
        else:
            tensors.append(call.name)
    returned = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=5))
    outputs = tuple(GraphOutput(f"y{number}", node) for number, node in enumerate(returned))
    state = [node.name for node in nodes if node.kind is NodeKind.STATE]
    changed = draw(st.lists(st.sampled_from(state), unique=True)) if state else []
    updates = tuple((target, draw(st.sampled_from(tensors))) for target in changed)
    return sizes(PlacedGraph("forward", tuple(nodes), outputs, updates))


io_rules = st.lists(
    st.builds(
        IoRule,
        st.sampled_from(("h2d", "d2h", "both")),
        st.sampled_from(("host", "device")),
        st.just("*"),
        st.sampled_from(("*", "x0", "x1", "y0", "y1")),
    ),
    max_size=3,
).map(tuple)


def fewest_copies(placed: PlacedGraph) -> int:
    """The least number of copies by trying all sets of copies, memory by memory; knows no view trees.

    Tensors that share memory form a family. A set of copies is enough for a family when every reader's tensor
    can be made on the reader's device from what is there by views alone.
    """
    nodes = {node.name: node for node in placed.nodes}
    made_by_view: dict[str, str] = {}
    for node in placed.nodes:
        owner = nodes[node.operands[0]] if node.kind is NodeKind.ELEMENT else node
        if owner.is_view:
            made_by_view[node.name] = node.operands[0]
    readers: list[tuple[str, Device | None]] = []
    for node in placed.nodes:
        if node.kind is NodeKind.CALL and not node.is_view:
            readers += [(name, node.device) for name in node.operands]
    readers += [(output.node, output.device) for output in placed.outputs]
    readers += [(source, nodes[target].device) for target, source in placed.updates]

    def family(name: str) -> str:
        return family(made_by_view[name]) if name in made_by_view else name

    def can_make(name: str, device: Device | None, there: set[tuple[str, Device | None]]) -> bool:
        if (name, device) in there:
            return True
        return name in made_by_view and can_make(made_by_view[name], device, there)

    total = 0
    for root in {family(name) for name in nodes}:
        node = nodes[root]
        if node.kind is NodeKind.CONSTANT:
            continue
        demands = [
            (name, device)
            for name, device in readers
            if family(name) == root and nodes[name].type is not None and nodes[name].type.max_nbytes  # type: ignore[union-attr]
        ]
        members = [name for name in nodes if family(name) == root and nodes[name].type is not None]
        choices = [(name, device) for name in members for device in {device for _, device in demands}]
        home = {(root, node.device)}
        for count in range(4):
            tries = itertools.combinations(choices, count)
            if any(all(can_make(n, d, home | set(chosen)) for n, d in demands) for chosen in tries):
                total += count
                break
        else:
            raise AssertionError("no set of three copies is enough, with three devices")
    return total


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(methods(), io_rules)
def test_copies_of_a_random_method(method: PlacedGraph, io: tuple[IoRule, ...]) -> None:
    placed = PlaceOperators(placement=RULES, io=io).run(method).subject
    copied = InsertCopies().run(placed).subject
    grouped, _ = assign_regions(copied)
    for graph in (copied, grouped):
        verify(graph)
        again = InsertCopies().run(graph)
        assert not again.changed
        assert again.subject == graph
    assert len(ledger(grouped)) == fewest_copies(placed)

    rng = np.random.default_rng(len(method.nodes))

    def fill(kind: NodeKind) -> dict[str, Array]:
        return {
            node.content or node.name: rng.standard_normal(node.type.max_nbytes // 4).astype(np.float32)
            for node in method.nodes
            if node.kind is kind and node.type is not None
        }

    inputs, constants, state = fill(NodeKind.INPUT), fill(NodeKind.CONSTANT), fill(NodeKind.STATE)
    eager, device = Machine(inputs, constants, dict(state)), Machine(inputs, constants, dict(state))
    for _ in range(2):
        expected = eager.call(method, placed=False)
        got = device.call(grouped, placed=True)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value)
        for name, value in eager.state.items():
            np.testing.assert_array_equal(device.state[name], value)
        if any(len(eager.state[name]) != len(value) for name, value in state.items()):
            return  # an update of another length ends the comparison after one call
    assert device.transfers == 2 * len(ledger(grouped))


def cut_at_regions(graph: PlacedGraph) -> list[list[Node]]:
    """Runs of nodes with one region number, and every other node by itself, in the graph's order."""
    return [
        list(group)
        for _, group in itertools.groupby(graph.nodes, key=lambda n: n.region if n.region >= 0 else n.name)
    ]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(methods())
def test_regions_of_a_random_method(method: PlacedGraph) -> None:
    """Each region is on one device, stands together, and no two of a device could be one."""
    placed = PlaceOperators(placement=RULES).run(method).subject
    graph, regions = assign_regions(InsertCopies().run(placed).subject)
    runs = [run for run in cut_at_regions(graph) if run[0].region >= 0]
    assert [run[0].region for run in runs] == list(range(len(regions))), "regions are whole and in order"
    assert [tuple(node.name for node in run) for run in runs] == [region.nodes for region in regions]
    for run, region in zip(runs, regions, strict=True):
        assert {node.device for node in run} == {region.device}
    in_region = {node.name for run in runs for node in run}
    assert in_region == {n.name for n in graph.nodes if n.kind in (NodeKind.CALL, NodeKind.ELEMENT)}
    unit = {node.name: node.region if node.region >= 0 else node.name for node in graph.nodes}
    edges: dict[object, set[object]] = {u: set() for u in unit.values()}
    for node in graph.nodes:
        for operand in node.operands:
            if unit[operand] != unit[node.name]:
                edges[unit[operand]].add(unit[node.name])
    reach: dict[object, set[object]] = {}
    for u in reversed(list(dict.fromkeys(unit.values()))):
        reach[u] = edges[u].union(*(reach[v] for v in edges[u]))
    for first, second in itertools.combinations(regions, 2):
        if first.device == second.device:
            detours = [reach[v] for v in edges[first.index] if v != second.index]
            assert any(second.index in found for found in detours), f"{first} and {second} could be one"

"""One small method through placement, copies, regions and ledger."""

from __future__ import annotations

from devplan.passes.insert_copies import InsertCopies
from devplan.passes.ledger import ledger
from devplan.passes.options import PlacementRule
from devplan.passes.place import PlaceOperators
from devplan.passes.placed import GraphOutput, Node, NodeKind, PlacedGraph, TensorType
from devplan.passes.regions import assign_regions
from devplan.passes.verify_placement import verify
from devplan.runtime.dtypes import DType

F = TensorType(DType.FLOAT32, (2, 2), 16)


def test_one_copy_per_tensor_and_device() -> None:
    x = Node("x", NodeKind.INPUT, type=F)
    t = Node("t", NodeKind.CALL, "aten.relu.default", ("x",), F)
    u = Node("u", NodeKind.CALL, "aten.sin.default", ("t",), F)
    v = Node("v", NodeKind.CALL, "aten.add.Tensor", ("x", "u"), F)
    graph = PlacedGraph("forward", (x, t, u, v), (GraphOutput("y", "v"),))
    placed = PlaceOperators(placement=(PlacementRule("cpu", operator="sin"),)).run(graph).subject
    copied, regions = assign_regions(InsertCopies().run(placed).subject)
    verify(copied)
    assert [(entry.kind, entry.tensor) for entry in ledger(copied)] == [
        ("h2d", "x"),
        ("d2h", "t"),
        ("h2d", "u"),
        ("d2h", "y"),
    ]
    assert [(str(region.device), region.nodes) for region in regions] == [
        ("cuda:0", ("t",)),
        ("cpu", ("u",)),
        ("cuda:0", ("v",)),
    ]
    assert not InsertCopies().run(copied).changed

"""Results whose size depends on data, on a GPU: in one graph, with the counts that come back with the outputs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402

from devplan.passes.options import BucketRule, IoRule  # noqa: E402
from devplan.runtime.cuda import driver  # noqa: E402
from devplan.runtime.errors import ExecutionError  # noqa: E402
from devplan.runtime.program import CopyKind  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]


class Found(torch.nn.Module):  # type: ignore[misc]
    """Boxes above a threshold: all of them, the three best, and what the mask finds."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, boxes: Any, scores: Any) -> Any:
        (kept,) = torch.where(scores > 0.5)
        torch._check(kept.shape[0] <= self.bound)
        best = kept[scores[kept].argsort(descending=True)][:3]
        return kept, boxes[kept] * 2, best, boxes[boxes > 1], boxes[kept].sum(0)


def inputs(rows: int, hits: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(rows + hits)
    scores = torch.rand(rows, generator=generator) * 0.4
    scores[torch.randperm(rows, generator=generator)[:hits]] += 0.55
    return torch.randn(rows, 4, generator=generator), scores


def exported(rows: int, bound: int, **options: Any) -> Any:
    options.setdefault("architectures", (driver.devices()[0].architecture,))
    return export_module(Found(bound), inputs(rows, 5), **options)


def assert_same(got: Any, wanted: Any) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        host = ours.numpy() if hasattr(ours, "numpy") else ours
        assert host.shape == theirs.shape
        np.testing.assert_allclose(host, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_results_have_their_true_size_in_one_graph() -> None:
    module = Found(64)
    with loaded(exported(1000, 64), None) as program:
        method = program.method()
        for hits in (5, 0, 64, 1, 33):
            given = inputs(1000, hits)
            assert_same(method(*(x.numpy() for x in given)).values(), module(*given))
        assert method.no_graph_reason == ""
        with pytest.raises(ExecutionError, match="is 65, declared is at most 64"):
            method(*(x.numpy() for x in inputs(1000, 65)))
        given = inputs(1000, 7)
        assert_same(method(*(x.numpy() for x in given)).values(), module(*given))
        arrays = [x.numpy() for x in given]
        begin = time.perf_counter()
        for _ in range(200):
            method(*arrays)
        taken = (time.perf_counter() - begin) / 200 * 1e6
        nbytes = {str(arena.device): arena.nbytes for arena in program.planned.plan.methods[0].arenas}
        print(f"{taken:.0f} us a call, arenas {nbytes}, copies {program.copies.counts}")


def test_what_stays_on_the_device_costs_the_counts_alone() -> None:
    module, given = Found(64), inputs(1000, 9)
    with loaded(exported(1000, 64, io=(IoRule("both", "device"),)), None) as program:
        results = program.method()(*(program.to_device(x.numpy()) for x in given))
        assert_same(results.values(), module(*given))
        counts = program.copies.counts
        assert counts[CopyKind.H2D] == 0
        assert counts[CopyKind.D2H] == len(program.planned.program.methods[0].counts)


def test_large_results_are_written_into_the_callers_memory() -> None:
    module, given = Found(90_000), inputs(100_000, 80_000)
    with loaded(exported(100_000, 90_000), None) as program:
        for _ in range(3):
            assert_same(program.method()(*(x.numpy() for x in given)).values(), module(*given))


def test_buckets_have_masks_of_their_own_size() -> None:
    rows = torch.export.Dim("rows", min=8, max=1000)
    buckets = (BucketRule("rows", (100, 1000)),)
    module = Found(8)
    with loaded(exported(1000, 8, dynamic_shapes=({0: rows}, {0: rows}), buckets=buckets), None) as program:
        for size in (1000, 100, 64, 100, 8, 1000):
            given = inputs(size, 6)
            assert_same(program.method()(*(x.numpy() for x in given)).values(), module(*given))
        assert [bucket.calls for bucket in program.method().buckets] == [2, 2]

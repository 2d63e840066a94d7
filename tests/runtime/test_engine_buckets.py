"""Declared sizes at run time: their own places, one graph each for life; everything else by the bound's plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import PlanError, UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import CPU, CopyKind, Port, Role, Symbol
from devplan.runtime.recording import RecordingBackend, elementwise

from .conftest import CUDA, ProgramBuilder

SIZES = ((1,), (8,), (64,))
WORK = {"double": elementwise(lambda x: x + x, "x_device", "y")}


def doubling(program: Any, symbolic: Any) -> Any:
    """y = x + x over rows of two, up to 64 of them."""
    method = program.method()
    n = symbolic(method, "s0", 1, 64, "x", 0)
    x = method.input("x", (n, 2))
    y = method.tensor("y", (n, 2))
    method.launch("double", [x], [y], grid=(Expr("(s0 + 7) // 8"), 1, 1))
    method.output("y", y)
    program.kernel("double")
    return program


def call(loaded: Any, rows: int) -> None:
    x = np.random.default_rng(rows).random((rows, 2), np.float32)
    np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)


def captures(fake: Any) -> int:
    return sum(line.startswith("capture") for line in fake.trace)


def test_results_are_right_in_between_and_at_every_bucket(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES, scrub=True, poison=True)
    for rows in (1, 2, 8, 7, 9, 63, 64, 1, 64):
        call(loaded, rows)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64)), max_size=5, unique=True),
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
)
def test_any_calls_in_any_order_are_right_and_keep_a_bounded_number_of_graphs(
    buckets: list[tuple[int]], calls: list[int]
) -> None:
    def symbolic(method: Any, *symbol: Any) -> Expr:
        method.symbols.append(Symbol(*symbol))
        return Expr(symbol[0])

    builder = doubling(ProgramBuilder(), symbolic)
    loaded, fake = builder.load(WORK, buckets=buckets, packed=True, scrub=True, poison=True)
    with loaded:
        for rows in calls:
            call(loaded, rows)
        method = loaded.method()
        counts = Counter(calls)
        assert [use.calls for use in method.buckets] == [counts[size] for (size,) in buckets]
        assert method.other_calls == len(calls) - sum(counts[size] for (size,) in buckets)
        hit = sum(counts[size] > 0 for (size,) in buckets)
        assert len(method._caller._cache) <= hit + 16
        if buckets:
            again = sum(count > 1 for size, count in counts.items() if (size,) not in buckets)
            assert captures(fake) >= hit if again else captures(fake) == hit


def test_a_bucket_has_one_graph_for_life_and_other_sizes_take_no_place_of_it(
    program: Any, symbolic: Any
) -> None:
    loaded, fake = doubling(program, symbolic).load(WORK, buckets=SIZES)
    for (rows,) in SIZES:
        call(loaded, rows)
    assert captures(fake) == 3
    for rows in range(9, 60):
        call(loaded, rows)
    assert captures(fake) == 3
    for rows in (1, 8, 64, 1):
        call(loaded, rows)
        assert loaded.method().no_graph_reason == ""
    assert captures(fake) == 3
    assert loaded.copies.counts[CopyKind.H2D] == 3 + 51 + 4


def test_all_plans_share_the_one_arena_of_the_bound(program: Any, symbolic: Any) -> None:
    builder = doubling(program, symbolic)
    loaded, fake = builder.load(WORK, buckets=SIZES)
    bound = next(arena.nbytes for arena in loaded.planned.plan.methods[0].arenas if arena.device == CUDA)
    assert [line for line in fake.trace if line.startswith("allocate cuda:0 ")] == [
        f"allocate cuda:0 {bound}"
    ]
    for rows in (1, 64, 8, 30):
        call(loaded, rows)
    assert sum(line.startswith("allocate cuda:0 ") for line in fake.trace) == 1


def test_a_bucket_lies_where_its_own_plan_says(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES)
    places = {}
    for rows in (8, 9):
        call(loaded, rows)
        bound = loaded.method().bound
        places[rows] = bound.operands["y"].address - bound.operands["x_device"].address
    assert places == {8: 256, 9: 512}


def test_the_reason_for_no_graph_names_the_buckets(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES)
    call(loaded, 9)
    reason = loaded.method().no_graph_reason
    assert "none of the declared buckets (x:0=1; x:0=8; x:0=64)" in reason
    assert "captured when they come again" in reason
    call(loaded, 9)
    assert loaded.method().no_graph_reason == ""


def test_hits_are_counted_by_bucket(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES)
    method = loaded.method()
    assert [use.calls for use in method.buckets] == [0, 0, 0]
    assert method.buckets[0].no_graph_reason == "no call had these sizes yet"
    for rows in (8, 8, 64, 3, 4):
        call(loaded, rows)
    assert [(dict(use.sizes), use.calls) for use in method.buckets] == [
        ({"x:0": 1}, 0),
        ({"x:0": 8}, 2),
        ({"x:0": 64}, 1),
    ]
    assert method.other_calls == 2
    assert method.buckets[1].no_graph_reason == ""
    assert method.buckets[1].graph_nbytes is None  # this device does not tell


def test_what_graphs_take_is_told_where_the_device_tells(program: Any, symbolic: Any) -> None:
    loaded, fake = doubling(program, symbolic).load(WORK, buckets=SIZES)
    plain = fake.capture

    def capture(steps: Any) -> Any:
        step = plain(steps)
        step.nbytes = 4096
        return step

    fake.capture = capture
    for rows in (8, 64):
        call(loaded, rows)
    assert [use.graph_nbytes for use in loaded.method().buckets] == [None, 4096, 4096]
    assert loaded.method().graph_nbytes == 8192


def test_buckets_can_be_prepared_ahead(program: Any, symbolic: Any) -> None:
    loaded, fake = doubling(program, symbolic).load(WORK, buckets=SIZES)
    loaded.prepare()
    assert captures(fake) == 3
    assert [use.calls for use in loaded.method().buckets] == [0, 0, 0]
    call(loaded, 8)
    assert captures(fake) == 3


def test_a_bucket_at_the_callers_addresses_shares_the_bounded_cache(program: Any, symbolic: Any) -> None:
    method = program.method()
    n = symbolic(method, "s0", 1, 64, "x", 0)
    method.tensor("x_device", (n, 2), role=Role.INPUT, external=True)
    method.inputs.append(Port("x", "x_device"))
    y = method.tensor("y", (n, 2))
    method.launch("double", ["x_device"], [y])
    method.output("y", y)
    program.kernel("double")
    loaded, fake = program.load(WORK, buckets=SIZES)
    tensors = [loaded.to_device(np.full((8, 2), k, np.float32)) for k in range(20)]
    for k, tensor in enumerate(tensors):
        np.testing.assert_array_equal(loaded.method()(tensor)["y"], 2 * k)
    assert len(loaded.method()._caller._cache) == 16
    assert captures(fake) == 4
    loaded.method()(tensors[-1])
    assert loaded.method().no_graph_reason == ""
    assert loaded.method().buckets[1].calls == 21


def test_a_clone_has_buckets_and_counts_of_its_own(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES)
    call(loaded, 8)
    with loaded.clone() as twin:
        call(twin, 8)
        call(twin, 8)
        assert [use.calls for use in twin.method().buckets] == [0, 2, 0]
    assert [use.calls for use in loaded.method().buckets] == [0, 1, 0]


def test_a_failed_capture_runs_step_by_step_and_says_so(program: Any, symbolic: Any) -> None:
    loaded, _ = doubling(program, symbolic).load(
        WORK, buckets=SIZES, fail=lambda line: line.startswith("capture")
    )
    call(loaded, 8)
    assert "the capture failed" in loaded.method().buckets[1].no_graph_reason


def test_a_bucket_that_leaves_its_arena_is_refused_at_load(program: Any, symbolic: Any) -> None:
    planned = doubling(program, symbolic).planned(buckets=((64,),))
    (plan,) = planned.plan.methods
    (bucket,) = plan.buckets
    beyond = tuple(replace(place, offset=1 << 20) for place in bucket.allocations)
    plan = replace(plan, buckets=(replace(bucket, allocations=beyond),))
    planned = replace(planned, plan=replace(planned.plan, methods=(plan,)))
    with pytest.raises(PlanError, match="leaves arena"):
        LoadedProgram(planned, {}, {CUDA: RecordingBackend(CUDA, WORK), CPU: CpuBackend()})


def test_sizes_that_take_more_than_is_reserved_are_refused(program: Any, symbolic: Any) -> None:
    """A size that does not grow with its dimension is largest somewhere below the bound."""
    method = program.method()
    symbolic(method, "s0", 1, 64, "x", 0)
    x = method.input("x", (Expr("s0"),))
    y = method.tensor("y", (Expr("s0 % 64"),))
    method.launch("double", [x], [y])
    method.output("y", y)
    program.kernel("double")
    loaded, _ = program.load(WORK)
    with pytest.raises(
        PlanError, match="storage `y` of method `forward` takes 12 bytes at s0=3: 0 are reserved"
    ):
        loaded.method()(np.ones(3, np.float32))


def test_inputs_of_a_known_bucket_are_checked_like_any_other(program: Any, symbolic: Any) -> None:
    """The second call of a bucket is found by its shapes alone."""
    loaded, _ = doubling(program, symbolic).load(WORK, buckets=SIZES)
    method = loaded.method()
    call(loaded, 8)
    for wrong, message in (
        (np.ones((8, 3), np.float32), "has size 3 in dimension 1 instead of 2"),
        (np.ones((8, 2), np.float64), "has dtype `float64`"),
        (np.ones(8, np.float32), "has 1 dimensions instead of 2"),
        (np.ones((65, 2), np.float32), "has size 65 in dimension 0"),
        ([[1.0, 2.0]] * 8, "is of type `list`"),
    ):
        with pytest.raises(UsageError, match=message):
            method(wrong)
    x = np.asfortranarray(np.arange(16, dtype=np.float32).reshape(8, 2))
    np.testing.assert_array_equal(method(x)["y"], 2 * x)


def test_sizes_that_must_be_solved_for_find_their_bucket_too(program: Any, symbolic: Any) -> None:
    method = program.method()
    symbolic(method, "s0", 1, 64, "x", 0)
    x = method.input("x", (Expr("s0 * 2"), 2))
    y = method.tensor("y", (Expr("s0 * 2"), 2))
    method.launch("double", [x], [y])
    method.output("y", y)
    program.kernel("double")
    loaded, fake = program.load(WORK, buckets=SIZES)
    for _ in range(2):
        call(loaded, 16)
    assert [use.calls for use in loaded.method().buckets] == [0, 2, 0]
    assert captures(fake) == 1


def test_small_inputs_and_outputs_of_a_bucket_need_no_copies(
    program: Any, symbolic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("direct_read_nbytes", "direct_write_nbytes"):
        monkeypatch.setattr(RecordingBackend, name, 64, raising=False)
    method = program.method()
    n = symbolic(method, "s0", 1, 64, "x", 0)
    x = method.input("x", (n, 2))
    y = method.tensor("y", (n, 2))
    method.launch("double", [x], [y])
    method.output("y", y)
    program.kernel("double", "", (("x", "*fp32"), ("y", "*fp32")))
    loaded, _ = program.load(WORK, buckets=SIZES)
    with loaded:
        for rows, copies in ((8, 0), (8, 0), (7, 1), (64, 2)):
            call(loaded, rows)
            assert loaded.copies.counts[CopyKind.H2D] == copies

"""Plans of declared sizes: each is proved on its own, all of them lie in the arena of the bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.planner import PlanOptions, check, plan
from devplan.planner.text import format_planned, parse_planned, parse_program
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import PlanError
from devplan.runtime.expr import Expr, evaluate
from devplan.runtime.program import (
    BucketPlan,
    Device,
    LibraryCall,
    Method,
    PlannedProgram,
    Port,
    Program,
    Role,
    Storage,
    Symbol,
    Value,
)

GPU = Device("cuda")

TWO_DIMENSIONS = """\
program
state $seen: uint8[256] on cuda:0 256 B
method forward(x = %x) -> (y = %y)
  symbol s0 = x[0] in [1,64] named "batch"
  symbol s1 = x[1] in [1,32]
  @x INPUT cuda:0 `s0 * s1 * 16` B max 32768
  @seen STATE cuda:0 256 B content $seen
  @a TEMPORARY cuda:0 `s0 * 512` B max 32768
  @b TEMPORARY cuda:0 `s1 * 1024` B max 32768
  @c TEMPORARY cuda:0 4096 B
  @y OUTPUT cuda:0 `s0 * 16` B max 1024
  %x: uint8[`s0`,`s1`,16] strides[`s1 * 16`,16,1] at @x
  %seen: uint8[256] at @seen
  %a: uint8[`s0`,512] strides[512,1] at @a
  %b: uint8[`s1`,1024] strides[1024,1] at @b
  %c: uint8[4096] at @c
  %y: uint8[`s0`,16] strides[16,1] at @y
  0  call fill(%x, %seen) -> (%a, %seen)
  1  call fill(%a) -> (%b)
  2  call fill(%b) -> (%c)
  3  call fill(%c) -> (%y)
"""


def planned(*sizes: tuple[int, ...], text: str = TWO_DIMENSIONS) -> PlannedProgram:
    return plan(parse_program(text), PlanOptions(buckets={"forward": sizes}))


def test_a_bucket_is_planned_with_its_exact_sizes(golden: Callable[[str, str], None]) -> None:
    found = planned((1, 1), (8, 32), (64, 32))
    check(found)
    golden(format_planned(found), "planner/buckets.txt")


def test_the_plan_at_the_bound_is_what_it_is_without_buckets() -> None:
    with_buckets, without = planned((8, 32)), planned()
    (one,), (other,) = with_buckets.plan.methods, without.plan.methods
    assert with_buckets.program == without.program
    assert one.allocations == other.allocations
    assert [a.nbytes for a in one.arenas] == [a.nbytes for a in other.arenas]


def test_a_bucket_at_the_bound_takes_what_the_bound_takes() -> None:
    (method,) = planned((64, 32)).plan.methods
    assert method.buckets[0].arenas[0].nbytes == method.arenas[0].nbytes


def test_the_text_of_a_plan_with_buckets_reads_back_as_it_was() -> None:
    text = format_planned(planned((1, 1), (8, 32)))
    assert format_planned(parse_planned(text)) == text


def test_no_bucket_is_planned_where_addresses_come_at_run_time() -> None:
    found = plan(parse_program(TWO_DIMENSIONS), PlanOptions(static=False, buckets={"forward": ((8, 32),)}))
    assert found.plan.methods[0].buckets == ()


def test_a_storage_that_is_larger_below_the_bound_is_refused_by_name() -> None:
    text = TWO_DIMENSIONS.replace("`s0 * 512` B max 32768", "`s0 % 64 * 512` B max 0")
    with pytest.raises(PlanError, match=r"storage `a` .* is larger at batch=8, x:1=32: 4096 bytes, and 0 at"):
        planned((8, 32), text=text)


Change = Callable[[BucketPlan], BucketPlan]


def moved(storage: str, **changes: int) -> Change:
    def change(bucket: BucketPlan) -> BucketPlan:
        places = (replace(p, **changes) if p.storage == storage else p for p in bucket.allocations)
        return replace(bucket, allocations=tuple(places))

    return change


def arena(**changes: object) -> Change:
    return lambda bucket: replace(bucket, arenas=(replace(bucket.arenas[0], **changes),))  # type: ignore[arg-type]


BROKEN: list[tuple[Change, str]] = [
    (moved("c", offset=0), "instruction 2 and its own writes: bytes are lost: .*storage `b`"),
    (moved("b", offset=1 << 20), "storage `b` reaches beyond its arena"),
    (moved("b", offset=4097), "storage `b` is not aligned"),
    (moved("b", nbytes=1024), "storage `b` has too little room"),
    (arena(lower_bound=1), "reports the bound 1"),
    (arena(nbytes=1 << 20), r"takes 1048576 bytes of an arena of"),
    (arena(memory_id=2), "memory 2 is no arena of the method"),
    (arena(device=Device("cuda", 1)), "memory 1 is no arena of the method on its device"),
    (lambda bucket: replace(bucket, sizes=(65, 32)), "`s0` is not from 1 to 64"),
    (lambda bucket: replace(bucket, sizes=(8,)), "not one for each symbol"),
    (lambda bucket: replace(bucket, sizes=(16, 32)), "storage `x` has too little room"),
    (lambda bucket: replace(bucket, allocations=bucket.allocations[1:]), "storage `x` has no place"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_the_checker_finds_what_is_wrong_with_a_bucket(change: Change, message: str) -> None:
    found = planned((8, 32))
    (method,) = found.plan.methods
    broken = replace(method, buckets=(change(method.buckets[0]),))
    with pytest.raises(PlanError, match=message):
        check(replace(found, plan=replace(found.plan, methods=(broken,))))


def test_the_checker_refuses_a_bucket_twice() -> None:
    found = planned((8, 32))
    (method,) = found.plan.methods
    twice = replace(method, buckets=method.buckets * 2)
    with pytest.raises(PlanError, match="come twice"):
        check(replace(found, plan=replace(found.plan, methods=(twice,))))


def random_method(seed: int, count: int) -> Method:
    """A random graph of calls whose results grow with one, both or none of two dimensions."""
    chance = random.Random(seed)
    bounds = {"s0": 40, "s1": 9}
    forms = ("s0 * {}", "s1 * {}", "s0 * s1 * {}", "(s0 + 7) // 8 * {}", "max(s0, s1) * {}", "{}")
    storages: list[Storage] = []
    for index in range(count + 1):
        text = chance.choice(forms).format(chance.choice((1, 100, 256, 1000)))
        nbytes = int(text) if text.isdigit() else Expr(text)
        role = Role.INPUT if index == 0 else Role.OUTPUT if index == count else Role.TEMPORARY
        most = -1 if isinstance(nbytes, int) else evaluate(nbytes, bounds)
        storages.append(Storage(f"t{index}", GPU, nbytes, role, chance.choice((16, 256)), most))
    values = [Value(s.name, s.name, DType.UINT8, (s.nbytes,), (1,)) for s in storages]
    calls = [
        LibraryCall(
            "fill", tuple({f"t{chance.randrange(max(index - 5, 0), index)}", f"t{index - 1}"}), (f"t{index}",)
        )
        for index in range(1, count + 1)
    ]
    symbols = tuple(Symbol(name, 1, upper, "x", i) for i, (name, upper) in enumerate(bounds.items()))
    ports = (Port("x", "t0"),), (Port("y", f"t{count}"),)
    return Method("forward", *ports, tuple(storages), tuple(values), tuple(calls), symbols=symbols)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 10_000),
    st.integers(2, 25),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=6, unique=True),
    st.sampled_from(("fast", "default")),
)
def test_every_bucket_passes_the_checker_and_fits_in_the_arena(
    seed: int, count: int, sizes: list[tuple[int, int]], effort: str
) -> None:
    program = Program((random_method(seed, count),))
    options = PlanOptions(effort, buckets={"forward": tuple(sizes)})  # type: ignore[arg-type]
    found = plan(program, options)
    check(found)
    (method,) = found.plan.methods
    assert [bucket.sizes for bucket in method.buckets] == sizes
    for bucket in method.buckets:
        (own,), (whole,) = bucket.arenas, method.arenas
        assert own.lower_bound <= own.nbytes <= whole.nbytes
        assert own.memory_id == whole.memory_id

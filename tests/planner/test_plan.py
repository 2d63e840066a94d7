"""Whole programs through the planner and its independent checker."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from devplan.planner import PlanOptions, check, peak_report, plan
from devplan.planner.text import format_planned, parse_planned, parse_program
from devplan.runtime.errors import BudgetError, PlanError
from devplan.runtime.program import Arena, PlannedProgram, Program

CHAIN = """\
program sm_90
method forward(x = %x) -> (y = %y)
  @x INPUT cuda:0 1024 B
  @a TEMPORARY cuda:0 4096 B from "aten.mm" module "encoder.fc1" line "model.py":14
  @b TEMPORARY cuda:0 2048 B
  @c TEMPORARY cuda:0 4096 B
  @y OUTPUT cuda:0 1024 B
  @unused TEMPORARY cuda:0 999999 B
  %x: uint8[1024] at @x
  %a: uint8[4096] at @a
  %b: uint8[2048] at @b
  %c: uint8[4096] at @c
  %y: uint8[1024] at @y
  %unused: uint8[3] at @unused
  0  call fill(%x) -> (%a)
  1  call fill(%a) -> (%b) line "model.py":15
  2  call fill(%b) -> (%c)
  3  call fill(%c) -> (%y)
"""

COND = """\
program
method forward(x = %x, flag = %flag) -> (y = %y)
  @x INPUT cuda:0 1024 B
  @flag INPUT cpu 1 B align 1
  @then TEMPORARY cuda:0 8192 B
  @else TEMPORARY cuda:0 8192 B
  @merged TEMPORARY cuda:0 1024 B
  @y OUTPUT cuda:0 1024 B
  %x: uint8[1024] at @x
  %flag: bool[] at @flag
  %then: uint8[8192] at @then
  %else: uint8[8192] at @else
  %merged: uint8[1024] at @merged
  %y: uint8[1024] at @y
  0  jump 4 unless %flag
  1  call fill(%x) -> (%then)
  2  call fill(%then) -> (%merged)
  3  jump 6
  4  call fill(%x) -> (%else)
  5  call fill(%else) -> (%merged)
  6  call fill(%merged) -> (%y)
"""

LOOP = """\
program
method forward(x = %x, go = %go) -> (y = %y)
  @x INPUT cuda:0 1024 B
  @go INPUT cpu 1 B align 1
  @carried TEMPORARY cuda:0 1024 B
  @local TEMPORARY cuda:0 1024 B
  @after TEMPORARY cuda:0 1024 B
  @y OUTPUT cuda:0 1024 B
  %x: uint8[1024] at @x
  %go: bool[] at @go
  %carried: uint8[1024] at @carried
  %local: uint8[1024] at @local
  %after: uint8[1024] at @after
  %y: uint8[1024] at @y
  0  call fill(%x) -> (%carried)
  1  jump 5 unless %go
  2  call fill(%carried) -> (%local)
  3  call fill(%local) -> (%carried)
  4  jump 1
  5  call fill(%carried) -> (%after)
  6  call fill(%after) -> (%y)
"""

COUNTED = """\
program sm_90
method forward(x = %x) -> (places = %places_host counts u0 along 0, total = %total_host)
  count u0 = %n_host in [0,128] from "aten.nonzero.default" line "model.py":14
  @x INPUT cpu 4096 B align 64
  @x_device TEMPORARY cuda:0 4096 B
  @places TEMPORARY cuda:0 1024 B
  @n TEMPORARY cuda:0 8 B
  @total TEMPORARY cuda:0 4 B
  @places_host OUTPUT cpu 1024 B align 64
  @n_host OUTPUT cpu 8 B align 64
  @total_host OUTPUT cpu 4 B align 64
  %x: float32[1024] at @x
  %x_device: float32[1024] at @x_device
  %places: int64[128,1] at @places
  %n: int64[] at @n
  %total: float32[] at @total
  %places_host: int64[128,1] at @places_host
  %n_host: int64[] at @n_host
  %total_host: float32[] at @total_host
  0  copy h2d %x -> %x_device
  1  call fill(%x_device) -> (%n)
  2  copy d2h %n -> %n_host reason "size u0 is read on the host"
  3  call fill(%x_device, %n) -> (%places)
  4  copy d2h %places -> %places_host
  5  call fill(%places) -> (%total)
  6  copy d2h %total -> %total_host
"""

STATE = """\
program
state $cache: uint8[4096] on cuda:0 4096 B
state $steps: int64[1] on cuda:0 8 B
method decode(x = %x) -> (y = %y)
  @x INPUT cuda:0 256 B
  @s STATE cuda:0 8 B content $steps
  @c STATE cuda:0 4096 B content $cache
  @y OUTPUT cuda:0 256 B
  %x: uint8[256] at @x
  %s: int64[1] at @s
  %c: uint8[4096] at @c
  %y: uint8[256] at @y
  0  call fill(%x, %c, %s) -> (%y)
method prefill(x = %x) -> (y = %y)
  @x INPUT cuda:0 65536 B
  @k STATE cuda:0 4096 B content $cache
  @y OUTPUT cpu 256 B
  @d TEMPORARY cuda:0 256 B
  %x: uint8[65536] at @x
  %k: uint8[4096] at @k
  %d: uint8[256] at @d
  %y: uint8[256] at @y
  0  call fill(%x) -> (%k, %d)
  1  copy d2h %d -> %y
"""


Golden = Callable[[str, str], None]


def planned(text: str, options: PlanOptions | None = None) -> PlannedProgram:
    """Plan the program of this text, and prove the plan."""
    found = plan(parse_program(text), options)
    check(found)
    return found


def arena(found: PlannedProgram, method: str = "forward", memory_id: int = 1) -> Arena:
    return next(each for each in found.plan.method(method).arenas if each.memory_id == memory_id)


def spans(found: PlannedProgram, method: str = "forward") -> dict[str, tuple[int, int]]:
    return {live.storage: (live.begin, live.end) for live in found.plan.method(method).live_ranges}


TEXTS = {"chain": CHAIN, "cond": COND, "loop": LOOP, "state": STATE, "counted": COUNTED}


@pytest.mark.parametrize("name", list(TEXTS))
def test_plans_read_as_before(name: str, golden: Golden) -> None:
    found = format_planned(planned(TEXTS[name]))
    golden(found, f"planner/{name}.txt")
    assert format_planned(parse_planned(found)) == found


def test_a_count_is_kept_to_the_end_of_the_call() -> None:
    found = planned(COUNTED)
    ranges = {live.storage: live for live in found.plan.methods[0].live_ranges}
    assert (ranges["n_host"].begin, ranges["n_host"].end) == (2, 7)
    assert ranges["n"].end == 4


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("count u0 = %n_host", "count u0 = %n", "count `u0` is not on the host"),
        ("%n_host: int64[]", "%n_host: float64[]", "count `u0` is no integer"),
        ("in [0,128] from", "in [129,128] from", "count `u0` runs from 129 to 128"),
        ("counts u0 along 0", "counts u0 along 2", "output `places` counts `u0` along dimension 2"),
        ("counts u0 along 0", "counts u1 along 0", "output `places` counts `u1` along dimension 0"),
    ],
)
def test_the_checker_refuses_a_count_that_is_none(old: str, new: str, why: str) -> None:
    found = parse_planned(format_planned(planned(COUNTED)).replace(old, new))
    with pytest.raises(PlanError, match=re.escape(why)):
        check(found)


def test_the_checker_refuses_a_count_that_is_overwritten() -> None:
    text = format_planned(planned(COUNTED))
    (line,) = [line for line in text.splitlines() if line.startswith("  @n_host")]
    text = text.replace(line, line.replace("live [2,7)", "live [2,3)"))
    with pytest.raises(PlanError):
        check(parse_planned(text))


def test_a_chain_takes_its_two_largest_neighbours_and_nothing_for_what_is_unused() -> None:
    found = planned(CHAIN)
    assert arena(found).nbytes == arena(found).lower_bound == 6144
    assert arena(found).sum_nbytes == 12288
    assert "unused" not in {storage.name for storage in found.program.methods[0].storages}


def test_branches_share_space_and_their_result_outlives_them() -> None:
    found = planned(COND)
    lives = spans(found)
    assert (lives["then"], lives["else"], lives["merged"]) == ((1, 3), (4, 6), (2, 7))
    assert arena(found, memory_id=2).nbytes == 1024 + 8192 + 1024


def test_what_a_loop_carries_lives_over_all_of_it_and_its_temporaries_do_not() -> None:
    lives = spans(planned(LOOP))
    assert lives["carried"] == (0, 6)
    assert lives["local"] == (2, 4)
    assert lives["after"] == (5, 7)


def test_a_loop_value_that_is_read_before_it_is_written_lives_over_the_whole_loop() -> None:
    text = LOOP.replace("2  call fill(%carried) -> (%local)", "2  call fill(%carried, %local) -> (%after)")
    lives = spans(plan(parse_program(text)))
    assert lives["local"] == (1, 5)


def test_methods_share_arenas_and_keep_state_at_one_address() -> None:
    found = planned(STATE)
    decode, prefill = found.plan.methods
    assert [(each.memory_id, str(each.device), each.kind) for each in decode.arenas] == [
        (1, "cpu", "arena"), (2, "cuda:0", "arena"), (3, "cuda:0", "state"),
    ]  # fmt: skip
    assert arena(found, "decode", 3) == arena(found, "prefill", 3)
    places = {each.storage: each for each in (*decode.allocations, *prefill.allocations)}
    assert replace(places["c"], storage="k") == places["k"]
    assert arena(found, "decode", 1).nbytes == 0


def test_without_static_planning_only_state_has_a_place() -> None:
    found = planned(STATE, PlanOptions(static=False))
    assert not found.plan.is_static
    assert {each.storage for each in found.plan.methods[0].allocations} == {"c", "s"}
    assert spans(found, "decode") == {"x": (0, 1), "s": (0, 1), "c": (0, 1), "y": (0, 1)}


def test_what_is_alive_at_the_peak_is_listed_with_its_origin() -> None:
    entries = peak_report(planned(CHAIN), "forward", 1)
    assert [(each.storage, each.nbytes) for each in entries] == [("a", 4096), ("b", 2048)]
    assert str(entries[0]) == "`a` 4096 B aten.mm in encoder.fc1 model.py:14"
    assert str(entries[1]) == "`b` 2048 B model.py:15"


def test_a_budget_is_kept_or_refused_with_what_is_alive() -> None:
    planned(CHAIN, PlanOptions(memory_budget=6144))
    with pytest.raises(BudgetError, match=r"take 6144 bytes .*`a` 4096 B aten.mm in encoder.fc1 model.py:14"):
        plan(parse_program(CHAIN), PlanOptions(memory_budget=6143))


def test_a_budget_counts_state_too() -> None:
    planned(STATE, PlanOptions(memory_budget=65536 + 256 + 4096 + 256))
    with pytest.raises(BudgetError, match="arena and state take 70144 bytes"):
        plan(parse_program(STATE), PlanOptions(memory_budget=70143))


def test_the_same_program_gives_the_same_plan() -> None:
    def untimed(found: PlannedProgram) -> list[object]:
        return [
            (m.method, m.allocations, m.live_ranges, [replace(a, seconds=0.0) for a in m.arenas])
            for m in found.plan.methods
        ]

    assert untimed(planned(COND)) == untimed(planned(COND))


TWO = """\
plan static
program
method forward(x = %x) -> (y = %y)
  arena 1 cuda:0 2048 B (lower bound 2048, sum 3072) by "hand"
  @x INPUT cuda:0 1024 B in 1 0:1024 live [0,1)
  @a TEMPORARY cuda:0 1024 B in 1 1024:2048 live [0,2)
  @y OUTPUT cuda:0 1024 B in 1 0:1024 live [1,2)
  %x: uint8[1024] at @x
  %a: uint8[1024] at @a
  %y: uint8[1024] at @y
  0  call fill(%x) -> (%a)
  1  call fill(%a) -> (%y)
"""

BROKEN = [
    ("in 1 1024:2048", "in 1 512:1536", "overlap|bytes are lost"),
    ("in 1 1024:2048", "in 1 1025:2049", "not aligned"),
    ("in 1 1024:2048", "in 1 2048:3072", "beyond its arena"),
    ("in 1 1024:2048", "in 1 1024:1536", "too little room"),
    ("live [0,2)", "live [0,1)", "outside its live range"),
    ("lower bound 2048", "lower bound 1024", "reports the bound"),
    ("arena 1 cuda:0", "arena 1 cpu", "lies in an arena of cpu"),
    ("1  call fill(%a)", "1  call fill(%y)", "never written"),
    ("%a: uint8[1024] at @a", "%a: uint8[1024] at @a + 8", "reaches beyond its storage"),
    ("(y = %y)", "(y = %y aliases input x)", "share no storage"),
    ("(y = %y)", "(y = %y, z = %y)", "output `z` shares bytes with `y` and does not say so"),
    ("(y = %y)", "(y = %x)", "output `y` shares bytes with `x` and does not say so"),
    ("0  call fill(%x) -> (%a)", "0  copy h2d %x -> %a", "no h2d copy"),
    (" in 1 1024:2048", "", "has no place"),
    (
        "0  call fill(%x)",
        "0  host aten::add.out() reads(%x) writes(%a)\n  1  call fill(%x)",
        "runs on the host",
    ),
]


def test_a_plan_by_hand_passes_the_checker() -> None:
    check(parse_planned(TWO))


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_the_checker_finds_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in TWO
    with pytest.raises(PlanError, match=message):
        check(parse_planned(TWO.replace(old, new)))


def test_the_checker_follows_both_ways_of_a_jump() -> None:
    found = planned(COND)
    merged = COND.replace("  5  call fill(%else) -> (%merged)", "  5  call fill(%else) -> (%else)")
    program: Program = parse_program(merged)
    with pytest.raises(PlanError, match="instruction 6: bytes are lost: it needs storage `merged`"):
        check(PlannedProgram(program, found.plan))


def test_the_checker_needs_state_at_one_address_in_all_methods() -> None:
    found = planned(STATE)
    first, second = found.plan.methods
    moved = tuple(
        replace(each, offset=each.offset + 256 if each.offset == 0 else 0) if each.storage == "k" else each
        for each in second.allocations
    )
    plans = (first, replace(second, allocations=moved))
    with pytest.raises(PlanError, match="state `cache` lies at different addresses"):
        check(replace(found, plan=replace(found.plan, methods=plans)))

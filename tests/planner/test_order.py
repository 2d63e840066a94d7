"""Reordering: within dependences, never worse, and a real saving where there is one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.planner import PlanOptions, check, plan
from devplan.planner.liveness import value_accesses
from devplan.planner.order import blocks, peaks, reorder
from devplan.planner.text import parse_program
from devplan.runtime.dtypes import DType
from devplan.runtime.program import (
    Device,
    Instruction,
    LibraryCall,
    Method,
    Port,
    Program,
    Role,
    Storage,
    Value,
)
from devplan.tests.bench.graphs import mixture_of_experts, random_wired, residual

CUDA = Device("cuda")


def random_method(seed: int, count: int) -> Method:
    """Calls that read and write windows of a few storages: in-place updates, state, the caller's memory."""
    chance = random.Random(seed)
    storages = [Storage("in", CUDA, 1024, Role.INPUT), Storage("s", CUDA, 256, Role.STATE, content="s")]
    storages.append(Storage("ext", CUDA, 512, Role.INPUT, external=True))
    code: list[Instruction] = []
    names = ["in", "s", "ext"]
    for index in range(count):
        reads = tuple(chance.sample(names[-8:], min(len(names), chance.randint(1, 3))))
        if index and chance.random() < 0.25:
            writes = (chance.choice(names),)
        else:
            storages.append(Storage(f"t{index}", CUDA, 256 * chance.randint(1, 9)))
            names.append(f"t{index}")
            writes = (f"t{index}",)
        code.append(LibraryCall("fill", reads, writes))
    values = tuple(Value(s.name, s.name, DType.UINT8, (s.nbytes,), (1,)) for s in storages)
    inputs = (Port("in", "in"), Port("ext", "ext"))
    return Method("forward", inputs, (Port("y", names[-1]),), tuple(storages), values, tuple(code))


def history(method: Method) -> dict[int, tuple[object, ...]]:
    """What each instruction (by identity of its place in the original) sees: who wrote last what it reads."""
    storage_of = {value.name: value.storage for value in method.values}
    last: dict[str, tuple[object, ...]] = {}
    seen: dict[int, tuple[object, ...]] = {}
    for instruction in method.instructions:
        reads, writes = value_accesses(instruction)
        view = (instruction, tuple(last.get(storage_of[name], (name,)) for name in (*reads, *writes)))
        for name in writes:
            last[storage_of[name]] = (hash(view), name)
        seen[id(instruction)] = (hash(view),)
    seen[-1] = tuple(sorted((name, hash(view)) for name, view in last.items()))
    return seen


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(3, 25))
def test_every_instruction_sees_what_it_saw_before(seed: int, count: int) -> None:
    method = random_method(seed, count)
    found = reorder(method)
    assert sorted(map(id, found.instructions)) == sorted(map(id, method.instructions))
    assert history(found) == history(method)
    before, after = peaks(method), peaks(found)
    assert all(after[device] <= before[device] for device in before)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(3, 20))
def test_a_reordered_plan_passes_the_checker_and_is_not_larger(seed: int, count: int) -> None:
    method = random_method(seed, count)
    from devplan.runtime.program import StateVariable

    program = Program((method,), state=(StateVariable("s", DType.UINT8, (256,), CUDA, 256),))
    found, given_order = plan(program), plan(program, PlanOptions(reorder=False))
    check(found)
    check(given_order)
    assert found.plan.methods[0].arenas[0].nbytes <= given_order.plan.methods[0].arenas[0].nbytes


WIDE = """\
program
method forward(x = %x) -> (y = %y)
  @x INPUT cuda:0 256 B
  @a TEMPORARY cuda:0 8192 B
  @b TEMPORARY cuda:0 8192 B
  @c TEMPORARY cuda:0 256 B
  @d TEMPORARY cuda:0 256 B
  @y OUTPUT cuda:0 256 B
  %x: uint8[256] at @x
  %a: uint8[8192] at @a
  %b: uint8[8192] at @b
  %c: uint8[256] at @c
  %d: uint8[256] at @d
  %y: uint8[256] at @y
  0  call fill(%x) -> (%a) region 0
  1  call fill(%x) -> (%b) region 0
  2  call fill(%a) -> (%c) region 0
  3  call fill(%b) -> (%d) region 0
  4  call fill(%c, %d) -> (%y) region 0
"""


def test_the_wide_branches_run_one_after_the_other() -> None:
    found = plan(parse_program(WIDE))
    assert [each.writes[0] for each in found.program.methods[0].instructions] == ["a", "c", "b", "d", "y"]
    assert found.plan.methods[0].arenas[0].nbytes == 8192 + 512 + 256 - 256


def test_off_means_as_given() -> None:
    program = parse_program(WIDE)
    assert (
        plan(program, PlanOptions(reorder=False)).program.methods[0].instructions
        == program.methods[0].instructions
    )


def test_regions_and_jumps_bound_what_may_move() -> None:
    method = parse_program(WIDE).methods[0]
    code = method.instructions
    split = replace(method, instructions=(*code[:3], *(replace(each, region=1) for each in code[3:])))
    assert list(blocks(split)) == [(0, 3)]
    text = WIDE.replace("3  call fill(%b) -> (%d) region 0", "3  jump 5 region 0")
    assert list(blocks(parse_program(text).methods[0])) == [(0, 3)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_wired_graphs_save_at_least_15_percent(seed: int) -> None:
    method = random_wired(200, seed).methods[0]
    assert sum(peaks(reorder(method)).values()) <= 0.85 * sum(peaks(method).values())


def test_mixtures_of_experts_save_at_least_3_percent() -> None:
    method = mixture_of_experts(8, 8, 1).methods[0]
    assert sum(peaks(reorder(method)).values()) <= 0.97 * sum(peaks(method).values())


def test_a_residual_chain_stays_as_it_is() -> None:
    method = residual(30).methods[0]
    assert reorder(method) is method

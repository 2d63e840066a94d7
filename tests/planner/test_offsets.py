"""Offsets: right always, optimal where brute force can tell, the same whatever the order of the input."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.planner.beam import beam
from devplan.planner.exact import ExactSearch
from devplan.planner.greedy import sweep
from devplan.planner.iterate import iterate
from devplan.planner.offsets import place
from devplan.planner.problem import Buffer, Placement, Problem, align, lower_bound, sections

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn, most: int, alignments: tuple[int, ...] = (1,)) -> Problem:
    def buffer() -> Buffer:
        alignment = draw(st.sampled_from(alignments))
        lower = draw(st.integers(0, 12))
        size = align(draw(st.integers(1, 20)), alignment)
        return Buffer(lower, lower + draw(st.integers(1, 6)), size, alignment)

    return Problem(tuple(buffer() for _ in range(draw(st.integers(1, most)))))


def verify(problem: Problem, found: Placement) -> None:
    """No overlap, aligned, as high as it says: pair by pair, without any cleverness."""
    places = list(zip(problem.buffers, found.offsets, strict=True))
    for (one, at), (other, there) in itertools.combinations(places, 2):
        if one.lower < other.upper and other.lower < one.upper:
            assert at + one.size <= there or there + other.size <= at
    assert all(at >= 0 and at % each.alignment == 0 for each, at in places)
    assert max(at + each.size for each, at in places) == found.height
    assert found.height >= problem.lower_bound


def optimum(problem: Problem) -> int:
    """The least height, by trying every order of first fit (some order of an optimum's offsets is one)."""
    best = sum(each.size for each in problem.buffers) + sum(each.alignment for each in problem.buffers)

    def extend(left: frozenset[int], placed: tuple[tuple[int, int], ...], height: int) -> None:
        nonlocal best
        if height >= best:
            return
        if not left:
            best = height
            return
        floor = placed[-1][1] if placed else 0
        for index in left:
            buffer = problem.buffers[index]
            tops = [at + problem.buffers[i].size for i, at in placed if _meet(problem.buffers[i], buffer)]
            at = align(max(tops, default=0), buffer.alignment)
            if at >= floor:  # in order of rising offsets, which loses nothing
                extend(left - {index}, (*placed, (index, at)), max(height, at + buffer.size))

    extend(frozenset(range(len(problem.buffers))), (), 0)
    return best


def _meet(one: Buffer, other: Buffer) -> bool:
    return one.lower < other.upper and other.lower < one.upper


@relaxed
@given(problems(25, (1, 2, 4, 8)))
def test_any_placement_is_right(problem: Problem) -> None:
    verify(problem, place(problem, "fast"))
    verify(problem, place(problem, "default"))


@relaxed
@given(problems(8))
def test_small_problems_are_solved_to_the_optimum(problem: Problem) -> None:
    assert place(problem, "default").height == optimum(problem)


@relaxed
@given(problems(7, (1, 2, 4)))
def test_mixed_alignments_are_solved_to_the_optimum(problem: Problem) -> None:
    assert place(problem, "default").height == optimum(problem)


@relaxed
@given(problems(8, (1, 3)), st.integers(0, 4))
def test_the_search_proves_what_it_says(problem: Problem, above: int) -> None:
    capacity = problem.lower_bound + above
    search = ExactSearch(problem, capacity)
    found = search.run([1.0] * len(problem.buffers), 100_000)
    assert found == (optimum(problem) <= capacity)
    if found:
        offsets = search.placement()
        verify(problem, Placement(offsets, problem.height(offsets), ""))


@relaxed
@given(problems(20, (1, 2, 4)), st.integers(1, 5))
def test_beam_and_iteration_are_right_and_never_worse(problem: Problem, width: int) -> None:
    greedy = sweep(problem, 1)
    for found in (beam(problem, greedy, width), iterate(problem, greedy, 10 * width)):
        verify(problem, found)
        assert found.height <= greedy.height


@relaxed
@given(problems(12), st.randoms(use_true_random=False))
def test_the_order_of_the_buffers_does_not_matter(problem: Problem, chance: random.Random) -> None:
    shuffled = list(problem.buffers)
    chance.shuffle(shuffled)
    assert place(Problem(tuple(shuffled)), "default").height == place(problem, "default").height


@relaxed
@given(problems(30))
def test_sections_hold_every_heaviest_moment(problem: Problem) -> None:
    count, spans = sections(problem.buffers)
    sums = [0] * count
    for buffer, (first, last) in zip(problem.buffers, spans, strict=True):
        assert first < last
        for section in range(first, last):
            sums[section] += buffer.size
    assert max(sums) == problem.lower_bound


def test_buffers_of_one_size_meet_the_bound() -> None:
    chance = random.Random(1)
    lives = [(chance.randint(0, 400), chance.randint(1, 60)) for _ in range(500)]
    problem = Problem(tuple(Buffer(lower, lower + life, 4096, 256) for lower, life in lives))
    found = place(problem)
    verify(problem, found)
    assert found.height == problem.lower_bound


def test_the_gap_below_the_first_live_buffer_is_used() -> None:
    problem = Problem((Buffer(0, 4, 30), Buffer(0, 2, 20), Buffer(3, 6, 20), Buffer(2, 4, 10)))
    assert place(problem, "fast").height == problem.lower_bound == 60


def test_no_buffers_and_empty_buffers_take_nothing() -> None:
    assert place(Problem(())) == Placement((), 0, "nothing to place")
    found = place(Problem((Buffer(0, 3, 0), Buffer(2, 2, 5), Buffer(0, 3, 4))))
    assert (found.offsets, found.height) == ((0, 0, 0), 4)


def test_the_lower_bound_is_the_heaviest_moment() -> None:
    assert lower_bound([(0, 2, 5), (2, 4, 7), (1, 3, 1), (5, 5, 100)]) == 8
    assert lower_bound([]) == 0


def test_both_scans_place_alike() -> None:
    chance = random.Random(7)
    lives = [(chance.randint(0, 90), chance.randint(1, 20), chance.randint(1, 99)) for _ in range(401)]
    large = Problem(tuple(Buffer(lower, lower + life, size) for lower, life, size in lives))
    small = Problem(large.buffers[:400])
    alone = Buffer(1000, 1001, 1)
    padded = Problem((*small.buffers, alone))
    assert sweep(small, 1).offsets == sweep(padded, 1).offsets[:400]


@pytest.mark.slow
def test_a_hundred_thousand_buffers_do_not_hang() -> None:
    chance = random.Random(3)
    buffers = [
        Buffer(lower, lower + chance.randint(1, 40), 256 * chance.randint(1, 400), 256)
        for lower in range(100_000)
    ]  # fmt: skip
    started = time.process_time()
    problem = Problem(tuple(buffers))
    found = place(problem, "default")
    assert time.process_time() - started < 60
    assert found.height <= 1.1 * problem.lower_bound

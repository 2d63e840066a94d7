"""Local copies that are not needed go, those that are stay and say why."""

from __future__ import annotations

import pytest

from devplan.planner import PlanOptions, check, plan
from devplan.planner.inplace import eliminate_copies
from devplan.planner.text import format_method, parse_program

CONCAT = """\
program
state $cache: uint8[4096] on cuda:0 4096 B
method forward(x = %x) -> (y = %y)
  @x INPUT cuda:0 1024 B
  @a TEMPORARY cuda:0 1024 B
  @b TEMPORARY cuda:0 1024 B
  @cat TEMPORARY cuda:0 2048 B
  @s STATE cuda:0 4096 B content $cache
  @y OUTPUT cuda:0 1024 B
  %x: uint8[1024] at @x
  %a: uint8[1024] at @a
  %b: uint8[1024] at @b
  %c0: uint8[1024] at @cat
  %c1: uint8[1024] at @cat + 1024
  %cat: uint8[2048] at @cat
  %s: uint8[4096] at @s
  %new: uint8[1024] at @s + 3072
  %old: uint8[3072] at @s
  %y: uint8[1024] at @y
  0  call fill(%x) -> (%a)
  1  call fill(%x) -> (%b)
  2  copy local %a -> %c0
  3  copy local %b -> %c1
  4  call fill(%cat) -> (%y)
"""


def kept(text: str) -> list[str]:
    """The local copies that stay, by what the notes say."""
    method = parse_program(text).methods[0]
    found = eliminate_copies(method)
    copies = sum(" copy local " in line for line in format_method(found).splitlines())
    assert copies == len(found.notes)
    check(plan(parse_program(text)))
    return [note.partition(": ")[2] for note in found.notes]


def test_a_concatenation_is_written_straight_into_its_slices() -> None:
    assert kept(CONCAT) == []
    found = plan(parse_program(CONCAT), PlanOptions(reorder=False))
    text = format_method(found.program.methods[0])
    assert "%b: uint8[1024] at @cat + 1024" in text and "copy local" not in text
    assert found.plan.methods[0].arenas[0].nbytes == 1024 + 2048
    without = plan(parse_program(CONCAT), PlanOptions(reorder=False, eliminate_copies=False))
    assert without.plan.methods[0].arenas[0].nbytes == 4096


def test_state_takes_its_new_part_in_place() -> None:
    text = CONCAT.replace("2  copy local %a -> %c0", "2  copy local %a -> %new").replace(
        "3  copy local %b -> %c1", "3  call fill(%b, %s) -> (%cat)"
    )
    assert kept(text) == []


def test_a_shift_register_still_needs_its_copy() -> None:
    text = (
        CONCAT.replace("1  call fill(%x) -> (%b)", "1  call fill(%x, %s) -> (%a)")
        .replace("2  copy local %a -> %c0", "2  copy local %a -> %new")
        .replace("3  copy local %b -> %c1", "3  call fill(%x) -> (%cat)")
    )
    assert kept(text) == ["instruction 1 still uses the destination"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("%c1: uint8[1024] at @cat + 1024", "%c1: uint8[512,2] strides[2,1] at @cat + 1024", "their types differ"),
        ("%b: uint8[1024] at", "%b: uint8[1024] strides[0] at", "their strides differ"),
        ("%c1: uint8[1024] at @cat + 1024", "%c1: uint8[1024] at @cat + 1020", "its place is not aligned to 16 bytes"),
        ("4  call fill(%cat)", "4  call fill(%b, %cat) -> (%cat)\n  5  call fill(%cat, %b)", "the destination changes while the source is still read"),
        ("4  call fill(%cat) -> (%y)", "4  call fill(%cat) -> (%b, %y)", "the source is written again later"),
        ("(y = %y)", "(y = %y, b = %b)", "the source is an input or output itself"),
        ("@b TEMPORARY", "@b WORKSPACE", "the source is workspace memory"),
        ("@cat TEMPORARY cuda:0 2048 B", "@cat OUTPUT cuda:0 2048 B external", "the destination is the caller's memory"),
    ],
)  # fmt: skip
def test_what_is_not_proved_is_kept_and_noted(old: str, new: str, reason: str) -> None:
    assert old in CONCAT
    method = parse_program(CONCAT.replace(old, new)).methods[0]
    found = eliminate_copies(method)
    assert f"`b` is not written straight into `c1`: {reason}" in found.notes


def test_jump_targets_follow_the_removed_copy() -> None:
    text = CONCAT.replace("4  call fill(%cat) -> (%y)", "4  jump 5\n  5  call fill(%cat) -> (%y)")
    assert "jump 3" in format_method(eliminate_copies(parse_program(text).methods[0]))


def test_a_copy_that_would_raise_the_peak_stays() -> None:
    big = CONCAT.replace("@cat TEMPORARY cuda:0 2048 B", "@cat TEMPORARY cuda:0 65536 B").replace(
        "  1  call fill(%x) -> (%b)", "  1  call fill(%a) -> (%big)\n  1  call fill(%big) -> (%b)"
    ).replace("  @y OUTPUT", "  @big TEMPORARY cuda:0 65536 B\n  @y OUTPUT").replace(
        "  %y: uint8", "  %big: uint8[65536] at @big\n  %y: uint8"
    )  # fmt: skip
    assert kept(big) == ["the peak would rise"] * 2

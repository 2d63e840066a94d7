"""Buckets in a file: written, read back, checked both ways, and no obstacle to readers that know of none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.planner import PlanOptions, plan
from devplan.planner.text import format_planned, parse_program
from devplan.runtime.artifact import read, reader, write, writer
from devplan.runtime.artifact.generated.devplan_layout import LAYOUT
from devplan.runtime.artifact.unpack import Layout
from devplan.runtime.describe import describe
from devplan.runtime.errors import ArtifactError
from devplan.runtime.program import BucketPlan, Device, MethodPlan, PlannedProgram

PROGRAM = """\
program
state $seen: uint8[256] on cuda:0 256 B
method forward(x = %x) -> (y = %y)
  symbol s0 = x[0] in [1,64] named "batch"
  @x INPUT cuda:0 `s0 * 16` B max 1024
  @seen STATE cuda:0 256 B content $seen
  @a TEMPORARY cuda:0 `s0 * 512` B max 32768
  @y OUTPUT cuda:0 `s0 * 16` B max 1024
  %x: uint8[`s0`,16] strides[16,1] at @x
  %seen: uint8[256] at @seen
  %a: uint8[`s0`,512] strides[512,1] at @a
  %y: uint8[`s0`,16] strides[16,1] at @y
  0  call fill(%x, %seen) -> (%a, %seen)
  1  call fill(%a) -> (%y)
"""


def planned(*sizes: int) -> PlannedProgram:
    return plan(parse_program(PROGRAM), PlanOptions(buckets={"forward": tuple((n,) for n in sizes)}))


def test_buckets_come_back_as_they_were(tmp_path: Path) -> None:
    program = planned(1, 8, 64)
    write(tmp_path / "m.pte", program, {})
    found = read(tmp_path / "m.pte").planned
    assert format_planned(found) == format_planned(program)
    assert [bucket.sizes for bucket in found.plan.methods[0].buckets] == [(1,), (8,), (64,)]
    assert found.program.methods[0].symbols[0].label == "batch"


def test_a_reader_that_knows_no_buckets_reads_the_plan_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.pte", planned(1, 8), {})
    tables = {**LAYOUT.tables, "Plan": LAYOUT.tables["Plan"][:3], "Symbol": LAYOUT.tables["Symbol"][:5]}
    older = Layout(LAYOUT.unions, tables)
    known = reader.unpack

    def unpack(buffer: memoryview, layout: Layout, table: str, **options: Any) -> Any:
        found = known(buffer, older if layout is LAYOUT else layout, table, **options)
        if table == "Manifest":
            for method in found.methods:
                method.plan.buckets = None
                for symbol in method.symbols:
                    symbol.label = None
        return found

    monkeypatch.setattr(reader, "unpack", unpack)
    found = read(tmp_path / "m.pte").planned.plan
    assert found.methods[0].buckets == ()
    assert [a.nbytes for a in found.methods[0].arenas] == [a.nbytes for a in planned().plan.methods[0].arenas]


def test_a_file_without_buckets_has_not_changed_for_them(tmp_path: Path) -> None:
    write(tmp_path / "with.pte", planned(8), {})
    write(tmp_path / "without.pte", planned(), {})
    assert read(tmp_path / "without.pte").planned.plan.methods[0].buckets == ()
    assert (tmp_path / "with.pte").stat().st_size > (tmp_path / "without.pte").stat().st_size


def test_the_description_tells_bytes_bound_and_sum_of_each_bucket(tmp_path: Path) -> None:
    write(tmp_path / "m.pte", planned(8, 64), {})
    (method,) = describe(read(tmp_path / "m.pte"))["methods"]
    assert method["symbols"][0]["label"] == "batch"
    small, large = method["buckets"]
    assert small["sizes"] == {"batch": 8}
    (arena,) = small["arenas"]
    assert (arena["device"], arena["memory_id"], arena["kind"]) == ("cuda:0", 1, "arena")
    assert (arena["planned_bytes"], arena["lower_bound_bytes"], arena["sum_bytes"]) == (4352, 4352, 4608)
    assert [a["name"] for a in arena["allocations"]] == ["x", "a", "y"]
    assert large["arenas"][0]["planned_bytes"] == method["arenas"][0]["planned_bytes"]


Change = Callable[[BucketPlan], BucketPlan]


def moved(storage: str, **changes: int) -> Change:
    return lambda bucket: replace(
        bucket,
        allocations=tuple(replace(p, **changes) if p.storage == storage else p for p in bucket.allocations),
    )


def arena(**changes: Any) -> Change:
    return lambda bucket: replace(bucket, arenas=(replace(bucket.arenas[0], **changes),))


BROKEN: list[tuple[Change, str]] = [
    (moved("x", offset=256), "storages `x` and `a` overlap"),
    (moved("x", offset=1 << 20), "storage `x` ends at byte 1048832"),
    (moved("x", offset=4095), "not aligned to 256"),
    (moved("a", nbytes=512), "it needs 4096"),
    (lambda bucket: replace(bucket, allocations=bucket.allocations[1:]), "storage `x` has no place"),
    (lambda bucket: replace(bucket, sizes=(65,)), "bucket [65] of method `forward` is impossible"),
    (lambda bucket: replace(bucket, sizes=()), "bucket [] of method `forward` is impossible"),
    (lambda bucket: replace(bucket, sizes=(1, 2)), "bucket [1, 2] of method `forward` is impossible"),
    (arena(nbytes=1 << 30), "bucket [8] of method `forward` does not fit into arena 1"),
    (arena(memory_id=2), "does not fit into arena 2"),
    (arena(device=Device("cuda", 1)), "does not fit into arena 1"),
]


def broken(change: Change) -> PlannedProgram:
    program = planned(8)
    (method,) = program.plan.methods
    return with_method(program, replace(method, buckets=(change(method.buckets[0]),)))


def with_method(program: PlannedProgram, method: MethodPlan) -> PlannedProgram:
    return replace(program, plan=replace(program.plan, methods=(method,)))


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_bucket_is_neither_written_nor_read(
    change: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError) as caught:
        write(tmp_path / "m.pte", broken(change), {})
    assert message in str(caught.value)
    monkeypatch.setattr(writer, "verify", lambda _: None)
    write(tmp_path / "m.pte", broken(change), {})
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "m.pte")
    assert message in str(caught.value)


def test_a_bucket_twice_and_one_without_a_static_plan_are_refused(tmp_path: Path) -> None:
    program = planned(8)
    (method,) = program.plan.methods
    with pytest.raises(ArtifactError, match="is impossible"):
        write(tmp_path / "m.pte", with_method(program, replace(method, buckets=method.buckets * 2)), {})
    with pytest.raises(ArtifactError, match="is impossible"):
        write(tmp_path / "m.pte", replace(program, plan=replace(program.plan, is_static=False)), {})

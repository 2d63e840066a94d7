"""The committed code is what the schemas give, and reads what flatc's own code packs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import flatbuffers
import pytest

from devplan.runtime.artifact import generate
from devplan.runtime.artifact.generated import devplan_generated as fb
from devplan.runtime.artifact.generated.devplan_layout import LAYOUT
from devplan.runtime.artifact.unpack import unpack
from devplan.runtime.errors import ArtifactError


def flatc_version() -> str:
    if shutil.which("flatc") is None:
        return ""
    return subprocess.run(["flatc", "--version"], capture_output=True, text=True).stdout.split()[-1]


@pytest.mark.skipif(flatc_version() != "2.0.8", reason="the committed code is that of flatc 2.0.8")
def test_regenerating_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = generate.GENERATED
    monkeypatch.setattr(generate, "GENERATED", tmp_path)
    generate.main()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in committed.iterdir() if path.is_file())
    for name in names:
        assert (tmp_path / name).read_text() == (committed / name).read_text(), name


def packed(table: fb.ArgumentT) -> memoryview:
    builder = flatbuffers.Builder(64)
    builder.Finish(table.Pack(builder))
    return memoryview(bytes(builder.Output()))


def test_absent_fields_take_their_defaults() -> None:
    read = unpack(packed(fb.ArgumentT()), LAYOUT, "Argument", what="it")
    assert (read.kind, read.integer, read.text, read.items) == (0, 0, None, None)


def test_nested_tables_and_text() -> None:
    outer, inner = fb.ArgumentT(), fb.ArgumentT()
    inner.text, inner.integer = "é", -5
    outer.items = [inner, fb.ArgumentT()]
    read = unpack(packed(outer), LAYOUT, "Argument", what="it")
    assert [(item.text, item.integer) for item in read.items] == [("é", -5), (None, 0)]


def test_unknown_slots_of_a_newer_writer_are_passed_over() -> None:
    """An `Argument` read as a `Device`, whose two fields are its first two: the rest is not looked at."""
    table = fb.ArgumentT()
    table.kind, table.text, table.items = 3, "new", [fb.ArgumentT()]
    assert unpack(packed(table), LAYOUT, "Device", what="it").kind == 3


def test_tables_nested_too_deep() -> None:
    table = fb.ArgumentT()
    for _ in range(70):
        outer = fb.ArgumentT()
        outer.items = [table]
        table = outer
    with pytest.raises(ArtifactError, match="nested more than 64 deep"):
        unpack(packed(table), LAYOUT, "Argument", what="it")


def test_a_buffer_that_expands_without_end_is_refused_at_once() -> None:
    """Every level's two items are one table: 2**60 tables in a few hundred bytes, if they were followed."""
    builder = flatbuffers.Builder(64)
    table = fb.ArgumentT().Pack(builder)
    for _ in range(60):
        fb.ArgumentStartItemsVector(builder, 2)  # type: ignore[attr-defined]
        builder.PrependUOffsetTRelative(table)  # type: ignore[attr-defined]
        builder.PrependUOffsetTRelative(table)  # type: ignore[attr-defined]
        items = builder.EndVector()  # type: ignore[attr-defined]
        fb.ArgumentStart(builder)  # type: ignore[attr-defined]
        fb.ArgumentAddItems(builder, items)  # type: ignore[attr-defined]
        table = fb.ArgumentEnd(builder)  # type: ignore[attr-defined]
    builder.Finish(table)
    with pytest.raises(ArtifactError, match="its parts overlap"):
        unpack(memoryview(bytes(builder.Output())), LAYOUT, "Argument", what="it")

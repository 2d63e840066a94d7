"""Constants outside the artifact: in a data file of ours beside it, or left in safetensors files."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write, writer
from devplan.runtime.describe import describe
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError
from devplan.runtime.program import CPU, Constant, PlannedProgram

ONE, TWO = bytes(range(200, 248)), bytes(range(100, 164))


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SOURCES = {digest_of(data): (lambda data=data: data) for data in (ONE, TWO)}


@pytest.fixture
def planned(sample: Any) -> PlannedProgram:
    """The sample with two constants more; one of them twice, under two names."""
    more = (
        Constant("one", digest_of(ONE), 48, DType.FLOAT32, (3, 4), (4, 1), CPU),
        Constant("two", digest_of(TWO), 64, DType.FLOAT32, (4, 4), (1, 4), CPU),
        Constant("tied", digest_of(ONE), 48, DType.FLOAT32, (12,), (1,), CPU),
    )
    program = replace(sample.planned.program, constants=(*sample.planned.program.constants, *more))
    return replace(sample.planned, program=program)


@pytest.fixture
def sources(sample: Any) -> dict[str, Any]:
    return {**sample.sources(), **SOURCES}


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


def test_external_weights_are_read_from_the_file_beside(planned: Any, sources: Any, tmp_path: Path) -> None:
    written = write(tmp_path / "m.pte", planned, sources, weights="external")
    assert written.data is not None
    assert written.data.stat().st_size == written.data_nbytes
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["m.pte", written.data.name])
    artifact = read(tmp_path / "m.pte")
    artifact.verify_constants()
    assert artifact.planned == planned
    assert bytes(artifact.constants[digest_of(ONE)]) == ONE
    assert bytes(artifact.constants[digest_of(TWO)]) == TWO
    assert ONE not in (tmp_path / "m.pte").read_bytes()
    assert describe(artifact)["constants"]["location"] == "external"
    assert written.data.read_bytes().count(ONE) == 1


def test_other_weights_get_another_file(planned: Any, sources: Any, tmp_path: Path) -> None:
    """So that the old artifact keeps working until the new one has replaced it."""
    first = write(tmp_path / "m.pte", planned, sources, weights="external")
    again = write(tmp_path / "n.pte", planned, sources, weights="external")
    (one, *rest) = planned.program.constants
    fewer = replace(planned, program=replace(planned.program, constants=(one, *rest[1:2])))
    second = write(tmp_path / "m.pte", fewer, sources, weights="external")
    assert first.data and again.data and second.data
    assert first.data != second.data
    assert first.data.read_bytes() == again.data.read_bytes()
    assert first.data.exists()


def test_a_missing_data_file(planned: Any, sources: Any, tmp_path: Path) -> None:
    written = write(tmp_path / "m.pte", planned, sources, weights="external")
    assert written.data
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written.data.rename(elsewhere / written.data.name)
    with pytest.raises(ArtifactError, match="is missing") as caught:
        read(tmp_path / "m.pte")
    assert caught.value.hint == "keep the file beside the artifact"
    assert read(tmp_path / "m.pte", folders=[elsewhere]).planned == planned


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:60] + b"\xff" + data[61:]])
def test_another_data_file(planned: Any, sources: Any, tmp_path: Path, change: Any) -> None:
    written = write(tmp_path / "m.pte", planned, sources, weights="external")
    assert written.data
    written.data.write_bytes(change(written.data.read_bytes()))
    with pytest.raises(ArtifactError, match="is not the one that it was exported with"):
        read(tmp_path / "m.pte")


def test_damaged_bytes_in_the_data_file_are_found_on_request(
    planned: Any, sources: Any, tmp_path: Path
) -> None:
    written = write(tmp_path / "m.pte", planned, sources, weights="external")
    assert written.data
    written.data.write_bytes(written.data.read_bytes().replace(TWO, bytes(64)))
    artifact = read(tmp_path / "m.pte")
    with pytest.raises(ArtifactError, match=digest_of(TWO)):
        artifact.verify_constants()


@pytest.mark.parametrize("name", ["/etc/passwd", "../m.ptd", ""])
def test_an_artifact_does_not_lead_out_of_its_folder(
    name: str, planned: Any, sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truthful = writer.manifest

    def forged(*given: Any) -> Any:
        table = truthful(*given)
        table.files[0].name = name
        return table

    monkeypatch.setattr(writer, "manifest", forged)
    write(tmp_path / "m.pte", planned, sources, weights="external")
    with pytest.raises(ArtifactError, match="is no name of a data file"):
        read(tmp_path / "m.pte")


def test_references_leave_the_bytes_where_they_are(planned: Any, sources: Any, tmp_path: Path) -> None:
    """What the files hold byte by byte stays there; the rest, here `two`, is embedded."""
    (tmp_path / "weights").mkdir()
    file = safetensors(tmp_path / "weights" / "model.safetensors", {"noise": bytes(48), "a.weight": ONE})
    written = write(tmp_path / "m.pte", planned, sources, weights="reference", files=[file])
    assert written.data is None
    artifact = read(tmp_path / "m.pte")
    artifact.verify_constants()
    assert artifact.planned == planned
    places = {blob.digest: (blob.location, blob.file, blob.key) for blob in artifact.blobs}
    assert places[digest_of(ONE)] == (2, "weights/model.safetensors", "a.weight")
    assert places[digest_of(TWO)] == (0, "", "")
    assert bytes(artifact.constants[digest_of(ONE)]) == ONE
    assert ONE not in (tmp_path / "m.pte").read_bytes()
    assert describe(artifact)["constants"]["location"] == "reference"


def test_no_path_of_this_machine_is_stored(planned: Any, sources: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "downloads").mkdir()
    file = safetensors(tmp_path / "downloads" / "model.safetensors", {"a": ONE})
    write(tmp_path / "out" / "m.pte", planned, sources, weights="reference", files=[file])
    assert b"downloads" not in (tmp_path / "out" / "m.pte").read_bytes()
    with pytest.raises(ArtifactError, match=r"`model.safetensors` is missing"):
        read(tmp_path / "out" / "m.pte")
    assert (
        bytes(read(tmp_path / "out" / "m.pte", folders=[tmp_path / "downloads"]).constants[digest_of(ONE)])
        == ONE
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x03\0\0\0\0\0\0\0abc"])
def test_what_is_no_safetensors_file(content: bytes, planned: Any, sources: Any, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="weight file"):
        write(tmp_path / "m.pte", planned, sources, weights="reference", files=[tmp_path / "w.safetensors"])
    assert not (tmp_path / "m.pte").exists()

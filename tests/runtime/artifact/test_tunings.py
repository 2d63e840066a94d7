"""Library algorithms that are embedded in a file: read back as they were, and checked."""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write, writer
from devplan.runtime.artifact.layout import SEAL, version_of
from devplan.runtime.describe import describe
from devplan.runtime.errors import ArtifactError
from devplan.runtime.program import LibraryTuning, PlannedProgram

H200 = LibraryTuning(
    "NVIDIA H200",
    "sm_90",
    (("cublaslt", 130100), ("cudnn", 91002)),
    (("matmul 1x2x3x4 float16", 3), ("convolution float32[1, 2]", 0)),
)
A100 = LibraryTuning("NVIDIA A100-SXM4-80GB", "sm_80", (("cublaslt", 2**40),), ())


def tuned(planned: PlannedProgram, *tunings: LibraryTuning) -> PlannedProgram:
    return replace(planned, program=replace(planned.program, tunings=tunings))


def test_they_read_back_as_they_were(sample: Any, tmp_path: Path) -> None:
    planned = tuned(sample.planned, H200, A100)
    write(tmp_path / "m.pte", planned, sample.sources())
    artifact = read(tmp_path / "m.pte")
    assert artifact.planned == planned
    assert describe(artifact)["library_tunings"] == [
        {
            "gpu": "NVIDIA H200",
            "architecture": "sm_90",
            "versions": {"cublaslt": 130100, "cudnn": 91002},
            "algorithms": {"matmul 1x2x3x4 float16": 3, "convolution float32[1, 2]": 0},
        },
        {
            "gpu": "NVIDIA A100-SXM4-80GB",
            "architecture": "sm_80",
            "versions": {"cublaslt": 2**40},
            "algorithms": {},
        },
    ]


def test_a_reader_that_knows_of_none_may_read_on(sample: Any) -> None:
    """They change no result, so that the version stays the one that older readers take."""
    assert version_of(tuned(sample.planned, H200).program) == version_of(sample.planned.program)


BROKEN = [
    ((H200, H200), "two tunings named `NVIDIA H200 sm_90`"),
    ((replace(H200, gpu=""),), "does not say what it is for"),
    ((replace(H200, versions=()),), "does not say what it is for"),
    ((replace(H200, versions=(("cublaslt", 0),)),), "does not say what it is for"),
    ((replace(H200, versions=(("", 5),)),), "a library version has no name"),
    ((replace(H200, versions=H200.versions[:1] * 2),), "two library versions named `cublaslt`"),
    ((replace(H200, algorithms=H200.algorithms[:1] * 2),), "two calls named `matmul"),
    ((replace(H200, algorithms=(("", 1),)),), "a call has no name"),
    ((replace(H200, algorithms=(("launch the rocket", 1),)),), "algorithm 1 for `launch the rocket`"),
]


@pytest.mark.parametrize(("tunings", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_what_says_nothing_or_two_things_is_neither_written_nor_read(
    tunings: tuple[LibraryTuning, ...],
    message: str,
    sample: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = tuned(sample.planned, *tunings)
    with pytest.raises(ArtifactError, match=message):
        write(tmp_path / "m.pte", planned, sample.sources())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(writer, "verify", lambda _: None)
    write(tmp_path / "m.pte", planned, sample.sources())
    with pytest.raises(ArtifactError, match=message):
        read(tmp_path / "m.pte")


def test_without_any_the_bytes_are_those_of_before(sample: Any, tmp_path: Path) -> None:
    plain = write(tmp_path / "a.pte", sample.planned, sample.sources(), producer="1")
    same = write(tmp_path / "b.pte", tuned(sample.planned), sample.sources(), producer="1")
    assert plain.sha256 == same.sha256


def test_forged_ones_load_or_are_refused(sample: Any, tmp_path: Path) -> None:
    """Any byte around them is changed, and the seal made to match, as a forger would."""
    path = tmp_path / "m.pte"
    write(path, tuned(sample.planned, H200, A100), sample.sources())
    good = path.read_bytes()
    begin, end = struct.unpack_from("<QQ", good, len(good) - SEAL.size + 8)
    middle = good.index(b"NVIDIA H200")
    generator, outcomes = random.Random(0), set[bool]()
    for place in range(max(end, middle - 250), middle + 250):
        data = bytearray(good)
        data[place] ^= 1 << generator.randrange(8)
        data[-32:] = hashlib.sha256(data[:begin] + data[end:-32]).digest()
        path.write_bytes(data)
        try:
            read(path)
            outcomes.add(True)
        except ArtifactError:
            outcomes.add(False)
    assert outcomes == {True, False}

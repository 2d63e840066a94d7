"""Damaged and forged files: every one is refused with an `ArtifactError`, and none with anything else."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write
from devplan.runtime.artifact.layout import SEAL
from devplan.runtime.errors import ArtifactError


@pytest.fixture
def good(sample: Any, tmp_path: Path) -> bytes:
    write(tmp_path / "good.pte", sample.planned, sample.sources(), producer="1.2.3")
    return (tmp_path / "good.pte").read_bytes()


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[bytes], str]:
    """Read some bytes as an artifact and give the refusal's line."""

    def run(data: bytes) -> str:
        path = tmp_path / "bad.pte"
        path.write_bytes(data)
        with pytest.raises(ArtifactError) as caught:
            read(path)
        assert caught.value.code == 7
        return caught.value.line()

    return run


def sealed(data: bytes) -> bytes:
    """The file with a seal that matches: what a forger, unlike an accident, would do."""
    begin, end = struct.unpack_from("<QQ", data, len(data) - SEAL.size + 8)
    return data[:-32] + hashlib.sha256(data[:begin] + data[end:-32]).digest()


def constants_of(data: bytes) -> range:
    return range(*struct.unpack_from("<QQ", data, len(data) - SEAL.size + 8))


@pytest.mark.parametrize("size", [0, 1, 3, 8, 63, 64, 100, 255, 256, 1000])
def test_truncated_at_the_front(good: bytes, refusal: Callable[[bytes], str], size: int) -> None:
    line = refusal(good[:size])
    assert any(word in line for word in ("is empty", "is not an artifact", "is truncated"))


@pytest.mark.parametrize("lost", [1, 31, 32, 56, 57, 300, 1000])
def test_truncated_at_the_end(good: bytes, refusal: Callable[[bytes], str], lost: int) -> None:
    line = refusal(good[:-lost])
    assert f"is truncated (code 7): it has {len(good) - lost} bytes of {len(good)}" in line


def test_bytes_after_the_end(good: bytes, refusal: Callable[[bytes], str]) -> None:
    assert "1 bytes follow its end" in refusal(good + b"\0")


@pytest.mark.parametrize(
    ("magic", "message"),
    [
        (b"ET13", "is of container version ET13"),
        (b"ET11", "is of container version ET11"),
        (b"FT01", "is not an artifact"),
        (b"\0\0\0\0", "is not an artifact"),
    ],
)
def test_another_identifier(good: bytes, refusal: Callable[[bytes], str], magic: bytes, message: str) -> None:
    assert message in refusal(good[:4] + magic + good[8:])


def test_without_the_extended_header(good: bytes, refusal: Callable[[bytes], str]) -> None:
    assert "no extended header" in refusal(good[:8] + b"\0" * 4 + good[12:])


def test_a_foreign_file_is_called_foreign(good: bytes, refusal: Callable[[bytes], str]) -> None:
    assert "was not written by devplan" in refusal(good[: -SEAL.size] + b"\0" * SEAL.size)


def test_other_things_than_artifacts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(ArtifactError, match="No such file"):
        read(tmp_path / "absent.pte")
    (tmp_path / "model.pt2").write_bytes(b"PK\3\4" + b"\0" * 500)
    with pytest.raises(ArtifactError, match="does not carry the identifier ET12"):
        read(tmp_path / "model.pt2")


def test_an_accident_is_told_as_damage(good: bytes, refusal: Callable[[bytes], str]) -> None:
    """Any flipped bit outside the constants and the header is found by the seal, before it is believed."""
    generator = random.Random(0)
    outside = [place for place in range(40, len(good) - SEAL.size) if place not in constants_of(good)]
    for place in generator.sample(outside, 100):
        line = refusal(good[:place] + bytes([good[place] ^ 1 << generator.randrange(8)]) + good[place + 1 :])
        assert "its bytes differ from those that were written" in line


def test_a_flip_in_a_constant_is_found_on_request(good: bytes, tmp_path: Path) -> None:
    place = constants_of(good)[5]
    (tmp_path / "bad.pte").write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    artifact = read(tmp_path / "bad.pte")
    with pytest.raises(ArtifactError, match="is damaged"):
        artifact.verify_constants()


@pytest.mark.parametrize("seed", range(4))
def test_forged_flips_load_or_are_refused(good: bytes, tmp_path: Path, seed: int) -> None:
    """With the seal made to match, flips reach the decoder. Nothing but `ArtifactError` may come of them."""
    generator = random.Random(seed)
    path = tmp_path / "forged.pte"
    loaded = 0
    for _ in range(500):
        data = bytearray(good)
        for _ in range(generator.choice((1, 1, 2, 8))):
            data[generator.randrange(len(data) - SEAL.size)] ^= 1 << generator.randrange(8)
        path.write_bytes(sealed(bytes(data)))
        try:
            read(path)
            loaded += 1
        except ArtifactError as error:
            assert error.what
    assert loaded > 0, "flips in padding and constants must load"


@pytest.mark.parametrize("seed", range(2))
def test_forged_words_load_or_are_refused(good: bytes, tmp_path: Path, seed: int) -> None:
    """Whole words become extreme numbers: offsets past the end, huge counts, negative indices."""
    generator = random.Random(seed)
    path = tmp_path / "forged.pte"
    for _ in range(500):
        data = bytearray(good)
        place = generator.randrange(0, len(data) - SEAL.size, 4)
        word = generator.choice(
            (0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(data), generator.getrandbits(32))
        )
        data[place : place + 4] = struct.pack("<I", word)
        path.write_bytes(sealed(bytes(data)))
        try:
            read(path)
        except ArtifactError as error:
            assert error.what

"""Writing is atomic, streams the constants, and believes no one about them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import atomic, read, write
from devplan.runtime.errors import ArtifactError, BudgetError


def test_a_failing_source_leaves_the_old_file(sample: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    path.write_bytes(b"old")

    def fail() -> bytes:
        raise RuntimeError("the weights went away")

    with pytest.raises(RuntimeError, match="went away"):
        write(path, sample.planned, dict.fromkeys(sample.constants, fail))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "message"), [(b"short", "has 5 bytes: 64 were announced"), (bytes(64), "have another digest")]
)
def test_other_bytes_than_promised(data: bytes, message: str, sample: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=message):
        write(tmp_path / "m.pte", sample.planned, {digest: lambda: data for digest in sample.constants})
    assert list(tmp_path.iterdir()) == []


def test_a_constant_without_a_source(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="the bytes of 1 constants are missing"):
        write(tmp_path / "m.pte", sample.planned, {})


def test_a_missing_folder_is_an_os_error_of_the_caller(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "absent" / "m.pte", sample.planned, sample.sources())


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="no ordinary file"):
        atomic.write_whole(pipe, "text")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_where_there_are_no_nameless_files(
    sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_open_nameless", lambda _: -1)
    written = write(tmp_path / "m.pte", sample.planned, sample.sources())
    assert read(tmp_path / "m.pte").sha256 == written.sha256
    with pytest.raises(ArtifactError):
        write(tmp_path / "n.pte", sample.planned, {digest: lambda: b"" for digest in sample.constants})
    assert [path.name for path in tmp_path.iterdir()] == ["m.pte"]


def test_a_refused_file_is_not_written(sample: Any, tmp_path: Path) -> None:
    """The check sees the finished file under another name; raising leaves the old one."""
    path = tmp_path / "m.pte"
    path.write_bytes(b"old")
    seen: list[str] = []

    def refuse(preview: Path) -> None:
        seen.append(read(preview).sha256)
        raise BudgetError("the artifact has 9528 bytes")

    for weights in ("embed", "external"):
        with pytest.raises(BudgetError):
            write(path, sample.planned, sample.sources(), weights=weights, check=refuse)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]
    written = write(path, sample.planned, sample.sources(), check=lambda preview: None)
    assert written.sha256 == seen[0] == read(path).sha256


def test_the_file_may_be_read_as_the_umask_says(sample: Any, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "m.pte", sample.planned, sample.sources())
    finally:
        os.umask(old)
    assert (tmp_path / "m.pte").stat().st_mode & 0o777 == 0o640


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import DIGEST, make_sample
from devplan.runtime.artifact import write

def slow():
    print("writing", flush=True)
    time.sleep(60)

write(Path(sys.argv[2]), make_sample().planned, {DIGEST: slow})
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs nameless files")
def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    path.write_bytes(b"old")
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", KILLED, here, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def big_constants(sample: Any, count: int, nbytes: int) -> tuple[Any, dict[str, Callable[[], bytes]]]:
    """The sample with many constants more, made when they are asked for."""
    (first,) = sample.planned.program.constants
    sources = dict(sample.sources())
    constants = [first]
    for index in range(count):
        digest = hashlib.sha256(bytes([index]) * nbytes).hexdigest()
        sources[digest] = lambda index=index: bytes([index]) * nbytes
        constants.append(replace(first, name=f"c{index}", digest=digest, nbytes=nbytes))
    program = replace(sample.planned.program, constants=tuple(constants))
    return replace(sample.planned, program=program), sources


def test_constants_are_streamed(sample: Any, tmp_path: Path) -> None:
    """64 MiB in 4 MiB pieces: never more than two pieces in memory, to write them or to read the file."""
    planned, sources = big_constants(sample, 16, 4 << 20)
    tracemalloc.start()
    written = write(tmp_path / "big.pte", planned, sources)
    artifact = read(tmp_path / "big.pte")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written.nbytes > 64 << 20
    assert len(artifact.constant_segment) > 64 << 20
    assert peak < 9 << 20
    assert artifact.constants[artifact.blobs[3].digest][:4] == bytes([2] * 4)


def test_equal_constants_are_stored_once(sample: Any, tmp_path: Path) -> None:
    (first,) = sample.planned.program.constants
    program = replace(sample.planned.program, constants=(first, replace(first, name="tied")))
    write(tmp_path / "m.pte", replace(sample.planned, program=program), sample.sources())
    assert [(blob.offset, blob.nbytes) for blob in read(tmp_path / "m.pte").blobs] == [(0, 64)]


@pytest.mark.slow
def test_opening_takes_no_longer_for_more_constants(sample: Any, tmp_path: Path) -> None:
    """A gigabyte has to open within half a second; a quarter of it takes far less."""
    planned, sources = big_constants(sample, 4, 64 << 20)
    write(tmp_path / "huge.pte", planned, sources)
    started = time.perf_counter()
    artifact = read(tmp_path / "huge.pte")
    assert time.perf_counter() - started < 0.1
    assert artifact.nbytes > 256 << 20

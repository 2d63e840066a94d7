"""Loading from a file: what is begun in the background, and tuning files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load
from devplan.runtime.artifact import write
from devplan.runtime.cuda import warm
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, UsageError
from devplan.runtime.measure.tune import Tuning


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `load` begins, instead of beginning it."""
    calls: list[tuple[Any, ...]] = []
    for name in ("begin_driver", "begin_context", "begin_cublaslt", "begin_cudnn"):
        monkeypatch.setattr(warm, name, lambda *given, name=name: calls.append((name, *given)))
    return calls


@pytest.fixture
def artifact(program: Any, tmp_path: Path) -> Path:
    """y = x @ x on the device."""
    method = program.method()
    x = method.input("x", (4, 4), DType.FLOAT16)
    y = method.tensor("y", (4, 4), DType.FLOAT16)
    method.call("matmul", [x, x], [y])
    method.output("y", y)
    return write(tmp_path / "model.pte", program.planned(), program.bytes).path


def test_the_gpu_is_begun_for_what_the_program_needs(artifact: Path, begun: list[Any]) -> None:
    with load(artifact, notify=lambda line: None):
        pass
    assert begun == [("begin_driver",), ("begin_context", 0), ("begin_cublaslt", 0, DType.FLOAT16)]


@pytest.mark.parametrize(("device", "ordinal"), [("cuda", 0), ("cuda:2", 2)])
def test_a_named_gpu_is_begun_while_the_file_is_read(
    tmp_path: Path, begun: list[Any], device: str, ordinal: int
) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tmp_path / "missing.pte", device)
    assert begun == [("begin_driver",), ("begin_context", ordinal)]


@pytest.mark.parametrize("given", [{}, {"device_map": {"cuda:0": "cuda:1"}}])
def test_a_gpu_that_is_not_known_is_not_begun(tmp_path: Path, begun: list[Any], given: Any) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tmp_path / "missing.pte", **given)
    assert begun == [("begin_driver",)]


@pytest.mark.parametrize("given", [{"device": "cuda:x"}, {"device_map": {"cuda:0": "cpu"}}])
def test_no_context_is_begun_for_what_is_no_gpu(tmp_path: Path, begun: list[Any], given: Any) -> None:
    with pytest.raises(UsageError):
        load(tmp_path / "missing.pte", **given)
    assert begun == [("begin_driver",)]


def test_nothing_is_begun_for_the_emulator(artifact: Path, begun: list[Any]) -> None:
    with load(artifact, "emulator") as program:
        x = np.eye(4, dtype=np.float16)
        assert np.array_equal(program.method()(x)["y"], x)
    assert begun == []


def test_a_tuning_that_cannot_be_used_is_told_and_one_that_is_none_refused(
    artifact: Path, tmp_path: Path
) -> None:
    path, told = tmp_path / "tuning.json", list[str]()
    Tuning("NVIDIA H200", {"cublaslt": 130100}, {}).save(path)
    with load(artifact, "emulator", tuning=path, notify=told.append):
        pass
    assert told == [f"`{path}` is not used: the program runs on no GPU"]
    path.write_text("{}")
    with pytest.raises(UsageError, match="no tuning file"):
        load(artifact, "emulator", tuning=path)


BEFORE_THE_DRIVER = """
import json, sys
before = set(sys.modules)
import devplan
from devplan.runtime.cuda import warm
seen = []
warm.begin_driver = lambda: seen.extend(sys.modules)
try:
    devplan.load("missing.pte", "cuda")
except devplan.runtime.errors.ArtifactError:
    print(json.dumps(sorted(set(seen) - before)))
"""


def test_nothing_large_is_imported_before_the_driver_starts() -> None:
    """From there on the GPU starts on a thread of its own: what is imported before delays all of it."""
    command = [sys.executable, "-c", BEFORE_THE_DRIVER]
    seen = set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    rooms = {"runtime", "runtime.start", "runtime.cuda", "runtime.cuda.warm", "runtime.cuda.native"}
    assert {name for name in seen if name.startswith("devplan")} == {
        "devplan",
        *(f"devplan.{name}" for name in rooms),
    }
    assert not {"numpy", "cuda", "subprocess", "tempfile", "dataclasses", "inspect", "json.encoder"} & seen

"""Library algorithms that an artifact embeds: taken on the GPU that they are for, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load
from devplan.runtime.artifact import write
from devplan.runtime.backend import Operand
from devplan.runtime.cuda import warm
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.measure.tune import Tuning
from devplan.runtime.program import Device, LibraryCall, LibraryTuning

GPU = Device("cuda", 0)
SQUARE = Operand(1 << 20, DType.FLOAT32, (4, 4), (4, 1), GPU)
Make = Callable[..., Path]


@pytest.fixture
def key(gpu: CudaBackend, lt: Any) -> str:
    """What the product of the artifact is known by."""
    call = LibraryCall("matmul", ("x", "x"), ("y",))
    return str(gpu.library("cublaslt").key(call, {"x": SQUARE, "y": SQUARE}))


@pytest.fixture
def make(program: Any, tmp_path: Path, cu: Any, lt: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The artifact of y = x @ x, with a tuning for the GPU that the fake driver has, but for the changes."""
    for name in ("begin_driver", "begin_context", "begin_cublaslt"):
        monkeypatch.setattr(warm, name, lambda *given: None)
    method = program.method()
    x = method.input("x", (4, 4))
    method.call("matmul", [x, x], [method.tensor("y", (4, 4))])
    method.output("out", "y")
    planned = program.planned()

    def written(**changes: Any) -> Path:
        tuning = replace(LibraryTuning("Fake GPU", "sm_90", (("cublaslt", 130100),), ((key, 2),)), **changes)
        changed = replace(planned.program, tunings=(tuning,))
        return write(tmp_path / "model.pte", replace(planned, program=changed), program.bytes).path

    return written


def run(path: Path, lt: Any, **options: Any) -> tuple[list[int], str, list[str]]:
    """Algorithms of the products of a call, the note, and what was told."""
    told: list[str] = []
    lt.products.clear()
    with load(path, "cuda", notify=told.append, **options) as program:
        program.method()(np.ones((4, 4), np.float32))
        return sorted(set(lt.products)), program.tuning_note, told


def test_they_are_used_where_they_were_measured(make: Make, lt: Any) -> None:
    algorithms, note, told = run(make(), lt)
    assert algorithms == [2] and note == "using 1 library algorithm measured on Fake GPU" and told == []


@pytest.mark.parametrize(
    "changes",
    [{"gpu": "NVIDIA A100"}, {"architecture": "sm_80"}, {"versions": (("cublaslt", 120900),)},
     {"versions": (("cublaslt", 130100), ("cudnn", 1))}, {"algorithms": (("matmul of something else", 1),)},
     {"algorithms": ()}],
)  # fmt: skip
def test_elsewhere_the_library_chooses_and_nothing_fails(
    make: Make, lt: Any, changes: dict[str, Any], key: str
) -> None:
    algorithms, note, told = run(make(**changes), lt)
    is_for_here = changes.keys() <= {"algorithms"} or "cudnn" in str(changes)
    assert ("not used" in note) is not is_for_here and told == []
    assert algorithms == (
        [2] if "cudnn" in str(changes) else [0]
    )  # it calls no cuDNN, which is not asked for


def test_one_that_the_library_does_not_offer_is_the_librarys_choice(make: Make, lt: Any, key: str) -> None:
    assert run(make(algorithms=((key, 99),)), lt)[0] == [0]


def test_a_file_goes_before_what_is_embedded(make: Make, lt: Any, key: str, tmp_path: Path) -> None:
    path, artifact = tmp_path / "gpu.json", make()
    tuning = Tuning("Fake GPU", {"cublaslt": 130100}, {key: 1}, "sm_90")
    tuning.save(path)
    assert run(artifact, lt, tuning=path) == ([1], f"library algorithms are those of `{path}`", [])
    replace(tuning, algorithms={}).save(path)  # the library's own choice was the best
    assert run(artifact, lt, tuning=path)[0] == [0]
    replace(tuning, gpu="NVIDIA A100").save(path)
    algorithms, note, told = run(artifact, lt, tuning=path)
    assert algorithms == [2] and note.startswith("using")
    assert told == [f"`{path}` is not used: the tuning is for NVIDIA A100, this is Fake GPU"]


def test_the_emulator_runs_without(make: Make) -> None:
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    with load(make(), "emulator") as program:
        assert "the program runs on no GPU" in program.tuning_note
        np.testing.assert_array_equal(program.method()(x)["out"], x @ x)


def test_a_clone_uses_them_too(make: Make, lt: Any) -> None:
    with load(make(), "cuda") as program, program.clone() as twin:
        twin.method()(np.ones((4, 4), np.float32))
    assert set(lt.products) == {2}

"""Choosing algorithms by measurement, on a device whose times are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import DeviceError, UsageError
from devplan.runtime.measure import tune
from devplan.runtime.program import CPU, Device, LibraryTuning
from devplan.runtime.recording import RecordingBackend

CUDA = Device("cuda", 0)


class Library:
    """Offers as many algorithms as ``times`` has for the output's value name."""

    version = 130100

    def __init__(self, times: dict[str, list[float | None]]) -> None:
        self.times = times

    def key(self, call: Any, operands: Any) -> str:
        return f"matmul {call.writes[0][0]}"

    def algorithms(self, call: Any, operands: Any) -> int:
        return len(self.times[self.key(call, operands)])

    def bind(self, call: Any, operands: Any, index: int | None = None) -> Any:
        seconds = self.times[self.key(call, operands)][index or 0]
        if seconds is None:
            raise DeviceError("this engine needs more workspace")
        return seconds


class TunedBackend(RecordingBackend):
    """A recording device with a library; steps of the library are their own times."""

    def __init__(self, times: dict[str, list[float | None]]) -> None:
        super().__init__(CUDA, {})
        self.tuning: dict[str, int] = {}
        self.asked: list[str] = []
        self._times = Library(times)

    label = "Fake GPU"
    info = SimpleNamespace(architecture="sm_90")

    def library(self, name: str) -> Library:
        assert name == "cublaslt"
        return self._times

    def library_version(self, name: str) -> int:
        self.asked.append(name)
        return self.library(name).version

    def timeline(self, groups: list[list[Any]], repeat: int, before: Any = None) -> list[list[float]]:
        return [[sum(group) for group in groups]] * repeat


def load(program: Any, backend: Any, *tunings: LibraryTuning) -> LoadedProgram:
    method = program.method()
    x = method.input("x", (4, 4))
    for name in ("y1", "y2", "z1"):
        method.tensor(name, (4, 4))
        method.call("matmul", [x, x], [name])
    state = program.variable(method, "w", (4, 4))
    method.call("matmul", [x, x], [state])
    method.output("out", "z1")
    planned = program.planned()
    planned = replace(planned, program=replace(planned.program, tunings=tunings))
    return LoadedProgram(planned, program.bytes, {CUDA: backend, CPU: CpuBackend()})


def test_the_fastest_algorithm_is_chosen_once_per_distinct_call(program: Any) -> None:
    loaded = load(program, TunedBackend({"matmul y": [5.0, 3.0, 4.0, None], "matmul z": [5.0, 4.95]}))
    method = loaded.method()
    method(np.ones((4, 4), np.float32))
    tuning, findings = tune.tune(loaded, method)
    assert [(found.key, found.candidates, found.best) for found in findings] == [
        ("matmul y", 3, 1),
        ("matmul z", 2, None),  # one percent is noise
    ]
    assert (findings[0].first_seconds, findings[0].best_seconds) == (5.0, 3.0)
    assert tuning == tune.Tuning("Fake GPU", {"cublaslt": 130100}, {"matmul y": 1}, "sm_90")


def test_a_file_comes_back_and_is_applied_only_where_it_was_made(program: Any, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tune.Tuning("Fake GPU", {"cublaslt": 130100}, {"matmul y": 2}).save(path)
    backend = TunedBackend({})
    loaded = load(program, backend)
    assert tune.apply(loaded, tune.Tuning.read(path)) == ""
    assert backend.tuning == {"matmul y": 2}
    backend.asked.clear()
    reason = tune.apply(loaded, tune.Tuning("Other GPU", {"cublaslt": 130100}, {}))
    assert "for Other GPU" in reason and "this is Fake GPU" in reason
    reason = tune.apply(loaded, tune.Tuning("Fake GPU", {"cublaslt": 130100}, {}, "sm_80"))
    assert "for Fake GPU (sm_80)" in reason and "this is sm_90" in reason
    assert backend.asked == []  # no library is loaded for what is of another GPU
    reason = tune.apply(loaded, tune.Tuning("Fake GPU", {"cublaslt": 99}, {}))
    assert "cublaslt 99" in reason and "with cublaslt 130100" in reason
    kernels = {"product fp16 1a": {"num_warps": 8}}
    reason = tune.apply(loaded, tune.Tuning("Fake GPU", {}, {}, "sm_90", "3.7.1", kernels))
    assert "`export --tuning` uses" in reason


def test_all_of_a_file_comes_back(tmp_path: Path) -> None:
    kernels = {"product fp16 1a": {"BLOCK_M": 64, "num_warps": 8}}
    tuning = tune.Tuning("Fake GPU", {"cudnn": 91000}, {"convolution y": 2}, "sm_90", "3.7.1", kernels)
    tuning.save(tmp_path / "t.json")
    assert tune.Tuning.read(tmp_path / "t.json") == tuning


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tune.Tuning("Fake GPU", {}, {"a": 1}).save(path)
    with pytest.raises(TypeError):
        tune.Tuning("Fake GPU", {}, {"a": object()}).save(path)  # type: ignore[dict-item]
    assert tune.Tuning.read(path).algorithms == {"a": 1} and list(tmp_path.iterdir()) == [path]


NEGATIVE = '{"format": "devplan tuning 1", "gpu": "G", "versions": {}, "algorithms": {"matmul": -1}}'
HALF = '{"format": "devplan tuning 1", "gpu": "G", "versions": {}, "algorithms": {}, "kernels": [1]}'


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"format": "devplan tuning 99"}', "[1]", '{"format": "devplan tuning 1"}', HALF, NEGATIVE],
)
def test_what_is_no_tuning_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UsageError, match="no tuning file"):
        tune.Tuning.read(tmp_path / "t.json")


def test_without_a_gpu_there_is_nothing_to_tune(program: Any) -> None:
    loaded = load(program, RecordingBackend(CUDA, {}))
    with pytest.raises(UsageError, match="not called yet"):
        tune.tune(loaded, loaded.method())
    loaded.method()(np.ones((4, 4), np.float32))
    with pytest.raises(DeviceError, match="needs a GPU"):
        tune.tune(loaded, loaded.method())


HERE = LibraryTuning("Fake GPU", "sm_90", (("cublaslt", 130100),), (("matmul y", 1), ("matmul z", 0)))
ELSEWHERE = replace(HERE, gpu="Other GPU", algorithms=(("matmul y", 3),))


@pytest.mark.parametrize(
    ("embedded", "note"),
    [
        ((HERE,), "using 2 library algorithms measured on Fake GPU"),
        ((ELSEWHERE, HERE), "using 2 library algorithms measured on Fake GPU"),
        ((ELSEWHERE,), "the tuning is for Other GPU, this is Fake GPU"),
        ((replace(HERE, architecture="sm_80"),), "is for Fake GPU (sm_80), this is sm_90"),
        ((replace(HERE, versions=(("cublaslt", 1),)),), "with cublaslt 1, this is Fake GPU with cublaslt 130100"),
        ((replace(HERE, versions=(("cudnn", 9),)),), "the program calls nothing of cudnn"),
        ((), ""),
    ],
)  # fmt: skip
def test_what_an_artifact_embeds_is_used_where_it_was_measured_and_told(
    program: Any, embedded: tuple[LibraryTuning, ...], note: str
) -> None:
    backend = TunedBackend({"matmul y": [1.0, 1.0], "matmul z": [1.0]})
    loaded = load(program, backend, *embedded)
    told = tune.apply_embedded(loaded)
    assert note in told if note else told == ""
    assert ("not used" in told) == (backend.tuning == {} and bool(embedded))
    assert backend.tuning == (dict(HERE.algorithms) if told.startswith("using") else {})
    loaded.method()(np.ones((4, 4), np.float32))  # runs, whichever it is


def test_a_library_that_is_missing_costs_nothing_but_the_hint(program: Any) -> None:
    class Without(TunedBackend):
        def library_version(self, name: str) -> int:
            raise DeviceError("cuBLASLt was not found")

    backend = Without({})
    told = tune.apply_embedded(load(program, backend, HERE))
    assert "not used: cuBLASLt was not found" in told and backend.tuning == {}


def test_what_is_embedded_is_not_what_is_tuned_against(program: Any) -> None:
    """A tuned program gives the same file again: compared is the libraries' own choice."""
    times = {"matmul y": [5.0, 3.0, 4.0], "matmul z": [5.0, 5.0]}
    backend = TunedBackend(times)

    def bind(call: Any, operands: Any, index: int | None = None) -> Any:
        key = backend.library("cublaslt").key(call, operands)
        return times[key][backend.tuning.get(key, 0) if index is None else index]

    backend.library("cublaslt").bind = bind  # type: ignore[method-assign]
    loaded = load(program, backend, HERE)
    tune.apply_embedded(loaded)
    loaded.method()(np.ones((4, 4), np.float32))
    tuning, _ = tune.tune(loaded, loaded.method())
    assert tuning.algorithms == {"matmul y": 1} and backend.tuning == dict(HERE.algorithms)


def test_only_what_a_program_calls_is_embedded(program: Any) -> None:
    of = load(program, TunedBackend({})).planned.program
    both = tune.Tuning("G", {"cublaslt": 2, "cudnn": 3}, {"matmul y": 1, "convolution z": 2}, "sm_90")
    assert tune.for_program(both.libraries, of) == LibraryTuning(
        "G", "sm_90", (("cublaslt", 2),), (("matmul y", 1),)
    )

"""`devplan tune` on a GPU that the fake driver has: what it prints, and the file that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import devplan
from devplan.devplan_cli.console import Output
from devplan.devplan_cli.tune_job import Wanted, run_tuning
from devplan.runtime.artifact import write
from devplan.runtime.cuda import backend as cuda_backend
from devplan.runtime.cuda import warm
from devplan.runtime.measure.tune import Tuning
from devplan.runtime.program import Kernel, KernelCode, KernelParameter, Launch, LibraryTuning

pytest.importorskip("torch")
pytest.importorskip("triton")
tune_kernels = pytest.importorskip("devplan.passes.lowered.tune_kernels")
pytestmark = pytest.mark.torch

CUBIN = b"\x7fELF\x02".ljust(18, b"\0") + b"\xbe".ljust(46, b"\0")


def compiled(kernel: Kernel) -> Kernel:
    return replace(kernel, codes=(KernelCode("sm_90", "cubin", "k", CUBIN, kernel.num_warps, 0),))


@pytest.fixture
def artifact(program: Any, tmp_path: Path, cu: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """y = f(x) by a kernel that may be measured, on a GPU on which two warps take half as long as four."""
    for name in ("_begun", "_contexts"):
        monkeypatch.setattr(warm, name, {})
    monkeypatch.setattr(warm, "_taken", set())
    monkeypatch.setattr(cuda_backend, "_shared", {})

    def timeline(self: Any, groups: Any, repeat: int, before: Any = None) -> list[list[float]]:
        seconds = []
        for group in groups:
            cu.calls.clear()
            group[0]()
            warps = cu.calls[-1][5] // 32
            seconds.append(len(group) * warps * 1e-6)
        return [seconds] * repeat

    def candidates(specs: Any, architecture: str, jobs: int) -> dict[str, Kernel]:
        assert architecture == "sm_90"
        parameters = (KernelParameter("x", "*fp32"), KernelParameter("y", "*fp32"))
        made = (Kernel(s.name, parameters, (), s.source, s.constants, s.num_warps) for s in specs)
        return {kernel.name: compiled(kernel) for kernel in made}

    monkeypatch.setattr(cuda_backend.CudaBackend, "timeline", timeline)
    monkeypatch.setattr(tune_kernels, "compile_candidates", candidates)
    add(program.method(), "row_product_1a2b3c4d")
    return written(program, tmp_path)


def add(method: Any, *kernels: str, shape: Any = (4,)) -> None:
    """Launches of kernels, one after the other."""
    y = method.input("x", shape)
    for kernel in kernels:
        x, y = y, method.tensor(f"of_{kernel}", shape)
        method.launch(kernel, [x], [y])
    method.output("out", y)


def written(program: Any, folder: Path, **plan: Any) -> Path:
    planned = program.planned(**plan)
    launches = [item for method in planned.program.methods for item in method.instructions]
    parameters = (KernelParameter("x", "*fp32"), KernelParameter("y", "*fp32"))
    kernels = [
        compiled(Kernel(name, parameters, (), f"@triton.jit\ndef {name}(x, y):\n    {name}\n", num_warps=4))
        for name in dict.fromkeys(item.kernel for item in launches if isinstance(item, Launch))
    ]
    made = replace(planned.program, kernels=tuple(kernels), architectures=("sm_90",))
    return write(folder / "model.pte", replace(planned, program=made), program.bytes).path


def wanted(artifact: Path, **changed: Any) -> Wanted:
    asked = Wanted(artifact, artifact.with_name("gpu.json"), None, None, (), 0, "cuda:0", False, jobs=1)
    return replace(asked, **changed)


def of_schema(document: Any) -> Any:
    """The document, as the committed schema has it."""
    schema = Path(devplan.__file__).parent / "devplan_cli" / "schemas" / "tune.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    return document


def test_the_best_configuration_is_written_for_exports(artifact: Path, capsys: Any) -> None:
    assert run_tuning(wanted(artifact), Output(False, False, False)) == 0
    tuning = Tuning.read(artifact.with_name("gpu.json"))
    ((key, choice),) = tuning.kernels.items()
    assert key.startswith("row_product fp32 ") and choice == {"num_warps": 2, "num_stages": 1}
    assert (tuning.gpu, tuning.architecture, tuning.algorithms) == ("Fake GPU", "sm_90", {})
    out, err = capsys.readouterr()
    assert "2 warps, 1 stage" in out and "row_product fp32" in out and key.split()[-1] not in out
    assert (
        "0 library algorithms for `run` and `export --tuning`, 1 configuration for `export --tuning`" in err
    )
    assert "measured 1 of 1 kernel of `forward`" in err


def test_the_document_has_all_that_was_measured(artifact: Path, capsys: Any) -> None:
    assert run_tuning(wanted(artifact), Output(True, False, False)) == 0
    document = of_schema(json.loads(capsys.readouterr().out))
    (kernel,) = document["kernels"]
    assert kernel["chosen"] == {"num_warps": 2, "num_stages": 1} and kernel["candidates"] == 2
    assert (kernel["first_us"], kernel["best_us"]) == (pytest.approx(4), pytest.approx(2))
    assert document["versions"].keys() == {"triton"} and document["calls"] == []


def test_kernels_can_be_left_out(artifact: Path, capsys: Any) -> None:
    assert run_tuning(wanted(artifact, kernels=False), Output(False, False, False)) == 0
    assert Tuning.read(artifact.with_name("gpu.json")).kernels == {}


def test_without_a_compiler_a_line_says_so(
    artifact: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from devplan.devplan_cli import tune_job

    monkeypatch.setattr(tune_job, "find_spec", lambda name: None)
    assert run_tuning(wanted(artifact), Output(False, False, False)) == 0
    assert "kernels are not measured: torch and triton are not installed" in capsys.readouterr().err


def test_all_methods_are_measured_each_kernel_once(
    artifact: Path, program: Any, tmp_path: Path, capsys: Any
) -> None:
    add(program.method("other"), "row_product_1a2b3c4d", "attention_2b3c4d5e")
    path = written(program, tmp_path)
    assert run_tuning(wanted(path), Output(False, False, False)) == 0
    stems = [key.split()[0] for key in Tuning.read(tmp_path / "gpu.json").kernels]
    assert sorted(stems) == ["attention", "row_product"]
    err = capsys.readouterr().err
    assert "measured 1 of 1 kernel of `forward`" in err and "measured 1 of 1 kernel of `other`" in err
    assert run_tuning(wanted(path, method="forward"), Output(False, True, False)) == 0
    assert len(Tuning.read(tmp_path / "gpu.json").kernels) == 1


def test_library_calls_are_measured_at_the_bound_and_at_each_bucket(
    artifact: Path, program: Any, symbolic: Any, tmp_path: Path, lt: Any, capsys: Any, monkeypatch: Any
) -> None:
    program.methods.clear()
    method = program.method()
    rows = symbolic(method, "s", 1, 8, "x", 0)
    x = method.input("x", (rows, 4))
    square = method.view("square", x, (4, rows), (1, 4))
    method.tensor("y", (rows, rows))
    method.call("matmul", [x, square], ["y"])
    method.output("out", "y")
    path = written(program, tmp_path, buckets=[(2,), (4,)])
    monkeypatch.setattr(cuda_backend.CudaBackend, "timeline", second_is_best)
    assert run_tuning(wanted(path), Output(True, False, False)) == 0
    calls = of_schema(json.loads(capsys.readouterr().out))["calls"]
    assert [call["key"].split()[1] for call in calls] == ["1x8x8x4", "1x2x2x4", "1x4x4x4"]
    tuning = Tuning.read(tmp_path / "gpu.json")
    assert list(tuning.algorithms.values()) == [1, 1, 1] and tuning.versions == {"cublaslt": 130100}
    assert tuning.libraries == LibraryTuning(
        "Fake GPU", "sm_90", (("cublaslt", 130100),), tuple(sorted(tuning.algorithms.items()))
    )
    assert run_tuning(wanted(path, shapes=("x=4x4",)), Output(True, False, False)) == 0
    (call,) = json.loads(capsys.readouterr().out)["calls"]
    assert call["key"].split()[1] == "1x4x4x4"


def second_is_best(self: Any, groups: Any, repeat: int, before: Any = None) -> list[list[float]]:
    """Of the library's choice and its algorithms, the second algorithm."""
    return [[1.0 if place == 2 else 2.0 for place in range(len(groups))]] * repeat

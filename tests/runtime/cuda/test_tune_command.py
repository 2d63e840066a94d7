"""`devplan tune` on a GPU that the fake driver has: what it prints, and the file that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.devplan_cli.console import Output
from devplan.devplan_cli.tune_job import Wanted, run_tuning
from devplan.runtime.artifact import write
from devplan.runtime.cuda import backend as cuda_backend
from devplan.runtime.cuda import warm
from devplan.runtime.program import Kernel, KernelCode, KernelParameter
from devplan.runtime.tune import Tuning

pytest.importorskip("torch")
pytest.importorskip("triton")
tune_kernels = pytest.importorskip("devplan.passes.tune_kernels")
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
    name, method = "row_product_1a2b3c4d", program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch(name, [x], [y])
    method.output("out", y)
    planned = program.planned()
    source = f"@triton.jit\ndef {name}(x, y):\n    tl.store(y, tl.load(x))\n"
    parameters = (KernelParameter("x", "*fp32"), KernelParameter("y", "*fp32"))
    kernel = compiled(Kernel(name, parameters, (), source, num_warps=4))
    made = replace(planned.program, kernels=(kernel,), architectures=("sm_90",))
    return write(tmp_path / "model.pte", replace(planned, program=made), program.bytes).path


def wanted(artifact: Path, **changed: Any) -> Wanted:
    asked = Wanted(artifact, artifact.with_name("gpu.json"), None, None, (), 0, "cuda:0", False, jobs=1)
    return replace(asked, **changed)


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
    assert "measured 1 of 1 kernel" in err


def test_the_document_has_all_that_was_measured(artifact: Path, capsys: Any) -> None:
    assert run_tuning(wanted(artifact), Output(True, False, False)) == 0
    document = json.loads(capsys.readouterr().out)
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

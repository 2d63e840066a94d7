"""Configurations of kernels: found on a device whose times are known, and taken over by an export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from torch.nn import functional as F

from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.lowered import compile_kernels
from devplan.passes.lowered import tune_kernels as tuning
from devplan.passes.lowered.compile_kernels import canonical, compile_candidates, compile_kernel
from devplan.passes.lowered.kernel_tuning import BLOCKS, key_of, key_of_spec, reconfigured, stem_of
from devplan.passes.tape import KernelSpec
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import PassError, UsageError
from devplan.runtime.measure.tune import Tuning
from devplan.runtime.program import CPU, Device, Kernel, KernelCode, Launch
from devplan.tests.support.exporting import assert_close, export_module, loaded
from devplan.tests.zoo.measure import without_code

pytestmark = pytest.mark.torch

CUDA = Device("cuda", 0)


class Network(torch.nn.Module):
    """A convolution, a product with a bias and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(16, 24, 3, padding=1)
        self.linear = torch.nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu(self.convolution(x)).mean((2, 3))).softmax(-1)


X = torch.randn(6, 16, 7, 9, generator=torch.Generator().manual_seed(1))


def exported(**options: Any) -> ExportResult:
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return export_module(Network(), (X,), library_calls=False, **options)


class TimedGpu(EmulatorBackend):
    """An emulated GPU that takes as long for a kernel as its warps say, and notes what each step wrote."""

    def __init__(self) -> None:
        super().__init__(CUDA)
        self.tuning: dict[str, int] = {}
        self.info = SimpleNamespace(architecture="sm_80")
        self.bound: dict[int, Launch] = {}
        self.kernels: dict[str, Kernel] = {}
        self.results: dict[str, list[bytes]] = {}

    def load(self, kernels: Any) -> None:
        self.kernels |= {kernel.name: kernel for kernel in kernels}
        super().load(kernels)

    def bind(self, instruction: Any, operands: Any, bindings: Any) -> Any:
        step = super().bind(instruction, operands, bindings)
        if not isinstance(instruction, Launch):
            return step
        out = operands[instruction.writes[0]]

        def noted() -> None:
            step()
            written = bytearray(out.numel * out.dtype.itemsize)
            self.download(out.address, memoryview(written))
            self.results.setdefault(stem_of(instruction.kernel), []).append(bytes(written))

        self.bound[id(noted)] = instruction
        return noted

    def timeline(self, groups: Any, repeat: int, before: Any = None) -> list[list[float]]:
        for group in groups:
            group[0]()
        seconds = [len(group) / self.kernels[self.bound[id(group[0])].kernel].num_warps for group in groups]
        return [seconds] * repeat


def candidates_without_code(specs: Any, architecture: str, jobs: int = 0) -> dict[str, Kernel]:
    assert architecture == "sm_80"
    return {kernel.name: kernel for kernel in without_code(specs)}


@pytest.fixture(scope="module")
def tuned() -> tuple[TimedGpu, dict[str, dict[str, int]], list[Any], ExportResult]:
    result, gpu = exported(), TimedGpu()
    constants = {digest: read() for digest, read in result.constants.items()}
    with (
        LoadedProgram(result.planned, constants, {CUDA: gpu, CPU: CpuBackend()}) as program,
        mock.patch.object(tuning, "compile_candidates", candidates_without_code),
    ):
        method = program.method()
        method(X.numpy())
        gpu.results.clear()
        chosen, findings = tuning.tune_kernels(program, method)
    return gpu, chosen, findings, result


def test_every_configuration_computes_the_same(tuned: Any) -> None:
    gpu, _, findings, _ = tuned
    assert {stem.split("_")[0] for stem in gpu.results} >= {"product", "convolution", "triton"}
    for stem in ("product", "convolution"):  # the softmax works in place, so that it begins anew each time
        first, *others = gpu.results[stem]
        wanted = np.frombuffer(first, np.float32)
        assert len(others) > 2
        for result in others:
            np.testing.assert_allclose(np.frombuffer(result, np.float32), wanted, rtol=1e-4, atol=1e-5)
    assert all(finding.candidates >= 2 for finding in findings)


def test_the_fastest_is_chosen_and_none_where_it_is_the_own(tuned: Any) -> None:
    _, chosen, findings, result = tuned
    warps = {key_of(kernel): kernel.num_warps for kernel in result.planned.program.kernels}
    for finding in findings:
        assert finding.first_seconds == 1 / warps[finding.key]
        if finding.best is None:
            assert finding.key not in chosen and finding.best_seconds == finding.first_seconds
        else:
            assert finding.best_seconds == 1 / chosen[finding.key]["num_warps"] < finding.first_seconds
    assert len(chosen) >= 3


def test_an_export_takes_over_what_was_found(tuned: Any, tmp_path: Path) -> None:
    _, chosen, _, before = tuned
    path = tmp_path / "gpu.json"
    Tuning("Timed GPU", {}, {}, "sm_80", triton.__version__, chosen).save(path)
    after = exported(tuning=path)
    by_key = {key_of(kernel): kernel for kernel in after.planned.program.kernels}
    assert set(by_key) == {key_of(kernel) for kernel in before.planned.program.kernels}
    for key, choice in chosen.items():
        kernel = by_key[key]
        assert (kernel.num_warps, kernel.num_stages) == (choice["num_warps"], choice["num_stages"])
        blocks = {name: value for name, value in kernel.constants if name in choice and name in BLOCKS}
        assert blocks == {name: choice[name] for name in blocks}
    (method,) = after.planned.program.methods
    assert f"{len(chosen)} of {len(chosen)} configurations of `{path}` are used" in method.notes
    with loaded(after) as program:
        (got,) = program.method()(X).values()
    assert_close(got, Network()(X), 1e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architecture": "sm_90"}, "measured on Timed GPU (sm_90), the export is for sm_80"),
        ({"triton": "1.0"}, "measured with triton 1.0"),
        ({"kernels": {}}, "all was best as it was"),
    ],
)
def test_a_foreign_or_stale_file_is_not_used_and_the_reason_told(
    tuned: Any, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    _, chosen, _, before = tuned
    good = Tuning("Timed GPU", {}, {}, "sm_80", triton.__version__, chosen)
    dataclasses.replace(good, **change).save(tmp_path / "gpu.json")
    after = exported(tuning=tmp_path / "gpu.json")
    assert after.planned.program.kernels == before.planned.program.kernels
    (note,) = [n for n in after.planned.program.methods[0].notes if "gpu.json" in n]
    assert "not used" in note and why in note


def test_algorithms_of_the_librarys_calls_are_embedded_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    found = {"convolution of something": 2, "matmul of something": 1}
    Tuning("Timed GPU", {"cublaslt": 130100, "cudnn": 91002}, found, "sm_90").save(path)
    with mock.patch.object(exporting, "compile_kernels", without_code):
        result = export_module(torch.nn.Conv2d(16, 24, 3), (X,), tuning=path)
    (tuning,) = result.planned.program.tunings
    assert tuning.algorithms == (("convolution of something", 2),)
    assert (tuning.gpu, tuning.architecture, tuning.versions) == ("Timed GPU", "sm_90", (("cudnn", 91002),))
    (method,) = result.planned.program.methods
    told = f"1 of 2 algorithms of `{path}` are embedded, for Timed GPU with cudnn 91002"
    assert [note for note in method.notes if "gpu.json" in note] == [told]
    none = exported(tuning=path)  # with kernels alone
    assert none.planned.program.tunings == ()
    assert f"0 of 2 algorithms of `{path}` are embedded" in none.planned.program.methods[0].notes


def test_what_is_no_tuning_file_ends_an_export(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text("{}")
    with pytest.raises(UsageError, match="no tuning file"):
        exported(tuning=tmp_path / "gpu.json")


def test_a_key_knows_what_is_computed_and_not_how(tuned: Any) -> None:
    _, _, _, result = tuned
    (kernel,) = [k for k in result.planned.program.kernels if stem_of(k.name) == "product"]
    constants = tuple((name, 16 if name in BLOCKS else value) for name, value in kernel.constants)
    same = dataclasses.replace(kernel, constants=constants, num_warps=1, num_stages=5)
    assert key_of(same) == key_of(kernel)
    constants = tuple((name, 7 if name == "M" else value) for name, value in kernel.constants)
    assert key_of(dataclasses.replace(kernel, constants=constants)) != key_of(kernel)


def test_kernels_that_follow_data_or_wait_for_each_other_are_left_alone() -> None:
    def kernel(name: str, line: str, parameter: str = "in_ptr0") -> Kernel:
        source = f"@triton.jit\ndef {name}({parameter}, out_ptr0):\n    {line}\n"
        return Kernel(name, (), (), source)

    plain = kernel("triton_poi_fused_1a", "tmp0 = tl.load(in_ptr0 + (x0), xmask)")
    gather = kernel("triton_poi_fused_2a", "tmp1 = tl.load(in_ptr0 + (x0 + 5 * tmp0), xmask)")
    own = [
        Kernel(f"{name}_0a", (), ())
        for name in ("product", "row_product", "embedding_bag", "grouped_product")
    ]
    assert tuning.is_measurable(plain) and not tuning.is_measurable(gather)
    assert [tuning.is_measurable(each) for each in own] == [True, True, False, False]


@pytest.mark.slow
def test_candidates_that_do_not_fit_are_left_out(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, _, result = tuned
    (kernel,) = [k for k in result.planned.program.kernels if stem_of(k.name) == "product"]
    (launch,) = [
        i
        for i in result.planned.program.methods[0].instructions
        if isinstance(i, Launch) and i.kernel == kernel.name
    ]
    operands = {name: SimpleNamespace(address=256) for name in (*launch.reads, *launch.writes)}
    spec = tuning.spec_of(kernel, launch, operands)  # type: ignore[arg-type]
    assert key_of_spec(spec) == key_of(kernel)
    fits, huge = (canonical(reconfigured(spec, {"num_warps": warps})) for warps in (2, 8))

    def compiled(spec: KernelSpec, architecture: str, form: str) -> KernelCode:
        if spec.num_warps == 8:
            raise PassError("it needs more shared memory than there is")
        return compile_kernel(spec, architecture, form)

    monkeypatch.setenv("DEVPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_kernels, "compile_kernel", compiled)
    for _ in range(2):  # the second time from the cache
        made = compile_candidates([fits, huge], "sm_80", 1)
        assert [code.form for code in made[fits.name].codes] == ["cubin"] and list(made) == [fits.name]

"""Loading an artifact on GPUs that the fake driver has: which one is used, with what code, and what is told."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load
from devplan.runtime.artifact import write
from devplan.runtime.cuda import backend as cuda_backend
from devplan.runtime.cuda import warm
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import DeviceError, DevplanError, ExecutionError, UsageError
from devplan.runtime.program import Device, Kernel, KernelCode, KernelParameter

CUBIN = b"\x7fELF\x02".ljust(18, b"\0") + b"\xbe".ljust(46, b"\0")
PTX = b".version 8.0\n.target sm_80\n"


def kernel(*forms: str) -> Kernel:
    """A kernel with codes such as ``sm_80 cubin``."""
    pairs = [text.split() for text in forms]
    codes = (KernelCode(a, form, "double", CUBIN if form == "cubin" else PTX, 4, 0) for a, form in pairs)
    parameters = (KernelParameter("x", "*fp32"), KernelParameter("y", "*fp32"))
    return Kernel("double", parameters, tuple(codes))


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_begun", "_contexts"):
        monkeypatch.setattr(warm, name, {})
    monkeypatch.setattr(warm, "_taken", set())
    monkeypatch.setattr(cuda_backend, "_shared", {})


@pytest.fixture
def artifact(program: Any, tmp_path: Path) -> Any:
    """Makes the artifact of y = x + x on given device slots, with given code."""

    def make(*forms: str, slots: int = 1) -> Path:
        method = program.method()
        for slot in range(slots):
            device = Device("cuda", slot)
            x = method.input(f"x{slot}", to=device)
            y = method.tensor(f"y{slot}", (4,), DType.FLOAT32, device)
            method.launch("double", [x], [y])
            method.output(f"out{slot}", y)
        planned = program.planned()
        made = replace(
            planned.program, kernels=(kernel(*(forms or ("sm_90 cubin",))),), architectures=("sm_90",)
        )
        return write(tmp_path / "model.pte", replace(planned, program=made), program.bytes).path

    return make


def contexts(cu: Any) -> list[int]:
    """GPUs of which a context was made."""
    return sorted({call[1] for call in cu.calls if call[0] == "cuDevicePrimaryCtxRetain"})


def test_the_named_gpu_serves_and_no_other_gets_a_context(artifact: Any, cu: Any) -> None:
    cu.count = 3
    with load(artifact(), "cuda:2") as program:
        program.method()(np.ones(4, np.float32))
    assert contexts(cu) == [2]
    retained = cu.names().count("cuDevicePrimaryCtxRetain")
    assert cu.names().count("cuDevicePrimaryCtxRelease") == retained == 1


def test_a_gpu_that_is_not_there_is_refused(artifact: Any, cu: Any) -> None:
    with pytest.raises(DeviceError, match="there is no GPU 4") as error:
        load(artifact(), "cuda:4")
    assert error.value.code == 6


def test_slots_are_mapped_and_mistakes_told(artifact: Any, cu: Any) -> None:
    cu.count = 4
    path = artifact(slots=2)
    with load(path, device_map={"cuda:0": "cuda:3", "cuda:1": "cuda:1"}) as program:
        assert [b.ordinal for slot, b in program.backends.items() if slot.kind == "cuda"] == [3, 1]  # type: ignore[attr-defined]
    assert contexts(cu) == [1, 3]
    with pytest.raises(UsageError, match="no slot `cuda:7`"):
        load(path, device_map={"cuda:7": "cuda:1"})
    for device in ("cuda:1", "emulator"):
        with pytest.raises(UsageError, match="with a device map"):
            load(path, device, device_map={"cuda:0": "cuda:1"})
    with pytest.raises(UsageError, match="is one GPU and the program uses 2"):
        load(path, "cuda:1")


def test_no_matching_code_names_what_there_is_and_what_is_needed(artifact: Any, cu: Any) -> None:
    cu.capability = (12, 0)
    with pytest.raises(DeviceError, match="kernel `double` has no code for this GPU") as error:
        load(artifact("sm_80 cubin", "sm_90 cubin"))
    line = error.value.line()
    assert error.value.code == 6 and "(code 6)" in line
    assert "the artifact has sm_80 (cubin), sm_90 (cubin)" in line and "the GPU runs sm_120 to sm_120" in line
    assert "cuMemAlloc" not in cu.names() and "cuLaunchKernel" not in cu.names()


def test_ptx_serves_newer_gpus_and_a_line_says_so(artifact: Any, cu: Any) -> None:
    cu.capability = (12, 0)
    path, told = artifact("sm_90 cubin", "sm_80 ptx"), list[str]()
    with load(path, notify=told.append) as program:
        assert program.compiled_from_ptx == {"sm_120": ("double",)}
        program.method()(np.ones(4, np.float32))
    assert told == [
        "the driver compiles 1 kernel from PTX: the artifact has no code for sm_120; "
        "export with `--arch sm_120` for a quicker start"
    ]
    cu.capability = (9, 0)
    told.clear()
    with load(path, notify=told.append) as program:
        assert program.compiled_from_ptx == {} and told == []


@pytest.mark.parametrize("at", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate"])
def test_a_load_that_fails_gives_everything_back(artifact: Any, cu: Any, at: str) -> None:
    cu.fail[at] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ExecutionError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
        load(artifact(), "cuda")
    assert error.value.code == 1
    assert cu.names().count("cuMemAlloc") - (at == "cuMemAlloc") == cu.names().count("cuMemFree")


RELEASES = ("Free", "Destroy", "Release", "Unload", "PopCurrent")
ASKED_IN_PASSING = ("cuGetErrorName", "cuGetErrorString", "cuStreamIsCapturing", "cuPointerGetAttribute")
"""Failures of these mean something of their own."""
TRIED_AGAIN = ("cuGraphLaunch", "cuStreamSynchronize")
"""In the right context: a thread that calls for the first time has none."""


def test_whichever_call_of_the_driver_fails_it_is_told_and_nothing_is_kept(
    artifact: Any, cu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("begin_driver", "begin_context"):  # in the background, where a failure is tried again
        monkeypatch.setattr(warm, name, lambda *given: None)
    path, x, worked = artifact(), np.ones(4, np.float32), list[int]()

    def session() -> str:
        """Load, call twice, close; how it went."""
        cu.calls.clear()
        cu.memory.clear()
        cu.capturing = False
        try:
            with load(path, "cuda") as program:
                method = program.method()
                method(x)
                method(x)
                worked.append(len(cu.calls))
                return method.no_graph_reason or "whole"
        except DevplanError as error:
            return error.line()

    assert session() == "whole"
    names, told = cu.names(), dict[str, str]()
    for number, name in enumerate(names[: worked[0]], 1):
        cu.fail_at = number
        how = session()
        cu.fail_at = 0
        if any(part in name for part in RELEASES) or name in (*ASKED_IN_PASSING, *TRIED_AGAIN):
            continue
        assert how != "whole", f"call {number}, {name}, failed unnoticed"
        assert "CUDA_ERROR_INVALID_VALUE" in how, (name, how)
        assert not cu.memory, f"call {number}, {name}: {how} {[c[0] for c in cu.calls][number - 4 :]}"
        told[name] = how
    for number in range(worked[0] + 1, len(names) + 1):  # while it closes: done or told, never a crash
        cu.fail_at = number
        assert session() == "whole" or "CUDA_ERROR_INVALID_VALUE" in session()
    cu.fail_at = 0
    assert len(told) > 15 and session() == "whole"
    assert "the capture failed" in told["cuGraphInstantiate"]
    assert "reserve" in told["cuMemAlloc"] and "launch kernel `double`" in told["cuLaunchKernel"]


def test_a_failed_capture_leaves_a_program_that_runs_and_says_why(artifact: Any, cu: Any) -> None:
    path = artifact()
    with load(path, "cuda") as program:
        cu.fail["cuGraphInstantiate"] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        method = program.method()
        method(np.ones(4, np.float32))
        assert "the capture failed" in method.no_graph_reason and "instantiate" in method.no_graph_reason
        launches = cu.names().count("cuLaunchKernel")
        method(np.ones(4, np.float32))
        assert cu.names().count("cuLaunchKernel") == launches + 1  # step by step
    with load(path, "cuda") as whole:
        whole.method()(np.ones(4, np.float32))
        assert whole.method().no_graph_reason == ""


WHOLE_START = """
import importlib.util, json, sys
processes = []
sys.addaudithook(lambda event, given: event == "subprocess.Popen" and processes.append(given[0]))
import devplan
from devplan.runtime.cuda import driver, warm
try:
    driver.bindings()  # cuda-python itself, where it is installed
except Exception:
    pass
spec = importlib.util.spec_from_file_location("fake_driver", sys.argv[1])
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)
cu = fake.FakeDriver()
driver.bindings, warm.native_driver = lambda: cu, lambda: fake.FakeNative(cu)
with devplan.load(sys.argv[2], "cuda") as program:
    import numpy as np
    program.method()(np.ones(4, np.float32))
print(json.dumps({"modules": sorted(sys.modules), "processes": processes, "calls": cu.names()}))
"""


def test_a_start_runs_no_process_and_imports_nothing_that_it_can_do_without(artifact: Any) -> None:
    """A start of 1 s has no room for executors, loggers, e-mail headers, and what exports and prints."""
    fake = Path(__file__).with_name("fake_driver.py")
    command = [sys.executable, "-c", WHOLE_START, str(fake), str(artifact())]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    modules, calls = set(done["modules"]), done["calls"]
    unwanted = {"torch", "triton", "typer", "rich", "pydantic", "flatbuffers", "sympy", "numpy.testing"}
    unwanted |= {"concurrent.futures", "logging", "importlib.metadata", "email", "asyncio", "unittest"}
    assert done["processes"] == [] and not unwanted & modules
    rooms = ("devplan.passes", "devplan.planner", "devplan.devplan_cli", "devplan.runtime.emulator")
    assert not {name for name in modules if name.startswith(rooms)}
    assert sum(name.startswith("devplan.") for name in modules) <= 75
    assert "cuGraphLaunch" in calls and calls.count("cuDevicePrimaryCtxRetain") == 1

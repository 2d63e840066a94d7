"""What a program's memory is made of, by the word of a driver that hands out whole pages and keeps some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime.artifact import write
from devplan.runtime.cuda import backend as cuda_backend
from devplan.runtime.cuda import ledger, warm
from devplan.runtime.measure.bench import measure
from devplan.runtime.program import Kernel, KernelCode, KernelParameter

CUBIN = b"\x7fELF\x02".ljust(18, b"\0") + b"\xbe".ljust(46, b"\0")
PAGE, TOTAL = 2 << 20, 1 << 37


class Accountant:
    """Device memory as the driver accounts for it; ``costs`` by the name of a call, once or each time."""

    def __init__(self, cu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken, self.costs, self.once = 0, dict[str, int](), dict[str, int]()
        self._blocks: dict[int, int] = {}
        for name in ("cuMemAlloc", "cuMemFree", "cuModuleLoadData", "cuGraphInstantiate", "cuStreamCreate",
                     "cuStreamDestroy", "cuLaunchKernel", "cuGraphLaunch", "cuMemHostAlloc", "cuGraphUpload",
                     "cuModuleUnload", "cuGraphExecDestroy"):  # fmt: skip
            answer = getattr(cu, f"_{name}", lambda *given: ())
            monkeypatch.setattr(cu, f"_{name}", self._counted(name, answer), raising=False)
        monkeypatch.setattr(cu, "_cuMemGetInfo", lambda: (TOTAL - self.taken, TOTAL), raising=False)

    def _counted(self, name: str, answer: Any) -> Any:
        def call(*given: Any) -> Any:
            self.taken += self.costs.get(name, 0) + self.once.pop(name, 0)
            result = answer(*given)
            if name == "cuMemAlloc":
                self._blocks[result] = -(-given[0] // PAGE) * PAGE
                self.taken += self._blocks[result]
            elif name == "cuMemFree":
                self.taken -= self._blocks.pop(given[0])
            return result

        return call


@pytest.fixture
def accountant(cu: Any, monkeypatch: pytest.MonkeyPatch) -> Accountant:
    for name, empty in (("_begun", {}), ("_contexts", {}), ("_taken", set[int]())):
        monkeypatch.setattr(warm, name, empty)
    monkeypatch.setattr(cuda_backend, "_shared", {})
    return Accountant(cu, monkeypatch)


@pytest.fixture
def artifact(program: Any, tmp_path: Path) -> Path:
    """y = x + x, with a copy each way."""
    method = program.method()
    y = method.tensor("y")
    method.launch("double", [method.input("x")], [y])
    method.output("y", y)
    code = KernelCode("sm_90", "cubin", "double", CUBIN, 4, 0)
    kernel = Kernel("double", (KernelParameter("x", "*fp32"), KernelParameter("y", "*fp32")), (code,))
    planned = program.planned()
    made = replace(planned.program, kernels=(kernel,), architectures=("sm_90",))
    return write(tmp_path / "model.pte", replace(planned, program=made), program.bytes).path


def measured(artifact: Path) -> dict[str, int]:
    inputs = {"x": np.ones(4, np.float32)}
    memory: dict[str, int] = measure(
        artifact, "forward", inputs, device="cuda", cold_start=False, repeat=3, warmup=1
    )["memory"]
    return memory


def test_the_parts_are_the_whole_whatever_the_driver_takes(artifact: Path, accountant: Accountant) -> None:
    accountant.costs = {
        "cuModuleLoadData": 3 * PAGE, "cuModuleUnload": -3 * PAGE, "cuGraphInstantiate": 65536,
        "cuGraphExecDestroy": -65536, "cuStreamCreate": 4096, "cuStreamDestroy": -4096,
    }  # fmt: skip
    memory = measured(artifact)
    staging = memory.pop("staging")
    total = memory.pop("measured_total")
    assert staging > 0 and sum(memory.values()) == total
    assert memory["code"] == 3 * PAGE and memory["graph"] == 65536 and memory["streams"] == 4096
    assert memory["arena"] + memory["rounding"] == PAGE
    assert memory["context"] == memory["load"] == memory["calls"] == memory["unnamed"] == 0


def test_what_the_driver_keeps_is_the_contexts(artifact: Path, accountant: Accountant) -> None:
    accountant.once = {"cuModuleLoadData": PAGE, "cuGraphLaunch": 2 * PAGE, "cuMemHostAlloc": 512}
    memory = measured(artifact)
    assert memory["context"] == 3 * PAGE + 512
    assert memory["code"] == memory["streams"] == memory["calls"] == memory["unnamed"] == 0


def test_what_is_taken_at_no_step_is_told_by_when_it_was(artifact: Path, accountant: Accountant) -> None:
    accountant.costs = {"cuGraphLaunch": 1000}  # a driver that leaks at each call
    memory = measured(artifact)
    assert memory["context"] == memory["calls"] == 1000
    assert memory["unnamed"] == 3 * 1000  # the calls that are timed


def test_steps_within_steps_are_noted_once() -> None:
    free = [100]

    def take(nbytes: int) -> None:
        free[0] -= nbytes

    noting = ledger.Ledger(lambda: free[0])
    with ledger.opened(noting), ledger.noted("outer"):
        take(1)
        for _ in range(2):
            with ledger.noted("inner"):
                take(10)
                with ledger.noted("innermost"):
                    take(-3)
        take(1)
    assert dict(noting.taken) == {"outer": 2, "inner": 20, "innermost": -6}
    with ledger.noted("outer"):  # no ledger is open
        take(5)
    assert sum(noting.taken.values()) == 16 and ledger.current() is None

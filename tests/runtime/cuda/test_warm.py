"""Starting the GPU in the background: begun once, taken once, and silent about what others will report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.cuda import warm
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.program import Device


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_begun", {})
    monkeypatch.setattr(warm, "_contexts", {})
    monkeypatch.setattr(warm, "_taken", set())


def test_a_context_is_begun_once_and_taken_by_the_backend(cu: Any) -> None:
    warm.begin_context(0)
    warm.begin_context(0)
    backend = CudaBackend(Device("cuda"), 0)
    assert cu.names().count("cuDevicePrimaryCtxRetain") == 1
    another = CudaBackend(Device("cuda"), 0)
    assert cu.names().count("cuDevicePrimaryCtxRetain") == 2
    backend.close()
    another.close()
    assert cu.names().count("cuDevicePrimaryCtxRelease") == 2


@pytest.mark.parametrize("fails", ["cuInit", "cuDevicePrimaryCtxRetain"])
def test_what_fails_here_is_left_to_whoever_needs_it(cu: Any, fails: str) -> None:
    cu.fail[fails] = cu.CUresult.CUDA_ERROR_NO_DEVICE
    warm.begin_context(0)
    begun = warm.take_context(0)
    assert (begun is None) == (fails == "cuDevicePrimaryCtxRetain")


def test_without_a_driver_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "native_driver", lambda: None)
    warm.begin_context(0)
    assert warm.take_context(0) is None


def test_a_process_that_ends_early_waits_for_what_was_begun() -> None:
    """Else a thread that comes back from the driver while Python shuts down aborts it, and the code is lost."""
    text = """
import sys, time
from devplan.runtime.cuda import warm
warm._initialise = lambda: (time.sleep(0.3), print("initialised"))
warm.begin_driver()
sys.exit(2)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "initialised\n", "")


def test_cublaslt_is_found_in_wheels_along_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert warm.find_cublaslt() is None
    place = tmp_path / "nvidia/cu13/lib/libcublasLt.so.13"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert warm.find_cublaslt() == place

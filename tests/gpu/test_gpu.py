"""The checks of `checks.py` as tests; skipped where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from devplan.runtime.cuda import driver


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_load("programs")
checks = _load("checks")
READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile the checks' kernels for this GPU, with Triton in another process."""
    pytest.importorskip("triton")
    checks.KERNELS.update(_load("kernels").build_apart(driver.devices()[0].architecture))


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_the_gpu(check: Callable[[], str]) -> None:
    name = check.__name__
    for library in ("torch", "cupy", "jax"):
        if name.endswith(library):
            pytest.importorskip(library)
    if name.endswith("imported_torch") and "torch" in sys.modules:
        pytest.skip("another test has imported torch")
    assert check()

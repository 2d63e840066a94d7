from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from devplan.runtime.cuda import backend, driver, nvidia_library, warm
from devplan.runtime.program import Device


def _load(name: str) -> ModuleType:
    """A helper module beside the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAKE = _load("fake_driver")
FAKE_CUBLASLT = _load("fake_cublaslt")


@pytest.fixture
def cu(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The fake driver, in place of cuda-python's."""
    fake = FAKE.FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(warm, "native_driver", lambda: FAKE.FakeNative(fake))
    yield fake


@pytest.fixture
def gpu(cu: object) -> Iterator[backend.CudaBackend]:
    """A backend on the fake driver."""
    made = backend.CudaBackend(Device("cuda", 0), 0)
    yield made
    made.close()


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> object:
    """The fake cuBLASLt, in place of the library."""
    fake = FAKE_CUBLASLT.FakeLt()
    monkeypatch.setattr(nvidia_library, "load", lambda name, title: (fake, "libcublasLt.so"))
    return fake

"""Exports in these tests share one kernel cache, apart from the user's."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of the test session."""
    import os

    os.environ.setdefault("DEVPLAN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))

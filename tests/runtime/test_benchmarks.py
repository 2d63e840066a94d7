"""What the benchmarks say of the runtime's insides is true, so that they do not fail where time on a GPU is short."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"a_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("module", "names"), load("bench_start").WRAPPED.items())
def test_the_timed_functions_are_where_a_cold_start_looks_them_up(
    module: str, names: tuple[str, ...]
) -> None:
    room = "" if module.startswith("devplan_cli.") else "runtime."
    home = importlib.import_module(f"devplan.{room}{module}")
    for name in names:
        assert callable(reduce(getattr, name.split("."), home)), name


def test_a_row_of_ours_has_its_times_under_any_name() -> None:
    memory: dict[str, Any] = {"measured_total": 8, "arena": 4, "constants": 2, "state": 0}
    times = {"end_to_end": {"p50": 2.0}, "device": {"p50": 1.0}}
    ours = {
        "latency_us": times,
        "memory": memory,
        "cold_start_s": {"first_result": 0.5},
        "output": [1.0],
    }
    peer = {"end_to_end": 2.0, "device": 1.0, "memory": 8, "output": [1.0], "first_result_s": 0.5}
    row_of = load("bench_runtime").row_of
    assert row_of("own kernels", ours) == row_of("own kernels", peer)
    assert row_of("devplan", {"error": "late"}) == {"name": "devplan", "error": "late"}

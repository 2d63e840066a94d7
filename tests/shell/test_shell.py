"""The shell scripts of this folder, run as CI would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODELS = ROOT / "tests" / "cli" / "models"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """This environment with a `devplan` on the path that is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "devplan"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m devplan.devplan_cli "$@"\n')
    script.chmod(0o755)
    paths = [str(ROOT.parent)] if ROOT.name == "devplan" else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def shell(
    script: str, *words: object, cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder."""
    command = ["bash", str(HERE / script), *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(shutil.which("jq") is None, reason="the recipe reads JSON with jq")
def test_the_ci_recipe_and_every_exit_code(tmp_path: Path, environment: dict[str, str]) -> None:
    first = shell("ci_recipe.sh", MODELS / "tiny.py", cwd=tmp_path, environment=environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == "forward: 2 copies, 2 generated kernels\n"
    (tmp_path / "tiny.pte").rename(tmp_path / "last.pte")
    codes = shell("exit_codes.sh", MODELS, "last.pte", cwd=tmp_path, environment=environment)
    assert codes.returncode == 0, codes.stdout + codes.stderr


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script reads JSON with jq")
def test_buckets_from_export_to_the_counts_of_a_run(tmp_path: Path, environment: dict[str, str]) -> None:
    done = shell("buckets.sh", MODELS / "batched.py", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "error: cannot use buckets of `bacth` (code 2): no method has a dynamic dimension of that name; "
        "did you mean `batch`; dynamic dimensions are `batch` of `forward` from 1 to 32",
        "error: cannot use buckets of `batch` (code 2): `batch` of `forward` from 1 to 32 does not admit 64; "
        "take sizes within the bounds, or widen those of the `Dim`",
        "error: cannot use `--buckets batch` (code 2): expected `DIMENSION=SIZE,SIZE`, such as `batch=1,8,32` "
        "or `x:0=1,8`; write `--buckets batch=1,8,32`",
        "error: input `input` has size 33 in dimension 0 (code 2): the program was exported for 1 to 32 (`batch`)",
        "error: no CUDA graph is used (code 1): the emulator has no graphs; run on a CUDA device with static "
        "shapes or a bucket's, or drop `--require-cuda-graph`",
    ]

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
    assert first.stdout == "forward: 2 copies, 1 generated kernels\n"
    (tmp_path / "tiny.pte").rename(tmp_path / "last.pte")
    codes = shell("exit_codes.sh", MODELS, "last.pte", cwd=tmp_path, environment=environment)
    assert codes.returncode == 0, codes.stdout + codes.stderr

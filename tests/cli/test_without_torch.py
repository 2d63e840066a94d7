"""An installation that only runs programs, without torch and triton: each verb works or says what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, environment

ARTIFACT = ROOT / "tests" / "artifacts" / "v1" / "sample.pte"
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `sitecustomize` hides torch and triton, with a model file and an artifact."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDE)
    (folder / "m.py").write_text("import torch\n")
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("inspect {artifact} --json", 0),
        ("diff {artifact} {artifact}", 0),
        ("export --print-config", 0),
        ("export m.py", 1),
        ("verify {artifact} m.py", 1),
        ("run {artifact} --device emulator", 2),
    ],
)
def test_each_verb_works_or_names_what_is_missing(hidden: Path, words: str, code: int) -> None:
    surroundings = environment()
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hidden), surroundings.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "devplan.devplan_cli", *words.format(artifact=ARTIFACT).split()],
        cwd=hidden, env=surroundings, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    if code:
        assert "torch" in done.stderr.splitlines()[-1]


def test_the_python_function_names_it_too(hidden: Path) -> None:
    surroundings = environment()
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hidden), surroundings.get("PYTHONPATH")]))
    script = (
        "import devplan\ntry: devplan.export\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=surroundings, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("DevplanError cannot export")
    assert "torch is not installed" in done.stdout

"""The command as its users meet it: a process with arguments, two streams and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

MODELS = Path(__file__).parent / "models"
ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "devplan_cli" / "schemas"


@dataclass(frozen=True)
class Result:
    """What a process left behind."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of standard error."""
        return self.err.strip().splitlines()[-1]

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as the one JSON document that it must be."""
        loaded: dict[str, Any] = json.loads(self.out)
        return loaded


def environment() -> dict[str, str]:
    """This process's environment, without colour; `devplan` is importable as it is here."""
    paths = [str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    plain = {"NO_COLOR": "1", "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}
    here = {"PYTHONPATH": os.pathsep.join(paths)} if ROOT.name == "devplan" else {}
    return {**os.environ, **plain, **here}


def devplan(*words: str | Path, cwd: Path | None = None) -> Result:
    """Run the command to its end."""
    command = [sys.executable, "-m", "devplan.devplan_cli", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300)
    return Result(done.returncode, done.stdout, done.stderr)


def check_schema(document: dict[str, Any], name: str) -> None:
    """Validate against a committed schema."""
    folder = ROOT / "runtime" / "artifact" if name == "inspect" else SCHEMAS
    jsonschema.validate(document, json.loads((folder / f"{name}.schema.json").read_text()))


@dataclass(frozen=True)
class Made:
    """An artifact that the command made, with what it said."""

    path: Path
    result: Result


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`models/tiny.py`, exported with ``--json --check --report``."""
    folder = tmp_path_factory.mktemp("tiny")
    words = ("export", MODELS / "tiny.py", "--json", "--check", "--report", "tiny.html")
    result = devplan(*words, cwd=folder)
    assert result.code == 0, result.err
    return Made(folder / "tiny.pte", result)


@pytest.fixture(scope="session")
def tiny_half(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The same in half precision with inputs and outputs on the device, told to a person."""
    folder = tmp_path_factory.mktemp("half")
    words = ("export", MODELS / "tiny.py", "-o", "half.pte", "--dtype", "float16", "--io", "device")
    result = devplan(*words, "--arch", "sm_90", cwd=folder)
    assert result.code == 0, result.err
    return Made(folder / "half.pte", result)


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`models/memory.py`: two methods, one state."""
    folder = tmp_path_factory.mktemp("memory")
    result = devplan("export", MODELS / "memory.py", "-q", cwd=folder)
    assert result.code == 0, result.err
    return Made(folder / "memory.pte", result)

"""Every command and every Python block of the pages runs, in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "devplan_cli/model-file.md",
    "devplan_cli/ci.md",
    "passes/README.md",
    "passes/operators.md",
    "planner/README.md",
    "runtime/README.md",
    "runtime/artifact/README.md",
    "tests/README.md",
    "tests/zoo/README.md",
]
NOT_HERE = ("pip install", "pytest", "python -m", "configs/models/")
"""What installs, tests itself, regenerates code, or needs packages that a test machine may lack."""


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    text = (ROOT / page).read_text()
    return [
        body
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M)
        if language in languages
    ]


def commands(page: str) -> list[str]:
    """The devplan and jq commands of a page: lines of shell blocks, and what follows a prompt in sessions."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += [
        line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")
    ]
    lines = [line.split("  #")[0].strip() for line in lines]
    return [
        line
        for line in lines
        if line.startswith(("devplan ", "jq ")) and not any(w in line for w in NOT_HERE)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model files that the pages show, and a `devplan` on the path."""
    path = tmp_path_factory.mktemp("docs")
    (path / "model.py").write_text(blocks("README.md", "python")[0])
    (path / "memory.py").write_text(blocks("devplan_cli/model-file.md", "python")[1])
    (path / "bin").mkdir()
    (path / "bin" / "devplan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m devplan.devplan_cli "$@"\n')
    (path / "bin" / "devplan").chmod(0o755)
    return path


def environment(folder: Path) -> dict[str, str]:
    """This environment, with this checkout's `devplan`."""
    paths = [str(ROOT.parent)] if ROOT.name == "devplan" else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
@pytest.mark.torch
def test_every_command_of_the_pages_runs(folder: Path) -> None:
    done: set[str] = set()
    for page in PAGES:
        for command in commands(page):
            if command in done:
                continue
            done.add(command)
            result = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment(folder),
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, (
                f"{page}: `{command}` ended with {result.returncode}: {result.stderr}"
            )
    assert (folder / "model.html").is_file() and (folder / "model.svg").is_file()
    for script in (blocks("README.md", "python")[1], blocks("runtime/README.md", "python")[0]):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=folder, env=environment(folder), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr


def test_the_pages_python_compiles() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, page, "exec")


def test_the_sessions_of_the_pages_name_commands_that_exist() -> None:
    assert {"devplan export model.py", "devplan verify model.pte model.py"} <= set(commands("README.md"))
    assert all(commands(page) for page in ("devplan_cli/ci.md", "planner/README.md", "runtime/README.md"))


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            if not link.startswith("http"):
                assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_the_readme_has_the_two_commands_on_its_first_screen() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:24]
    assert any('pip install -e ".[dev]"' in line for line in first)
    assert any(line.startswith("pytest") for line in first)

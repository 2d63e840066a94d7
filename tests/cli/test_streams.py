"""Streams that are closed, full, without a reader or with few letters, as shells and services hand them over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Made, devplan, environment

ARTIFACT = ROOT / "tests" / "artifacts" / "v1" / "sample.pte"
DEVPLAN = f"{sys.executable} -m devplan.devplan_cli"


def shell(
    line: str, cwd: Path | None = None, *, buffered: bool = True, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which ``$devplan`` is the command and ``$artifact`` a program."""
    surroundings = environment() | {"devplan": DEVPLAN, "artifact": str(ARTIFACT)} | variables
    surroundings.pop("PYTHONUNBUFFERED", None)
    surroundings |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=surroundings, capture_output=True, timeout=120, check=False
    )


PRINTING = ("--version", "--help", "inspect $artifact", "inspect $artifact --json", "export --print-config")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", PRINTING)
def test_a_full_disk_under_standard_output_is_code_1_and_one_line(words: str, buffered: bool) -> None:
    done = shell(f"$devplan {words} >/dev/full", buffered=buffered)
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: cannot write"), lines
    assert "No space left on device" in lines[0]


@pytest.mark.parametrize("words", PRINTING)
def test_a_reader_that_has_gone_ends_the_command_without_a_word(words: str) -> None:
    done = shell(f"$devplan {words} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 141
    assert b"rror" not in done.stderr


@pytest.mark.parametrize("words", PRINTING)
def test_a_closed_standard_output_loses_what_is_printed_and_no_more(words: str, tmp_path: Path) -> None:
    done = shell(f"$devplan {words} >&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.torch
@pytest.mark.slow
def test_a_run_goes_on_without_its_streams(tiny: Made, tmp_path: Path) -> None:
    def run(words: str) -> subprocess.CompletedProcess[bytes]:
        return shell(f"$devplan run {words}", tmp_path, artifact=str(tiny.path))

    # What is printed must not land in a file that has got a closed stream's number.
    assert run("$artifact --outputs out.npz >&- 2>&-").returncode == 0
    assert devplan("run", tiny.path, "--expect", tmp_path / "out.npz").code == 0
    told = run("$artifact --json 2>/dev/full")
    assert told.returncode == 0 and json.loads(told.stdout)["device"]
    assert run("$artifact --json 2>&1 | true; exit ${PIPESTATUS[0]}").returncode == 141


def test_failures_keep_their_code_when_nobody_reads_them() -> None:
    assert shell("$devplan inspect absent.pte 2>&-").returncode == 2
    assert shell("$devplan inspect absent.pte --json >/dev/full 2>/dev/full").returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_the_encoding_lacks_are_escaped(encoding: str, tmp_path: Path) -> None:
    name = "modèle-模型.pte"
    (tmp_path / name).write_bytes(ARTIFACT.read_bytes())
    told = shell(f"$devplan inspect {name} --plan", tmp_path, PYTHONIOENCODING=encoding)
    assert told.returncode == 0, told.stderr
    failed = shell(f"$devplan inspect {name}x --json", tmp_path, PYTHONIOENCODING=encoding)
    assert failed.returncode == 2
    assert name in json.loads(failed.stdout.decode("utf-8"))["error"]["message"]
    assert failed.stderr.startswith(b"error: ") and b"Traceback" not in failed.stderr


def test_a_name_that_is_not_utf_8_is_json_too(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xffd.pte")
    done = shell("$devplan inspect $'b\\xffd.pte' --json", tmp_path)
    assert done.returncode == 2
    assert name in json.loads(done.stdout)["error"]["message"]


def test_print_config_with_json_is_wrong_usage() -> None:
    result = devplan("export", "--print-config", "--json")
    assert result.code == result.document["error"]["code"] == 2


def test_a_drawing_on_a_full_disk_is_named_and_not_there(tmp_path: Path) -> None:
    done = shell("ulimit -f 1; $devplan inspect $artifact --report page.html", tmp_path)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("error: cannot use `page.html` (code 1): File too large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", ["1", "30", "200"])
def test_a_narrow_terminal_loses_nothing_of_a_table(columns: str, tmp_path: Path) -> None:
    if shutil.which("script") is None:
        pytest.skip("needs `script`, which makes a terminal")
    command = f"stty cols {columns}; $devplan inspect $artifact"
    done = shell(f"script -qec '{command}' /dev/null", tmp_path, NO_COLOR="1")
    assert done.returncode == 0 and b"\xe2\x80\xa6" not in done.stdout
    assert b"lowest gap" in done.stdout or b"planned" in done.stdout

"""What `run` begins before its words are parsed: the GPU that they name, if any."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from devplan.devplan_cli.early import begin_gpu
from devplan.runtime.cuda import warm


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("run model.pte", ["driver"]),
        ("run model.pte --device cuda", ["driver", "context 0"]),
        ("run --device=cuda:2 model.pte", ["driver", "context 2"]),
        ("run model.pte --device cuda --device-map cuda:0=cuda:1", ["driver"]),
        ("run model.pte --device cuda:x", ["driver"]),
        ("run model.pte --device", ["driver"]),
        ("run model.pte --device emulator", []),
        ("run model.pte --device=cpu", []),
        ("run --help", []),
        ("export model.py --device cuda", []),
        ("", []),
    ],
)
def test_what_words_begin(monkeypatch: pytest.MonkeyPatch, words: str, begun: list[str]) -> None:
    calls: list[str] = []
    monkeypatch.setattr(warm, "begin_driver", lambda: calls.append("driver"))
    monkeypatch.setattr(warm, "begin_context", lambda number: calls.append(f"context {number}"))
    begin_gpu(words.split())
    assert calls == begun


def test_the_gpu_is_begun_before_the_command_is_imported() -> None:
    text = """
import sys
from devplan.devplan_cli import __main__ as command
from devplan.runtime.cuda import warm
def begin():
    print(sorted({"typer", "rich", "numpy"} & set(sys.modules)))
warm.begin_driver = begin
sys.argv = ["devplan", "run", "missing.pte"]
command.main()
"""
    done: Any = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "[]" and done.returncode == 2, done.stderr

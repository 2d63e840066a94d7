"""Model files that do to the process what they should not: the contract holds all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import check_schema, devplan, environment

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

GOOD = "import atexit, os, sys, torch\nmodel = torch.nn.ReLU()\nexample_inputs = (torch.ones(2, 4),)\n"
NOISE = """
print("printed")
os.write(1, b"written\\n")
os.system("echo from a shell")
atexit.register(os.write, 1, b"at exit\\n")
atexit.register(print, "printed at exit")
os.fork()
os.chdir("/")
sys.stdout = None
"""


def test_noise_forks_and_a_change_of_folder_leave_the_document_and_the_artifact_alone(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(GOOD + NOISE)
    result = devplan("export", "noisy.py", "--json", cwd=tmp_path)
    assert result.code == 0, result.err
    check_schema(result.document, "inspect")
    assert (tmp_path / "noisy.pte").is_file()
    for line in ("printed", "written", "from a shell", "at exit", "printed at exit"):
        assert line in result.err.splitlines()


ENDS = {
    "an exit on import": (GOOD + "sys.exit(0)", 2, "importing it raised `SystemExit` at m.py:4"),
    "an error beyond errors": (
        GOOD + "class Odd(BaseException): ...\nraise Odd", 2, "importing it raised `Odd` at m.py:5"
    ),
    "letters that steer terminals": (
        GOOD + "raise ValueError('\\x1b[31mred\\udcff')", 2, "`ValueError` at m.py:4: \\x1b[31mred\\udcff;"
    ),
    "an exit while it is exported": (
        GOOD + "class model(torch.nn.Module):\n    def forward(self, x):\n        sys.exit(0)", 3, "(at m.py:6)"
    ),
    "a tensor beyond the format": (
        GOOD + "example_inputs = (torch.empty(1 << 40, device='meta'),)", 3, "that ET12 cannot hold"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_no_model_file_ends_the_command_with_a_code_of_its_own(tmp_path: Path, case: str) -> None:
    text, code, expected = ENDS[case]
    (tmp_path / "m.py").write_text(text + "\n")
    result = devplan("export", "m.py", "--json", cwd=tmp_path)
    assert result.code == result.document["error"]["code"] == code, result.err
    assert expected in result.last_line and result.last_line.isprintable()
    assert not list(tmp_path.glob("*.pte"))


def test_an_interrupt_is_130_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(GOOD + "import time\nopen('ready', 'w').close()\ntime.sleep(60)\n")
    (tmp_path / "m.pte").write_text("old")
    command = [sys.executable, "-m", "devplan.devplan_cli", "export", "m.py"]
    begun = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists() and begun.poll() is None:
        time.sleep(0.05)
    begun.send_signal(signal.SIGINT)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 130
    assert told.splitlines()[-1] == "interrupted" and "Traceback" not in told
    assert {path.name for path in tmp_path.iterdir()} == {"m.py", "m.pte", "ready"}
    assert (tmp_path / "m.pte").read_text() == "old"


def test_a_saved_program_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.pt2").write_text("no archive\n")
    result = devplan("export", "p.pt2", cwd=tmp_path)
    assert result.code == 2 and "Traceback" not in result.err

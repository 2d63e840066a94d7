"""`devplan export`: what it writes and says, and each way in which it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devplan.devplan_cli.budgets import check_artifact, check_plan
from devplan.passes.config.read import load_config
from devplan.runtime.artifact import read
from devplan.runtime.errors import BudgetError

from .conftest import MODELS, Made, check_schema, devplan, environment

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_the_document_of_an_export_is_that_of_inspect_and_its_cost(tiny: Made) -> None:
    document = tiny.result.document
    inspected = devplan("inspect", tiny.path, "--json").document
    check_schema(inspected, "inspect")
    assert {key: document[key] for key in inspected} == inspected
    assert document["export_seconds"] > 0 and document["peak_rss_bytes"] > 1 << 20
    assert document["file"]["bytes"] == tiny.path.stat().st_size


def test_the_summary_says_what_a_person_wants_to_know(tiny_half: Made) -> None:
    out = tiny_half.result.out
    for word in (
        "Methods",
        "Arenas",
        "Kernels",
        "Constants",
        "Took",
        "Wrote",
        "half.pte",
        "float16[2x16] @cuda:0",
    ):
        assert word in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\x1b" not in out + tiny_half.result.err
    stages = [line.split()[0] for line in tiny_half.result.err.splitlines() if line.startswith("  ")]
    assert stages == ["load", "export", "place", "lower", "compile", "plan", "write"]


def test_device_io_leaves_no_copies(tiny: Made, tiny_half: Made) -> None:
    def copies(made: Made) -> list[str]:
        document = devplan("inspect", made.path, "--json").document
        return [copy["kind"] for copy in document["methods"][0]["copies"]]

    assert (copies(tiny), copies(tiny_half)) == (["h2d", "d2h"], [])


def test_the_report_is_one_page_that_needs_no_network(tiny: Made) -> None:
    page = (tiny.path.parent / "tiny.html").read_text()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert (
        "http://" not in page.replace("http://www.w3.org", "")
        and "https://" not in page
        and "src=" not in page
    )
    for heading in (
        "Method forward",
        "Arena on cuda:0",
        "Regions and copies",
        "Tensors by size",
        "Constants by module",
    ):
        assert heading in page


def test_what_cannot_be_exported_is_code_3_with_the_users_line(tmp_path: Path) -> None:
    result = devplan("export", MODELS / "eigenvalues.py", "--json", cwd=tmp_path)
    assert result.code == 3, result.err
    check_schema(result.document, "error")
    assert result.document["error"]["kind"] == "unsupported"
    assert "(code 3)" in result.last_line and "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_off_the_convention_is_code_2_with_the_users_line(tmp_path: Path) -> None:
    result = devplan("export", MODELS / "misspelled.py", cwd=tmp_path)
    assert result.code == 2
    assert "did you mean `modle` at misspelled.py:5" in result.last_line


def test_over_a_budget_is_code_5_and_the_old_file_stays(tmp_path: Path) -> None:
    old = tmp_path / "tiny.pte"
    old.write_bytes(b"old")
    result = devplan("export", MODELS / "tiny.py", "--fail-on-copy", cwd=tmp_path)
    assert (result.code, old.read_bytes()) == (5, b"old")
    assert "2 copies exceed the budget of 0 (code 5): `input` h2d in `forward`" in result.last_line
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize(
    ("budget", "part"),
    [
        ({"budget.artifact-size": "1kB"}, "the artifact of 9.77 KiB exceeds the budget of 1000 B"),
        ({"budget.copies": 1}, "2 copies exceed the budget of 1"),
    ],
)
def test_each_budget_says_what_is_over_it(tiny: Made, budget: dict[str, object], part: str) -> None:
    planned, config = read(tiny.path).planned, load_config(flags=budget)
    with pytest.raises(BudgetError, match=part):
        check_plan(planned, config)
        check_artifact(10_000, config)


def test_within_the_budgets_nothing_is_said(tiny: Made) -> None:
    config = load_config(flags={"budget.artifact-size": "1MB", "budget.memory": "1GiB", "budget.copies": 2})
    check_plan(read(tiny.path).planned, config)
    check_artifact(10_000, config)


def test_an_export_says_something_at_once_and_dies_cleanly_when_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "devplan.devplan_cli", "export", str(MODELS / "tiny.py")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == f"exporting {MODELS / 'tiny.py'} to tiny.pte\n"
    used = Path(f"/proc/{process.pid}/schedstat")
    if used.exists():  # processor time, which other work on the machine does not lengthen
        assert int(used.read_text().split()[0]) <= 0.35e9
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and err.strip().splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_the_python_interface_speaks_the_same_words_and_writes_the_same_bytes(
    tiny: Made, tmp_path: Path
) -> None:
    script = f"""
import json, sys
sys.path.insert(0, {str(MODELS)!r})
import numpy, devplan
assert "torch" not in sys.modules
import tiny
exported = devplan.export(tiny.model, tiny.example_inputs, io="host")
path = exported.write({str(tmp_path / "api.pte")!r})
x = tiny.example_inputs[0]
with devplan.load(path, "emulator") as program:
    (ours,) = program.method()(x.numpy()).values()
with exported.load("emulator") as program:
    (again,) = program.method()(x.numpy()).values()
try:
    devplan.export(tiny.model, tiny.example_inputs, dtyp="float16")
except devplan.runtime.errors.UsageError as error:
    hint = error.hint
print(json.dumps([float(abs(ours - tiny.model(x).detach().numpy()).max()), bool((ours == again).all()), hint]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    error, same, hint = json.loads(done.stdout)
    assert (tmp_path / "api.pte").read_bytes() == tiny.path.read_bytes()
    assert error <= 1e-6 and same and hint == "did you mean `dtype`"


def test_explain_says_where_each_operator_is_and_why_each_copy(tmp_path: Path) -> None:
    result = devplan("export", MODELS / "tiny.py", "--explain", "-o", tmp_path / "tiny.pte")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert any(line.startswith("insert-copies on forward: changed") for line in lines)
    placed = [line for line in lines if "region 0 on cuda:0 (default device)" in line]
    assert [line.split(":")[0].strip() for line in placed] == ["linear", "gelu", "linear_1"]
    assert any(line.startswith("  h2d `") and "is read by region 0 on cuda:0" in line for line in lines)

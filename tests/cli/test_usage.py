"""Wrong usage, help, versions and start-up time: nothing here imports torch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import check_schema, devplan, environment

VERBS = ("export", "run", "inspect", "verify", "bench", "tune", "diff", "doctor")
CONTRACT = {
    "export": "--output --config --device --dtype --arch --io --skip-h2d --skip-d2h --device-planning "
    "--no-device-planning --weights --memory-budget --max-artifact-size --max-copies --fail-on-copy --check "
    "--report --json --quiet --verbose --no-progress --print-config --explain -o -q -v",
    "run": "--method --input --inputs --shape --seed --outputs --expect --rtol --atol --device --repeat --warmup "
    "--profile --require-cuda-graph --allow-torch-ops --json",
    "inspect": "--json --plan --report --svg",
    "verify": "--json --device",
    "bench": "--json --device",
    "tune": "--output --json --device",
    "diff": "--json --markdown",
    "doctor": "--json",
}

WRONG = {
    "no verb of that name": (("exprt",), "did you mean `export`"),
    "no option of that name": (("export", "m.py", "--dtyp", "float16"), "did you mean `--dtype`"),
    "no source": (("export",), "SOURCE is missing"),
    "a source that is not there": (("export", "absent.py"), "there is no such file"),
    "a source that is none": (("export", "absent"), "a SOURCE is `model.py`"),
    "a dtype that is none": (("export", "m.py", "--dtype", "float61"), "did you mean `float16`"),
    "an architecture that is none": (("export", "m.py", "--arch", "sm_91"), "known are"),
    "a location that is none": (("export", "m.py", "--io", "gpu"), "`gpu` is no location"),
    "a size that is none": (("export", "m.py", "--memory-budget", "2 apples"), "`2GiB`"),
    "a number that is none": (("run", "m.pte", "--repeat", "x"), "--repeat"),
    "a pass that is none": (("export", "m.py", "--config", "passes.toml"), "did you mean `fold-constants`"),
    "a configuration that is not there": (("export", "m.py", "--config", "defalt"), "did you mean `default`"),
    "a folder that is not there": (("export", "m.py", "-o", "no/m.pte"), "there is no folder `no`"),
    "an artifact that is not there": (("inspect", "absent.pte"), "there is no such file"),
    "an artifact that is a folder": (("inspect", "."), "it is a folder"),
    "a device that is none": (("run", "m.pte", "--device", "tpu"), "devices are"),
    "outputs of another format": (("run", "m.pte", "--outputs", "o.txt"), "`.npz`"),
    "a tolerance of nothing": (("run", "m.pte", "--rtol", "1"), "belong to `--expect`"),
    "an output that is the source": (("export", "m.py", "-o", "m.py"), "the same file is read"),
    "a report that is the source": (("export", "m.py", "--report", "./m.py"), "the same file is read"),
    "a report that is the artifact": (("export", "m.py", "--report", "m.pte"), "the same file is written"),
    "a drawing that is the artifact": (("inspect", "m.pte", "--svg", "m.pte"), "the same file is read"),
    "a profile that is the artifact": (("run", "m.pte", "--profile", "m.pte"), "the same file is read"),
    "a measurement that is the artifact": (("tune", "m.pte", "-o", "m.pte"), "the same file is read"),
    "a date in a configuration": (("export", "m.py", "--config", "date.toml"), "expected one of `float32`"),
    "an artifact that is a pipe": (("inspect", "pipe.pte"), "it is no ordinary file"),
    "contradicting options": (
        ("export", "m.py", "--io", "device", "--no-device-planning"),
        "need planned device memory",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and an artifact that nobody comes to read."""
    path = tmp_path_factory.mktemp("usage")
    (path / "m.py").write_text("raise SystemExit\n")
    (path / "m.pte").write_bytes(b"")
    (path / "date.toml").write_text("[export]\ndtype = 2020-01-01\n")
    os.mkfifo(path / "pipe.pte")
    (path / "passes.toml").write_text('pipeline = ["fold-constant"]\n')
    return path


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_code_2_and_one_line(folder: Path, case: str) -> None:
    words, expected = WRONG[case]
    result = devplan(*words, cwd=folder)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1, result.err
    assert result.last_line.startswith("error: ") and " (code 2)" in result.last_line
    assert expected in result.last_line


def test_wrong_usage_with_json_is_a_document_too(folder: Path) -> None:
    result = devplan("export", "absent.py", "--json", cwd=folder)
    check_schema(result.document, "error")
    assert result.document["error"]["code"] == result.code == 2
    assert result.last_line.startswith("error: ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_every_option_of_the_contract_and_an_example(verb: str) -> None:
    result = devplan(verb, "--help")
    assert result.code == 0
    words = set(result.out.replace("│", " ").replace(",", " ").split())
    assert set(CONTRACT[verb].split()) <= words
    assert f"devplan {verb}" in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines())


def test_help_is_the_golden_one() -> None:
    names = [
        line.split()[1]
        for line in devplan("--help").out.splitlines()
        if line.startswith("│ ") and line[2] != " "
    ]
    assert [name for name in names if not name.startswith("-")] == list(VERBS)


def test_version_names_what_it_builds_on() -> None:
    lines = devplan("--version").out.splitlines()
    assert [line.split()[0] for line in lines] == ["devplan", "format", "torch", "triton", "cuda-python"]
    assert lines[1] == "format ET12"


def test_no_verb_prints_help() -> None:
    result = devplan()
    assert result.code == 2
    assert "Usage: devplan" in result.out
    assert result.last_line.startswith("error: wrong usage (code 2): a verb is missing")


def fastest(*words: str, folder: Path) -> float:
    """Processor seconds of the cheapest of some runs: what the command needs, whatever else the machine does."""
    command = [sys.executable, "-m", "devplan.devplan_cli", *words]
    compiled = environment() | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}  # as after an installation
    del compiled["PYTHONDONTWRITEBYTECODE"]
    seconds: list[float] = []
    for _ in range(5):
        begin = children_seconds()
        subprocess.run(command, cwd=folder, env=compiled, capture_output=True, check=False)
        seconds.append(children_seconds() - begin)
    return min(seconds)


def children_seconds() -> float:
    """Processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_takes_at_most_300_ms(folder: Path) -> None:
    assert fastest("--help", folder=folder) <= 0.3


def test_arguments_are_checked_before_anything_heavy_is_imported(folder: Path) -> None:
    script = (
        "import sys; from devplan.devplan_cli.main import main\n"
        "try: main(['export', 'absent.py', '--dtype', 'float16'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'triton', 'numpy', 'cuda') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_print_config_says_where_values_come_from(folder: Path) -> None:
    result = devplan("export", "--config", "device-io", "--dtype", "float16", "--skip-h2d", "--print-config")
    assert result.code == 0
    assert 'dtype = "float16"' in result.out and "# --dtype" in result.out
    assert "device-io.toml:" in result.out and "# default" in result.out


def test_doctor_knows_the_mends() -> None:
    told, listed = devplan("doctor"), devplan("doctor", "--json")
    assert (told.code, listed.code) == (0, 0)
    check_schema(listed.document, "doctor")
    checks = {check["name"]: check for check in listed.document["checks"]}
    assert {
        "python",
        "torch",
        "triton",
        "triton matches torch",
        "cuda-python",
        "NVIDIA driver",
        "GPU",
    } <= set(checks)
    for check in checks.values():
        assert check["ok"] or check["mend"] in told.out


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m devplan.devplan_cli doctor | head -n 1"
    done = subprocess.run(command, shell=True, env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr == ""

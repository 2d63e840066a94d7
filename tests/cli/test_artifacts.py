"""The verbs that read artifacts: inspect, run, verify, bench, diff."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from devplan.devplan_cli.main import main
from devplan.runtime.artifact import read, write
from devplan.runtime.method import LoadedMethod
from devplan.runtime.program import LibraryTuning

from .conftest import MODELS, Made, check_schema, devplan, environment

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

GPU = Path("/dev/nvidia0").exists()


def test_inspect_tells_a_person(tiny: Made) -> None:
    out = devplan("inspect", tiny.path).out
    for part in ("ET12", "sm_80, sm_90", "input float32[2x16]", "h2d", "d2h", "Arenas"):
        assert part in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_what_is_tuned_is_told_by_inspect_diff_and_run(tiny: Made, tmp_path: Path) -> None:
    plain = read(tiny.path)
    tuning = LibraryTuning("NVIDIA H200", "sm_90", (("cublaslt", 130100),), (("matmul 1x2x3x4", 3),))
    program = replace(plain.planned.program, tunings=(tuning,))
    sources = {digest: (lambda data=data: data) for digest, data in plain.constants.items()}
    path = tmp_path / "tuned.pte"
    write(path, replace(plain.planned, program=program), sources)
    line = "Tuned for  NVIDIA H200 (sm_90) with cublaslt 130100: 1 algorithm"
    assert line in devplan("inspect", path).out and "Tuned" not in devplan("inspect", tiny.path).out
    (listed,) = json.loads(devplan("inspect", path, "--json").out)["library_tunings"]
    assert listed["algorithms"] == {"matmul 1x2x3x4": 3}
    lost = json.loads(devplan("diff", path, tiny.path, "--json").out)
    check_schema(lost, "diff")
    (change,) = [change for change in lost["changes"] if change["kind"] == "tuning"]
    assert change["what"] == "library algorithms for NVIDIA H200 are gone" and change["matters"]
    assert "not used" in devplan("run", path, "--device", "emulator", "--verbose").err
    assert "not used" not in devplan("run", path, "--device", "emulator").err


def test_inspect_draws_the_plan(tiny: Made, tmp_path: Path) -> None:
    result = devplan(
        "inspect", tiny.path, "--plan", "--svg", tmp_path / "plan.svg", "--report", tmp_path / "plan.html"
    )
    assert result.code == 0, result.err
    explained = devplan("inspect", tiny.path, "--explain").out
    assert "Alive at the peak of forward on cuda:0" in explained and "row_product in 0" in explained
    assert "forward on cuda:0" in result.out and "instruction" in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines())
    svg = (tmp_path / "plan.svg").read_text()
    assert svg.startswith("<svg") and svg.count("<rect") >= 3
    assert (tmp_path / "plan.html").stat().st_size > 5_000


def test_inspect_and_diff_import_neither_torch_nor_numpy_nor_triton(tiny: Made) -> None:
    script = (
        "import sys; from devplan.devplan_cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    for words in (["inspect", str(tiny.path), "--json"], ["diff", str(tiny.path), str(tiny.path)]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.strip() == "[]"


def test_run_writes_what_it_then_expects(tiny: Made, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    x = np.random.default_rng(1).standard_normal((2, 16), np.float32)
    np.save(tmp_path / "x.npy", x)
    result = devplan("run", tiny.path, "--input", f"input={tmp_path / 'x.npy'}", "--outputs", out, "--json")
    assert result.code == 0, result.err
    check_schema(result.document, "run")
    if not GPU:
        assert result.err.splitlines()[0] == "no CUDA device; running on the emulator"
    again = ("run", tiny.path, "--input", f"input={tmp_path / 'x.npy'}", "--expect", out, "--json")
    same = devplan(*again)
    assert same.code == 0 and same.document["comparisons"][0]["equal"]


def test_other_results_are_code_4_with_the_first_index(tiny: Made, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    assert devplan("run", tiny.path, "--seed", 1, "--outputs", out).code == 0
    tensors = dict(np.load(out))
    tensors["output"][1, 2] += 1
    np.savez(out, **tensors)
    result = devplan("run", tiny.path, "--seed", 1, "--expect", out, "--json")
    assert result.code == 4
    assert "1 of 8 differ, first at [1, 2]" in result.last_line
    check_schema(result.document, "run")
    check_schema(result.document, "error")
    assert devplan("run", tiny.path, "--seed", 1, "--expect", out, "--atol", 2).code == 0


def test_half_precision_and_device_inputs_run_too(tiny_half: Made, tmp_path: Path) -> None:
    result = devplan(
        "run", tiny_half.path, "--outputs", tmp_path / "out.safetensors", "--json", "--repeat", 3
    )
    assert result.code == 0, result.err
    assert result.document["outputs"][0]["dtype"] == "float16"
    assert result.document["copies"]["h2d"]["count"] == result.document["copies"]["d2h"]["count"] == 0
    assert devplan("run", tiny_half.path, "--expect", tmp_path / "out.safetensors").code == 0


WRONG_INPUTS = {
    "a name": (("--input", "x=x.npy"), 2, "unknown input `x`"),
    "a file": (("--input", "input=absent.npy"), 2, "there is no such file"),
    "a form": (("--input", "input"), 2, "expected `NAME=FILE.npy`"),
    "a shape": (("--input", "input=wrong.npy"), 2, "input"),
    "a dtype": (("--input", "input=whole.npy"), 2, "float32"),
    "a name twice": (
        ("--input", "input=whole.npy", "--input", "input=wrong.npy"),
        2,
        "`input` is given twice",
    ),
    "a random shape": (("--shape", "input=3x16"), 2, "the program takes 2x16"),
    "a method": (("--method", "forwards"), 2, "did you mean `forward`"),
    "an expected output": (("--expect", "other.npz"), 2, "unknown output `y`"),
    "a graph where there is none": (
        ("--require-cuda-graph", "--device", "emulator"),
        1,
        "no CUDA graph is used",
    ),
    "a host": (("--device", "cpu"), 6, "no code for `cpu`"),
    "a GPU": (("--device", "cuda:77"), 6, "(code 6)"),
}


def test_nothing_runs_where_a_graph_is_wanted_and_there_is_none(
    tiny: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoadedMethod, "run", lambda *given, **named: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tiny.path), "--device", "emulator", "--require-cuda-graph"])
    assert ended.value.code == 1 and "no CUDA graph is used" in capsys.readouterr().err


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_what_does_not_fit_is_refused(tiny: Made, tmp_path: Path, case: str) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 16), np.float32))
    np.save(tmp_path / "wrong.npy", np.ones((2, 17), np.float32))
    np.save(tmp_path / "whole.npy", np.ones((2, 16), np.int64))
    np.savez(tmp_path / "other.npz", y=np.ones(3))
    words, code, part = WRONG_INPUTS[case]
    result = devplan("run", tiny.path, *words, cwd=tmp_path)
    assert result.code == code, result.err
    assert part in result.last_line and f"(code {code})" in result.last_line
    assert "Traceback" not in result.err


@pytest.mark.parametrize("verb", ["inspect", "run", "bench"])
@pytest.mark.parametrize("harm", ["truncated", "changed", "empty", "foreign"])
def test_a_damaged_artifact_is_code_7(tiny: Made, tmp_path: Path, verb: str, harm: str) -> None:
    data = bytearray(tiny.path.read_bytes())
    data[-200] ^= 0xFF
    harmed = {"truncated": data[: len(data) // 2], "changed": data, "empty": b"", "foreign": b"PK\3\4" * 99}
    (tmp_path / "bad.pte").write_bytes(harmed[harm])
    result = devplan(verb, tmp_path / "bad.pte", "--json")
    assert result.code == 7, result.err
    check_schema(result.document, "error")
    assert "bad.pte" in result.last_line and "Traceback" not in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--outputs", "nowhere/out.npz"),
        ("run", "--profile", "nowhere/trace.json"),
        ("bench", "--report", "nowhere/page.html"),
        ("tune", "-o", "nowhere/gpu.json"),
        ("inspect", "--svg", "nowhere/plan.svg"),
        ("inspect", "--report", "."),
        ("run", "--profile", "/dev/null"),
    ],
)
def test_where_nothing_can_be_written_no_work_is_done(
    tiny: Made, tmp_path: Path, words: tuple[str, ...]
) -> None:
    verb, *rest = words
    result = devplan(verb, tiny.path, *rest, cwd=tmp_path)
    assert result.code == 2 and result.out == "" and len(result.err.splitlines()) == 1
    assert f"cannot write `{rest[-1]}`" in result.last_line
    assert list(tmp_path.iterdir()) == []


def test_a_profile_names_modules_and_has_a_row_per_stream(tiny: Made, tmp_path: Path) -> None:
    result = devplan("run", tiny.path, "--device", "emulator", "--profile", tmp_path / "trace.json")
    assert result.code == 0, result.err
    assert result.last_line == f"wrote {tmp_path / 'trace.json'}"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert any("cuda:0 stream" in name for name in rows.values())
    assert {event["tid"] for event in slices} == set(rows)
    assert {"h2d", "device", "d2h"} == {event["cat"] for event in slices}
    assert any(event["name"].startswith("0: ") for event in slices)
    for before, after in pairwise(slices):
        assert before["dur"] >= 0 and after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.01)


def test_tuning_needs_a_gpu(tiny: Made, tmp_path: Path) -> None:
    if not GPU:
        result = devplan("tune", tiny.path, "-o", tmp_path / "gpu.json")
        assert result.code == 6 and "tuning needs a GPU" in result.last_line
        assert not (tmp_path / "gpu.json").exists()


def test_verify_takes_state_along(memory: Made) -> None:
    result = devplan("verify", memory.path, MODELS / "memory.py", "--json")
    assert result.code == 0, result.err
    check_schema(result.document, "verify")
    rows = [(row["method"], row["call"], row["kind"]) for row in result.document["comparisons"]]
    assert rows == [
        (m, call, kind) for m in ("store", "recall") for call in (1, 2, 3) for kind in ("output", "state")
    ]
    assert result.document["max_abs_error"] == {
        "store.output": 0,
        "store.kept": 0,
        "recall.output": 0,
        "recall.kept": 0,
    }


def test_verify_of_a_model_that_draws_random_numbers_says_why_they_differ(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(
        "import torch\n"
        "def drawn(x): return x + torch.rand_like(x)\n"
        "methods = {'forward': {'function': drawn, 'example_inputs': (torch.zeros(4),)}}\n"
    )
    assert devplan("export", "drawn.py", "-q", "--device", "cpu", cwd=tmp_path).code == 0
    result = devplan("verify", "drawn.pte", "drawn.py", cwd=tmp_path)
    assert result.code == 4
    assert "the model draws random numbers, which are not eager PyTorch's" in result.last_line


def test_verify_against_another_model_is_code_4_with_the_tolerance(tiny: Made, tmp_path: Path) -> None:
    changed = (MODELS / "tiny.py").read_text().replace("manual_seed(0)", "manual_seed(1)")
    changed += "torch.manual_seed(0)\nexample_inputs = (torch.ones(2, 16),)\n"
    (tmp_path / "other.py").write_text(changed)
    result = devplan("verify", tiny.path, tmp_path / "other.py", "--json")
    assert result.code == 4
    check_schema(result.document, "verify")
    assert "first at [0, 0]" in result.last_line and "float32 keeps 24 bits" in result.last_line
    assert devplan("verify", tiny.path, MODELS / "memory.py").code == 2


def test_bench_measures_what_the_contract_names(tiny: Made) -> None:
    result = devplan("bench", tiny.path, "--repeat", 5, "--warmup", 1, "--json")
    assert result.code == 0, result.err
    check_schema(result.document, "bench")
    unknown = {name for name, nbytes in result.document["memory"].items() if nbytes is None}
    shown = devplan("bench", tiny.path, "--repeat", 2, "--warmup", 1).out.partition("Memory")[2]
    rows = shown.partition("Cold start")[0].split()
    assert "arena" in rows and unknown and not unknown & set(rows)


def test_diff_of_an_artifact_and_itself_is_nothing(tiny: Made) -> None:
    assert devplan("diff", tiny.path, tiny.path).out == "no differences\n"
    document = devplan("diff", tiny.path, tiny.path, "--json").document
    check_schema(document, "diff")
    assert document == {"equal": True, "changes": []}


def test_diff_names_what_matters(tiny: Made, tiny_half: Made) -> None:
    result = devplan("diff", tiny.path, tiny_half.path, "--json")
    assert result.code == 4
    check_schema(result.document, "diff")
    kinds = {change["kind"] for change in result.document["changes"] if change["matters"]}
    assert kinds == {"architectures", "signature", "constants", "kernels"}
    better = {change["kind"] for change in result.document["changes"] if not change["matters"]}
    assert {"copies", "arenas", "file"} <= better
    words = devplan("diff", tiny.path, tiny_half.path)
    assert words.code == 4 and "! input `input` of `forward`: float32[2x16] on cpu became" in words.out
    table = devplan("diff", tiny.path, tiny_half.path, "--markdown").out
    assert "| | what | before | after |" in table
    back = devplan("diff", tiny_half.path, tiny.path, "--json").document["changes"]
    assert any(change["kind"] == "copies" and change["matters"] for change in back)


def test_a_flipped_weight_is_code_7_and_never_a_result(tiny: Made, tmp_path: Path) -> None:
    data = bytearray(tiny.path.read_bytes())
    begin = int.from_bytes(data[-48:-40], "little")  # the seal tells where the constants are
    data[begin + 5] ^= 0x40
    path = tmp_path / "flipped.pte"
    path.write_bytes(data)
    for words in (("run", path, "--outputs", tmp_path / "o.npz"), ("verify", path, MODELS / "tiny.py")):
        result = devplan(*words, "--json")
        check_schema(result.document, "error")
        assert result.code == result.document["error"]["code"] == 7, result.err
    assert "is damaged" in devplan("inspect", path, "--json").last_line
    assert not (tmp_path / "o.npz").exists()

"""Buckets through the command: what an export declares, what `run` and `bench` count, what `diff` misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import MODELS, Made, check_schema, devplan

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

BATCHED = MODELS / "batched.py"


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported with its own bucket of 8."""
    folder = tmp_path_factory.mktemp("batched")
    result = devplan("export", BATCHED, "--json", cwd=folder)
    assert result.code == 0, result.err
    check_schema(result.document, "inspect")
    (method,) = result.document["methods"]
    assert [bucket["sizes"] for bucket in method["buckets"]] == [{"batch": 8}]
    return folder / "batched.pte"


def test_run_counts_hits_and_says_why_no_graph_is_used(batched: Path) -> None:
    result = devplan("run", batched, "--shape", "input=8x16", "--repeat", "3", "--json")
    check_schema(result.document, "run")
    (bucket,) = result.document["buckets"]
    assert (bucket["sizes"], bucket["calls"], result.document["other_calls"]) == ({"batch": 8}, 3, 0)
    assert bucket["cuda_graph"] is True or bucket["cuda_graph"]["reason"]


def test_run_tells_a_person_the_same(batched: Path) -> None:
    lines = devplan("run", batched, "--shape", "input=7x16").out.splitlines()
    at = lines.index("Buckets of forward")
    assert lines[at + 2].split()[:2] == ["batch=8", "0"]
    assert lines[at + 3].split() == ["other", "sizes", "1"]


def test_bench_counts_its_calls(batched: Path) -> None:
    words = ("--shape", "input=8x16", "--repeat", "5", "--warmup", "2", "--no-cold-start", "--json")
    document = devplan("bench", batched, *words).document
    check_schema(document, "bench")
    assert document["buckets"][0]["calls"] == 7


def test_bench_times_each_bucket_when_asked(batched: Path, tmp_path: Path) -> None:
    words = ("bench", batched, "--repeat", "5", "--warmup", "2", "--no-cold-start", "--each-bucket")
    document = devplan(*words, "--json").document
    check_schema(document, "bench")
    (bucket,) = document["buckets"]
    assert bucket["calls"] == 7 and bucket["latency_us"]["p50"] > 0
    assert document["other_calls"] == 7  # the random inputs of the first measurement are at the bound
    lines = devplan(*words).out.splitlines()
    assert lines[lines.index("Buckets of forward") + 1].split() == [
        "sizes",
        "calls",
        "p50",
        "p99",
        "graph",
        "bytes",
        "graph",
    ]


def test_each_bucket_without_any_is_refused(tiny: Made) -> None:
    result = devplan("bench", tiny.path, "--each-bucket", "--no-cold-start")
    assert result.code == 2
    assert "method `forward` has no buckets; export with `--buckets batch=1,8,32`" in result.last_line


def test_inspect_shows_each_plan_beside_its_lower_bound(batched: Path) -> None:
    for words in ((), ("--explain",)):
        out = devplan("inspect", batched, *words).out
        assert "Buckets of forward, within its arenas" in out
        assert any(line.split()[:2] == ["batch=8", "cpu"] for line in out.splitlines())
    assert "float32[batchx16]" in devplan("inspect", batched).out


def test_a_lost_bucket_matters_to_diff_and_a_new_one_does_not(batched: Path, tmp_path: Path) -> None:
    assert (
        devplan("export", BATCHED, "-q", "-o", "more.pte", "--buckets", "batch=8,32", cwd=tmp_path).code == 0
    )
    more = tmp_path / "more.pte"
    gained = devplan("diff", batched, more, "--json")
    check_schema(gained.document, "diff")
    assert (gained.code, gained.document["equal"]) == (0, True)
    lost = devplan("diff", more, batched, "--json")
    check_schema(lost.document, "diff")
    assert lost.code == 4
    assert "`forward` has no bucket batch=32 any more" in [
        change["what"] for change in lost.document["changes"]
    ]


def test_a_configuration_file_declares_them_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[buckets]\nbatch = [1, 2]\n")
    words = ("export", BATCHED, "-q", "--config", "mine.toml", "--json")
    document = devplan(*words, cwd=tmp_path).document
    assert [b["sizes"]["batch"] for b in document["methods"][0]["buckets"]] == [1, 2]
    document = devplan(*words, "--buckets", "input:0=4", cwd=tmp_path).document
    assert [b["sizes"]["batch"] for b in document["methods"][0]["buckets"]] == [4]
    printed = devplan(*words[:-1], "--buckets", "batch=4", "--print-config", cwd=tmp_path).out
    assert '"batch" = [4]' in printed and "# --buckets batch=4" in printed


def test_verify_compares_each_bucket_with_eager(batched: Path) -> None:
    result = devplan("verify", batched, BATCHED, "--json")
    check_schema(result.document, "verify")
    assert result.code == 0
    rows = result.document["comparisons"]
    assert [(row["call"], row.get("sizes")) for row in rows] == [
        (1, None),
        (2, None),
        (3, None),
        (4, "batch=8"),
    ]
    assert "batch=8" in devplan("verify", batched, BATCHED).out

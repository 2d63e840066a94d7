"""Results whose size depends on data, through the command: what is shown, compared and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .conftest import MODELS, check_schema, devplan

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

MODEL = MODELS / "detections.py"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported, with what the command said about it."""
    folder = tmp_path_factory.mktemp("detections")
    result = devplan("export", MODEL, "--json", "--check", cwd=folder)
    assert result.code == 0, result.err
    check_schema(result.document, "inspect")
    (method,) = result.document["methods"]
    kept, boxes, total = method["outputs"]
    assert (kept["max_shape"], boxes["max_shape"]) == ([10], [10, 4])
    assert kept["data_dependent"] == boxes["data_dependent"]
    assert kept["data_dependent"] | {"count": ""} == {"dimension": 0, "count": "", "lower": 0, "upper": 10}
    assert total["data_dependent"] is None
    assert [count["outputs"] for count in method["counts"]] == [["kept", "boxes"]]
    assert [copy["tensor"] for copy in method["copies"] if copy["bytes"] == 8] == [
        f"size {kept['data_dependent']['count']}"
    ]
    return folder / "detections.pte"


def test_verify_compares_true_sizes(artifact: Path, tmp_path: Path) -> None:
    on_device = tmp_path / "d.pte"
    assert devplan("export", MODEL, "-o", on_device, "-q", "--io", "device").code == 0
    for path in (artifact, on_device):
        result = devplan("verify", path, MODEL, "--calls", "1", "--json")
        assert result.code == 0, result.err
        assert result.document["equal"] is True
        assert len(result.document["comparisons"]) == 3


def test_inspect_tells_a_person_the_bound(artifact: Path) -> None:
    out = devplan("inspect", artifact).out
    assert "kept int64[0..10]" in out and "boxes float32[0..10x4]" in out and "data-dependent" in out
    plan = devplan("inspect", artifact, "--plan").out
    assert "`boxes` of forward is data-dependent: 0 to 10 in dimension 0, planned at 10x4" in plan


def test_run_hands_out_what_is_real_and_fails_above_the_bound(artifact: Path, tmp_path: Path) -> None:
    scores = np.full(100, 0.25, np.float32)
    scores[[3, 50, 99]] = 0.75
    boxes = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.savez(tmp_path / "in.npz", boxes=boxes, scores=scores)
    words = ("run", artifact, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", "--json")
    result = devplan(*words)
    assert result.code == 0, result.err
    check_schema(result.document, "run")
    assert [output["shape"] for output in result.document["outputs"]] == [[3], [3, 4], []]
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["kept"], [3, 50, 99])
        np.testing.assert_array_equal(out["boxes"], boxes[[3, 50, 99]] * 2)
    np.savez(tmp_path / "in.npz", boxes=boxes, scores=1 - scores)
    result = devplan(*words)
    assert result.code == 1
    assert "is 97, declared is at most 10" in result.last_line
    assert "detections.py:" in result.last_line and "torch._check" in result.last_line

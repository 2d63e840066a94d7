"""`devplan export --quantize`: smaller constants, a note of what was left, and the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import MODELS, devplan

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXCLUDE = """
[export]
quantize = "int4-weight-only:32"

[pass.quantize-weights]
exclude = ["2"]
"""


def test_constants_shrink_and_the_result_is_that_of_rounded_weights(tmp_path: Path) -> None:
    words = ("export", MODELS / "tiny.py", "--quantize", "int8-weight-only", "--arch", "sm_90")
    made = devplan(*words, "--check", "--report", "tiny.html", "--json", cwd=tmp_path)
    assert made.code == 0, made.err
    note = "int8-weight-only: 2 of 2 linear layers quantised"
    assert note in made.document["notes"]
    assert note in (tmp_path / "tiny.html").read_text(encoding="utf-8")
    inspected = devplan("inspect", "tiny.pte", "--json", cwd=tmp_path).document
    assert inspected["methods"][0]["notes"] == [note]
    verified = devplan("verify", "tiny.pte", MODELS / "tiny.py", cwd=tmp_path)
    assert verified.code == 0, verified.err
    assert f"eager weights are rounded likewise: {note}" in verified.err


def test_a_file_leaves_a_module_out_and_the_summary_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(EXCLUDE, encoding="utf-8")
    words = ("export", MODELS / "tiny.py", "--config", "mine.toml", "--arch", "sm_90")
    made = devplan(*words, cwd=tmp_path)
    assert made.code == 0, made.err
    told = " ".join(made.out.split())
    assert "int4-weight-only:32: 1 of 2 linear layers quantised; " in told
    assert "in floating point: 1 weight (512 bytes) for `aten.linear.default`; " in told
    assert "left: `2` (`exclude` names it by `2`)" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--quantize", "int3"), "cannot use `--quantize int3` (code 2): expected `int8-weight-only`"),
        (("--quantize", "int8-weight-only", "--device", "cpu"), "`--quantize` with `--device cpu` (code 2)"),
    ],
)
def test_what_cannot_be_is_said_before_torch_is_loaded(words: tuple[str, ...], told: str) -> None:
    result = devplan("export", MODELS / "tiny.py", *words)
    assert result.code == 2
    assert told in result.last_line

"""The command's parts that have an oracle of their own: comparing, tensor files, optional values, words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from devplan.devplan_cli.arguments import fill_optional_values
from devplan.devplan_cli.compare import EXACT, TOLERANCES, Tolerance, compare, tolerance_for
from devplan.devplan_cli.run_inputs import gather_inputs
from devplan.devplan_cli.tensor_files import read_many, write_many
from devplan.devplan_cli.words import size
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import CPU, Method, Port, Storage, Symbol, Value
from devplan.runtime.tensors.host import HostTensor

from .conftest import environment

FLOATS = arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32))


@given(FLOATS, FLOATS)
def test_compare_agrees_with_numpy(actual: np.ndarray, expected: np.ndarray) -> None:
    found = compare("y", actual, expected, Tolerance(1e-3, 1e-2, "because"))
    close = np.isclose(actual.astype(float), expected.astype(float), rtol=1e-3, atol=1e-2)
    assert found.equal == close.all()
    assert found.bad == np.count_nonzero(~close)
    assert found.max_abs_error == np.abs(actual.astype(float) - expected.astype(float)).max()
    if not found.equal:
        assert found.first == tuple(np.argwhere(~close)[0])


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        ([np.nan, 1], [np.nan, 1], True),
        ([np.inf, 1], [np.inf, 1], True),
        ([np.inf, 1], [-np.inf, 1], False),
        ([np.nan, 1], [0, 1], False),
        ([0, 1], [np.nan, 1], False),
        ([np.inf, 1], [0, 1], False),
    ],
)
def test_what_is_not_finite_equals_only_itself(
    actual: list[float], expected: list[float], equal: bool
) -> None:
    found = compare("y", np.array(actual), np.array(expected), TOLERANCES["float32"])
    assert found.equal == equal
    assert found.nonfinite == sum(not np.isfinite(value) for value in actual)


def test_integers_are_exact_and_do_not_wrap() -> None:
    assert compare("y", np.array([2**40]), np.array([2**40]), EXACT).equal
    found = compare("y", np.array([255], np.uint8), np.array([0], np.uint8), EXACT)
    assert (found.equal, found.max_abs_error) == (False, 255)


def test_another_shape_is_told_as_such() -> None:
    assert "shape [2] instead of [3]" in compare("y", np.ones(2), np.ones(3), EXACT).words()


def test_the_tolerance_is_that_of_the_coarsest_type() -> None:
    assert tolerance_for(["float32", "bfloat16"], "float32") is TOLERANCES["bfloat16"]
    assert tolerance_for(["float32"], "float32") is TOLERANCES["float32"]
    assert tolerance_for(["bfloat16"], "int64") is EXACT


def test_half_precision_is_relative_to_the_largest_value() -> None:
    expected = np.array([100.0, 0.0])
    assert compare("y", np.array([100.0, 1.9]), expected, TOLERANCES["float16"]).equal
    assert not compare("y", np.array([100.0, 2.1]), expected, TOLERANCES["float16"]).equal


def test_safetensors_agree_with_their_own_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    tensors = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.ones(3, np.float16),
        "c": np.array(True),
    }
    write_many(tmp_path / "ours.safetensors", tensors)
    library.save_file(tensors, str(tmp_path / "theirs.safetensors"))
    for found in (
        library.load_file(str(tmp_path / "ours.safetensors")),
        read_many(tmp_path / "theirs.safetensors"),
    ):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            np.testing.assert_array_equal(found[name], tensor)


def test_bfloat16_stays_itself_in_safetensors_and_becomes_float32_in_npz(tmp_path: Path) -> None:
    tensor = HostTensor.from_float32(np.array([1.5, -2.0], np.float32), DType.BFLOAT16)
    write_many(tmp_path / "t.safetensors", {"y": tensor})
    write_many(tmp_path / "t.npz", {"y": tensor})
    assert read_many(tmp_path / "t.safetensors")["y"].dtype is DType.BFLOAT16
    assert np.load(tmp_path / "t.npz")["y"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b'\x10\0\0\0\0\0\0\0{"a": {"dtype":1']
)
def test_damaged_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match="no safetensors file"):
        read_many(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        ("export --skip-h2d model.py", "export --skip-h2d=* model.py"),
        ("export model.py --skip-h2d", "export model.py --skip-h2d=*"),
        (
            "export m.py --skip-h2d prefill --skip-d2h --json",
            "export m.py --skip-h2d=prefill --skip-d2h=* --json",
        ),
        ("export --skip-d2h decode.logits a.b:NET", "export --skip-d2h=decode.logits a.b:NET"),
        ("export --skip-h2d a.b:NET", "export --skip-h2d=* a.b:NET"),
        ("export --skip-h2d=x m.py", "export --skip-h2d=x m.py"),
    ],
)
def test_a_value_may_be_left_out(words: str, filled: str) -> None:
    assert fill_optional_values(words.split()) == filled.split()


@given(st.integers(0, 1 << 60))
def test_sizes_keep_three_figures(nbytes: int) -> None:
    number, unit = size(nbytes).split()
    factor = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert float(number) * factor == pytest.approx(nbytes, rel=0.006)


def method() -> Method:
    """``f(x: float32[n, 3], i: int64[2])``, n up to 8."""
    n = Expr("n")
    storages = (Storage("x", CPU, Expr("n * 12"), max_nbytes=96), Storage("i", CPU, 16))
    values = (
        Value("x", "x", DType.FLOAT32, (n, 3), (3, 1)),
        Value("i", "i", DType.INT64, (2,), (1,)),
    )
    ports = (Port("x", "x"), Port("i", "i"), Port("k", "", literal=7))
    return Method("f", ports, (), storages, values, (), symbols=(Symbol("n", 1, 8, "x", 0),))


def test_missing_inputs_are_random_and_the_same_for_a_seed() -> None:
    first, random = gather_inputs(method(), shapes=["x=5x3"], seed=3)
    again, _ = gather_inputs(method(), shapes=["x=5x3"], seed=3)
    assert random == ["x", "i"]
    assert (first["x"].shape, first["i"].dtype, first["k"]) == ((5, 3), np.int64, 7)
    np.testing.assert_array_equal(first["x"], again["x"])
    assert gather_inputs(method())[0]["x"].shape == (8, 3)


def test_a_shape_must_be_one_that_the_program_takes() -> None:
    with pytest.raises(UsageError, match="the program takes nx3"):
        gather_inputs(method(), shapes=["x=5x4"])


def test_keywords_go_by_their_names() -> None:
    torch = pytest.importorskip("torch")
    from devplan.devplan_cli.eager import flat_inputs

    x, scale = torch.ones(2), torch.zeros(1)
    source = SimpleNamespace(args=(), kwargs={"scale": scale, "x": x})
    assert flat_inputs(source, ["x", "scale"]) == [x, scale]  # type: ignore[arg-type]
    assert flat_inputs(source, ["a", "b"]) == [scale, x]  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_memory_is_not_what_the_parent_held() -> None:
    """A process that a large one started inherits its `ru_maxrss`."""
    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    code = "from devplan.devplan_cli.export_job import peak_rss; print(peak_rss())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert 0 < int(done.stdout) < len(held)

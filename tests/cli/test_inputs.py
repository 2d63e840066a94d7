"""Tensor files that are damaged, pickled or something else: code 2, one line, and nothing is loaded from them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.devplan_cli.tensor_files import read_many, read_one
from devplan.runtime.errors import UsageError

from .conftest import Made, devplan

X = np.arange(32, dtype=np.float32).reshape(2, 16)
ENTRY = {"dtype": "F32", "shape": [2, 16], "data_offsets": [0, 128]}


def npy(array: Any, *, pickled: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=pickled)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def safetensors(header: Any, body: bytes = X.tobytes()) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


class Bomb:
    """What a pickle must never get to do."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return Path.touch, (Path("bomb"),)  # type: ignore[return-value]


GOOD = npy(X)
ONE = {
    "text": (b"hello\n", "no NumPy file"),
    "nothing": (b"", "no NumPy file"),
    "a pickle": (pickle.dumps(X), "never loaded"),
    "objects": (npy(np.array([Bomb()], object), pickled=True), "never loaded"),
    "half of it": (GOOD[:150], "no NumPy file"),
    "half a header": (GOOD[:30], "no NumPy file"),
    "an open bracket in the header": (GOOD.replace(b"(2, 16), }", b"(2, (((, }"), "no NumPy file"),
    "a shape beyond its bytes": (GOOD.replace(b"(2, 16)", b"(9, 99)"), "no NumPy file"),
    "a shape beyond all memory": (
        GOOD.replace(b"(2, 16), }      ", b"(9999999999999),}"[:16]),
        "no NumPy file",
    ),
    "an archive": (npz(input=X), "use `--inputs`"),
}
MANY = {
    "text.npz": (b"hello\n", "no NumPy file"),
    "cut.npz": (npz(input=X)[:200], "no NumPy file"),
    "objects.npz": (npz(input=np.array([Bomb()], object)), "never loaded"),
    "one.npz": (GOOD, "use `--input NAME=FILE`"),
    "flip.npz": (npz(input=X).replace(X.tobytes(), X[::-1].tobytes()), "damaged"),
    "cut.safetensors": (safetensors({"input": ENTRY})[:150], "lies outside"),
    "empty.safetensors": (b"", "cut off"),
    "long.safetensors": (b"\xff" * 8 + b"{}", "cut off"),
    "text.safetensors": (safetensors(b"{no json}"), "no safetensors file"),
    "deep.safetensors": (safetensors(b"[" * 100_000), "no safetensors file"),
    "list.safetensors": (safetensors([1, 2]), "no JSON object"),
    "entry.safetensors": (safetensors({"input": 5}), "`input` is not as the format has it"),
    "keys.safetensors": (safetensors({"input": {"dtype": "F32"}}), "`input` is not as the format has it"),
    "words.safetensors": (
        safetensors({"input": ENTRY | {"data_offsets": ["0", "128"]}}),
        "not as the format",
    ),
    "type.safetensors": (safetensors({"input": ENTRY | {"dtype": "F4"}}), "type that no program has"),
    "minus.safetensors": (safetensors({"input": ENTRY | {"shape": [-2, -16]}}), "has the shape"),
    "infer.safetensors": (safetensors({"input": ENTRY | {"shape": [-1, 16]}}), "has the shape"),
    "shape.safetensors": (safetensors({"input": ENTRY | {"shape": [3, 16]}}), "has 128 bytes"),
    "before.safetensors": (safetensors({"input": ENTRY | {"data_offsets": [-128, 0]}}), "lies outside"),
}


@pytest.mark.parametrize("case", ONE)
def test_a_file_that_is_no_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    data, expected = ONE[case]
    monkeypatch.chdir(tmp_path)
    Path("x.npy").write_bytes(data)
    with pytest.raises(UsageError) as refused:
        read_one(Path("x.npy"))
    assert expected in refused.value.line() and "allow_pickle" not in refused.value.line()
    assert not Path("bomb").exists()


@pytest.mark.parametrize("name", MANY)
def test_a_file_of_no_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data, expected = MANY[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(UsageError) as refused:
        read_many(Path(name))
    assert expected in refused.value.line() and "allow_pickle" not in refused.value.line()
    assert not Path("bomb").exists()


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_tensors_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    good = {"x.npy": GOOD, "x.npz": npz(input=X), "x.safetensors": safetensors({"input": ENTRY})}[name]
    at = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(min_size=0, max_size=8))
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(good[:at] + piece + good[at + data.draw(st.integers(0, 8)) :])
    try:
        found = {"input": read_one(path)} if name == "x.npy" else read_many(path)
    except UsageError as error:
        assert str(path) in error.what
    else:
        assert all(hasattr(tensor, "dtype") for tensor in found.values())


@pytest.mark.torch
@pytest.mark.slow
def test_an_expectation_of_nothing_is_no_success(tiny: Made, tmp_path: Path) -> None:
    (tmp_path / "none.npz").write_bytes(npz())
    result = devplan("run", tiny.path, "--expect", tmp_path / "none.npz", "--json")
    assert result.code == result.document["error"]["code"] == 2
    assert "it holds no tensor" in result.last_line

"""Whose code a frame runs is told by where the file lies, not by what a folder is called."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from devplan.passes.exported import capture  # noqa: E402
from devplan.passes.source import frames  # noqa: E402
from devplan.runtime import program  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "file",
    [
        __file__,
        str(ROOT / "configs" / "models" / "add.py"),
        "/home/someone/torch/model.py",
        "/home/someone/devplan/passes/model.py",
        r"C:\work\torch\model.py",
        str(Path(pytest.__file__)),
    ],
)
def test_a_model_is_the_users_wherever_it_lies(file: str) -> None:
    assert frames.is_users(file)
    assert not frames.is_torchs(file)


@pytest.mark.parametrize(
    "file", [capture.__file__, program.__file__, contextlib.__file__, "<eval_with_key>.7"]
)
def test_our_code_and_pythons_is_not_the_users(file: str) -> None:
    assert not frames.is_users(file)
    assert not frames.is_torchs(file)


@pytest.mark.parametrize(
    "file",
    [
        str(Path(torch.__file__).parent / "_refs" / "__init__.py"),
        "/elsewhere/lib/python3.12/site-packages/torch/nn/modules/linear.py",
        r"C:\elsewhere\Lib\site-packages\torch\nn\modules\linear.py",
    ],
)
def test_torchs_code_is_known_also_from_another_machine(file: str) -> None:
    assert frames.is_torchs(file)
    assert not frames.is_users(file)

"""Outputs are named after the user's keys, and names that no input has are refused before the export."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import devplan
from devplan.passes.exported.call_names import misfit, output_names, wrong_name
from devplan.passes.source.load import resolve
from devplan.runtime.errors import UsageError
from tests.support.exporting import assert_close, export_module, loaded

pytestmark = pytest.mark.torch

Pair = namedtuple("Pair", "loss logits")


class Returning(torch.nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


NAMED: dict[str, tuple[Any, list[str]]] = {
    "a tensor": (lambda x: x + 1, ["output"]),
    "a tuple of one": (lambda x: (x + 1,), ["output"]),
    "a list": (lambda x: [x + 1, x + 2], ["output0", "output1"]),
    "tuples in a tuple": (lambda x: (x + 1, (x + 2, x + 3)), ["output0", "output1", "output2"]),
    "a dict": (lambda x: {"logits": x + 1, "hidden": x + 2}, ["logits", "hidden"]),
    "a dict of one": (lambda x: {"logits": x + 1}, ["logits"]),
    "a tuple in a dict": (lambda x: {"a": x + 1, "kv": (x + 2, x + 3)}, ["a", "kv.0", "kv.1"]),
    "a dict in a tuple": (lambda x: (x + 1, {"mask": x + 2}), ["output0", "output1.mask"]),
    "an ordered dict": (lambda x: OrderedDict(z=x + 1, y=x + 2), ["z", "y"]),
    "a named tuple": (lambda x: Pair(x + 1, x + 2), ["loss", "logits"]),
    "keys that read alike": (lambda x: {1: x + 1, "1": x + 2}, ["output0", "output1"]),
    "nothing in between": (lambda x: {"a": x + 1, "none": None, "b": x + 2}, ["a", "none", "b"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_outputs_are_named_after_their_keys(case: str) -> None:
    function, names = NAMED[case]
    program = torch.export.export(Returning(function), (torch.ones(2),))
    assert output_names(program.call_spec.out_spec, len(names)) == names


def test_a_model_that_returns_a_dict_gives_it_back_by_its_keys() -> None:
    module = Returning(lambda x: {"double": x * 2, "parts": (x + 1, x - 1)})
    x = torch.randn(3, 4)
    with loaded(export_module(module, (x,))) as program:
        outputs = program.method()(x.numpy())
    assert list(outputs) == ["double", "parts.0", "parts.1"]
    assert_close(outputs["double"], x * 2)
    assert_close(outputs["parts.1"], x - 1)


def test_rules_about_outputs_use_these_names() -> None:
    exported = devplan.export(
        Returning(lambda x: {"keep": x * 2, "give": x + 1}),
        (torch.randn(3, 4),),
        arch="sm_80",
        io="forward.keep=device",
    )
    (method,) = exported.planned.program.methods
    homes = [str(method.storage(method.value(port.value).storage).device) for port in method.outputs]
    assert homes == ["cuda:0", "cpu"]
    with exported.load("emulator") as program:
        x = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(program.method()(x)["keep"].numpy(), 2 * x)


FILE = """
import torch


class Net(torch.nn.Module):
    def forward(self, tokens, mask=None):
        return tokens * 2 if mask is None else tokens * mask


model = Net()
example_inputs = {"tokens": torch.ones(2)}
"""

BAD = {
    "a name that is no input": (
        'example_inputs = {"token": torch.ones(2)}',
        ["`example_inputs` at net.py:11 names no input `token`", "did you mean `tokens`", "`tokens`, `mask`"],
    ),
    "a missing input": (
        'example_inputs = {"mask": torch.ones(2)}',
        ["`example_inputs` at net.py:11 does not fit the model", "missing a required argument: 'tokens'"],
    ),
    "too many inputs": (
        "example_inputs = (torch.ones(2),) * 3",
        ["too many positional arguments", "its inputs are `tokens`, `mask`"],
    ),
    "a name in the dynamic shapes": (
        'example_inputs = {"tokens": torch.ones(2)}\ndynamic_shapes = {"token": {0: torch.export.Dim("n", max=4)}}',
        ["`dynamic_shapes` at net.py:12 names no input `token`", "did you mean `tokens`"],
    ),
    "a name in one of several methods": (
        'methods = {"go": {"module": model, "example_inputs": {"x": torch.ones(2)}}}',
        ['`methods["go"].example_inputs` at net.py:11 names no input `x`', "its inputs are `tokens`, `mask`"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_example_that_is_for_no_input_is_refused_with_the_names(case: str, tmp_path: Path) -> None:
    line, parts = BAD[case]
    (tmp_path / "net.py").write_text(FILE.replace('example_inputs = {"tokens": torch.ones(2)}', line))
    with pytest.raises(UsageError) as caught:
        resolve(str(tmp_path / "net.py"))
    for part in parts:
        assert part in caught.value.line()


class Any_(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]


def test_modules_that_take_anything_take_any_name() -> None:
    assert wrong_name(Any_(), ["whatever"]) is None
    assert misfit(Any_(), (1, 2), {"whatever": 3}) == ""


def test_wrapped_modules_are_left_to_torch() -> None:
    import functools

    class Wrapped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    inner = Wrapped.forward

    @functools.wraps(inner)
    def outer(self: Any, *args: Any, extra: Any = None, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    Wrapped.forward = outer  # type: ignore[method-assign]
    assert wrong_name(Wrapped(), ["extra"]) is None

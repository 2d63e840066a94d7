"""Random operators: their distributions, and what repeats, on the emulator and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from devplan.passes import export as exporting
from devplan.passes.exported.random_numbers import STATE
from devplan.passes.options import ExportOptions
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.tests.support.functions import Function
from devplan.tests.zoo.measure import load, without_code

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def loaded(*functions: Callable[..., Any], inputs: tuple[torch.Tensor, ...], device: str = "cuda") -> Any:
    methods = [MethodSource(f"m{i}", Function(f), inputs) for i, f in enumerate(functions)]
    with mock.patch.object(exporting, "compile_kernels", without_code):
        options = ExportOptions(device=device, architectures=("sm_90",))
        return load(exporting.export(ModelSource("random", tuple(methods)), options))


def call(program: Any, *inputs: torch.Tensor, method: str = "m0") -> list[Any]:
    made = program.method(method)(*[x.numpy() for x in inputs])
    return [np.array(value) for value in made.values()]


ONES = torch.ones(40, 1000)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_distributions(device: str) -> None:
    """40,000 elements each: the first two moments within six standard errors."""
    chances = torch.tensor([0.1, 0.0, 0.6, 0.3])

    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.rand(x.shape),
            torch.randn_like(x),
            torch.bernoulli(x * 0.2),
            F.dropout(x, 0.25, training=True),
            torch.normal(x, 2.0),
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).uniform_(-1, 1),
            torch.empty_like(x).geometric_(0.4),
            torch.randint(3, 9, x.shape),
            torch.multinomial(chances.expand(40000, 4), 1),
            torch.multinomial(chances, 40000, replacement=True),
        ]

    moments = [  # mean and variance
        (1 / 2, 1 / 12),
        (0, 1),
        (0.2, 0.16),
        (1, 1 / 3),
        (1, 4),
        (0.5, 0.25),
        (0, 1 / 3),
        (2.5, 0.6 / 0.16),
        (5.5, 35 / 12),
        (2.1, 0.69),
        (2.1, 0.69),
    ]
    with loaded(draw, inputs=(ONES,), device=device) as program:
        for values, (mean, variance) in zip(call(program, ONES), moments, strict=True):
            assert values.size == 40000
            assert abs(values.mean() - mean) < 6 * (variance / 40000) ** 0.5
            assert abs(values.var() - variance) < 0.08 * variance


def test_calls_differ_and_a_reset_repeats_them() -> None:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.rand_like(x)

    x = torch.ones(64)
    with loaded(draw, draw, inputs=(x,)) as program:
        first, second = call(program, x), call(program, x)
        third = call(program, x, method="m1")  # methods share the counter
        assert len({values.tobytes() for values in (*first, *second, *third)}) == 6
        program.state.reset(STATE)
        for before, now in zip(first, call(program, x), strict=True):
            np.testing.assert_array_equal(before, now)
        program.state.set(STATE, np.int64(1))
        np.testing.assert_array_equal(second[0], call(program, x)[0])


def test_devices_draw_the_same() -> None:
    x, made = torch.ones(128), list[Any]()
    for device in ("cuda", "cpu"):
        with loaded(torch.rand_like, inputs=(x,), device=device) as program:
            made.append(call(program, x)[0])
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_types_stay_below_one(dtype: torch.dtype) -> None:
    x = torch.ones(40000)
    with loaded(lambda x: torch.rand(x.shape, dtype=dtype).float(), inputs=(x,)) as program:
        (values,) = call(program, x)
        assert values.min() == 0
        assert 1 - 2**-7 <= values.max() < 1


def test_without_replacement_nothing_comes_twice() -> None:
    weights = torch.tensor([[1.0, 2.0, 0.0, 4.0, 3.0]]).expand(200, 5).contiguous()

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.multinomial(x, 4), torch.randperm(2000)

    with loaded(draw, inputs=(weights,)) as program:
        chosen, order = call(program, weights)
        assert np.array_equal(np.sort(chosen, 1), np.tile([0, 1, 3, 4], (200, 1)))
        assert np.array_equal(np.sort(order), np.arange(2000))
        assert abs((chosen[:, 0] == 3).mean() - 0.4) < 0.15

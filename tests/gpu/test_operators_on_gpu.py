"""Operators with kernels or ways of our own, on a GPU against eager on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from devplan.runtime.cuda import driver  # noqa: E402
from devplan.tests.support.functions import Function  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]


def rand(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def grouped(x: Any, weight: Any, ends: Any) -> Any:
    return F.grouped_mm(x.bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends).float()


def bags(weight: Any, indices: Any, offsets: Any) -> Any:
    given = (indices, weight, offsets)
    return [F.embedding_bag(*given, mode=mode, padding_idx=3) for mode in ("sum", "mean", "max")]


def order(x: Any, ties: Any) -> Any:
    return (
        *torch.sort(x, stable=True),
        *torch.sort(ties, stable=True, descending=True),
        x.topk(600)[0],
        x.topk(9)[0],
    )


def masks(x: Any) -> Any:
    (row,) = torch.where(x[:, 0] > 0)
    put = torch.zeros_like(x).index_add(0, row, torch.relu(x[row]) * 2)
    return x[x > 0].sum(), x[row].mean(0), put, x.index_put((row,), x[row] + 1)


def recurrence(x: Any, start: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = torch.tanh(x + h)
        return h, h * 2

    return scan(step, start, x)


def padded_pool(x: Any) -> Any:
    return F.avg_pool2d(x.relu() + 1, 3, 1, 1)


def spelled(query: Any, key: Any, value: Any, sinks: Any) -> Any:
    """Attention in half precision with capped scores, and with a sink for each head; four heads share one."""
    query, key, value = query.half(), *(t.half().repeat_interleave(4, 1) for t in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.6
    capped = torch.softmax(torch.tanh(scores / 3) * 3, -1, dtype=torch.float32).half()
    more = sinks.half().reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.2  # read by nothing else, so that it is one kernel
    both = torch.softmax(torch.cat([scores, more], -1), -1, dtype=torch.float32).half()
    return torch.matmul(capped, value).float(), torch.matmul(both[..., :-1], value).float()


def cells(x: Any, h: Any, w: Any, u: Any) -> Any:
    return (*torch.lstm_cell(x, (h, h), w, u), torch.gru_cell(x, h, w[:192], u[:192]))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "grouped, few rows": (grouped, (rand(12, 64), rand(8, 96, 64), torch.arange(1, 9, dtype=torch.int32))),
    "grouped, many rows": (
        grouped,
        (rand(3000, 512), rand(4, 640, 512), torch.tensor([0, 1000, 1001, 2900], dtype=torch.int32)),
    ),
    "bags": (bags, (rand(500, 200), torch.arange(4000) * 7 % 500, torch.tensor([0, 0, 3, 1000, 3999]))),
    "order": (order, (rand(3, 20000), (rand(2, 5000) * 2).round())),
    "masks": (masks, (rand(300, 64),)),
    "recurrence": (recurrence, (rand(20, 8, 16), rand(8, 16))),
    "attention, many rows": (
        spelled,
        (rand(2, 8, 200, 64), rand(2, 2, 200, 64), rand(2, 2, 200, 64), rand(8)),
    ),
    "attention, one row": (spelled, (rand(2, 8, 1, 64), rand(2, 2, 900, 64), rand(2, 2, 900, 64), rand(8))),
    "cells": (cells, (rand(3, 40), rand(3, 64), rand(256, 40) / 8, rand(256, 64) / 8)),
    "a pool of one pixel": (padded_pool, (rand(2, 32, 1, 1),)),
}


@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu_as_in_eager(name: str) -> None:
    function, inputs = CASES[name]
    with loaded(export_module(Function(function), inputs), "cuda") as program:
        for _ in range(3):
            outputs = program.method("forward")(*(x.numpy() for x in inputs))
    with torch.no_grad():
        expected = function(*inputs)
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    for got, want in zip(outputs.values(), expected, strict=True):
        wanted = want.numpy()
        if name.startswith("grouped"):  # eager leaves the rows behind the last end as they were
            got, wanted = got[: int(inputs[2][-1])], wanted[: int(inputs[2][-1])]
        scale = max(float(np.abs(wanted).max(initial=0.0)), 1.0)
        is_half = name.startswith(("grouped", "attention"))
        np.testing.assert_allclose(got, wanted, atol=(1e-2 if is_half else 1e-5) * scale)

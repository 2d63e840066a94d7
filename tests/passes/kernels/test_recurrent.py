"""Recurrent layers are one launch a frame of one kernel, and equal eager in every form that PyTorch has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from devplan.runtime.program import Launch
from devplan.tests.support.exporting import assert_close, export_module, loaded

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lstm, two layers, both directions": (lambda: torch.nn.LSTM(5, 20, 2, bidirectional=True), (6, 3, 5)),
    "lstm, batch first, no biases": (lambda: torch.nn.LSTM(5, 6, batch_first=True, bias=False), (1, 4, 5)),
    "lstm, a batch that is a matrix": (lambda: torch.nn.LSTM(5, 24), (4, 17, 5)),
    "gru, both directions": (lambda: torch.nn.GRU(5, 20, bidirectional=True), (5, 2, 5)),
    "gru, a batch that is a matrix": (lambda: torch.nn.GRU(5, 33, batch_first=True), (16, 3, 5)),
    "tanh": (lambda: torch.nn.RNN(5, 7, 2), (4, 1, 5)),
    "relu": (lambda: torch.nn.RNN(5, 7, nonlinearity="relu", bidirectional=True), (4, 2, 5)),
}


def launches(program: Any) -> Counter[str]:
    (method,) = program.planned.program.methods
    names = [i.kernel for i in method.instructions if isinstance(i, Launch)]
    return Counter(name for name in names if name.startswith("recurrent_step"))


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_equals_eager(form: str) -> None:
    torch.manual_seed(0)
    make, shape = FORMS[form]
    net, x = make().eval(), torch.randn(*shape)
    result = export_module(net, (x,))
    count = launches(result)
    frames = shape[1] if net.batch_first else shape[0]
    assert len(count) <= net.num_layers  # one kernel a shape of frames, whichever way they are read
    assert sum(count.values()) == frames * net.num_layers * (1 + net.bidirectional)
    with torch.no_grad():
        output, state = net(x)
    wanted = [output, *(state if isinstance(state, tuple) else (state,))]
    with loaded(result, poison=True) as program:
        for _ in range(2):
            for got, want in zip(program.method("forward")(x).values(), wanted, strict=True):
                assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_nearer_to_float32_than_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = torch.nn.LSTM(8, 16).eval(), torch.randn(12, 2, 8)
    half = torch.nn.LSTM(8, 16).eval()
    half.load_state_dict(net.state_dict())
    half = half.to(dtype)
    exact = torch.nn.LSTM(8, 16).eval()
    exact.load_state_dict({name: t.float() for name, t in half.state_dict().items()})
    with torch.no_grad():
        wanted, eager = exact(x.to(dtype).float())[0], half(x.to(dtype))[0]
    with loaded(export_module(half, (x.to(dtype),))) as program:
        got = np.asarray(next(iter(program.method("forward")(x.to(dtype)).values())), np.float32)
    error = float(np.abs(got - wanted.numpy()).max())
    assert error <= float((eager.float() - wanted).abs().max()) * 1.5


def test_given_states_and_projections_are_taken() -> None:
    torch.manual_seed(0)
    net, x = torch.nn.LSTM(5, 8, proj_size=4).eval(), torch.randn(3, 2, 5)
    given = (torch.randn(1, 2, 4), torch.randn(1, 2, 8))
    result = export_module(net, (x, given))
    assert not launches(result)  # a step with a projection is written out
    with torch.no_grad():
        output, _ = net(x, given)
    with loaded(result) as program:
        assert_close(next(iter(program.method("forward")(x, *given).values())), output)
    plain = torch.nn.LSTM(5, 4).eval()
    given = (torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    with torch.no_grad():
        output, (hidden, cell) = plain(x, given)
    with loaded(export_module(plain, (x, given))) as program:
        for got, want in zip(
            program.method("forward")(x, *given).values(), (output, hidden, cell), strict=True
        ):
            assert_close(got, want)

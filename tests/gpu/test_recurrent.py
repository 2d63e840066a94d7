"""Recurrent layers on a GPU, against eager on the host in float32."""

from __future__ import annotations

import time

import numpy as np
import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.tests.support.exporting import assert_close, export_module  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]

LAYERS = {
    "lstm of a voice encoder": (lambda: torch.nn.LSTM(40, 256, 3, batch_first=True), (1, 160, 40)),
    "lstm, a batch that is a matrix": (lambda: torch.nn.LSTM(64, 200, bidirectional=True), (20, 40, 64)),
    "gru": (lambda: torch.nn.GRU(64, 200, 2), (20, 3, 64)),
    "tanh": (lambda: torch.nn.RNN(64, 100), (20, 5, 64)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_equals_eager(layer: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    net, x = make().eval(), torch.randn(*shape)
    result = export_module(net, (x,), architectures=(driver.devices()[0].architecture,))
    with torch.no_grad():
        output, _ = net(x)
    constants = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, constants, None) as program:
        method = program.method("forward")
        for _ in range(3):
            assert_close(next(iter(method(x).values())), output)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            method(x)
            times.append(time.perf_counter() - begin)
    print(f"{layer}: {1e3 * float(np.median(times)):.2f} ms")

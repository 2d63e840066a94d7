"""Packed weights on a GPU: every kernel and type, against eager with weights rounded likewise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from devplan.passes.quantized_eager import RoundedWeights  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.tests.support.exporting import export_module  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]

SCHEMES = ("int8-weight-only", "int4-weight-only", "int4-weight-only:32")
ROWS = (1, 3, 16, 30, 64, 1024)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


class Layer(torch.nn.Module):
    """The feed-forward half of a decoder's layer, and a head that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(500, 704)
        self.norm = torch.nn.RMSNorm(704, eps=1e-5)
        self.gate, self.up = (torch.nn.Linear(704, 1056, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(1056, 704)
        self.head = torch.nn.Linear(704, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token)
        y = self.norm(x)
        made: torch.Tensor = self.head(x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y)))
        return made


def errors(scheme: str, dtype: torch.dtype, rows: Sequence[int] = ROWS) -> list[float]:
    """For each number of rows the largest error relative to the largest value."""
    found: list[float] = []
    for count in rows:
        layer, token = Layer().to(dtype), torch.arange(count)[None] % 500
        result = export_module(
            layer,
            (token,),
            architectures=(driver.devices()[0].architecture,),
            quantize=scheme,
            pass_options={"quantize-weights": {"embeddings": True}},
        )
        constants = {digest: read() for digest, read in result.constants.items()}
        notes = result.planned.program.method("forward").notes
        with torch.no_grad(), RoundedWeights(layer, notes, None):
            wanted = layer(token).float()
        with load_planned(result.planned, constants, None) as program:
            for _ in range(2):
                (ours,) = program.method("forward")(token.numpy()).values()
        got = torch.from_numpy(np.asarray(ours).astype(np.float32))
        found.append(float((got - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_weights_equal_eager_with_rounded_ones(scheme: str, dtype: torch.dtype) -> None:
    found = errors(scheme, dtype)
    assert max(found) < TOLERANCE[dtype], found


if __name__ == "__main__":
    for each in SCHEMES:
        for kind in TOLERANCE:
            print(
                each,
                kind,
                *(f"{rows}:{error:.1e}" for rows, error in zip(ROWS, errors(each, kind), strict=True)),
            )
            sys.stdout.flush()

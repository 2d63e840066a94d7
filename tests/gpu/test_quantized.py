"""Packed weights on a GPU: every kernel and type, against eager with weights rounded likewise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from devplan.passes.quantized.eager import RoundedWeights  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.tests.support.exporting import export_module  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]

SCHEMES = ("int8-weight-only", "int4-weight-only", "int4-weight-only:32")
ROWS = (1, 3, 16, 30, 64, 200, 1024)
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


class Experts(torch.nn.Module):
    """Experts in groups of rows, and one for each row by its index, behind a layer with its outputs last."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(384, 256) / 20)
        self.bias = torch.nn.Parameter(torch.randn(256))
        self.grouped = torch.nn.Parameter((torch.randn(8, 256, 192) / 16).bfloat16())
        self.chosen = torch.nn.Parameter(torch.randn(8, 160, 192) / 14)
        for parameter in (self.first, self.bias, self.chosen):
            parameter.data = parameter.data.to(dtype)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.to(self.first.dtype), self.first)
        z = torch.nn.functional.grouped_mm(y.bfloat16(), self.grouped, offs=ends).to(self.first.dtype)
        return torch.bmm(self.chosen[which], z.unsqueeze(-1)).squeeze(-1).float()


def error_of(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], scheme: str, device: str | None = None
) -> float:
    """The largest error relative to the largest value; ``device`` None is the GPU."""
    architecture = "sm_90" if device else driver.devices()[0].architecture
    result = export_module(
        module,
        inputs,
        architectures=(architecture,),
        quantize=scheme,
        pass_options={"quantize-weights": {"embeddings": True}},
    )
    constants = {digest: read() for digest, read in result.constants.items()}
    notes = result.planned.program.method("forward").notes
    with torch.no_grad(), RoundedWeights(module, notes, None):
        wanted = module(*inputs).float()
    with load_planned(result.planned, constants, device) as program:
        for _ in range(2):
            (ours,) = program.method("forward")(*(i.numpy() for i in inputs)).values()
    got = torch.from_numpy(np.asarray(ours).astype(np.float32))
    return float((got - wanted).abs().max() / wanted.abs().max())


def errors(scheme: str, dtype: torch.dtype, rows: Sequence[int] = ROWS) -> list[float]:
    """For each number of rows the largest error relative to the largest value."""
    return [error_of(Layer().to(dtype), (torch.arange(count)[None] % 500,), scheme) for count in rows]


def experts_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    """Rows, where eight groups of them end (some are empty), and an index for each."""
    made = torch.Generator().manual_seed(rows)
    counts = torch.randint(6, (rows,), generator=made).bincount(minlength=8)
    which = torch.randint(8, (rows,), generator=made)
    return torch.randn(rows, 384, generator=made), counts.cumsum(0).to(torch.int32), which


@pytest.mark.parametrize("rows", [1, 6, 200, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_experts_equal_eager_with_rounded_ones(scheme: str, dtype: torch.dtype, rows: int) -> None:
    assert error_of(Experts(dtype), experts_inputs(rows), scheme) < 2e-2


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
            sizes = (1, 6, 200, 1000)
            found = [error_of(Experts(kind), experts_inputs(rows), each) for rows in sizes]
            print("  experts", *(f"{rows}:{error:.1e}" for rows, error in zip(sizes, found, strict=True)))
            sys.stdout.flush()

"""Decoders' attention over a cache, with the rotary embedding and the cache's update within the kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.kernels.cached_attention import OPERATOR
from devplan.passes.kernels.split_attention import to_cached_steps, to_steps
from devplan.passes.lowered.compile_kernels import canonical, compile_kernels, that_waits
from devplan.passes.options import ExportOptions
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.passes.tape import ExternCall, OwnLaunch, Window
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Launch
from devplan.tests.zoo.measure import load, without_code

pytestmark = pytest.mark.torch

HEADS, KEY_HEADS, HEAD, CACHE = 4, 2, 16, 300
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def by_chunks(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """With one angle for each pair."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)


def by_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """As language models write it: tables of the head's width."""
    cosine, sine = (torch.cat([each, each], -1).unsqueeze(0) for each in (cosine, sine))
    low, high = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * cosine + torch.cat((-high, low), -1) * sine


def by_neighbours(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Pairs (2 i, 2 i + 1), which the kernel does not know."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)


def not_turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """No rotary embedding."""
    return x


def copied(cache: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> object:
    """An update by `index_copy_`."""
    return cache.index_copy_(2, position, rows)


def assigned(cache: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> object:
    """An update by an assignment."""
    cache[:, :, position] = rows
    return cache


class Decoder(torch.nn.Module):
    """One layer: projections, a rotary embedding, a cache, attention."""

    def __init__(self, turn: Turn, write: Write, batch: int, reads_cache: bool = False) -> None:
        super().__init__()
        self.turn, self.write, self.reads_cache = turn, write, reads_cache
        width = HEADS * HEAD
        self.project = torch.nn.Linear(width, width + 2 * KEY_HEADS * HEAD, bias=False)
        self.register_buffer("keys", torch.zeros(batch, KEY_HEADS, CACHE, HEAD))
        self.register_buffer("values", torch.zeros(batch, KEY_HEADS, CACHE, HEAD))
        angles = torch.arange(CACHE)[:, None] * 10.0 ** -torch.arange(HEAD // 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        both = self.project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key, value = both.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        cosine, sine = self.cosines[position], self.sines[position]
        self.write(self.keys, position, self.turn(key, cosine, sine))
        self.write(self.values, position, value)
        query = self.turn(query, cosine, sine)
        mask = torch.arange(CACHE) <= position[:, None]
        mixed = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return mixed + self.keys.sum() if self.reads_cache else mixed


def launches(model: Decoder, rows: int = 1) -> list[str]:
    """The kernels of a step, after four steps agreed with eager."""
    model = model.half().eval()
    batch = model.keys.shape[0]
    chance = torch.Generator().manual_seed(1)
    steps = [
        (torch.randn(batch, rows, HEADS * HEAD, generator=chance).half(), torch.arange(at, at + rows))
        for at in (40, 41, 299 - rows, 0)
    ]
    eager = copy.deepcopy(model)
    result = export(ModelSource("decoder", (MethodSource("forward", model, steps[0]),)))
    with load(result) as program, torch.no_grad():
        for x, position in steps:
            (ours,) = program.method("forward")(x.numpy(), position.numpy()).values()
            np.testing.assert_allclose(np.asarray(ours), eager(x, position).numpy(), atol=4e-3, rtol=4e-3)
    method = result.planned.program.method("forward")
    return [i.kernel.rsplit("_", 1)[0] for i in method.instructions if isinstance(i, Launch)]


def export(source: ModelSource) -> ExportResult:
    """Export with kernels as the emulator needs them: their sources alone."""
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return exporting.export(source, ExportOptions(device="cuda", architectures=("sm_90",)))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("write", [copied, assigned])
@pytest.mark.parametrize("turn", [by_chunks, by_halves, not_turned])
def test_besides_mask_and_tables_only_projection_and_attention_are_launched(
    turn: Turn, write: Write, batch: int
) -> None:
    names = launches(Decoder(turn, write, batch))
    assert sorted(name.split("_")[0] for name in names) == ["attention", "attention", "row", "triton"]


def test_an_embedding_that_the_kernel_does_not_know_is_computed_before() -> None:
    names = launches(Decoder(by_neighbours, copied, 1))
    assert sum(name.startswith("triton") for name in names) == 2
    assert names[-2:] == ["attention_parts", "attention_join"]


@pytest.mark.parametrize(("rows", "reads_cache"), [(2, False), (1, True)])
def test_several_rows_and_caches_with_other_readers_are_updated_before(rows: int, reads_cache: bool) -> None:
    names = launches(Decoder(by_chunks, copied, 1, reads_cache), rows)
    assert names[names.index("attention_parts") - 1].startswith("triton")


@pytest.mark.slow
def test_the_cache_is_fetched_while_the_kernel_waits() -> None:
    def window(name: str, *sizes: int) -> Window:
        return Window(name, DType.FLOAT16, sizes, tuple(torch.empty(sizes, device="meta").stride()))

    query, newest, keys = window("q", 1, 32, 1, 64), window("n", 1, 4, 1, 64), window("k", 1, 4, 2048, 64)
    position, mask = Window("p", DType.INT64, (1,), (1,)), Window("m", DType.BOOL, (1, 2048), (2048, 1))
    table, output = window("t", 32), window("o", 1, 32, 1, 64)
    operands = (query, newest, newest, table, table, position, keys, window("v", *keys.sizes), mask, 0.125)
    parts, _ = (
        canonical(step.kernel)
        for step in to_cached_steps(ExternCall(OPERATOR, operands, {}, (output,)))
        if isinstance(step, OwnLaunch)
    )
    assert "prefetch" not in parts.source  # the emulator runs the portable text
    assert that_waits(parts).source.count("prefetch") == 2
    (kernel,) = compile_kernels([parts], ("sm_80", "sm_90"), jobs=1)
    assert [code.waits for code in kernel.codes] == [False, True, False]


@pytest.mark.parametrize(
    ("batch", "strides", "count"),
    [
        (1, (524288, 131072, 64, 1), 2),
        (1, (524288, 64, 256, 1), 0),  # rows of a head stand apart
        (32, (524288, 131072, 64, 1), 0),  # 33 MB each: more than the L2 cache is to hold of them
    ],
)
def test_which_caches_are_fetched(batch: int, strides: tuple[int, ...], count: int) -> None:
    query = Window("q", DType.FLOAT16, (batch, 8, 1, 64), (512, 64, 64, 1))
    key = Window("k", DType.FLOAT16, (batch, 4, 2048, 64), strides)
    call = ExternCall("devplan.attention.default", (query, key, key, None, 0.125, False), {}, (query,))
    parts, _ = (step.kernel for step in to_steps(call) if isinstance(step, OwnLaunch))
    assert that_waits(parts).source.count("prefetch") == count

"""Attention kernels against eager PyTorch, on the emulator: few query rows and many keys above all."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import devplan
from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.kernels.attention import to_launch
from devplan.passes.kernels.split_attention import splits_of, to_steps
from devplan.passes.lowered.compile_kernels import canonical, compile_kernels
from devplan.passes.options import ExportOptions
from devplan.passes.source.load import resolve
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.passes.tape import ExternCall, OwnLaunch, Window
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Launch, LibraryCall, Method
from devplan.tests.zoo.measure import load, without_code

MODELS = Path(devplan.__file__).parent / "configs" / "models"
pytestmark = pytest.mark.torch


def window(*sizes: int) -> Window:
    """A dense half-precision window."""
    return Window("b", DType.FLOAT16, sizes, tuple(torch.empty(sizes, device="meta").stride()))


class Attention(torch.nn.Module):
    """Attention whose mask is made of the positions, as over a static cache."""

    def __init__(self, mask: str = "", is_causal: bool = False) -> None:
        super().__init__()
        self.mask, self.is_causal = mask, is_causal

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        mask: torch.Tensor | None = None
        if self.mask:
            mask = torch.arange(key.shape[2], device=last.device) <= last[:, None]
        if self.mask == "additive":
            mask = torch.where(mask, 0.25, -float("inf")).to(query.dtype)
        if self.mask == "by_head":
            heads = torch.arange(query.shape[1], device=last.device)
            mask = mask & (heads[:, None, None] != torch.arange(key.shape[2], device=last.device))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.is_causal, enable_gqa=True
        )


def rand(*shape: int) -> torch.Tensor:
    """Reproducible normal numbers in half precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def export(source: ModelSource) -> ExportResult:
    """Export with kernels as the emulator needs them: their sources alone."""
    options = ExportOptions(device="cuda", architectures=("sm_90",))
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return exporting.export(source, options)


def assert_near(ours: Any, theirs: torch.Tensor) -> None:
    """Equal to a few units in the last place of half precision, relative to the largest value."""
    assert ours.shape == tuple(theirs.shape)
    error = (torch.from_numpy(np.asarray(ours)).float() - theirs.float()).abs().max()
    assert error <= 4e-3 * theirs.abs().max()


def exported(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Method:
    """The method, after its result was compared with eager's."""
    result = export(ModelSource("attention", (MethodSource("forward", module, inputs),)))
    with load(result) as program:
        (ours,) = program.method("forward")(*(x.numpy() for x in inputs)).values()
    assert_near(ours, module(*inputs))
    return result.planned.program.method("forward")


def launches(method: Method, stem: str) -> list[Launch]:
    """Launches of kernels whose name begins so."""
    return [i for i in method.instructions if isinstance(i, Launch) and i.kernel.startswith(stem)]


def case(rows: int, group: int, keys: int, *, head: int = 16, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """Query, key, value and the last position that each row sees."""
    last = torch.arange(keys // 2, keys // 2 + rows)
    shape = (batch, 2, keys, head)
    return rand(batch, 2 * group, rows, head), rand(*shape), rand(*shape) + 0.5, last


@pytest.mark.parametrize("mask", ["", "boolean", "additive", "by_head"])
@pytest.mark.parametrize(("rows", "group", "keys"), [(1, 1, 300), (1, 8, 257), (4, 4, 320), (4, 8, 1000)])
def test_split_keys_give_what_eager_gives(rows: int, group: int, keys: int, mask: str) -> None:
    method = exported(Attention(mask), case(rows, group, keys))
    (parts,) = launches(method, "attention_parts")
    (join,) = launches(method, "attention_join")
    assert set(parts.writes) <= set(join.reads)
    assert parts.grid[0] == -(keys // -32)


def test_a_batch_and_a_head_that_is_no_power_of_two() -> None:
    method = exported(Attention("boolean"), case(3, 3, 290, head=24, batch=2))
    assert launches(method, "attention_parts")


def test_rows_that_see_nothing_give_zeros() -> None:
    query, key, value, last = case(2, 2, 300)
    exported(Attention("boolean"), (query, key, value, torch.full_like(last, -1)))


class Scaled(torch.nn.Module):
    """Attention with a scale of its own, as plain torch has it."""

    def __init__(self, scale: float | None, is_causal: bool) -> None:
        super().__init__()
        self.scale, self.is_causal = scale, is_causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, scale=self.scale, is_causal=self.is_causal, enable_gqa=True
        )


@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
@pytest.mark.parametrize(
    ("rows", "keys", "head"), [(200, 200, 16), (130, 65, 24), (64, 192, 32), (100, 128, 16)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_blocks_of_keys_and_the_rest(
    rows: int, keys: int, head: int, is_causal: bool, scale: float | None
) -> None:
    inputs = (rand(1, 4, rows, head), rand(1, 2, keys, head), rand(1, 2, keys, head))
    if is_causal and scale == -0.2:
        pytest.skip("eager masks before it scales: minus infinity becomes infinity")
    assert launches(exported(Scaled(scale, is_causal), inputs), "attention")


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16)),
        ((1, 2, 5, 16), (3, 2, 7, 16), (3, 2, 7, 16)),
        ((2, 4, 5, 48), (2, 2, 300, 48), (2, 2, 300, 24)),
        ((1, 2, 130, 24), (1, 2, 90, 24), (1, 2, 90, 64)),
        ((4, 5, 16), (4, 7, 16), (4, 7, 16)),
        ((4, 5, 16), (2, 7, 16), (2, 7, 16)),
        ((2, 3, 2, 5, 16), (2, 3, 2, 7, 16), (2, 3, 2, 7, 32)),
    ],
    ids=str,
)
def test_operands_that_share_a_batch_have_wider_values_or_other_ranks_are_one_kernel(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    method = exported(Scaled(None, False), (rand(*query), rand(*key), rand(*value) + 0.5))
    assert launches(method, "attention")
    assert not [i for i in method.instructions if isinstance(i, LibraryCall)]


class Spelled(torch.nn.Module):
    """Attention as model code spells it out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        more: torch.Tensor,
    ) -> Any:
        batch, heads, rows, head = query.shape
        key, value = (repeated(t, heads // t.shape[1]) for t in (key, value))
        if self.way == "repeated":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if self.way == "alibi":  # as Bloom does it
            flat, across, down = (t.reshape(batch * heads, -1, head) for t in (query, key, value))
            scores = more.repeat(batch, 1, 1).baddbmm(flat, across.transpose(-1, -2), beta=1.0, alpha=0.3)
            scores = scores.view(batch, heads, rows, -1) + mask
            weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
            return torch.bmm(weights.view(batch * heads, rows, -1), down).view(batch, heads, rows, head)
        if self.way == "widened":  # as GPT-Neo does it
            scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
            scores = torch.where(mask < 0, torch.tensor(torch.finfo(torch.float32).min), scores)
            return torch.matmul(scores.softmax(-1).to(value.dtype), value)
        scores = torch.matmul(query, key.transpose(2, 3)) * 0.3
        if self.way == "capped":
            scores = torch.tanh(scores / 0.7) * 0.7 + mask
        elif self.way == "filled":
            scores = (scores + more).masked_fill(mask < 0, torch.finfo(query.dtype).min)
        elif self.way == "hidden":
            scores = scores.masked_fill(mask < 0, float("-inf"))
        elif self.way == "sinks":
            sinks = more[:, 0, 0].reshape(1, -1, 1, 1).expand(batch, -1, rows, -1)
            scores = torch.cat([scores + mask, sinks], -1)
            scores = scores - scores.max(-1, keepdim=True).values
        elif self.way == "scaled with its mask":
            scores = (scores + mask) * 0.5
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        weights = weights[..., :-1] if self.way == "sinks" else weights
        made = torch.matmul(weights, value)
        return (made, weights) if self.way == "with its weights" else made


def repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Every head ``count`` times, as transformers does it."""
    batch, given, rows, head = heads.shape
    return heads[:, :, None].expand(batch, given, count, rows, head).reshape(batch, given * count, rows, head)


def spelled_inputs(rows: int, keys: int, groups: int = 2) -> tuple[torch.Tensor, ...]:
    hidden = torch.ones(rows, keys).tril(keys - rows) == 0
    mask = torch.where(hidden, torch.finfo(torch.float16).min, 0.0).half()[None, None]
    shape = (2, 4 // groups, keys, 16)
    return rand(2, 4, rows, 16), rand(*shape), rand(*shape) + 0.5, mask, rand(4, 1, keys)


@pytest.mark.parametrize(
    "way", ["repeated", "alibi", "widened", "capped", "filled", "hidden", "sinks", "plain"]
)
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (1, 300)])
def test_attention_that_is_spelled_out_is_one_kernel_and_reads_shared_heads_where_they_are(
    way: str, rows: int, keys: int
) -> None:
    method = exported(Spelled(way), spelled_inputs(rows, keys))
    assert launches(method, "attention")
    assert not [i for i in method.instructions if isinstance(i, LibraryCall)]
    if way in ("repeated", "capped", "plain"):
        assert launches(method, "") == launches(method, "attention")


@pytest.mark.parametrize("way", ["capped", "sinks"])
def test_capped_scores_and_sinks_in_float32(way: str) -> None:
    inputs = tuple(t.float() for t in spelled_inputs(5, 7))
    assert not launches(exported(Spelled(way), inputs), "attention")


def test_what_is_no_attention_of_ours_stays_as_it_is() -> None:
    assert not launches(exported(Spelled("scaled with its mask"), spelled_inputs(9, 9)), "attention")


@pytest.mark.slow
@pytest.mark.parametrize(("sinks", "cap"), [(None, 0.0), (window(32), 0.0), (None, 30.0)], ids=str)
def test_the_kernels_compile_for_ampere_and_hopper(sinks: Window | None, cap: float) -> None:
    query, key = window(1, 32, 1, 64), window(1, 4, 2048, 64)
    mask = Window("m", DType.BOOL, (1, 2048), (2048, 1))
    operands = (query, key, key, mask, 0.125, False, sinks, cap)
    call = ExternCall("devplan.attention.default", operands, {}, (query,))
    specs = [canonical(s.kernel) for s in to_steps(call) if isinstance(s, OwnLaunch)]
    whole = to_launch(replace(call, operands=(window(1, 32, 200, 64), *operands[1:])))
    kernels = compile_kernels([*specs, canonical(whole.kernel)], ("sm_80", "sm_90"), jobs=1)
    assert len(kernels) == 3
    for kernel in kernels:
        assert {c.architecture for c in kernel.codes if c.form == "cubin"} == {"sm_80", "sm_90"}


def test_causal_rows_see_few_keys_and_are_not_split() -> None:
    method = exported(Attention(is_causal=True), case(4, 4, 300))
    assert not launches(method, "attention_parts")
    assert len(launches(method, "attention")) == 1


def test_a_mask_is_computed_once_for_all_layers() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention("boolean")

        def forward(self, query: torch.Tensor, key: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return self.attention(self.attention(query, key, key, last), key, key, last)

    query, key, _, last = case(1, 4, 300)
    method = exported(Two(), (query, key, last))
    kernels = [i.kernel for i in method.instructions if isinstance(i, Launch)]
    assert sum("le" in kernel.split("_") for kernel in kernels) == 1
    assert len(kernels) == 5


def test_three_tokens_of_a_decoder_with_a_cache() -> None:
    source = resolve(str(MODELS / "llama_decode.py"))
    eager = copy.deepcopy(source.methods[0].module)
    result = export(source)
    with load(result) as program, torch.no_grad():
        for method, token, position in (
            ("prefill", torch.arange(7, 15), torch.arange(8)),
            *(("decode", torch.tensor([n]), torch.tensor([n])) for n in (8, 9, 10)),
        ):
            (ours,) = program.method(method)(token[None].numpy(), position.numpy()).values()
            assert_near(ours, eager(token[None], position))
    decode = result.planned.program.method("decode")
    layers = len(launches(decode, "attention_parts"))
    kernels = sum(isinstance(i, Launch | LibraryCall) for i in decode.instructions)
    assert kernels <= 10 * layers + 4


@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "rows", "keys", "splits"),
    [
        (1, 32, 4, 1, 2048, 64),  # one block of keys for each: 256 programs
        (1, 32, 32, 1, 2048, 16),
        (32, 32, 4, 1, 2048, 8),  # up to four programs as many, with four blocks and more
        (8, 32, 4, 1, 2048, 16),
        (1, 8, 8, 1, 100, None),  # short caches
        (1, 8, 8, 17, 2048, None),  # many rows
        (64, 32, 8, 1, 2048, 2),
        (64, 32, 32, 1, 2048, None),
    ],
)
def test_enough_programs_to_keep_each_multiprocessor_loading(
    batch: int, heads: int, key_heads: int, rows: int, keys: int, splits: int | None
) -> None:
    query, key = window(batch, heads, rows, 64), window(batch, key_heads, keys, 64)
    call = ExternCall("devplan.attention.default", (query, key, key, None, 0.125, False), {}, (query,))
    assert splits_of(call) == splits

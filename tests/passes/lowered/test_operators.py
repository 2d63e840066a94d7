"""Operators one by one: exported for the host and for CUDA, and run against eager PyTorch.

A line of the table is a function of tensors and its inputs. On ``cuda`` the generated kernels run on the
emulator, so that nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from devplan.passes.source.model import MethodSource, ModelSource
from devplan.tests.zoo.measure import measure

pytestmark = pytest.mark.torch

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(*shape: int, below: int = 8) -> torch.Tensor:
    """Reproducible integers."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def put_behind_a_slice(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``x[:, mask] = values``, into a copy."""
    made = x.clone()
    made[:, mask] = values
    return made


X, Y, IMAGE, ROWS = rand(4, 6), rand(4, 6, seed=1), rand(1, 3, 8, 8), rand(3, 40)

CASES: dict[str, Case] = {
    # element by element
    "add_alpha": (lambda x, y: torch.add(x, y, alpha=2), (X, Y)),
    "transcendental": (lambda x: torch.sin(x) + x.exp().log1p() + torch.erf(x) + x.tanh(), (X,)),
    "comparisons": (lambda x, y: (x > y) & (x != 0) | ~(x <= 1), (X, Y)),
    "where_clamp": (lambda x, y: torch.where(x > 0, x.clamp(-1, 1), y.clamp_min(0)), (X, Y)),
    "integer_division": (lambda a, b: (a // (b + 1), a % (b + 1), a << 1, a & b), (ints(4, 6), ints(4, 6))),
    "floor_round_trunc": (lambda x: (x.floor(), x.round(), x.trunc(), x.frac(), torch.sign(x)), (3 * X,)),
    "casts": (lambda x: (x.half().float(), x.to(torch.int32), x.bool(), x.double()), (3 * X,)),
    "nan_to_num": (lambda x: torch.nan_to_num(x / 0, 7.0, 8.0, 9.0).isfinite(), (X,)),
    "powers": (lambda x: (x.abs() ** 1.5, x**2, x.abs().rsqrt(), torch.float_power(x.abs(), 2)), (X,)),
    "activations": (
        lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.elu(x), F.softplus(x)),
        (X,),
    ),
    "hard_activations": (lambda x: (F.hardswish(x), F.hardsigmoid(x), F.relu6(x), F.leaky_relu(x)), (X,)),
    "prelu_glu": (lambda x, w: (F.prelu(x, w), F.glu(x)), (X, rand(6))),
    # shapes
    "cat_stack": (lambda x, y: (torch.cat([x, y], 1), torch.stack([x, y], 1)), (X, Y)),
    "views": (lambda x: (x.t(), x.reshape(2, 12), x[1:, ::2], x.unfold(1, 3, 2), x.diagonal()), (X,)),
    "flip_roll": (lambda x: (x.flip(0), x.roll(2, 1), x.repeat(2, 1), x.repeat_interleave(2, 0)), (X,)),
    "pads": (
        lambda x: tuple(F.pad(x, (1, 2, 2, 1), m) for m in ("constant", "reflect", "replicate", "circular")),
        (IMAGE,),
    ),
    "tril_eye": (lambda x: (x.tril(), x.triu(1), x + torch.eye(4, 6), torch.diag_embed(x)), (X,)),
    "split_chunk": (lambda x: (*x.split(2, 1), *x.chunk(2, 0), *x.unbind(0)), (X,)),
    "pixel_shuffle": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), (rand(1, 8, 3, 3),)),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="ij"), (rand(3), rand(4))),
    # indexing
    "gather": (lambda x, i: x.gather(1, i), (X, ints(4, 3, below=6))),
    "index": (lambda x, i: (x[i], x[:, i], x.index_select(0, i), x.take(i)), (X, ints(3, below=4))),
    "masked": (lambda x, y: (x.masked_fill(x > 0, 1.0), x.masked_scatter(x > 0, y)), (X, Y)),
    "scatter": (
        lambda x, i, y: (x.scatter(1, i, y), x.scatter_add(1, i, y)),
        (X, ints(4, 6, below=6).argsort(1), Y),
    ),
    "scatter_reduce": (lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), (X, ints(4, 6, below=6), Y)),
    "index_put": (lambda x, i, y: torch.index_put(x, (i,), y), (X, torch.tensor([2, 0]), Y[:2])),
    "index_add_copy": (
        lambda x, i, y: (x.index_add(0, i, y), x.index_copy(0, i, y)),
        (X, torch.tensor([2, 0]), Y[:2]),
    ),
    "embedding": (lambda i, w: F.embedding(i, w), (ints(2, 5), rand(8, 4))),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="mean"), (ints(3, 5), rand(8, 4))),
    "embedding_bag_offsets": (
        lambda i, w, o, f: (
            F.embedding_bag(i, w, o, mode="max", padding_idx=3),
            F.embedding_bag(i, w, o, mode="mean", padding_idx=3),
            F.embedding_bag(i, w, o, mode="sum", include_last_offset=True),
            F.embedding_bag(i, w, o, mode="sum", per_sample_weights=f),
        ),
        (ints(37, below=50), rand(50, 20), torch.tensor([0, 0, 5, 30]), rand(37)),
    ),
    "embedding_bag_half": (
        lambda i, w, o: F.embedding_bag(i, w, o, mode="sum"),
        (ints(37, below=50).int(), rand(50, 130).half(), torch.tensor([0, 9], dtype=torch.int32)),
    ),
    "embedding_bag_double": (
        lambda i, w, o: F.embedding_bag(i, w, o, mode="mean"),
        (ints(9, below=5), rand(5, 3).double(), torch.tensor([0, 4, 4])),
    ),
    "one_hot": (lambda i: F.one_hot(i, 8), (ints(2, 5),)),
    "bucketize": (
        lambda x, e: (torch.bucketize(x, e), torch.searchsorted(e, x)),
        (X, torch.tensor([-1.0, 0, 1])),
    ),
    # reductions
    "sums": (lambda x: (x.sum(), x.mean(1), x.prod(0), x.amax(1), x.amin(), x.var(1), x.std(0)), (X,)),
    "argmax": (lambda x: (x.argmax(1), x.argmin(), *x.max(1), *x.min(0)), (X,)),
    "any_all": (lambda x: ((x > 0).any(1), (x > -9).all(), x.count_nonzero(1)), (X,)),
    "norms": (
        lambda x: (x.norm(), x.norm(1, 1), torch.linalg.vector_norm(x, 3, 1), F.normalize(x, dim=1)),
        (X,),
    ),
    "logsumexp": (lambda x: (x.logsumexp(1), x.softmax(1), x.log_softmax(0), F.softmin(x, 1)), (X,)),
    "cumulative": (lambda x: (x.cumsum(1), x.cumprod(0), x.logcumsumexp(1), x.cummax(1)[0]), (X,)),
    "long_cumsum": (lambda x: x.cumsum(1), (rand(2, 3000),)),
    "flat_cumsum": (lambda x: x.flatten().cumsum(0), (ints(150, 128),)),
    "put_by_mask": (
        lambda x, v, m: (
            x.index_put((x > 0,), v[0, 0]),
            x.index_put((m,), v[0]),
            x.index_put((m,), v[:1], accumulate=True),
            x.index_put((m,), v),
            x.t().index_put((x.t() > 1,), v[:1, 0]),
            put_behind_a_slice(x.t(), m, v.t()[:, :1]),
        ),
        (X, rand(3, 6), torch.tensor([True, False, True, True])),
    ),
    "histc": (lambda x: torch.histc(x, 5, -2, 2), (X,)),
    # order
    "topk": (lambda x: x.topk(5, 1), (ROWS,)),
    "topk_smallest": (lambda x: x.topk(3, 0, largest=False), (ROWS,)),
    "topk_long": (lambda x: x.topk(7, 1), (rand(2, 5000),)),
    "sort": (lambda x: x.sort(1), (ROWS,)),
    "sort_descending": (lambda x: torch.sort(x, dim=0, descending=True, stable=True), (ints(9, 4),)),
    "sort_long": (lambda x: x.sort(1), (rand(2, 3000),)),
    "sort_long_ties": (
        lambda x: torch.sort(x, dim=0, descending=True, stable=True),
        (ints(1030, 2, below=5),),
    ),
    "sort_long_extremes": (
        lambda x: (*torch.sort(x, stable=True), x.topk(5)[0], x.topk(5, largest=False)[0]),
        (torch.tensor([2**63 - 1, 3, -(2**63)] * 201),),
    ),
    "sort_long_nan": (
        lambda x: (*torch.sort(x, stable=True), x.topk(600)[0], x.topk(200, largest=False)[0]),
        (torch.where(rand(2, 700) > 1.5, float("nan"), torch.where(rand(2, 700) < -1, -0.0, rand(2, 700))),),
    ),
    "sort_long_float64": (lambda x: x.sort(1, descending=True), (rand(2, 1025).double(),)),
    "sort_long_half": (lambda x: torch.sort(x, dim=1, stable=True), (rand(2, 1025).half(),)),
    "sort_long_bytes": (
        lambda x: torch.sort(x, dim=1, stable=True),
        (ints(2, 700, below=200).to(torch.uint8),),
    ),
    "argsort": (lambda x: x.argsort(1), (ROWS,)),
    "quantiles": (
        lambda x: (x.quantile(torch.tensor([0.0, 0.25, 1.0]), dim=-1), x.nanquantile(0.4, dim=0)),
        (ROWS,),
    ),
    "median": (lambda x: (x.median(1)[0], x.kthvalue(3, 1)[0], x.median()), (ROWS,)),
    "quantile": (lambda x: x.quantile(0.3, 1), (ROWS,)),
    # matrix products
    "mm": (lambda x, y: (x @ y.t(), torch.mv(x, y[0]), x[0] @ y[0], torch.outer(x[0], y[1])), (X, Y)),
    "bmm": (lambda x, y: torch.bmm(x, y), (rand(3, 4, 5), rand(3, 5, 2))),
    "baddbmm": (
        lambda a, x, y: torch.baddbmm(a, x, y, beta=0.5),
        (rand(3, 4, 2), rand(3, 4, 5), rand(3, 5, 2)),
    ),
    "addmm": (lambda a, x, y: torch.addmm(a, x, y, beta=2, alpha=3), (rand(4, 2), rand(4, 5), rand(5, 2))),
    "addmm_of_any_shape": (
        lambda row, column, number, x, y: tuple(
            torch.addmm(a, x, y, beta=beta) for a in (row, column, number, number[0]) for beta in (1, 0.5)
        ),
        (rand(2), rand(4, 1), rand(1), rand(4, 5), rand(5, 2)),
    ),
    "baddbmm_of_any_shape": (
        lambda a, b, x, y: (torch.baddbmm(a, x, y, alpha=2), torch.baddbmm(b, x, y), torch.addbmm(b, x, y)),
        (rand(3, 1, 2), rand(4, 2), rand(3, 4, 5), rand(3, 5, 2)),
    ),
    "grouped_mm": (
        lambda x, w, ends: F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), offs=ends).float(),
        (rand(40, 64), rand(4, 48, 64), torch.tensor([3, 3, 20, 40], dtype=torch.int32)),
    ),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (rand(2, 3, 4), rand(2, 5, 4))),
    "linear": (lambda x, w, b: F.linear(x, w, b), (rand(2, 3, 6), rand(5, 6), rand(5))),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), (X, Y, rand(3, 6, 6))),
    "kron_cross": (lambda x, y: (torch.kron(x, y), torch.linalg.cross(x[:, :3], y[:, :3])), (X, Y)),
    "cdist": (lambda x, y: torch.cdist(x, y), (X, Y)),
    # convolutions and pooling
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2), (rand(2, 3, 20), rand(4, 3, 3))),
    "conv2d_groups": (lambda x, w: F.conv2d(x, w, groups=3, padding=1), (IMAGE, rand(6, 1, 3, 3))),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (rand(1, 2, 4, 4, 4), rand(3, 2, 3, 3, 3))),
    "conv_transpose": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        (IMAGE, rand(3, 4, 3, 3)),
    ),
    "conv_transpose1d": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, groups=2),
        (rand(1, 4, 9), rand(4, 3, 4)),
    ),
    "pools": (lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.lp_pool2d(x, 2.0, 2)), (IMAGE,)),
    "average_pools_of_large_windows": (
        lambda x: (F.avg_pool2d(x, 7, 2, 3), F.avg_pool2d(x, 200, ceil_mode=True), F.lp_pool2d(x, 2.0, 6, 1)),
        (IMAGE,),
    ),
    "adaptive_pools": (lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 4)), (IMAGE,)),
    "pools_1d_3d": (
        lambda x, v: (F.max_pool1d(x, 2), F.avg_pool3d(v, 2), F.max_pool3d(v, 2)),
        (rand(2, 3, 8), rand(1, 2, 4, 4, 4)),
    ),
    "pool_of_one_pixel": (
        lambda x, y: F.avg_pool2d(torch.cat([x.relu(), y + 1], 1), 3, 1, 1),
        (rand(1, 3, 1, 1), rand(1, 2, 1, 1)),
    ),
    "max_pool_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,)),
    "unfold_fold": (lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2), (IMAGE,)),
    # normalisations
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (X, rand(6), rand(6, seed=2))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (X, rand(6))),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), (rand(2, 4, 5), rand(4))),
    "instance_norm": (lambda x: F.instance_norm(x), (IMAGE,)),
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v.abs(), m, m), (IMAGE, rand(3), rand(3, seed=1))),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), (rand(1, 6, 4, 4),)),
    # sampling and resizing
    "interpolate": (
        lambda x: tuple(
            F.interpolate(x, scale_factor=2.0, mode=m) for m in ("nearest", "bilinear", "bicubic", "area")
        ),
        (IMAGE,),
    ),
    "interpolate_corners": (
        lambda x: F.interpolate(x, (5, 11), mode="bilinear", align_corners=True),
        (IMAGE,),
    ),
    "interpolate_1d_3d": (
        lambda x, v: (
            F.interpolate(x, 11, mode="linear"),
            F.interpolate(v, scale_factor=2, mode="trilinear"),
        ),
        (rand(1, 2, 7), rand(1, 2, 3, 3, 3)),
    ),
    "interpolate_antialias": (lambda x: F.interpolate(x, (5, 5), mode="bilinear", antialias=True), (IMAGE,)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (IMAGE, rand(1, 5, 5, 2))),
    "affine_grid": (lambda t: F.affine_grid(t, (1, 3, 4, 4), align_corners=False), (rand(1, 2, 3),)),
    # attention
    "sdpa_mask": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m > 0),
        (rand(1, 2, 5, 8), rand(1, 2, 7, 8), rand(5, 7).abs()),
    ),
    "sdpa_gqa": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
        (rand(1, 4, 5, 8), rand(1, 2, 5, 8)),
    ),
    "sdpa_of_other_ranks": (
        lambda q, k, m: (
            F.scaled_dot_product_attention(q, k, k, attn_mask=m > 0),
            F.scaled_dot_product_attention(q[0], k[0], k[0, ..., :3]),
            F.scaled_dot_product_attention(q[0, 0], k[0, 0], k[0, 0], is_causal=True),
        ),
        (rand(2, 2, 3, 5, 8), rand(2, 2, 3, 7, 8), rand(3, 5, 7)),
    ),
    # recurrent layers
    "cells": (
        lambda x, h, w, u, b: (
            *torch.lstm_cell(x, (h, h), w, u, b, b),
            torch.gru_cell(x, h, w[:9], u[:9]),
            torch.rnn_tanh_cell(x, h, w[:3], u[:3], b[:3], b[:3]),
            torch.rnn_relu_cell(x, h, w[:3], u[:3], b[:3], None),
        ),
        (rand(2, 4), rand(2, 3), rand(12, 4), rand(12, 3), rand(12)),
    ),
    "half_cell": (
        lambda x, h, w, u: torch.lstm_cell(x, (h, h), w, u),
        (rand(2, 4).half(), rand(2, 3).half(), rand(12, 4).half(), rand(12, 3).half()),
    ),
    "lstm": (
        lambda x, h, *w: torch.lstm(x, (h, h), w, True, 1, 0.0, False, True, True),
        (
            rand(2, 5, 4),
            rand(2, 2, 3),
            *(rand(*s, seed=i) for i, s in enumerate([(12, 4), (12, 3), (12,), (12,)] * 2)),
        ),
    ),
    "gru": (
        lambda x, h, *w: torch.gru(x, h, w, True, 1, 0.0, False, False, False),
        (rand(5, 2, 4), rand(1, 2, 3), rand(9, 4), rand(9, 3), rand(9), rand(9, seed=1)),
    ),
    "scatter_integers": (
        lambda x, i: (x.scatter(1, i, x), x.scatter_add(1, i, x)),
        (ints(4, 6), ints(4, 6, below=6).argsort(1)),
    ),
    # complex numbers, as pairs of real ones
    "rotary_complex": (
        lambda x, a: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(a), a)
        ).flatten(-2),
        (rand(2, 5, 6), rand(5, 3)),
    ),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x)), (X,)),
    "rfft_abs": (lambda x: torch.fft.rfft(x).abs(), (rand(2, 20),)),
    "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=20), (rand(2, 20),)),
    "fft2": (lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real, (IMAGE,)),
    "stft": (
        lambda x, w: torch.view_as_real(torch.stft(x, 16, 4, window=w, return_complex=True)),
        (rand(2, 64), rand(16).abs()),
    ),
    "stft_in_pairs": (
        lambda x, w: torch.stft(x, 16, 4, window=w, return_complex=False),
        (rand(64), rand(16)),
    ),
    # tensors without elements
    "nothing": (
        lambda x, i, w: (x + 1, x.sum(), x.sum(1), *x.sort(1), w[i], F.embedding_bag(i, w, i), x @ w.t()),
        (rand(0, 4), ints(0), rand(3, 4)),
    ),
    "nothing_chosen": (
        lambda x: (
            *x.topk(0, 1),
            torch.nonzero_static(x[:0], size=2),
            torch.cat([x[:, :0], x], 1),
            x[:0] * 2,
        ),
        (X,),
    ),
    "nothing_in_rows": (
        lambda q, k: (F.scaled_dot_product_attention(q[:, :, :0], k, k), F.layer_norm(q[:0], (16,))),
        (rand(1, 2, 3, 16).half(), rand(1, 2, 5, 16).half()),
    ),
    # sizes that depend on data are refused; sizes that are padded are not
    "nonzero_static": (lambda x: torch.nonzero_static(x > 0, size=30, fill_value=-1), (X,)),
}


class Function(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def outcome(name: str, device: str) -> Any:
    """How far a case comes on a device."""
    function, inputs = CASES[name]
    source = ModelSource(name, (MethodSource("forward", Function(function), inputs),))
    return measure(name, "operators", lambda: source, device, code=False, calls=1)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: torch.linalg.eigh(x @ x.t())[0], "aten.linalg_eigh"),
        (lambda x: x[x > 0][::2], "aten.slice"),
    ],
)
def test_what_cuda_cannot_run_is_refused_by_name(function: Callable[..., Any], operator: str) -> None:
    source = ModelSource("refused", (MethodSource("forward", Function(function), (rand(4, 4),)),))
    row = measure("refused", "operators", lambda: source, "cuda", code=False)
    assert row.status == "refused"
    assert operator in row.error
    assert "test_operators.py:" in row.error


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operator_equals_eager(name: str, device: str) -> None:
    row = outcome(name, device)
    assert row.status == "right", row.error

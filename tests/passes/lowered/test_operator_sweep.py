"""Operators that have a way of their own here, over many sizes and element types, against eager on the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from devplan.tests.support.functions import against_eager

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    row = against_eager(function, *inputs)
    assert row.status == "right", row.error


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def permuted(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Two rows without equal elements."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    return torch.stack([order, order.flip(0)]).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "descending"),
    [(torch.float32, False), (torch.float16, True), (torch.int16, True), (torch.bool, False)],
    ids=str,
)
def test_sort(dtype: torch.dtype, descending: bool) -> None:
    def sort(*rows: torch.Tensor) -> list[torch.Tensor]:
        made = [torch.sort(x, dim=-1, stable=True, descending=descending) for x in rows]
        return [tensor for pair in made for tensor in pair]

    check(sort, *[(rand(2, length) * 10).to(dtype) for length in (1, 513, 1500)])


def test_searching_parts_and_sorting_one_long_row() -> None:
    def search(x: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.searchsorted(x[40:], row), torch.bucketize(row, x[40:]), torch.searchsorted(x, row)]
        return [*found, *torch.sort(row, stable=True)]

    check(search, rand(100).sort()[0], rand(1500))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, True), (torch.int64, False)], ids=str)
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    lengths = (17, 513, 1300)

    def topk(*rows: torch.Tensor) -> list[torch.Tensor]:
        made = [x.topk(k, -1, largest=largest) for x in rows for k in (1, min(7, x.size(-1)), x.size(-1))]
        return [tensor for pair in made for tensor in pair]

    check(topk, *[permuted(length, dtype) for length in lengths])


@pytest.mark.parametrize(
    ("count", "bins", "low", "high"),
    [(10, 100, 0, 0), (1000, 7, -1, 1), (1, 3, 0, 0)],
)
def test_histc(count: int, bins: int, low: float, high: float) -> None:
    def count_twice(x: torch.Tensor, same: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.histc(x, bins, low, high), torch.histc(same, bins)

    check(count_twice, rand(count), torch.ones(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "ends"),
    [(40, [0, 0, 16, 33]), (5, [1, 2, 3, 5]), (300, [0, 250, 250, 300])],
)
def test_grouped_products(dtype: torch.dtype, rows: int, ends: list[int]) -> None:
    pytest.importorskip("transformers.integrations.moe")  # registers the operator
    operator = torch.ops.transformers.grouped_mm_fallback

    def product(x: torch.Tensor, weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = operator(x.to(dtype), weight.to(dtype).transpose(1, 2), given)
        return made.float()[: ends[-1]]  # eager leaves the rows behind the last end as they were

    check(product, rand(rows, 64) / 8, rand(4, 48, 64), torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_products_with_what_is_added(dtype: torch.dtype) -> None:
    """Of every shape that fits, and lying in any way; libraries take rows and matrices like the result alone."""
    shapes = [(), (1,), (3,), (2, 1), (1, 3), (2, 3)]

    def add(a: torch.Tensor, b: torch.Tensor, wide: torch.Tensor, *added: torch.Tensor) -> list[torch.Tensor]:
        factors = {"alpha": 2.7, "beta": 3.2}
        return [
            *(c + a @ b for c in added),
            *(torch.addmm(c, a, b, **factors) for c in added),
            torch.addmm(wide[0, ::2], a, b),
            torch.addmm(wide[:3, :2].T, a, b, **factors),
            F.linear(a, b.T.contiguous(), added[1].expand(3)),
            torch.baddbmm(wide[:3, :2].T.expand(4, 2, 3), a.expand(4, 2, 5), b.expand(4, 5, 3), **factors),
            torch.addbmm(added[0], a.expand(4, 2, 5), b.expand(4, 5, 3), **factors),
        ]

    given = [(rand(1, *shape)[0] * 4).to(dtype) for shape in ((2, 5), (5, 3), (6, 6), *shapes)]
    check(add, *given)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_without_the_last_row(mode: str) -> None:
    """A negative padding index of the function counts from the end."""
    indices, offsets = torch.tensor([0, 4, 1, 4, 2, 4]), torch.tensor([0, 3])
    bags = [(lambda w, i, o, p=p: F.embedding_bag(i, w, o, mode=mode, padding_idx=p)) for p in (-1, 4, None)]
    check(lambda *given: [bag(*given) for bag in bags], rand(5, 5), indices, offsets)


def test_integer_products_without_elements() -> None:
    check(lambda a, b, c: [a @ b, b.T @ a.T, b @ c], *map(torch.ones, ((0, 5), (5, 3), (3, 0))))
    whole = [torch.ones(shape, dtype=torch.int64) for shape in ((0, 5), (5, 3), (4, 0), (0, 2))]
    check(lambda a, b, c, d: [a @ b, c @ d], *whole)


def test_small_things() -> None:
    def compute(scalar: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [
            *scalar.kthvalue(1),
            *scalar.median(-1),
            torch.view_as_real(torch.complex(row, scalar)),
            torch.masked_select(scalar, scalar > -9),
            torch.special.i0(row),
            torch.special.bessel_j1(row * 20),
        ]

    check(compute, torch.tensor(0.7), rand(7))


IMAGE = rand(2, 3, 9, 13)
MODES: list[dict[str, Any]] = [
    {"mode": "nearest", "size": (4, 20)},
    {"mode": "nearest-exact", "size": (4, 20)},
    {"mode": "area", "size": (4, 6)},
    {"mode": "bilinear", "size": (5, 20)},
    {"mode": "bilinear", "scale_factor": (1.7, 0.6)},
    {"mode": "bilinear", "scale_factor": 1.7, "recompute_scale_factor": True},
    {"mode": "bilinear", "size": (1, 1), "align_corners": True},
    {"mode": "bicubic", "size": (18, 26), "align_corners": True},
    {"mode": "bilinear", "size": (20, 5), "antialias": True},
    {"mode": "bicubic", "size": (20, 5), "antialias": True},
    {"mode": "bilinear", "size": (4, 7), "antialias": True, "align_corners": True},
    {"mode": "bicubic", "size": (1, 30), "antialias": True, "align_corners": True},
]


def test_adaptive_pools_with_large_windows() -> None:
    def pool(x: torch.Tensor, volume: torch.Tensor) -> list[torch.Tensor]:
        means = [F.adaptive_avg_pool2d(x, size) for size in ((1, 2), (2, 3), 1)]
        half = F.adaptive_avg_pool2d(x.half(), (1, 2)).float()
        pairs = [
            F.adaptive_max_pool3d(volume, size, return_indices=True) for size in (1, (2, 3, 4), (5, 1, 7))
        ]
        return [*means, half, *(tensor for pair in pairs for tensor in pair)]

    check(pool, IMAGE, (rand(2, 6, 8, 9) * 2).round())  # equal elements: the first one's place counts


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce: str) -> None:
    def put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [x.index_reduce(1, index, source, reduce, include_self=itself) for itself in (True, False)]

    check(put, rand(4, 5), torch.tensor([0, 2, 2]), rand(4, 3))


def test_interpolate() -> None:
    check(lambda x: [F.interpolate(x, **mode) for mode in MODES], IMAGE)


def test_interpolate_lines_and_volumes() -> None:
    def resize(line: torch.Tensor, volume: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.interpolate(line, 7, mode="linear"),
            F.interpolate(line, scale_factor=2.5, mode="linear", align_corners=True),
            F.interpolate(line, 5, mode="area"),
            F.interpolate(volume, (5, 2, 7), mode="trilinear"),
            F.interpolate(volume, (6, 8, 10), mode="nearest"),
            F.interpolate(volume, (2, 2, 3), mode="area"),
        ]

    check(resize, rand(1, 2, 11), rand(1, 2, 3, 4, 5))


def test_grid_sample() -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.grid_sample(x, grid.tanh() * 1.3, mode=mode, padding_mode=padding, align_corners=corners)
            for mode, padding, corners in (
                ("bilinear", "zeros", False),
                ("bilinear", "reflection", True),
                ("nearest", "border", False),
            )
        ]

    check(sample, IMAGE, rand(2, 4, 5, 2))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_of_volumes(padding: str) -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.grid_sample(x, grid * 1.3, mode=mode, padding_mode=padding, align_corners=corners)
            for mode in ("bilinear", "nearest")
            for corners in (False, True)
        ]

    check(sample, rand(2, 3, 4, 5, 6), rand(2, 3, 4, 2, 3))


def test_real_spectra() -> None:
    check(lambda x: [torch.fft.irfft(x), torch.fft.hfft(x, 7), torch.fft.irfft2(x)], rand(4, 9))


def test_digamma() -> None:
    x = torch.cat([torch.linspace(-6.3, 20, 500), torch.tensor([0.0, -0.0, -1.0, 1e-6, 1e6, math.inf])])
    check(lambda x, wide: [torch.digamma(x), torch.digamma(wide)], x, x.double())


@pytest.mark.parametrize("length", [1, 31, 64])
def test_fourier(length: int) -> None:
    def transform(x: torch.Tensor) -> list[torch.Tensor]:
        half = torch.fft.rfft(x)
        whole = [torch.fft.fft(x), half, torch.fft.ifft(x).resolve_conj()]
        return [*map(torch.view_as_real, whole), torch.fft.irfft(half, n=length), half.abs()]

    check(transform, rand(2, length))


@pytest.mark.parametrize(
    ("size", "hop", "center", "normalized"),
    [(16, 4, True, False), (64, 16, False, True), (30, 7, True, True)],
)
def test_short_time_fourier(size: int, hop: int, center: bool, normalized: bool) -> None:
    def transform(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        made = torch.stft(
            x, size, hop, window=window, center=center, normalized=normalized, return_complex=True
        )
        return torch.view_as_real(made)

    check(transform, rand(2, 1000), torch.hann_window(size))


def test_scattering_scalars_and_with_a_word_for_how() -> None:
    one = torch.tensor(0)

    def scattered(x: torch.Tensor, whole: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        at = torch.zeros_like(whole[0])
        return [
            whole[0].scatter(0, at, whole[1]),
            whole[0].scatter_add(0, at, whole[1]),
            *[x[0, 0].scatter_reduce(0, at, x[0, 1], how) for how in ("sum", "prod", "mean", "amax", "amin")],
            x.scatter(0, index, x * 2, reduce="add"),
            x.scatter(1, index, 3.0, reduce="multiply"),
            whole.scatter(0, index[0], whole + 1, reduce="multiply"),
        ]

    check(scattered, rand(3, 4), torch.arange(4) + one, torch.tensor([[0, 2, 2, 1]]))


def test_median_of_what_is_a_number() -> None:
    def medians(x: torch.Tensor, none: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
        where = [*x.nanmedian(1), *x.nanmedian(0, keepdim=True)]
        return [*where, x.nanmedian(), x[1, 0].nanmedian(), none.nanmedian(), whole.nanmedian()]

    x = rand(5, 7)
    x[0, ::2] = x[2, 3] = float("nan")
    check(medians, x, torch.full((3,), float("nan")), torch.tensor([4, 1, 3, 2]))


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
def test_distances_of_every_two_rows(p: float) -> None:
    check(lambda x: F.pdist(x, p), rand(6, 5))


def test_places_by_dimension() -> None:
    def places(x: torch.Tensor, one: torch.Tensor) -> list[torch.Tensor]:
        return [*(x > 0).nonzero(as_tuple=True), *one.nonzero(as_tuple=True)]

    check(places, rand(4, 5), torch.tensor(2.0))


def test_leaks_that_are_random_in_training_are_their_mean() -> None:
    check(lambda x: F.rrelu(x, 0.1, 0.5), rand(4, 5))


def test_numbers_keep_their_digits() -> None:
    check(lambda x: [x.new_full((3,), 1 / 3, dtype=torch.float64), x.double() / 3], torch.ones(2))


def test_an_example_with_gaps_stands_for_one_without() -> None:
    gaps, repeated = rand(6, 8)[:, ::2], rand(6, 1).expand(6, 4)
    check(lambda x, y: [x.t(), y.t(), x[1:].view(-1), x + y], gaps, repeated)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool, torch.float16], ids=str)
def test_sums_at_indices(dtype: torch.dtype) -> None:
    def summed(x: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        made = [
            x.scatter_add(0, at, y),
            x.scatter_add(1, at[:, :0], y[:, :0]),
            x.index_put((at[0],), y[0], accumulate=True),
            x.index_add(0, at[0], y[:1].expand(3, 3)),
            x.flatten().put(at, y, accumulate=True),
        ]
        if dtype == torch.bool:
            return made
        return [
            *made,
            *[x.scatter_reduce(0, at, y, "mean", include_self=self) for self in (True, False)],
            *[x.scatter_reduce(0, at, y, "sum", include_self=self) for self in (True, False)],
        ]

    check(
        summed, rand(4, 3).mul(4).to(dtype), torch.tensor([[0, 1, 1], [3, 3, 3]]), rand(2, 3).mul(4).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_powers_of_integers(dtype: torch.dtype) -> None:
    def powers(base: torch.Tensor, exponent: torch.Tensor) -> list[torch.Tensor]:
        return [base[:, None] ** exponent, 2**exponent, 2.5**exponent, base ** exponent[:5].float()]

    exponents = torch.tensor([0, 1, 2, 3, 7, 100, -1, -2]).to(dtype)
    check(
        powers,
        torch.tensor([0, 1, 2, 5, -3]).to(dtype),
        exponents.abs() if dtype == torch.uint8 else exponents,
    )


def test_nothing_has_no_mean() -> None:
    check(
        lambda x, y: [*torch.var_mean(x), *torch.std_mean(y, 0), y.mean(0)], torch.ones(0), torch.ones(0, 5)
    )


def test_a_scalar_taken() -> None:
    check(lambda x, at: [x.take(at[0, 1]), x.take(at)], rand(2, 3), torch.tensor([[1, -1]]))


def test_places_that_a_mask_hides_are_not_read_outside_of_a_tensor() -> None:
    """Inductor unrolls a short sum over what is joined, and reads each place of both parts."""

    def joined(x: torch.Tensor) -> list[torch.Tensor]:
        change, one = x[1:] - x[:-1], torch.ones(1)
        return [torch.cat([one, change]).sum(), torch.cat([change, one]).sum()]

    check(joined, rand(4))

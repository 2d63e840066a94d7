"""What library calls are offered: what their shapes can need, and no more than the limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devplan.passes.lowered.library_calls import Call
from devplan.passes.lowered.workspaces import CONVOLUTION_LIMIT, MATMUL_LIMIT, workspace_of
from devplan.passes.tape import Window
from devplan.runtime.dtypes import DType
from devplan.runtime.expr import Expr, Size
from devplan.runtime.program import LibraryCall
from devplan.tests.support.exporting import export_module

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.integers(1, 5000)


def window(*sizes: Size, dtype: DType = DType.FLOAT16) -> Window:
    return Window("x", dtype, sizes, (1,) * len(sizes))


def matmul(m: Size, n: int, k: int, *batch: int, dtype: DType = DType.FLOAT16) -> Call:
    a, b = window(*batch, m, k, dtype=dtype), window(*batch, k, n, dtype=dtype)
    return Call("matmul", (a, b), window(*batch, m, n, dtype=dtype), ())


def convolution(x: tuple[Size, ...], weight: tuple[int, ...], out: tuple[Size, ...], groups: int = 1) -> Call:
    return Call("convolution", (window(*x), window(*weight)), window(*out), (("groups", groups),))


def test_a_small_product_gets_its_partial_sums_and_a_little() -> None:
    assert workspace_of(matmul(1, 10, 512)) == 320 * KIB  # 1 x 10 x 4 bytes, at most eight splits
    assert workspace_of(matmul(196, 192, 192)) == 704 * KIB  # 196 x 192 x 4 bytes x 3 splits = 441 KiB
    assert workspace_of(matmul(196, 192, 64)) == 256 * KIB  # not split


def test_large_products_get_the_limit_unless_they_fill_a_gpu_unsplit() -> None:
    assert workspace_of(matmul(128, 1536, 384)) == MATMUL_LIMIT
    assert workspace_of(matmul(8192, 8192, 8192)) == 256 * KIB


@given(
    m=SIZES, n=SIZES, k=SIZES, batch=st.integers(1, 64), dtype=st.sampled_from([DType.FLOAT16, DType.FLOAT64])
)
def test_partial_sums_of_any_useful_split_fit_or_the_limit_is_given(
    m: int, n: int, k: int, batch: int, dtype: DType
) -> None:
    given_nbytes = workspace_of(matmul(m, n, k, batch, dtype=dtype))
    for rows, columns in ((64, 64), (128, 128), (256, 128)):
        tiles = batch * -(-m // rows) * -(-n // columns)
        splits = min(2 * 132 // tiles, k // 64)  # two for each processor of an H200
        needed = splits * batch * m * n * max(dtype.itemsize, 4) if splits > 1 else 0
        assert given_nbytes >= min(needed, MATMUL_LIMIT)


def test_a_convolution_gets_other_layouts_and_transforms() -> None:
    small = convolution((1, 16, 24, 24), (32, 16, 3, 3), (1, 32, 24, 24))
    assert workspace_of(small) == 640 * KIB
    pointwise = convolution((1, 96, 7, 7), (24, 96, 1, 1), (1, 24, 7, 7))
    assert workspace_of(pointwise) == 320 * KIB
    large = convolution((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56))
    assert workspace_of(large) == CONVOLUTION_LIMIT


def test_images_of_few_channels_get_a_layout_of_their_own_however_many_they_are() -> None:
    def first(images: int) -> Call:
        return convolution((images, 3, 224, 224), (64, 3, 7, 7), (images, 64, 112, 112))

    four_channels = 32 * 4 * 224 * 224 * 2  # 12.3 MiB, and the least that the library's fast engine takes
    assert four_channels <= workspace_of(first(32)) < four_channels + MIB
    assert workspace_of(first(1)) == CONVOLUTION_LIMIT
    assert workspace_of(first(32), MIB) == MIB


def test_dynamic_sizes_get_the_limit_and_the_limit_can_be_lowered() -> None:
    n = Expr("n")
    assert workspace_of(matmul(n, 10, 512)) == MATMUL_LIMIT
    assert workspace_of(convolution((n, 3, 8, 8), (4, 3, 3, 3), (n, 4, 8, 8))) == CONVOLUTION_LIMIT
    assert workspace_of(matmul(128, 1536, 384), MIB) == MIB
    assert workspace_of(matmul(1, 10, 512), MIB) == 320 * KIB
    assert workspace_of(matmul(128, 1536, 384), 0) == 0


@pytest.mark.torch
def test_an_export_reserves_what_the_option_says() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(384, 1536), torch.nn.Softmax(-1))
    inputs = (torch.randn(128, 384),)

    def reserved(**options: int) -> list[int]:
        planned = export_module(model, inputs, **options).planned
        method = planned.program.methods[0]
        calls = [i for i in method.instructions if isinstance(i, LibraryCall) and i.workspace]
        return [method.storage(method.value(call.workspace).storage).reserved_nbytes for call in calls]

    assert reserved() == [MATMUL_LIMIT]
    assert reserved(library_workspace=65536) == [65536]
    assert reserved(library_workspace=0) == []

"""Exports without library calls: products and convolutions as kernels of ours, against torch, on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.kernels.tiles import candidates, choose_tile
from devplan.passes.targets import TARGETS
from devplan.runtime.dtypes import DType
from devplan.runtime.program import LibraryCall
from devplan.tests.support.exporting import assert_close, export_module, loaded
from devplan.tests.support.functions import Function
from devplan.tests.support.tiled_cases import CONVOLUTIONS, HALF, HALVES, PRODUCTS, rand
from devplan.tests.zoo.measure import without_code

pytestmark = pytest.mark.torch


def exported(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], **options: Any) -> ExportResult:
    """The function's export, its kernels as the emulator needs them."""
    options.setdefault("library_calls", False)
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return export_module(Function(function), inputs, **options)


def library_functions(result: ExportResult) -> list[str]:
    """What goes to libraries; filling memory is the driver's."""
    instructions = [i for method in result.planned.program.methods for i in method.instructions]
    return [i.function for i in instructions if isinstance(i, LibraryCall) and i.function != "fill"]


def agrees(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """The export without library calls has none, and gives what eager gives."""
    result = exported(function, inputs)
    assert library_functions(result) == []
    with loaded(result) as program:
        (got,) = program.method()(*inputs).values()
    assert_close(got, function(*inputs), HALVES.get(inputs[0].dtype, 1e-5))


@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    depth=st.integers(1, 200),
    items=st.integers(0, 3),
    turned=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=6, deadline=None)
def test_products_of_any_sizes_and_layouts(
    rows: int, columns: int, depth: int, items: int, turned: tuple[bool, bool], dtype: torch.dtype
) -> None:
    batch = (items,) if items else ()
    left = rand(*batch, *((depth, rows) if turned[0] else (rows, depth)), dtype=dtype)
    right = rand(*batch, *((columns, depth) if turned[1] else (depth, columns)), dtype=dtype, scale=0.1)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.mT if turned[0] else x) @ (y.mT if turned[1] else y)

    agrees(product, (left, right))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_what_belongs_to_them(name: str) -> None:
    agrees(*PRODUCTS[name])


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_every_kind(name: str) -> None:
    agrees(*CONVOLUTIONS[name])


def test_sizes_known_at_run_time_only() -> None:
    batch = torch.export.Dim("batch", min=2, max=40)
    weight, kernel = rand(24, 16 * 6 * 6), rand(16, 3, 3, 3)

    def network(x: torch.Tensor) -> torch.Tensor:
        features = F.conv2d(x, kernel, stride=2, padding=1).relu().flatten(1)
        scores = features @ features.mT
        return scores.softmax(-1) @ F.linear(features, weight)

    result = exported(network, (rand(5, 3, 12, 12),), dynamic_shapes={"tensors": ({0: batch},)})
    assert library_functions(result) == []
    with loaded(result) as program:
        for size in (2, 7, 40):
            x = rand(size, 3, 12, 12)
            (got,) = program.method()(x).values()
            assert_close(got, network(x), 1e-4)


def test_a_network_that_needs_nothing_but_the_driver() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    x = rand(2, 9, 32)
    with mock.patch.object(exporting, "compile_kernels", without_code):
        ours = export_module(layer, (x,), library_calls=False)
        theirs = export_module(layer, (x,))
    assert (library_functions(ours), bool(library_functions(theirs))) == ([], True)
    with loaded(ours) as program:
        (got,) = program.method()(x).values()
    assert_close(got, layer(x), 1e-5)


def test_integers_have_no_library_in_any_export() -> None:
    result = exported(
        lambda x, y: x @ y, (torch.ones(3, 4).int(), torch.ones(4, 5).int()), library_calls=True
    )
    assert library_functions(result) == []


def test_the_kernels_compile_for_gpus_of_both_kinds() -> None:
    def network(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1).flatten(2) @ m

    inputs = (rand(1, 16, 8, 8, dtype=HALF), rand(16, 16, 3, 3, dtype=HALF), rand(64, 24, dtype=HALF))
    result = export_module(Function(network), inputs, library_calls=False, architectures=("sm_80", "sm_90"))
    stems = {kernel.name.rsplit("_", 1)[0] for kernel in result.planned.program.kernels}
    assert {"product", "convolution"} <= stems
    for kernel in result.planned.program.kernels:
        for code in kernel.codes if kernel.name.startswith("convolution") else ():
            sizes = {name: int(str(value)) for name, value in kernel.constants if name.startswith("BLOCK")}
            step = 2 * (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"]
            assert code.form == "ptx" or code.shared_nbytes >= 2 * step  # loads run ahead of products
        assert {(code.architecture, code.form) for code in kernel.codes} >= {
            ("sm_80", "cubin"),
            ("sm_90", "cubin"),
        }


@given(
    sizes=st.tuples(*[st.integers(1, 20000)] * 3),
    dtype=st.sampled_from([DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]),
    architecture=st.sampled_from(sorted(TARGETS)),
)
def test_a_tile_fits_its_gpu_and_is_never_larger_than_it_need_be(
    sizes: tuple[int, int, int], dtype: DType, architecture: str
) -> None:
    rows, columns, depth = sizes
    target = TARGETS[architecture]
    tile = choose_tile(rows, columns, depth, dtype, target)
    assert tile in set(candidates(dtype))
    assert (
        tile.rows + tile.columns
    ) * tile.depth * dtype.itemsize * tile.num_stages <= target.shared_per_block
    least = min(t.rows for t in candidates(dtype))
    assert tile.rows < 2 * max(rows, least) and np.isfinite(tile.rows)


def test_large_products_get_large_tiles_and_small_ones_many_programs() -> None:
    target = TARGETS["sm_90"]
    large = choose_tile(8192, 8192, 4096, DType.FLOAT16, target)
    small = choose_tile(128, 384, 384, DType.FLOAT16, target)
    assert large.rows * large.columns >= 128 * 128
    assert (128 // small.rows) * (384 // small.columns) >= 48

"""Weights that torchao has quantised: read from its tensors, and whole modules of it exported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from devplan.passes.quantized.torchao import PackedLinear, codes_of, unwrap
from devplan.passes.quantized.weight import quantized, unpack
from devplan.passes.source.model import MethodSource
from devplan.runtime.errors import UnsupportedOperatorError
from devplan.tests.support.exporting import export_module, loaded

pytestmark = pytest.mark.torch


def stand_in(kind: str, **attributes: Any) -> Any:
    """An object that has a tensor's class name and attributes."""
    return type(kind, (), attributes)()


def codes(rows: int, columns: int, low: int, high: int) -> torch.Tensor:
    """Reproducible whole numbers from low to high."""
    made = torch.Generator().manual_seed(rows + columns)
    return torch.randint(low, high + 1, (rows, columns), generator=made)


def affine(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, group: int) -> torch.Tensor:
    """``q * scale + zero`` written out."""
    wanted = torch.empty(q.shape)
    for n in range(q.shape[0]):
        for k in range(q.shape[1]):
            shift = zero if isinstance(zero, float) else float(zero[n, k // group])
            wanted[n, k] = float(q[n, k]) * float(scale[n, k // group]) + shift
    return wanted


def assert_reads(tensor: Any, wanted: torch.Tensor) -> None:
    """Taken apart, and packed for the kernels, the tensor stands for these weights."""
    read = codes_of(tensor, "layer.weight")
    torch.testing.assert_close(read.dequantized(), wanted)
    torch.testing.assert_close(read.packed().dequantized(wanted.shape[1]), wanted)


@pytest.mark.parametrize("group", [96, 32])
def test_int8_by_rows_and_by_groups(group: int) -> None:
    q, scale = codes(3, 96, -128, 127), torch.rand(3, 96 // group) + 0.1
    tensor = stand_in(
        "Int8Tensor",
        qdata=q.to(torch.int8),
        scale=scale,
        zero_point=torch.zeros(3, 96 // group, dtype=torch.int8),
        block_size=[1, group],
    )
    assert_reads(tensor, affine(q, scale, 0.0, group))
    assert codes_of(tensor, "w").packed().zeros is None


def test_int8_with_one_scale_for_all() -> None:
    q = codes(3, 96, -128, 127)
    tensor = stand_in(
        "Int8Tensor",
        qdata=q.to(torch.int8),
        scale=torch.tensor([[0.5]]),
        zero_point=None,
        block_size=[3, 96],
    )
    assert_reads(tensor, q * 0.5)


def test_bytes_of_four_bits_with_zero_points() -> None:
    q, scale, point = codes(4, 64, -8, 7), torch.rand(4, 2) + 0.1, codes(4, 2, -8, 7)
    tensor = stand_in(
        "IntxUnpackedToInt8Tensor",
        qdata=q.to(torch.int8),
        scale=scale,
        zero_point=point.to(torch.int8),
        block_size=[1, 32],
        target_dtype="torch.int4",
    )
    assert_reads(tensor, affine(q, scale, -point * scale, 32))
    assert codes_of(tensor, "w").bits == 4


def test_int4_two_in_a_byte() -> None:
    q, scale, zero = codes(4, 64, -8, 7), torch.rand(4, 2) + 0.1, torch.rand(4, 2)
    qdata = ((q[:, 1::2] << 4) | (q[:, ::2] & 15)).to(torch.int8)
    tensor = stand_in("Int4Tensor", qdata=qdata, scale=scale.t(), zero_point=zero.t(), block_size=[1, 32])
    assert_reads(tensor, affine(q, scale, zero, 32))


def tile_packed(q: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] in the layout of PyTorch's int4 product, word by word; N and K fill the tiles."""
    rows, columns = q.shape
    words = np.zeros((rows // 8, columns // 128, 32, 4), np.uint32)
    for tile, outer, lane, word in np.ndindex(*words.shape):
        begin = outer * 128 + word * 32 + lane % 4 * 2
        ks = [begin + far + near for far in (0, 8, 16, 24) for near in (0, 1)]
        for position, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            code = int(q[tile * 8 + lane // 4, ks[which]])
            words[tile, outer, lane, word] |= np.uint32(code << (4 * position))
    return torch.from_numpy(words.view(np.int32))


def test_int4_in_tiles_padded_to_whole_ones() -> None:
    q, scale, zero = codes(16, 256, 0, 15), torch.rand(16, 4) + 0.1, torch.rand(16, 4)
    tensor = stand_in(
        "Int4TilePackedTo4dTensor",
        qdata=tile_packed(q),
        scale_and_zero=torch.stack([scale, zero], -1).transpose(0, 1).contiguous(),
        block_size=[1, 64],
        shape=(13, 192),
    )
    assert_reads(tensor, affine(q[:13, :192] - 8, scale, zero, 64))


def test_other_kinds_and_quantised_activations_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"`a\.weight` is a `Float8Tensor`"):
        codes_of(stand_in("Float8Tensor"), "a.weight")
    with pytest.raises(UnsupportedOperatorError, match="quantise activations"):
        codes_of(stand_in("Int8Tensor", act_quant_kwargs=object()), "a.weight")


def test_a_group_that_no_kernel_has_is_said() -> None:
    tensor = stand_in(
        "Int8Tensor",
        qdata=codes(2, 48, -9, 9).to(torch.int8),
        scale=torch.ones(2, 2),
        zero_point=None,
        block_size=[1, 24],
    )
    assert codes_of(tensor, "w").obstacle == "groups of 24 columns fit no kernel"


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    """The library, where it is installed."""
    found: ModuleType = pytest.importorskip("torchao.quantization")
    return found


class Layers(torch.nn.Module):
    """Two layers that read one tensor, and one behind them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = torch.nn.Linear(256, 64, dtype=dtype)
        self.right = torch.nn.Linear(256, 32, bias=False, dtype=dtype)
        self.last = torch.nn.Linear(96, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.cat([self.left(x), self.right(x)], -1).relu())
        return made


def quantised(torchao: ModuleType, name: str) -> Layers:
    """The layers, quantised by torchao."""
    int4: Any = vars(torch)["int4"]
    whole = {
        "int8": torchao.Int8WeightOnlyConfig(),
        "int8 groups": torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
        "int4": torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(32)),
    }[name]
    model = Layers(torch.float32)
    torchao.quantize_(model, whole)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_codes_are_torchaos(torchao: ModuleType, dtype: torch.dtype) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = torch.nn.Linear(256, 32, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    ours, theirs = quantized(weight, 8, 0), codes_of(layer.weight, "weight")
    assert torch.equal(unpack(ours.words, 8, 256), theirs.codes)
    assert torch.equal(ours.scales, theirs.scales)
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    arguments = (torchao.MappingType.ASYMMETRIC, (1, 64), torch.int32, 0, 15)
    scale, zero = primitives._choose_qparams_affine_tinygemm(
        weight, *arguments, scale_dtype=dtype, zero_point_dtype=dtype
    )
    codes = primitives._quantize_affine_tinygemm(weight, (1, 64), scale, zero, torch.int32, 0, 15)
    ours = quantized(weight, 4, 64)
    assert ours.zeros is not None
    assert torch.equal(ours.scales, scale.reshape(32, -1)) and torch.equal(ours.zeros, zero.reshape(32, -1))
    assert torch.equal(unpack(ours.words, 4, 256), codes)


@pytest.mark.parametrize("name", ["int8", "int8 groups", "int4"])
def test_modules_of_torchaos_give_what_they_give_eagerly(torchao: ModuleType, name: str) -> None:
    model, x = quantised(torchao, name), torch.randn(1, 256)
    result = export_module(model, (x,))
    (method,) = result.planned.program.methods
    assert method.notes[0].startswith("torchao's weights: 3 linear layers read them packed")
    assert not any(
        constant.dtype.is_floating and constant.nbytes > 4096 for constant in result.planned.program.constants
    )
    with loaded(result) as program, torch.no_grad():
        (ours,) = program.method("forward")(x.numpy()).values()
        np.testing.assert_allclose(np.asarray(ours), model(x).numpy(), rtol=1e-4, atol=1e-5)


def test_the_users_module_stays_as_it_is_and_methods_share_the_weights(torchao: ModuleType) -> None:
    model = quantised(torchao, "int8")
    x = torch.randn(1, 256)
    sources = [MethodSource("a", model, (x,)), MethodSource("b", model, (x,))]
    (first, second), notes = unwrap(sources, pack_weights=True)
    assert type(model.left) is torch.nn.Linear and type(model.left.weight).__name__ == "Int8Tensor"
    assert first.module is second.module and isinstance(first.module.left, PackedLinear)
    assert notes["a"] == notes["b"] == "torchao's weights: 3 linear layers read them packed (3 int8 by rows)"
    half = first.module.to(torch.float16).get_submodule("left")
    assert isinstance(half, PackedLinear) and half.bias is not None
    assert (half.scales.dtype, half.bias.dtype) == (torch.float32, torch.float16)


def test_programs_for_the_host_get_floating_point_weights(torchao: ModuleType) -> None:
    model, x = quantised(torchao, "int8"), torch.randn(1, 256)
    result = export_module(model, (x,), device="cpu")
    assert (
        "in floating point: `left` (the program is for the host)"
        in result.planned.program.methods[0].notes[0]
    )
    with loaded(result, "cpu") as program, torch.no_grad():
        (ours,) = program.method("forward")(x.numpy()).values()
        np.testing.assert_allclose(np.asarray(ours), model(x).numpy(), rtol=1e-4, atol=1e-5)


def test_an_embedding_of_torchaos_is_refused_by_name(torchao: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 32))
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding)
    )
    assert "torchao" in sys.modules
    with pytest.raises(UnsupportedOperatorError, match=r"`0\.weight` is a `Int8Tensor`"):
        unwrap([MethodSource("forward", model, (torch.tensor([1]),))], pack_weights=True)

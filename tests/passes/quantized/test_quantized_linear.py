"""Products with packed weights: the kernels, interpreted, against the weights that the codes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from devplan.passes.lowered.compile_kernels import canonical, compile_kernels, shared_limit
from devplan.passes.quantized import matrix as quantized_matrix
from devplan.passes.quantized import row as quantized_row
from devplan.passes.quantized.linear import OPERATOR, Blocks, blocks_of, tile_steps, to_steps
from devplan.passes.quantized.weight import QuantizedWeight, pack, quantized, unpack
from devplan.passes.tape import Allocate, ExternCall, OwnLaunch
from devplan.runtime.dtypes import DType
from devplan.tests.support.steps import Emulated, window

pytestmark = pytest.mark.torch
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
Steps = Sequence[Allocate | OwnLaunch]


@dataclass(frozen=True)
class Case:
    """A product: sizes, types, and how the weight is rounded."""

    rows: int
    columns: int
    outputs: int
    dtype: torch.dtype = torch.float16
    bits: int = 4
    group: int = 128
    has_bias: bool = True
    stride: int = 0
    """Elements between rows of x; 0: dense."""

    def tensors(self) -> tuple[torch.Tensor, QuantizedWeight, torch.Tensor | None]:
        """x, the weight and the bias, reproducible."""
        made = torch.Generator().manual_seed(self.rows * 7919 + self.columns * 31 + self.outputs)
        weight = torch.randn(self.outputs, self.columns, generator=made) / self.columns**0.5
        bias = torch.randn(self.outputs, generator=made).to(self.dtype) if self.has_bias else None
        wide = torch.randn(self.rows, max(self.stride, self.columns), generator=made).to(self.dtype)
        return wide[:, : self.columns], quantized(weight.to(self.dtype), self.bits, self.group), bias


def call_of(case: Case) -> tuple[ExternCall, dict[str, torch.Tensor]]:
    """The operator's call and what its windows hold."""
    x, weight, bias = case.tensors()
    output = torch.full((case.rows, case.outputs), float("nan"), dtype=case.dtype)
    named = {"x": x, "words": weight.words, "scales": weight.scales, "zeros": weight.zeros, "bias": bias}
    operands = [None if t is None else window(name, t) for name, t in named.items()]
    call = ExternCall(OPERATOR, (*operands, weight.bits, weight.group), {}, (window("output", output),))
    held = {name: t for name, t in named.items() if t is not None}
    return call, {**held, "output": output}


def in_halves(weight: QuantizedWeight, columns: int) -> torch.Tensor:
    """The weights in float16 arithmetic: the product with the scale is rounded, and the sum."""
    scales, zeros = (
        torch.zeros(()) if t is None else t.repeat_interleave(weight.group, 1)[:, :columns]
        for t in (weight.scales, weight.zeros)
    )
    codes = unpack(weight.words, weight.bits, columns) - (1 << (weight.bits - 1))
    return codes.half() * scales.half() + zeros.half()


def check(case: Case, blocks: Blocks | None = None) -> Steps:
    """Run the kernels and compare with float64 products of the dequantised weights; the steps."""
    call, tensors = call_of(case)
    steps = to_steps(call) if blocks is None else tile_steps(call, blocks)
    device = Emulated(tensors)
    device.run(steps)
    x, weight, bias = case.tensors()
    matrix = weight.dequantized(case.columns)
    if case.rows > 1 and case.group:  # dequantised in registers to the type of x
        is_half = case.dtype is torch.float16 and (blocks is None or blocks.in_halves)
        matrix = in_halves(weight, case.columns) if is_half else matrix.to(case.dtype)
    expected = x.double() @ matrix.double().T + (0 if bias is None else bias.double())
    ours = device.output(tensors["output"]).double()
    worst = (x.double().abs() @ matrix.double().abs().T).max() + 1
    bound = EPSILON[case.dtype] * expected.abs().clamp(min=1) + 2.0**-20 * worst
    assert ((ours - expected).abs() <= bound).all(), (ours - expected).abs().max()
    return steps


DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
SCHEMES = st.sampled_from([(8, 0), (4, 32), (4, 64), (4, 128), (4, 256)])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), st.integers(1, 40), DTYPES, SCHEMES, st.booleans())
def test_one_row(
    columns: int, outputs: int, dtype: torch.dtype, scheme: tuple[int, int], has_bias: bool
) -> None:
    check(Case(1, columns, outputs, dtype, *scheme, has_bias))


def after(y: torch.Tensor, activation: str, is_gated: bool) -> torch.Tensor:
    """The activation, and the gate, in float64."""
    half = y.shape[-1] // 2
    first = y[:, :half] if is_gated else y
    if activation != "none":
        first = F.silu(first) if activation == "silu" else F.relu(first)
    return first * y[:, half:] if is_gated else first


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(1, 20),
    DTYPES,
    SCHEMES,
    st.sampled_from(["none", "silu", "relu"]),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_one_row_with_what_stands_around_it(
    columns: int,
    outputs: int,
    dtype: torch.dtype,
    scheme: tuple[int, int],
    activation: str,
    has: tuple[bool, bool, bool, bool],
) -> None:
    has_bias, has_norm, has_added, is_gated = has
    case = Case(1, columns, outputs * (2 if is_gated else 1), dtype, *scheme, has_bias)
    call, tensors = call_of(case)
    x, weight, bias = case.tensors()
    made = torch.Generator().manual_seed(columns)
    norm = torch.rand(columns, generator=made).to(dtype) + 0.5 if has_norm else None
    added = torch.randn(1, outputs, generator=made).to(dtype) if has_added else None
    output = torch.full((1, outputs), float("nan"), dtype=dtype)
    extra = {"norm": norm, "added": added, "output": output}
    windows = {name: None if t is None else window(name, t) for name, t in extra.items()}
    ends = (windows["norm"], 1e-5, windows["added"], activation, is_gated)
    call = replace(call, operands=(*call.operands, *ends), outs=(window("output", output),))
    device = Emulated({**tensors, **{name: t for name, t in extra.items() if t is not None}})
    device.run(quantized_row.to_steps(call))
    row = x.double() if norm is None else F.rms_norm(x.double(), (columns,), norm.double(), 1e-5)
    matrix = weight.dequantized(columns).double()
    product = row @ matrix.T + (0 if bias is None else bias.double())
    expected = after(product, activation, is_gated) + (0 if added is None else added.double())
    worst = (row.abs() @ matrix.abs().T).max() + 1
    scale = expected.abs().clamp(min=1)
    bound = EPSILON[dtype] * scale + 2.0**-18 * worst * (1 + product.abs().max())
    assert ((device.output(output).double() - expected).abs() <= bound).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 70), st.integers(1, 600), st.integers(1, 100), DTYPES, SCHEMES, st.integers(0, 9))
def test_several_rows(
    rows: int, columns: int, outputs: int, dtype: torch.dtype, scheme: tuple[int, int], more: int
) -> None:
    check(Case(rows, columns, outputs, dtype, *scheme, has_bias=more % 2 == 0, stride=columns + more))


@pytest.mark.parametrize(
    "blocks", [Blocks(128, 128), Blocks(64, 64, in_halves=False), Blocks(16, 64, 3), Blocks(32, 64, 2)]
)
@pytest.mark.parametrize("scheme", [(8, 0), (4, 32)])
def test_every_way_to_cut_a_product(blocks: Blocks, scheme: tuple[int, int]) -> None:
    steps = check(Case(19, 700, 70, torch.float16, *scheme), blocks)
    assert len(steps) == (1 if blocks.splits == 1 else 3)


def test_few_rows_split_the_columns_so_that_every_program_has_some() -> None:
    blocks = blocks_of(4, 4096, 4096 // 8, DType.FLOAT16, 4)
    assert (blocks.rows, blocks.splits) == (16, 4)
    chunks, part = 32, -(32 // -blocks.splits)
    assert (blocks.splits - 1) * part < chunks
    assert blocks_of(128, 4096, 512, DType.FLOAT16, 4) == Blocks(128, 64, 4)
    assert blocks_of(4096, 4096, 512, DType.FLOAT16, 4) == Blocks(256, 128, num_warps=8)
    assert blocks_of(4, 32, 16, DType.FLOAT16, 4).splits == 1


@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([4, 8]), st.integers(0, 2**32))
def test_packing_keeps_every_code(rows: int, columns: int, bits: int, seed: int) -> None:
    codes = torch.randint(1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    words = pack(codes, bits)
    assert words.dtype is torch.int32 and words.shape[1] % (4 * bits) == 0
    assert torch.equal(unpack(words, bits, columns), codes.to(torch.int32))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_word_holds_columns_as_the_page_says(bits: int) -> None:
    codes = torch.arange(256).reshape(1, -1) % (1 << bits)
    words = pack(codes, bits)[0].tolist()
    height = 4 * bits
    for chunk, i, t in ((0, 0, 0), (0, 5, 1), (1, height - 1, 32 // bits - 1)):
        code = words[chunk * height + i] >> (bits * t) & ((1 << bits) - 1)
        assert code == codes[0, chunk * 128 + t * height + i]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), DTYPES, SCHEMES, st.floats(1e-3, 1e3))
def test_rounding_is_off_by_half_a_step_at_most(
    rows: int, columns: int, dtype: torch.dtype, scheme: tuple[int, int], scale: float
) -> None:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * scale).to(dtype)
    made = quantized(weight, *scheme)
    step = made.scales.float().max(1, keepdim=True).values
    error = (made.dequantized(columns) - weight.float()).abs()
    slack = (
        16 * EPSILON[dtype] * weight.float().abs().max()
    )  # scale and zero are rounded to the weight's type
    assert (error <= 0.51 * step + slack).all()


@pytest.mark.parametrize("value", [0.0, 3.5])
@pytest.mark.parametrize("scheme", [(8, 0), (4, 128)])
def test_rows_of_one_value(value: float, scheme: tuple[int, int]) -> None:
    made = quantized(torch.full((2, 130), value), *scheme).dequantized(130)
    torch.testing.assert_close(made, torch.full((2, 130), value), rtol=5e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", [(8, 0), (4, 128)])
def test_the_kernels_compile_for_three_generations(scheme: tuple[int, int], dtype: torch.dtype) -> None:
    cases = [Case(rows, 512, 256, dtype, *scheme) for rows in (1, 4, 40)]
    steps = [step for case in cases for step in to_steps(call_of(case)[0])]
    wide = blocks_of(4096, 4096, 512, DType.BFLOAT16, scheme[0])
    assert (wide.rows, wide.columns) == (256, 128)
    steps += tile_steps(call_of(cases[2])[0], wide)
    specs = [canonical(step.kernel) for step in steps if isinstance(step, OwnLaunch)]
    kernels = compile_kernels(specs, ("sm_80", "sm_90", "sm_100"), jobs=1)
    for kernel in kernels:
        assert {c.architecture for c in kernel.codes if c.form == "cubin"} == {"sm_80", "sm_90", "sm_100"}
        assert all(c.shared_nbytes <= shared_limit(c.architecture, c.form) for c in kernel.codes)


@pytest.mark.parametrize("scheme", [(8, 0), (4, 32), (4, 256)])
@pytest.mark.parametrize(("outputs", "columns"), [(7, 300), (64, 256), (3, 8)])
def test_a_weight_is_written_out(scheme: tuple[int, int], outputs: int, columns: int) -> None:
    _, weight, _ = case = Case(2, columns, outputs, torch.float16, *scheme).tensors()
    output = torch.full((outputs, columns), float("nan"), dtype=torch.float16)
    named = {"x": case[0], "words": weight.words, "scales": weight.scales, "zeros": weight.zeros}
    operands = [None if t is None else window(name, t) for name, t in named.items()]
    operator = quantized_matrix.OPERATOR
    call = ExternCall(operator, (*operands, weight.bits, weight.group), {}, (window("output", output),))
    device = Emulated({**{name: t for name, t in named.items() if t is not None}, "output": output})
    device.run(quantized_matrix.to_steps(call))
    assert torch.equal(device.output(output), weight.dequantized(columns).half())


def test_when_a_weight_is_written_out() -> None:
    few, many, large = (
        torch.empty(rows, 4096, dtype=torch.float16, device="meta") for rows in (256, 512, 512)
    )
    assert not quantized_matrix.is_better(few, 4096)
    assert quantized_matrix.is_better(many, 4096)
    assert not quantized_matrix.is_better(large, 128256)


def test_strides_and_rows_that_are_known_late_are_parameters() -> None:
    call, _ = call_of(Case(8, 256, 64))
    from devplan.runtime.expr import Expr

    x = replace(call.operands[0], sizes=(Expr("s0"), 256), strides=(Expr("s1"), 1))
    output = replace(call.outs[0], sizes=(Expr("s0"), 64))
    (step,) = to_steps(replace(call, operands=(x, *call.operands[1:]), outs=(output,)))
    assert isinstance(step, OwnLaunch)
    assert ("x_m", "i64") in step.kernel.parameters and step.arguments[-1] == Expr("s1")

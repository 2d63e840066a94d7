"""The emulator's kernels against NumPy: written in Triton, run over raw device memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.runtime.backend import Operand
from devplan.runtime.dtypes import DType
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.emulator.special import bessel_i, bessel_j, bessel_y, erf, erfc, erfinv
from devplan.runtime.errors import ArtifactError, DevplanError, ExecutionError
from devplan.runtime.program import Device, Kernel, KernelParameter, Launch, Ref
from devplan.runtime.tensors.host import HostTensor, contiguous_strides, numpy_dtype

CUDA = Device("cuda", 0)


class Bench:
    """An emulated device with named tensors and one kernel at a time."""

    def __init__(self) -> None:
        self.backend = EmulatorBackend(CUDA)
        self.operands: dict[str, Operand] = {}

    def put(self, name: str, value: Any, dtype: DType | None = None) -> None:
        raw = value.raw if isinstance(value, HostTensor) else np.asarray(value)
        kind = value.dtype if isinstance(value, HostTensor) else dtype or DType.from_name(str(raw.dtype))
        address = self.backend.allocate(raw.nbytes)
        if raw.nbytes:
            self.backend.upload(address, memoryview(raw.tobytes()))
        self.operands[name] = Operand(address, kind, raw.shape, contiguous_strides(raw.shape), CUDA)

    def get(self, name: str) -> np.ndarray:
        operand = self.operands[name]
        raw = np.empty(operand.shape, numpy_dtype(operand.dtype))
        self.backend.download(operand.address, memoryview(raw.reshape(-1)).cast("B"))
        return raw if operand.dtype is not DType.BFLOAT16 else HostTensor(raw, operand.dtype).float32()

    def run(
        self, source: str, types: dict[str, str], *arguments: Any, grid: Any = (1, 1, 1), **constants: Any
    ) -> None:
        parameters = tuple(KernelParameter(*pair) for pair in types.items())
        self.backend.load([Kernel("k", parameters, (), source, tuple(constants.items()))])
        refs = tuple(Ref(a) if isinstance(a, str) else a for a in arguments)
        names = tuple(a for a in arguments if isinstance(a, str))
        self.backend.bind(Launch("k", refs, grid, names, names), self.operands, {})()


@pytest.fixture
def bench() -> Bench:
    return Bench()


ADD = """
@triton.jit
def k(x_ptr, y_ptr, out_ptr, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x = tl.load(x_ptr + xindex, xmask)
    y = tl.load(y_ptr + xindex, xmask, eviction_policy='evict_last')
    tl.store(out_ptr + xindex, x + y, xmask)
"""
ADD_TYPES = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "xnumel": "i32"}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1, 32, 1024]))
def test_pointwise_with_masks_over_a_grid(count: int, block: int) -> None:
    bench, rng = Bench(), np.random.default_rng(count)
    x, y = rng.random(count, np.float32), rng.random(count, np.float32)
    bench.put("x", x)
    bench.put("y", y)
    bench.put("out", np.zeros(count + 3, np.float32))
    bench.run(ADD, ADD_TYPES, "x", "y", "out", count, grid=(-(-count // block), 1, 1), XBLOCK=block)
    np.testing.assert_array_equal(bench.get("out"), [*(x + y), 0, 0, 0])


def test_reads_and_writes_outside_of_a_block_are_refused(bench: Bench) -> None:
    for name in ("x", "y", "out"):
        bench.put(name, np.zeros(100, np.float32))
    with pytest.raises(ExecutionError, match=r"accesses element 127 of a block of 100 elements"):
        bench.run(ADD, ADD_TYPES, "x", "y", "out", 200, XBLOCK=128)


ROW = """
@triton.jit
def k(x_ptr, sum_ptr, top_ptr, at_ptr, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    total = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    best = tl.full([XBLOCK, R0_BLOCK], float("-inf"), tl.float32)
    where = tl.full([XBLOCK, R0_BLOCK], 9223372036854775807, tl.int64)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        x = tl.load(x_ptr + (r0_index + r0_numel * xindex), r0_mask & xmask, other=0.0)
        total = tl.where(r0_mask & xmask, total + x, total)
        new_best, new_where = triton_helpers.maximum_with_index(best, where, x, r0_index)
        best = tl.where(r0_mask & xmask, new_best, best)
        where = tl.where(r0_mask & xmask, new_where, where)
    tl.store(sum_ptr + xindex, tl.sum(total, 1)[:, None], xmask)
    top, at = triton_helpers.max_with_index(best, where, 1)
    tl.store(top_ptr + xindex, top[:, None], xmask)
    tl.store(at_ptr + xindex, at[:, None], xmask)
"""
ROW_TYPES = {
    "x_ptr": "*fp32", "sum_ptr": "*fp32", "top_ptr": "*fp32", "at_ptr": "*i64", "xnumel": "i32", "r0_numel": "i32",
}  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from([1, 4]), st.sampled_from([16, 64]))
def test_looped_reductions(rows: int, columns: int, xblock: int, rblock: int) -> None:
    bench = Bench()
    x = np.random.default_rng(rows * columns).integers(-9, 9, (rows, columns)).astype(np.float32)
    bench.put("x", x)
    for name, kind in (("sum", np.float32), ("top", np.float32), ("at", np.int64)):
        bench.put(name, np.zeros(rows, kind))
    arguments = ("x", "sum", "top", "at", rows, columns)
    bench.run(ROW, ROW_TYPES, *arguments, grid=(-(-rows // xblock), 1, 1), XBLOCK=xblock, R0_BLOCK=rblock)
    np.testing.assert_array_equal(bench.get("sum"), x.sum(1))
    np.testing.assert_array_equal(bench.get("top"), x.max(1))
    np.testing.assert_array_equal(bench.get("at"), x.argmax(1))


def test_programs_that_diverge_run_one_by_one(bench: Bench) -> None:
    source = """
@triton.jit
def k(x_ptr, out_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)
    if i % 2 == 0:
        tl.store(out_ptr + i, 10)
    else:
        tl.store(out_ptr + i, tl.load(x_ptr + i - 1))
"""
    bench.put("x", np.arange(6, dtype=np.int32))
    bench.put("out", np.zeros(6, np.int32))
    bench.run(source, {"x_ptr": "*i32", "out_ptr": "*i32"}, "x", "out", grid=(6, 1, 1))
    np.testing.assert_array_equal(bench.get("x"), [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(bench.get("out"), [10, 1, 10, 3, 10, 5])


def test_loops_of_different_length_per_program(bench: Bench) -> None:
    source = """
@triton.jit
def k(out_ptr):
    i = tl.program_id(0)
    total = tl.full([], 0, tl.int32)
    for j in range(i + 1):
        total += j
    while total > 100:
        total = total - 100
    tl.store(out_ptr + i, total)
"""
    bench.put("out", np.zeros(20, np.int32))
    bench.run(source, {"out_ptr": "*i32"}, "out", grid=(20, 1, 1))
    expected = [i * (i + 1) // 2 for i in range(20)]
    np.testing.assert_array_equal(bench.get("out"), [e - 100 if e > 100 else e for e in expected])


def test_three_dimensional_grids(bench: Bench) -> None:
    source = """
@triton.jit
def k(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out_ptr + at, x + 10 * y + 100 * z)
"""
    bench.put("out", np.zeros((2, 3, 4), np.int32))
    bench.run(source, {"out_ptr": "*i32"}, "out", grid=(4, 3, 2))
    z, y, x = np.meshgrid(range(2), range(3), range(4), indexing="ij")
    np.testing.assert_array_equal(bench.get("out"), x + 10 * y + 100 * z)


def test_matrix_product_with_helper_functions(bench: Bench) -> None:
    source = """
@triton.jit
def offsets(row, columns, stride, EXTRA: tl.constexpr = 0):
    return row[:, None] * stride + columns[None, :] + EXTRA

@triton.jit
def k(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    rm = tl.program_id(0) * M + tl.arange(0, M)
    rn = tl.arange(0, N)
    acc = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, tl.cdiv(K, BLOCK_K)):
        rk = start * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + offsets(rm, rk, K), mask=rk[None, :] < K, other=0.0)
        b = tl.load(b_ptr + offsets(rk, rn, N), mask=rk[:, None] < K, other=0.0)
        acc += tl.dot(a, b, allow_tf32=False)
    tl.store(c_ptr + offsets(rm, rn, N), acc.to(c_ptr.dtype.element_ty))
"""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((32, 50)).astype(np.float16), rng.standard_normal((50, 16)).astype(np.float16)
    bench.put("a", a)
    bench.put("b", b)
    bench.put("c", np.zeros((32, 16), np.float16))
    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp16", "K": "i32"}
    bench.run(source, types, "a", "b", "c", 50, grid=(2, 1, 1), M=16, N=16, BLOCK_K=16)
    expected = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    np.testing.assert_allclose(bench.get("c"), expected, rtol=2e-3)


def unary_source(expression: str) -> str:
    return f"""
@triton.jit
def k(x_ptr, out_ptr, XBLOCK: tl.constexpr):
    i = tl.arange(0, XBLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, {expression})
"""


@pytest.mark.parametrize(
    ("expression", "function"),
    [
        ("libdevice.erf(x)", np.vectorize(math.erf)),
        ("tl.math.exp(x)", np.exp),
        ("tl_math.abs(x)", np.abs),
        ("libdevice.rsqrt(tl_math.abs(x))", lambda x: 1 / np.sqrt(np.abs(x))),
        ("libdevice.pow(tl_math.abs(x), 1.5)", lambda x: np.abs(x) ** 1.5),
        ("tl.sigmoid(x)", lambda x: 1 / (1 + np.exp(-x))),
        ("libdevice.nearbyint(x)", np.rint),
        ("libdevice.trunc(x)", np.trunc),
        ("libdevice.log1p(tl_math.abs(x))", lambda x: np.log1p(np.abs(x))),
        ("libdevice.expm1(x)", np.expm1),
        ("libdevice.lgamma(tl_math.abs(x) + 1)", np.vectorize(lambda v: math.lgamma(abs(v) + 1))),
        ("tl.where((x > 0) and not (x > 1), x, -x)", lambda x: np.where((x > 0) & ~(x > 1), x, -x)),
        ("x if XBLOCK == 64 else x * 2", lambda x: x),
        ("tl.inline_asm_elementwise('fma.rn.f32 $0, $1, $2, $3;', '=f,f,f,f', [x, x, x], dtype=tl.float32)",
         lambda x: x * x + x),
        ("x.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)", lambda x: x),
        ("x.to(tl.int32)", np.trunc),
        ("triton_helpers.maximum(x, 0.5)", lambda x: np.maximum(x, 0.5)),
        ("tl.cumsum(x, 0)", np.cumsum),
        ("tl.flip(x)", lambda x: x[::-1]),
        ("tl.sort(x, descending=True)", lambda x: np.sort(x)[::-1]),
        ("x - tl.max(x, 0)", lambda x: x - x.max()),
        ("tl.max(x, 0, return_indices=True)[1]", lambda x: np.full(64, x.argmax())),
        ("tl.argmin(x, 0)", lambda x: np.full(64, x.argmin())),
        ("tl.softmax(x)", lambda x: np.exp(x) / np.exp(x).sum()),
        ("tl.gather(x, XBLOCK - 1 - i, 0)", lambda x: x[::-1]),
        ("tl.split(tl.join(x, x + 1))[1]", lambda x: x + 1),
        ("tl.cumprod(tl.where(i < 3, x, 1.0), 0)", lambda x: np.cumprod(np.where(np.arange(64) < 3, x, 1))),
        ("tl.cumsum(x, 0, reverse=True)", lambda x: np.cumsum(x[::-1])[::-1]),
        ("tl.histogram((i % 4), XBLOCK)", lambda x: np.where(np.arange(64) < 4, 16, 0)),
        ("tl.clamp(x, -1.0, 1.0)", lambda x: np.clip(x, -1, 1)),
        ("tl.reduce_or((x > 0).to(tl.int32), 0)", lambda x: np.ones(64)),
        ("tl.sum(tl.broadcast_to(x[None, :], [4, XBLOCK]), 0)", lambda x: 4 * x),
        ("tl.where(libdevice.isnan(x / 0.0 * 0.0), x, 0.0)", lambda x: x),
        ("tl.min(tl.expand_dims(x, 1) + tl.arange(0, 2)[None, :], 1)", lambda x: x),
    ],
)  # fmt: skip
def test_functions(bench: Bench, expression: str, function: Any) -> None:
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32) * 2
    bench.put("x", x)
    bench.put("out", np.zeros(64, np.float32))
    bench.run(unary_source(expression), {"x_ptr": "*fp32", "out_ptr": "*fp32"}, "x", "out", XBLOCK=64)
    expected = function(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(bench.get("out"), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x // y", [-2, 2, 0, 3]),
        ("x % y", [-1, -1, 2, 0]),
        ("triton_helpers.div_floor_integer(x, y)", [-3, 2, 0, 3]),
        ("triton_helpers.remainder_integer(x, y)", [2, -1, 2, 0]),
        ("x / y", [-7 / 3, 7 / 3, 2 / 3, 3]),
        ("x << 1", [-14, -14, 4, 18]),
        ("x >> 1", [-4, -4, 1, 4]),
        ("x & 3", [1, 1, 2, 1]),
        ("-x", [7, 7, -2, -9]),
        ("~x", [6, 6, -3, -10]),
        ("x * 2147483647", [-2147483641, -2147483641, -2, 2147483639]),
    ],
)
def test_integer_arithmetic_is_that_of_c(bench: Bench, expression: str, expected: list[float]) -> None:
    source = unary_source(expression).replace("out_ptr,", "y_ptr, out_ptr,")
    source = source.replace("    tl.store", "    y = tl.load(y_ptr + i)\n    tl.store")
    bench.put("x", np.array([-7, -7, 2, 9], np.int32))
    bench.put("y", np.array([3, -3, 3, 3], np.int32))
    bench.put("out", np.zeros(4, np.float32 if expression == "x / y" else np.int32))
    out = "*fp32" if expression == "x / y" else "*i32"
    bench.run(source, {"x_ptr": "*i32", "y_ptr": "*i32", "out_ptr": out}, "x", "y", "out", XBLOCK=4)
    np.testing.assert_allclose(bench.get("out"), expected, rtol=1e-7)


def test_bfloat16_is_rounded_to_nearest_even(bench: Bench) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 3.1415927, -65280.5, np.inf, np.nan, 1e-40], np.float32)
    bench.put("x", values)
    bench.put("out", HostTensor.from_float32(np.zeros(8), DType.BFLOAT16))
    bench.run(unary_source("x"), {"x_ptr": "*fp32", "out_ptr": "*bf16"}, "x", "out", XBLOCK=8)
    got = bench.get("out")
    np.testing.assert_array_equal(got[:6], [1.0, 1.0, 1.015625, 3.140625, -65280.0, np.inf])
    assert np.isnan(got[6])


def test_sort_with_index_puts_nan_last_and_keeps_ties_in_order(bench: Bench) -> None:
    source = """
@triton.jit
def k(x_ptr, value_ptr, index_ptr, rnumel, DESCENDING: tl.constexpr, R0_BLOCK: tl.constexpr):
    r = tl.arange(0, R0_BLOCK)[None, :]
    x = tl.load(x_ptr + r, r < rnumel, other=0.0)
    value, index = triton_helpers.sort_with_index(x, r.to(tl.int16), rnumel, 1, stable=True, descending=DESCENDING)
    tl.store(value_ptr + r, value, r < rnumel)
    tl.store(index_ptr + r, index.to(tl.int64), r < rnumel)
"""
    x = np.array([2, np.nan, 1, 2, 0, 1, -5], np.float32)
    types = {"x_ptr": "*fp32", "value_ptr": "*fp32", "index_ptr": "*i64", "rnumel": "i32"}
    for descending, order in ((False, [6, 4, 2, 5, 0, 3, 1]), (True, [1, 0, 3, 2, 5, 4, 6])):
        bench = Bench()
        bench.put("x", x)
        bench.put("value", np.zeros(7, np.float32))
        bench.put("index", np.zeros(7, np.int64))
        bench.run(source, types, "x", "value", "index", 7, DESCENDING=descending, R0_BLOCK=8)
        np.testing.assert_array_equal(bench.get("index"), order)
        np.testing.assert_array_equal(bench.get("value"), x[order])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(1, 5))
def test_generic_reductions_and_scans_keep_their_order(power: int, rows: int) -> None:
    """A combination that is associative but not commutative: x -> a x + b."""
    source = """
@triton.jit
def compose(a1, b1, a2, b2):
    return a2 * a1, a2 * b1 + b2

@triton.jit
def k(a_ptr, b_ptr, ra_ptr, rb_ptr, sa_ptr, sb_ptr, ROWS: tl.constexpr, R0_BLOCK: tl.constexpr):
    at = tl.program_id(0) * R0_BLOCK + tl.arange(0, R0_BLOCK)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    ra, rb = tl.reduce((a, b), 1, compose)
    tl.store(ra_ptr + tl.program_id(0) + tl.arange(0, 1), ra)
    tl.store(rb_ptr + tl.program_id(0) + tl.arange(0, 1), rb)
    sa, sb = tl.associative_scan((a, b), 1, compose)
    tl.store(sa_ptr + at, sa)
    tl.store(sb_ptr + at, sb)
"""
    length, bench = 2**power, Bench()
    a, b = np.random.default_rng(power).integers(-2, 3, (2, rows, length))
    wa, wb = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
    for row in range(rows):
        total_a, total_b = 1, 0
        for i in range(length):
            total_a, total_b = a[row, i] * total_a, a[row, i] * total_b + b[row, i]
            wa[row, i], wb[row, i] = total_a, total_b
    for name, value in (("a", a), ("b", b), ("ra", a[:, 0]), ("rb", a[:, 0]), ("sa", a), ("sb", b)):
        bench.put(name, np.ascontiguousarray(value))
    names = ("a", "b", "ra", "rb", "sa", "sb")
    bench.run(
        source, {f"{n}_ptr": "*i64" for n in names}, *names, grid=(rows, 1, 1), ROWS=rows, R0_BLOCK=length
    )
    np.testing.assert_array_equal(bench.get("sa"), wa)
    np.testing.assert_array_equal(bench.get("sb"), wb)
    np.testing.assert_array_equal(bench.get("ra"), wa[:, -1])
    np.testing.assert_array_equal(bench.get("rb"), wb[:, -1])


def test_atomics(bench: Bench) -> None:
    source = """
@triton.jit
def k(index_ptr, sum_ptr, top_ptr, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    at = tl.load(index_ptr + i)
    tl.atomic_add(sum_ptr + at, 1.5, i < 30, sem='relaxed')
    tl.atomic_max(top_ptr + at, i)
"""
    index = np.random.default_rng(0).integers(0, 4, 32)
    bench.put("index", index)
    bench.put("sum", np.zeros(4, np.float32))
    bench.put("top", np.zeros(4, np.int32))
    bench.run(
        source,
        {"index_ptr": "*i64", "sum_ptr": "*fp32", "top_ptr": "*i32"},
        "index",
        "sum",
        "top",
        grid=(4, 1, 1),
        XBLOCK=8,
    )
    np.testing.assert_array_equal(bench.get("sum"), np.bincount(index[:30], minlength=4) * 1.5)
    np.testing.assert_array_equal(bench.get("top"), [np.flatnonzero(index == i)[-1] for i in range(4)])


def test_the_last_program_to_arrive_knows_it(bench: Bench) -> None:
    source = """
@triton.jit
def k(arrived, out):
    pair = tl.program_id(1)
    before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
    if before == 4:
        tl.store(arrived + pair, 0)
        tl.store(out + pair, tl.program_id(0))
"""
    bench.put("arrived", np.zeros(3, np.int32))
    bench.put("out", np.full(3, -1, np.int32))
    for _ in range(2):
        bench.run(source, {"arrived": "*i32", "out": "*i32"}, "arrived", "out", grid=(5, 3, 1))
        np.testing.assert_array_equal(bench.get("arrived"), [0, 0, 0])
        np.testing.assert_array_equal(bench.get("out"), [4, 4, 4])


def test_an_atomic_gives_what_was_there_before(bench: Bench) -> None:
    source = """
@triton.jit
def k(index_ptr, sum_ptr, before_ptr, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    at = tl.load(index_ptr + i)
    tl.store(before_ptr + i, tl.atomic_add(sum_ptr + at, i, i < 30))
"""
    index = np.random.default_rng(0).integers(0, 4, 32)
    bench.put("index", index)
    bench.put("sum", np.arange(4, dtype=np.int64))
    bench.put("before", np.zeros(32, np.int64))
    types = {"index_ptr": "*i64", "sum_ptr": "*i64", "before_ptr": "*i64"}
    bench.run(source, types, "index", "sum", "before", grid=(4, 1, 1), XBLOCK=8)
    sums, before = np.arange(4), np.zeros(32, np.int64)
    for i in range(30):
        before[i] = sums[index[i]]
        sums[index[i]] += i
    np.testing.assert_array_equal(bench.get("sum"), sums)
    np.testing.assert_array_equal(bench.get("before"), before)


def test_welford(bench: Bench) -> None:
    source = """
@triton.jit
def k(x_ptr, mean_ptr, m2_ptr, r0_numel, R0_BLOCK: tl.constexpr):
    base = tl.arange(0, R0_BLOCK)[None, :]
    mean = tl.zeros([1, R0_BLOCK], tl.float32)
    m2 = tl.zeros([1, R0_BLOCK], tl.float32)
    weight = tl.zeros([1, R0_BLOCK], tl.float32)
    for offset in tl.range(0, r0_numel, R0_BLOCK):
        mask = offset + base < r0_numel
        x = tl.load(x_ptr + offset + base, mask, other=0.0)
        a, b, c = triton_helpers.welford_reduce(x, mean, m2, weight, offset == 0)
        mean, m2, weight = tl.where(mask, a, mean), tl.where(mask, b, m2), tl.where(mask, c, weight)
    a, b, c = triton_helpers.welford(mean, m2, weight, 1)
    tl.store(mean_ptr + tl.arange(0, 1), a)
    tl.store(m2_ptr + tl.arange(0, 1), b)
"""
    x = (np.random.default_rng(0).standard_normal(1000) + 1000).astype(np.float32)
    bench.put("x", x)
    bench.put("mean", np.zeros(1, np.float32))
    bench.put("m2", np.zeros(1, np.float32))
    types = {"x_ptr": "*fp32", "mean_ptr": "*fp32", "m2_ptr": "*fp32", "r0_numel": "i32"}
    bench.run(source, types, "x", "mean", "m2", 1000, R0_BLOCK=64)
    np.testing.assert_allclose(bench.get("mean"), x.astype(np.float64).mean(), rtol=1e-6)
    np.testing.assert_allclose(bench.get("m2"), x.astype(np.float64).var() * 1000, rtol=1e-4)


def test_scans_across_programs(bench: Bench) -> None:
    source = """
@triton.jit
def add(a, b):
    return a + b

@triton.jit
def k(x_ptr, out_ptr, ws_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    at = i * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    total = tl.reduce(x, 0, add)
    before = triton_helpers.exclusive_scan_decoupled_lookback_64(ws_ptr.to(tl.pointer_type(tl.uint64)), total, i, add)
    scan = tl.associative_scan(x, 0, add)
    tl.store(out_ptr + at, tl.where(i == 0, scan, before + scan))
"""
    x = np.random.default_rng(0).integers(-9, 9, 64)
    bench.put("x", x)
    bench.put("out", np.zeros(64, np.int64))
    bench.put("ws", np.zeros(64 * 24, np.uint8))
    types = {"x_ptr": "*i64", "out_ptr": "*i64", "ws_ptr": "*u8"}
    bench.run(source, types, "x", "out", "ws", grid=(8, 1, 1), BLOCK=8)
    np.testing.assert_array_equal(bench.get("out"), np.cumsum(x))


def test_barriers_across_programs(bench: Bench) -> None:
    source = """
@triton.jit
def k(x_ptr, part_ptr, out_ptr, sem_ptr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    x = tl.load(x_ptr + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(part_ptr + i, tl.sum(x, 0))
    triton_helpers.x_grid_barrier(sem_ptr)
    parts = tl.load(part_ptr + tl.arange(0, SPLIT))
    tl.store(out_ptr + i, tl.sum(parts, 0))
"""
    bench.put("x", np.arange(64, dtype=np.float32))
    for name in ("part", "out"):
        bench.put(name, np.zeros(8, np.float32))
    bench.put("sem", np.zeros(1, np.uint32))
    types = {"x_ptr": "*fp32", "part_ptr": "*fp32", "out_ptr": "*fp32", "sem_ptr": "*u32"}
    bench.run(source, types, "x", "part", "out", "sem", grid=(8, 1, 1), SPLIT=8, BLOCK=8)
    np.testing.assert_array_equal(bench.get("out"), [2016] * 8)


def test_error_functions_against_the_standard_library() -> None:
    x = np.linspace(-7, 7, 2001)
    np.testing.assert_allclose(erf(x), np.vectorize(math.erf)(x), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(erfc(x), np.vectorize(math.erfc)(x), rtol=1e-12, atol=1e-300)
    inside = np.linspace(-0.9999, 0.9999, 1001)
    np.testing.assert_allclose(erf(erfinv(inside)), inside, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bessel", [bessel_j, bessel_y])
def test_bessel_functions_solve_their_equation(bessel: Any) -> None:
    """Both orders, near and far: the Wronskian, the derivative of order 0, and J's first values."""
    x = np.concatenate([np.linspace(0.2, 60, 999), [24.999, 25.001, 1e3]])
    step = 1e-5
    slope = (bessel(0, x + step) - bessel(0, x - step)) / (2 * step)
    np.testing.assert_allclose(-slope, bessel(1, x), atol=1e-8)
    wronskian = bessel_j(1, x) * bessel_y(0, x) - bessel_j(0, x) * bessel_y(1, x)
    np.testing.assert_allclose(wronskian, 2 / (np.pi * x), rtol=1e-9)
    np.testing.assert_array_equal(bessel_j(0, np.zeros(1)), [1.0])
    np.testing.assert_array_equal(bessel_y(0, np.array([0.0, -1.0])), [-np.inf, np.nan])


def test_modified_bessel_functions_against_their_series() -> None:
    x = np.linspace(-12, 12, 101)
    for order in (0, 1):
        terms = [
            (x / 2) ** (2 * k + order) / (math.factorial(k) * math.factorial(k + order)) for k in range(60)
        ]
        np.testing.assert_allclose(bessel_i(order, x), sum(terms), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os", "`Import` is not allowed"),
        ("x_ptr.__class__", "attribute `__class__` is not allowed"),
        ("tl._private", "attribute `_private` is not allowed"),
        ("open('/etc/passwd')", "name `open` is not known"),
        ("(lambda: 0)()", "`Lambda` is not allowed"),
        ("[a for a in x_ptr]", "is not allowed"),
        ("f'{x_ptr}'", "is not allowed"),
        ("tl.load = 3", "attribute `load` is not allowed"),
        ("tl = 3", "hides a name"),
        ("global y", "`Global` is not allowed"),
        ("__not(3)", "name `__not` is not known"),
        ("with x_ptr: pass", "`With` is not allowed"),
        ("def inner(): pass", "inside a function"),
    ],
)
def test_unsafe_sources_are_refused(bench: Bench, body: str, message: str) -> None:
    bench.put("x", np.zeros(4, np.float32))
    with pytest.raises(ArtifactError, match=message):
        bench.run(f"@triton.jit\ndef k(x_ptr):\n    {body}\n", {"x_ptr": "*fp32"}, "x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\n@triton.jit\ndef k(x_ptr):\n    pass", "only functions decorated"),
        ("def k(x_ptr):\n    pass", "only functions decorated"),
        ("@triton.jit\ndef other(x_ptr):\n    pass", "does not define it"),
        ("@triton.jit\ndef k(x_ptr:\n", "is not Python"),
        ("@triton.jit\ndef k(x_ptr, y):\n    pass", "takes `y`, which the artifact does not give"),
        ("@triton.jit\ndef k(x_ptr, *rest):\n    pass", "only plain parameters"),
        ("@print\ndef k(x_ptr):\n    pass", "only functions decorated"),
        ("", "carries no source"),
    ],
)
def test_foreign_sources_are_refused(bench: Bench, source: str, message: str) -> None:
    bench.put("x", np.zeros(4, np.float32))
    with pytest.raises(ArtifactError, match=message):
        bench.run(source, {"x_ptr": "*fp32"}, "x")


@pytest.mark.parametrize("expression", ["x.nothing", "x + 'a'", "tl.nothing(x)", "x[0]", "x.reshape(3, 5)"])
def test_what_a_kernel_does_wrong_is_one_of_our_errors(bench: Bench, expression: str) -> None:
    bench.put("x", np.zeros(4, np.float32))
    bench.put("out", np.zeros(4, np.float32))
    with pytest.raises(DevplanError, match=r"kernel `k`|cannot run kernel"):
        bench.run(unary_source(expression), {"x_ptr": "*fp32", "out_ptr": "*fp32"}, "x", "out", XBLOCK=4)

"""Rows times packed matrices that each chose: the kernels, interpreted, against loops over the codes in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.passes.lowered.compile_kernels import canonical, compile_kernels
from devplan.passes.quantized.experts import OPERATOR, by_rows, to_steps
from devplan.passes.quantized.weight import QuantizedWeight, quantized
from devplan.passes.tape import ExternCall, OwnLaunch
from devplan.runtime.expr import Expr
from devplan.tests.support.steps import Emulated, window

pytestmark = pytest.mark.torch
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """Rows of K columns, matrices [outputs, K], and how they are rounded."""

    rows: int
    columns: int
    outputs: int
    matrices: int
    dtype: torch.dtype = torch.float16
    bits: int = 4
    group: int = 32
    are_ends: bool = True
    behind: int = 0
    """Rows behind the last end."""

    def tensors(self) -> tuple[torch.Tensor, QuantizedWeight, torch.Tensor]:
        """x, the packed matrices, and ends or indices."""
        made = torch.Generator().manual_seed(self.rows * 7919 + self.columns * 31 + self.outputs)
        weight = torch.randn(self.matrices * self.outputs, self.columns, generator=made) / self.columns**0.5
        x = torch.randn(self.rows, self.columns, generator=made).to(self.dtype)
        which = torch.randint(self.matrices, (self.rows,), generator=made)
        if self.are_ends:
            counts = which[: max(self.rows - self.behind, 0)].bincount(minlength=self.matrices)
            which = counts.cumsum(0)
        return x, quantized(weight.to(self.dtype), self.bits, self.group), which.to(torch.int32)


def call_of(case: Case) -> tuple[ExternCall, dict[str, torch.Tensor]]:
    """The operator's call and what its windows hold."""
    x, weight, which = case.tensors()
    output = torch.full((case.rows, case.outputs), float("nan"), dtype=case.dtype)
    named = {"x": x, "words": weight.words, "scales": weight.scales, "zeros": weight.zeros, "which": which}
    operands = [None if t is None else window(name, t) for name, t in named.items()]
    rest = (weight.bits, weight.group, case.matrices, case.are_ends)
    call = ExternCall(OPERATOR, (*operands, *rest), {}, (window("output", output),))
    return call, {**{name: t for name, t in named.items() if t is not None}, "output": output}


def codes_of(words: Array, bits: int, columns: int) -> Array:
    """Codes read one by one: position t of word i of a chunk is column ``t * H + i`` of it."""
    height = 4 * bits
    made = np.zeros((words.shape[0], words.shape[1] // height * 128), np.int64)
    unsigned = words.view(np.uint32).astype(np.int64)
    for at in range(words.shape[1]):
        chunk, i = divmod(at, height)
        for t in range(32 // bits):
            made[:, chunk * 128 + t * height + i] = unsigned[:, at] >> (bits * t) & ((1 << bits) - 1)
    return made[:, :columns]


def matrices_of(case: Case, weight: QuantizedWeight) -> Array:
    """[matrices, outputs, K] in float64, dequantised by what the page of the format says."""
    codes = codes_of(weight.words.numpy(), case.bits, case.columns) - (1 << (case.bits - 1))
    scales = weight.scales.double().numpy()
    zeros = np.zeros_like(scales) if weight.zeros is None else weight.zeros.double().numpy()
    of = np.arange(case.columns) // (case.group or case.columns)
    return (codes * scales[:, of] + zeros[:, of]).reshape(case.matrices, case.outputs, case.columns)


def expected(case: Case) -> tuple[Array, float]:
    """What comes out, row by row, and the largest sum of magnitudes."""
    x, weight, which = case.tensors()
    matrices, rows = matrices_of(case, weight), x.double().numpy()
    made, worst = np.zeros((case.rows, case.outputs)), 1.0
    for row in range(case.rows):
        index = int((which.numpy() <= row).sum()) if case.are_ends else int(which[row])
        if index < case.matrices:
            made[row] = matrices[index] @ rows[row]
            worst = max(worst, float((np.abs(matrices[index]) @ np.abs(rows[row])).max()))
    return made, worst


def check(case: Case, way: Callable[[ExternCall], OwnLaunch] | None = None) -> str:
    """Run the kernel, the one that ``way`` makes or the chosen one, compare, and give its name."""
    call, tensors = call_of(case)
    step = to_steps(call)[0] if way is None else way(call)
    device = Emulated(tensors)
    device.run([step])
    wanted, worst = expected(case)
    ours = device.output(tensors["output"]).double().numpy()
    # weights are rounded to the type of x, a product with the scale before that
    bound = EPSILON[case.dtype] * (np.abs(wanted) + 3 * worst) + 2.0**-20 * worst
    assert (np.abs(ours - wanted) <= bound).all(), np.abs(ours - wanted).max()
    return step.kernel.name


DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
SCHEMES = st.sampled_from([(8, 0), (4, 32), (4, 128), (4, 256)])


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 9),
    DTYPES,
    SCHEMES,
    st.booleans(),
)
def test_few_rows_read_the_matrices_that_they_need(
    rows: int,
    columns: int,
    outputs: int,
    matrices: int,
    dtype: torch.dtype,
    scheme: tuple[int, int],
    are_ends: bool,
) -> None:
    case = Case(rows, columns, outputs, matrices, dtype, *scheme, are_ends, behind=rows // 3)
    assert check(case, by_rows) == "quantized_expert_rows"


@settings(max_examples=15, deadline=None)
@given(st.integers(33, 90), st.integers(1, 300), st.integers(1, 70), st.integers(1, 9), DTYPES, SCHEMES)
def test_many_rows_in_groups(
    rows: int, columns: int, outputs: int, matrices: int, dtype: torch.dtype, scheme: tuple[int, int]
) -> None:
    case = Case(rows, columns, outputs, matrices, dtype, *scheme, behind=rows % 5)
    assert check(case) == "quantized_experts"


def test_many_rows_that_chose_one_by_one_are_still_right() -> None:
    assert check(Case(40, 200, 24, 5, torch.float16, 8, 0, are_ends=False)) == "quantized_expert_rows"


def test_more_rows_than_matrices_share_them() -> None:
    names = [to_steps(call_of(Case(rows, 128, 8, 6))[0])[0].kernel.name for rows in (6, 7)]
    assert names == ["quantized_expert_rows", "quantized_experts"]


def test_a_number_of_rows_that_is_known_late_is_a_parameter() -> None:
    call, _ = call_of(Case(40, 256, 64, 4))
    x = replace(call.operands[0], sizes=(Expr("s0"), 256))
    output = replace(call.outs[0], sizes=(Expr("s0"), 64))
    (step,) = to_steps(replace(call, operands=(x, *call.operands[1:]), outs=(output,)))
    assert ("ROWS", "i64") in step.kernel.parameters and Expr("s0") in step.arguments


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [(8, 0), (4, 128)])
def test_the_kernels_compile_for_three_generations(scheme: tuple[int, int]) -> None:
    cases = [Case(rows, 512, 256, 8, torch.bfloat16, *scheme) for rows in (4, 512)]
    cases.append(replace(cases[1], dtype=torch.float16))
    steps = [step for case in cases for step in to_steps(call_of(case)[0]) if isinstance(step, OwnLaunch)]
    architectures = ("sm_80", "sm_90", "sm_100")
    for kernel in compile_kernels([canonical(s.kernel) for s in steps], architectures, jobs=1):
        assert {c.architecture for c in kernel.codes if c.form == "cubin"} == set(architectures)

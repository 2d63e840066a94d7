"""The emulator's library calls against plain loops and definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from devplan.runtime.backend import Operand
from devplan.runtime.dtypes import DType
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.errors import ArtifactError
from devplan.runtime.program import Device, LibraryCall
from devplan.runtime.tensors.host import HostTensor, array_at, contiguous_strides, host_value

CUDA = Device("cuda", 0)


def run(function: str, reads: list[Any], out: tuple[tuple[int, ...], DType], **attributes: Any) -> np.ndarray:
    """Call a library function on arrays (their strides are kept) and return its result."""
    backend = EmulatorBackend(CUDA)
    operands: dict[str, Operand] = {}
    for index, value in enumerate(reads):
        raw = value.raw if isinstance(value, HostTensor) else value
        dtype = value.dtype if isinstance(value, HostTensor) else DType.from_name(str(raw.dtype))
        strides = tuple(step // raw.itemsize for step in raw.strides)
        span = 1 + sum((n - 1) * s for n, s in zip(raw.shape, strides, strict=True))
        address = backend.allocate(span * raw.itemsize)
        array_at(address, dtype, raw.shape, strides)[...] = raw
        operands[f"r{index}"] = Operand(address, dtype, raw.shape, strides, CUDA)
    shape, kind = out
    address = backend.allocate(math.prod(shape) * kind.itemsize)
    operands["out"] = Operand(address, kind, shape, contiguous_strides(shape), CUDA)
    names = tuple(f"r{index}" for index in range(len(reads)))
    backend.bind(LibraryCall(function, names, ("out",), tuple(attributes.items())), operands, {})()
    made = host_value(array_at(address, kind, shape, contiguous_strides(shape)).copy(), kind)
    return np.asarray(made)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("epilogue", ["none", "relu", "gelu_erf", "gelu_tanh"])
def test_product_with_bias_addend_and_epilogue(epilogue: str) -> None:
    a, b, bias, c = normal(5, 7), normal(7, 6, seed=1), normal(6, seed=2), normal(5, 6, seed=3)
    got = run(
        "matmul", [a, b, bias, c], ((5, 6), DType.FLOAT32),
        has_bias=True, has_c=True, alpha=0.5, beta=2.0, epilogue=epilogue,
    )  # fmt: skip
    x = 0.5 * (a.astype(float) @ b) + 2.0 * c + bias
    expected = {
        "none": x,
        "relu": np.maximum(x, 0),
        "gelu_erf": 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }[epilogue]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_batched_products_of_strided_operands() -> None:
    a = normal(4, 3, 5, 2).transpose(1, 0, 3, 2)[:, 1]
    b = normal(3, 6, 5, seed=1).transpose(0, 2, 1)
    got = run("matmul", [a, b], ((3, 2, 6), DType.FLOAT32))
    np.testing.assert_allclose(got, np.einsum("bij,bjk->bik", a.astype(float), b), rtol=1e-5, atol=1e-5)


def test_products_of_bfloat16_accumulate_in_float32() -> None:
    a, b = (HostTensor.from_float32(normal(9, 9, seed=s), DType.BFLOAT16) for s in (0, 1))
    got = run("matmul", [a, b], ((9, 9), DType.BFLOAT16))
    wide = a.float32().astype(float) @ b.float32()
    np.testing.assert_array_equal(got, HostTensor.from_float32(wide, DType.BFLOAT16).float32())


def test_integer_products_are_exact() -> None:
    a = np.random.default_rng(0).integers(-100, 100, (4, 4))
    np.testing.assert_array_equal(run("matmul", [a, a.T], ((4, 4), DType.INT64)), a @ a.T)


def direct(x: np.ndarray, w: np.ndarray, stride: Any, padding: Any, dilation: Any, groups: int) -> np.ndarray:
    """A convolution as its definition, element by element."""
    rank = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)
    ]
    out = np.zeros((x.shape[0], w.shape[0], *sizes))
    share, per = w.shape[1], w.shape[0] // groups
    for n, k, *at in np.ndindex(*out.shape):
        window = (
            slice(a * s, a * s + d * (e - 1) + 1, d)
            for a, s, d, e in zip(at, stride, dilation, w.shape[2:], strict=True)
        )
        group = k // per
        out[(n, k, *at)] = (x[(n, slice(group * share, (group + 1) * share), *window)] * w[k]).sum()
    assert rank == len(sizes)
    return out


def transposed(
    x: np.ndarray, w: np.ndarray, stride: Any, padding: Any, extra: Any, dilation: Any, groups: int
) -> np.ndarray:
    """A transposed convolution as its definition: every input element adds a kernel to the output."""
    full = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], stride, dilation, w.shape[2:], extra, strict=True)
    ]
    outputs, per = w.shape[1], x.shape[1] // groups
    out = np.zeros((x.shape[0], outputs * groups, *full))
    for n, c, *at in np.ndindex(*x.shape):
        window = (
            slice(a * s, a * s + d * (k - 1) + 1, d)
            for a, s, d, k in zip(at, stride, dilation, w.shape[2:], strict=True)
        )
        group = c // per
        out[(n, slice(group * outputs, (group + 1) * outputs), *window)] += x[(n, c, *at)] * w[c]
    cut = (slice(p, size - p) for p, size in zip(padding, full, strict=True))
    return out[(slice(None), slice(None), *cut)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_convolutions_are_their_definition(data: Any) -> None:
    rank, groups = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3]))
    numbers = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    kernel, stride, padding, dilation = numbers(1, 3), numbers(1, 2), numbers(0, 2), numbers(1, 2)
    size = tuple(k * d + data.draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True))
    share, per = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    x, w = normal(2, groups * share, *size), normal(groups * per, share, *kernel, seed=1)
    expected = direct(x, w, stride, padding, dilation, groups)
    bias = normal(groups * per, seed=2)
    got = run(
        "convolution", [x, w, bias], (expected.shape, DType.FLOAT32), stride=stride, padding=padding,
        dilation=dilation, groups=groups, has_bias=True, transposed=False, activation="relu",
    )  # fmt: skip
    biased = expected + bias.reshape(1, -1, *([1] * rank))
    np.testing.assert_allclose(got, np.maximum(biased, 0), rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_transposed_convolutions_are_their_definition(data: Any) -> None:
    rank, groups = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2]))
    numbers = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    kernel, stride, dilation = numbers(1, 3), numbers(1, 3), numbers(1, 2)
    padding = tuple(data.draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True))
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    x, w = normal(2, groups * 2, *numbers(2, 4)), normal(groups * 2, 3, *kernel, seed=1)
    expected = transposed(x, w, stride, padding, extra, dilation, groups)
    assume(expected.size)  # PyTorch refuses results without elements
    got = run(
        "convolution", [x, w], (expected.shape, DType.FLOAT32), stride=stride, padding=padding,
        dilation=dilation, groups=groups, transposed=True, output_padding=extra,
    )  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation", "low", "high"), [("none", -99, 99), ("relu", 0, 99), ("relu6", 0, 6)])
def test_convolutions_with_bias_addend_and_activation(activation: str, low: float, high: float) -> None:
    x, w, bias = normal(2, 3, 6, 5) * 3, normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    expected = direct(x, w, (1, 1), (1, 1), (1, 1), 1) + bias.reshape(1, 4, 1, 1)
    added = normal(*expected.shape, seed=3)
    got = run(
        "convolution", [x, w, bias, added], (expected.shape, DType.FLOAT32), stride=(1, 1), padding=(1, 1),
        has_bias=True, has_added=True, activation=activation,
    )  # fmt: skip
    np.testing.assert_allclose(got, np.clip(expected + added, low, high), rtol=1e-4, atol=1e-4)


def test_convolutions_take_channels_last() -> None:
    x, w = normal(2, 5, 6, 3).transpose(0, 3, 1, 2), normal(4, 2, 2, 3, seed=1).transpose(0, 3, 1, 2)
    expected = direct(x, w, (1, 1), (0, 0), (1, 1), 1)
    got = run("convolution", [x, w], (expected.shape, DType.FLOAT32), stride=(1, 1), padding=(0, 0))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "additive mask", "grouped", "scaled"])
def test_attention_is_its_definition(kind: str) -> None:
    heads = 2 if kind == "grouped" else 4
    q, k, v = normal(2, 4, 5, 8), normal(2, heads, 7, 8, seed=1), normal(2, heads, 7, 8, seed=2)
    mask = np.zeros((5, 7))
    reads: list[Any] = [q, k, v]
    attributes: dict[str, Any] = {"scale": 0.3 if kind == "scaled" else None, "is_causal": kind == "causal"}
    if kind == "causal":
        mask = np.where(np.tri(5, 7, dtype=bool), 0, -np.inf)
    if kind == "bool mask":
        allowed = np.random.default_rng(3).random((2, 1, 5, 7)) > 0.4
        allowed[0, 0, 2] = False  # a row that sees nothing
        reads.append(allowed)
        mask = np.where(allowed, 0, -np.inf)
    if kind == "additive mask":
        reads.append(normal(5, 7, seed=4))
        mask = reads[-1]
    attributes["has_mask"] = len(reads) == 4
    got = run("attention", reads, ((2, 4, 5, 8), DType.FLOAT32), **attributes)
    k, v = (np.repeat(t.astype(float), 4 // heads, axis=1) for t in (k, v))
    scores = np.einsum("bhmd,bhnd->bhmn", q, k) * (0.3 if kind == "scaled" else 8**-0.5) + mask
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
    np.testing.assert_allclose(got, np.einsum("bhmn,bhnd->bhmd", weights, v), rtol=1e-5, atol=1e-5)


def test_fill() -> None:
    np.testing.assert_array_equal(run("fill", [], ((2, 3), DType.INT8), value=7), np.full((2, 3), 7))


def test_unknown_functions_are_refused() -> None:
    with pytest.raises(ArtifactError, match="no library function `fft`"):
        run("fft", [], ((1,), DType.FLOAT32))

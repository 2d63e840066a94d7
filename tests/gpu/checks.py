"""What must hold on a GPU: functions that raise AssertionError or return one line of findings.

`selftest.py` runs them in order and prints a table; `test_gpu.py` makes them pytest tests. Checks whose name
ends in ``_torch``, ``_cupy`` or ``_jax`` need that library, and come last: those before watch that no torch is imported.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import programs

from devplan.runtime.backend import Operand
from devplan.runtime.cuda import driver
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, DeviceError, DevplanError, ExecutionError, UsageError
from devplan.runtime.program import (
    CPU,
    Copy,
    CopyKind,
    Device,
    Kernel,
    KernelCode,
    Launch,
    LibraryCall,
    Ref,
)
from devplan.runtime.tensors.host import HostTensor, numpy_dtype
from devplan.runtime.tensors.tensor import DeviceTensor

GPU = Device("cuda", 0)
RANDOM = np.random.default_rng(0)
FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)
TOLERANCE = {DType.FLOAT64: 1e-12, DType.FLOAT32: 3e-6, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1.6e-2}
KERNELS: dict[str, Kernel] = {}
"""Filled by whoever runs the checks."""


@cache
def gpu() -> CudaBackend:
    backend = CudaBackend(GPU, 0)
    backend.load(list(KERNELS.values()))
    return backend


def raises(kind: type[DevplanError], act: Callable[[], Any]) -> DevplanError:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"nothing raised {kind.__name__}")


def place(array: np.ndarray, dtype: DType | None = None, shift: int = 0) -> tuple[Operand, DeviceTensor]:
    """A copy on the GPU with the array's own strides; ``shift`` elements past an aligned address."""
    kind = dtype or DType.from_name(array.dtype.name)
    strides = tuple(step // array.itemsize for step in array.strides)
    span = Operand(0, kind, array.shape, strides, GPU).span_nbytes
    memory = DeviceTensor.empty((span + (shift + 16) * kind.itemsize,), DType.UINT8, gpu())
    operand = Operand(memory.pointer + shift * kind.itemsize, kind, array.shape, strides, GPU)
    view = DeviceTensor(operand, gpu(), lambda: None)
    view.write(
        HostTensor.from_float32(array, kind) if kind is DType.BFLOAT16 else array.astype(numpy_dtype(kind))
    )
    return operand, memory


def fetch(operand: Operand) -> np.ndarray:
    value = DeviceTensor(operand, gpu(), lambda: None).numpy()
    return value.float32() if isinstance(value, HostTensor) else value


def laid_out(shape: Sequence[int], transposed: bool = False, padding: int = 0) -> np.ndarray:
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
    wide = RANDOM.standard_normal((*stored[:-1], stored[-1] + padding)).astype(np.float32)
    narrow = wide[..., : stored[-1]]
    return narrow.swapaxes(-1, -2) if transposed else narrow


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BFLOAT16:
        return HostTensor.from_float32(array, dtype).float32().astype(np.float64)
    return array.astype(numpy_dtype(dtype)).astype(np.float64)


def error_of(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest value."""
    return float(np.max(np.abs(got.astype(np.float64) - wanted)) / max(float(np.max(np.abs(wanted))), 1e-30))


# --- the driver ---------------------------------------------------------------------------------------


def check_device() -> str:
    (info, *_) = driver.devices()
    assert driver.cuda_available() == (True, "")
    assert gpu().info == info
    return f"{info.name}, {info.architecture}, {info.memory_nbytes / 2**30:.0f} GiB, CUDA {driver.driver_version()}"


def check_copies() -> str:
    backend, count = gpu(), 0
    for shape, source, destination in (
        ((5, 7), (7, 1), (7, 1)),
        ((5, 7), (20, 1), (9, 1)),
        ((5, 7), (1, 5), (7, 1)),
        ((3, 4, 5), (1, 3, 12), (20, 5, 1)),
        ((4, 6), (0, 1), (6, 1)),
    ):
        for kind, item in itertools.product(("h2d", "d2d", "d2h"), (DType.INT8, DType.INT16, DType.FLOAT64)):
            a, b = (np.zeros(400, numpy_dtype(item)) for _ in range(2))
            a[:] = RANDOM.integers(0, 100, 400)
            sides = [DeviceTensor.from_host(a, backend), DeviceTensor.from_host(b, backend)]
            addresses = [
                a.ctypes.data if kind == "h2d" else sides[0].pointer,
                b.ctypes.data if kind == "d2h" else sides[1].pointer,
            ]
            devices = [CPU if kind == "h2d" else GPU, CPU if kind == "d2h" else GPU]
            operands = {
                name: Operand(address, item, shape, strides, device)
                for name, address, strides, device in zip(
                    "ab", addresses, (source, destination), devices, strict=True
                )
            }
            kinds = {"h2d": CopyKind.H2D, "d2d": CopyKind.LOCAL, "d2h": CopyKind.D2H}
            backend.bind(Copy(kinds[kind], "a", "b"), operands, {})()
            backend.synchronize()
            got = b if kind == "d2h" else np.asarray(sides[1].numpy())
            wanted = np.zeros(400, a.dtype)
            view = np.lib.stride_tricks.as_strided
            step = item.itemsize
            view(wanted, shape, [s * step for s in destination])[...] = view(
                a, shape, [s * step for s in source]
            )
            assert np.array_equal(got, wanted), (shape, source, destination, kind, item)
            count += 1
    return f"{count} copies with every kind of strides"


def check_fill() -> str:
    cases = (
        (DType.INT64, 1 << 40),
        (DType.FLOAT64, 1.1),
        (DType.FLOAT16, -2.5),
        (DType.BOOL, True),
        (DType.FLOAT32, 3.0),
    )
    for dtype, value in cases:
        operand, _memory = place(np.zeros(1000, numpy_dtype(dtype)), dtype)
        gpu().bind(LibraryCall("fill", (), ("o",), (("value", value),)), {"o": operand}, {})()
        gpu().synchronize()
        assert np.array_equal(fetch(operand), np.full(1000, value, numpy_dtype(dtype))), dtype
    return f"{len(cases)} types"


def check_upload_speed() -> str:
    nbytes = 1 << 30
    data = np.zeros(nbytes, np.uint8)
    data[::4096] = RANDOM.integers(0, 256, nbytes // 4096)
    address = gpu().allocate(nbytes)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        gpu().upload(address, memoryview(data))
        times.append(time.perf_counter() - start)
    back = np.empty_like(data)
    gpu().download(address, memoryview(back))
    gpu().free(address)
    assert np.array_equal(data, back)
    return f"1 GiB in {min(times) * 1e3:.0f} ms ({nbytes / min(times) / 1e9:.1f} GB/s), first {times[0] * 1e3:.0f} ms"


def check_launches() -> str:
    x, y = (RANDOM.standard_normal(1000).astype(np.float32) for _ in range(2))
    (a, _1), (b, _2), (o, _3) = place(x), place(y), place(np.zeros(1000, np.float32))
    launch = Launch("add_scaled", (Ref("x"), Ref("y"), Ref("o"), 1000, 0.5), (4, 1, 1), ("x", "y"), ("o",))
    gpu().bind(launch, {"x": a, "y": b, "o": o}, {})()
    gpu().synchronize()
    np.testing.assert_allclose(fetch(o), x + np.float32(0.5) * y, rtol=1e-6)
    kernel = KERNELS["shared_product"]
    assert kernel.codes[0].shared_nbytes > 48 << 10, kernel.codes[0].shared_nbytes
    m = RANDOM.standard_normal((256, 256)).astype(np.float16)
    (p, _4), (q, _5) = place(m), place(np.zeros((256, 256), np.float16))
    gpu().bind(
        Launch("shared_product", (Ref("p"), Ref("q")), (1, 1, 1), ("p",), ("q",)), {"p": p, "q": q}, {}
    )()
    gpu().synchronize()
    error = error_of(fetch(q), m.astype(np.float64) @ m.astype(np.float64))
    assert error < 2e-3
    return f"scalars, masks, {kernel.codes[0].shared_nbytes} bytes of shared memory"


def check_early_launches() -> str:
    if "add_early" not in KERNELS:
        return "skipped: this GPU launches one after the other"
    count, turns = 1 << 20, 240
    (one, _1), (zero, _2) = place(np.ones(count, np.float32)), place(np.zeros(count, np.float32))
    (a, _3), (b, _4) = place(np.zeros(count, np.float32)), place(np.zeros(count, np.float32))
    operands, grid = {"one": one, "zero": zero, "a": a, "b": b}, (count // 256, 1, 1)
    steps = [gpu().bind(Copy(CopyKind.LOCAL, "zero", "a"), operands, {})]
    for turn in range(turns):
        of, to = ("a", "b") if turn % 2 == 0 else ("b", "a")
        launch = Launch("add_early", (Ref(of), Ref("one"), Ref(to), count), grid, (of, "one"), (to,))
        steps.append(gpu().bind(launch, operands, {}))
        if turn % 7 == 0:  # other nodes of a graph between them
            steps.append(gpu().bind(Copy(CopyKind.LOCAL, to, of), operands, {}))
    replay = gpu().capture(steps)
    for run in (lambda: [step() for step in steps], *[replay] * 20):
        run()
        gpu().synchronize()
        np.testing.assert_array_equal(fetch(a), np.full(count, turns, np.float32))
    replay.close()
    return f"{turns} launches that each read what the one before wrote, 20 replays"


def check_ptx() -> str:
    backend = CudaBackend(GPU, 0)
    kernel = KERNELS["add_scaled"]
    backend.load(
        [Kernel("ptx", kernel.parameters, tuple(code for code in kernel.codes if code.form == "ptx"))]
    )
    assert backend.uses_ptx == ("ptx",)
    (o, _memory) = place(np.ones(8, np.float32))
    launch = Launch("ptx", (Ref("o"), Ref("o"), Ref("o"), 8, 2.0), (1, 1, 1), ("o",), ("o",))
    start = time.perf_counter()
    backend.bind(launch, {"o": o}, {})()
    backend.synchronize()
    seconds = time.perf_counter() - start
    assert np.array_equal(fetch(o), np.full(8, 3, np.float32))
    backend.close()
    return f"compiled by the driver in {seconds * 1e3:.0f} ms"


def check_errors() -> str:
    found = [raises(ExecutionError, lambda: gpu().allocate(1 << 50))]
    header = b"\x7fELF\x02".ljust(18, b"\0") + b"\xbe".ljust(46, b"\0")
    code = KernelCode(gpu().info.architecture, "cubin", "bad", header, 4, 0)
    found.append(
        raises(ArtifactError, lambda: gpu().load([Kernel("bad", (), (replace(code, data=header[:40]),))]))
    )
    gpu().load([Kernel("bad", (), (code,))])
    found.append(raises(DeviceError, lambda: gpu().bind(Launch("bad", (), (1, 1, 1), (), ()), {}, {})))
    found.append(raises(DeviceError, lambda: CudaBackend(GPU, 99)))
    gpu().synchronize()
    return " | ".join(error.why.split(":")[0] for error in found)


# --- libraries ----------------------------------------------------------------------------------------


def matmul(call: LibraryCall, arrays: dict[str, np.ndarray], dtype: DType, shift: int = 0) -> np.ndarray:
    placed = {name: place(array, dtype, shift) for name, array in arrays.items()}
    operands = {name: operand for name, (operand, _) in placed.items()}
    workspace = DeviceTensor.empty((4 << 20,), DType.UINT8, gpu())
    gpu().bind(call, operands | {"workspace": workspace.operand}, {})()
    gpu().synchronize()
    return fetch(operands["out"])


def check_matmul_layouts() -> str:
    worst: dict[DType, float] = dict.fromkeys(FLOATS, 0.0)
    count = 0
    sizes = ((1, 64, 48), (33, 17, 70), (128, 96, 64), (5, 1, 9))
    bits = [False, True]
    for dtype, batched, a_t, b_t, out_t, padding in itertools.product(FLOATS, bits, bits, bits, bits, (0, 8)):
        for m, n, k in sizes:
            lead = (3,) if batched else ()
            a, b = laid_out((*lead, m, k), a_t, padding), laid_out((*lead, k, n), b_t, padding)
            out = laid_out((*lead, m, n), out_t, padding)
            call = LibraryCall("matmul", ("a", "b"), ("out", "workspace"), (), "workspace")
            got = matmul(call, {"a": a, "b": b, "out": out}, dtype)
            worst[dtype] = max(worst[dtype], error_of(got, rounded(a, dtype) @ rounded(b, dtype)))
            count += 1
    assert all(error < TOLERANCE[dtype] for dtype, error in worst.items()), worst
    return f"{count} products; " + ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def check_matmul_epilogues() -> str:
    activations: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "none": lambda x: x, "relu": lambda x: np.maximum(x, 0), "gelu_tanh": gelu,
    }  # fmt: skip
    count = 0
    for dtype, name, has_bias, has_c in itertools.product(
        FLOATS[:3], activations, (False, True), (False, True)
    ):
        a, b, out = laid_out((48, 64)), laid_out((64, 40), True), laid_out((48, 40))
        bias, c = RANDOM.standard_normal(40).astype(np.float32), laid_out((48, 40))
        reads = ["a", "b", *(["bias"] if has_bias else []), *(["c"] if has_c else [])]
        attributes = (
            ("epilogue", name), ("has_bias", has_bias), ("has_c", has_c), ("alpha", 0.5), ("beta", 2.0),
        )  # fmt: skip
        call = LibraryCall("matmul", tuple(reads), ("out", "workspace"), attributes, "workspace")
        got = matmul(call, {"a": a, "b": b, "out": out, "bias": bias, "c": c}, dtype)
        wanted = 0.5 * (rounded(a, dtype) @ rounded(b, dtype))
        wanted = (
            wanted + (2.0 * rounded(c, dtype) if has_c else 0) + (rounded(bias, dtype) if has_bias else 0)
        )
        wanted = activations[name](wanted)
        error = error_of(got, wanted)
        assert error < 2 * TOLERANCE[dtype] + (1e-5 if name == "gelu_tanh" else 0), (
            dtype,
            name,
            has_bias,
            has_c,
            error,
        )
        count += 1
    refused = LibraryCall("matmul", ("a", "b"), ("out",), (("epilogue", "gelu_erf"),))
    arrays = {name: laid_out((8, 8)) for name in ("a", "b", "out")}
    raises(DeviceError, lambda: matmul(refused, arrays, DType.FLOAT16))
    return f"{count} epilogues"


def check_matmul_precision() -> str:
    a, b, out = laid_out((512, 2048)), laid_out((2048, 512)), laid_out((512, 512))
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    errors = []
    for tf32 in (False, True):
        call = LibraryCall("matmul", ("a", "b"), ("out", "workspace"), (("allow_tf32", tf32),), "workspace")
        errors.append(error_of(matmul(call, {"a": a, "b": b, "out": out}, DType.FLOAT32), wanted))
    assert errors[0] < 2e-6 < errors[1], errors
    return f"float32 {errors[0]:.1e}, with TF32 allowed {errors[1]:.1e}"


def check_matmul_alignment() -> str:
    for dtype, shift in itertools.product(FLOATS[:3], (0, 1, 2, 3, 4, 7)):
        a, b, out = laid_out((64, 64)), laid_out((64, 64)), laid_out((64, 64))
        call = LibraryCall("matmul", ("a", "b"), ("out", "workspace"), (), "workspace")
        got = matmul(call, {"a": a, "b": b, "out": out}, dtype, shift)
        assert error_of(got, rounded(a, dtype) @ rounded(b, dtype)) < TOLERANCE[dtype], (dtype, shift)
    a, b, out = (laid_out(shape) for shape in ((4, 0), (0, 5), (4, 5)))
    assert not matmul(
        LibraryCall("matmul", ("a", "b"), ("out",), ()), {"a": a, "b": b, "out": out}, DType.FLOAT16
    ).any()
    return "operands from 1 to 7 elements past an aligned address; k of 0"


def convolve(
    x: np.ndarray, w: np.ndarray, stride: Any, padding: Any, dilation: Any, groups: int
) -> np.ndarray:
    """A convolution as a sum over the taps."""
    rank = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    extents = [
        (x.shape[2 + i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in range(rank)
    ]
    out = np.zeros((x.shape[0], w.shape[0], *extents))
    per_in, per_out = w.shape[1], w.shape[0] // groups
    for tap in itertools.product(*(range(extent) for extent in w.shape[2:])):
        window = tuple(
            slice(t * d, t * d + (e - 1) * s + 1, s)
            for t, d, e, s in zip(tap, dilation, extents, stride, strict=True)
        )
        for group in range(groups):
            part = x[(slice(None), slice(group * per_in, (group + 1) * per_in), *window)]
            weights = w[(slice(group * per_out, (group + 1) * per_out), slice(None), *tap)]
            out[:, group * per_out : (group + 1) * per_out] += np.einsum("nc...,kc->nk...", part, weights)
    return out


def transposed(
    x: np.ndarray, w: np.ndarray, stride: Any, padding: Any, dilation: Any, extra: Any
) -> np.ndarray:
    """A transposed convolution as a scatter over the taps; weight [C, K, *taps]."""
    rank = x.ndim - 2
    full = [
        (x.shape[2 + i] - 1) * stride[i] + dilation[i] * (w.shape[2 + i] - 1) + 1 + extra[i]
        for i in range(rank)
    ]
    out = np.zeros((x.shape[0], w.shape[1], *full))
    for tap in itertools.product(*(range(extent) for extent in w.shape[2:])):
        window = tuple(
            slice(t * d, t * d + (e - 1) * s + 1, s)
            for t, d, e, s in zip(tap, dilation, x.shape[2:], stride, strict=True)
        )
        out[(slice(None), slice(None), *window)] += np.einsum(
            "nc...,ck->nk...", x, w[(slice(None), slice(None), *tap)]
        )
    cut = tuple(slice(p, extent - p) for p, extent in zip(padding, full, strict=True))
    return out[(slice(None), slice(None), *cut)]


CONVOLUTIONS: tuple[tuple[Any, ...], ...] = (
    # x, weight, stride, padding, dilation, groups
    ((1, 8, 16, 16), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 16, 15, 13), (32, 16, 3, 5), (2, 1), (1, 2), (1, 1), 1),
    ((1, 16, 16, 16), (16, 1, 3, 3), (1, 1), (1, 1), (1, 1), 16),
    ((2, 16, 12, 12), (32, 4, 3, 3), (1, 1), (2, 2), (2, 2), 4),
    ((1, 3, 32, 32), (8, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    ((1, 1, 1024, 1), (16, 1, 512, 1), (4, 1), (0, 0), (1, 1), 1),
    ((2, 8, 50), (16, 8, 5), (2,), (2,), (1,), 1),
    ((1, 8, 6, 7, 8), (16, 8, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
)


def convolution(dtype: DType, case: Any, channels_last: bool, has_bias: bool, relu: bool) -> float:
    x_shape, w_shape, stride, padding, dilation, groups = case
    x, w, bias = (RANDOM.standard_normal(s).astype(np.float32) for s in (x_shape, w_shape, w_shape[:1]))
    wanted = convolve(*(rounded(array, dtype) for array in (x, w)), stride, padding, dilation, groups)
    if has_bias:
        wanted += rounded(bias, dtype).reshape(1, -1, *[1] * (x.ndim - 2))
    wanted = np.maximum(wanted, 0) if relu else wanted
    out = np.zeros(wanted.shape, np.float32)
    arrays = {"x": x, "w": w, "bias": bias, "out": out}
    if channels_last:
        for name in ("x", "w", "out"):
            arrays[name] = np.moveaxis(np.ascontiguousarray(np.moveaxis(arrays[name], 1, -1)), -1, 1)
    attributes = (
        ("stride", stride), ("padding", padding), ("dilation", dilation), ("groups", groups),
        ("has_bias", has_bias), ("activation", "relu" if relu else "none"),
    )  # fmt: skip
    reads = ("x", "w", "bias") if has_bias else ("x", "w")
    call = LibraryCall("convolution", reads, ("out", "workspace"), attributes, "workspace")
    return error_of(run_convolution(call, arrays, dtype), wanted)


def run_convolution(call: LibraryCall, arrays: dict[str, np.ndarray], dtype: DType) -> np.ndarray:
    placed = {name: place(array, dtype) for name, array in arrays.items()}
    operands = {name: operand for name, (operand, _) in placed.items()}
    workspace = DeviceTensor.empty((32 << 20,), DType.UINT8, gpu())
    gpu().bind(call, operands | {"workspace": workspace.operand}, {})()
    gpu().synchronize()
    return fetch(operands["out"])


def check_convolutions() -> str:
    worst: dict[DType, float] = dict.fromkeys(FLOATS[:3], 0.0)
    failures: list[str] = []
    count, slowest = 0, 0.0
    for dtype, case, last, (bias, relu) in itertools.product(
        FLOATS[:3], CONVOLUTIONS, (False, True), ((False, False), (True, False), (True, True))
    ):
        start = time.perf_counter()
        try:
            error = convolution(dtype, case, last, bias, relu)
        except DevplanError as refused:
            failures.append(f"{dtype} {case} last={last} bias={bias} relu={relu}: {refused}")
            continue
        slowest = max(slowest, time.perf_counter() - start)
        if not error < 2 * TOLERANCE[dtype]:
            failures.append(f"{dtype} {case} last={last} bias={bias} relu={relu}: error {error:.1e}")
        worst[dtype] = max(worst[dtype], error)
        count += 1
    assert not failures, f"{len(failures)} of {count + len(failures)}:\n" + "\n".join(failures[:12])
    errors = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())
    return f"{count} convolutions; {errors}; slowest bind and run {slowest * 1e3:.0f} ms"


def check_residual_convolutions_in_a_graph() -> str:
    """ResNet's downsampling block at batch 32, in which cuDNN's kernels once read a residual before it was there."""
    shapes = {"x": (32, 64, 56, 56), "a": (128, 64, 3, 3), "b": (128, 128, 3, 3), "c": (128, 64, 1, 1)}
    shapes |= {name: (32, 128, 28, 28) for name in ("y", "z", "out")} | {"bias": (128,)}
    held = {}
    for name, shape in shapes.items():
        array = (RANDOM.standard_normal(shape) * (0.05 if name in "abc" else 1)).astype(np.float32)
        if len(shape) == 4:
            array = np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
        held[name] = place(array, DType.FLOAT16)
    workspace = DeviceTensor.empty((32 << 20,), DType.UINT8, gpu())
    operands = {name: operand for name, (operand, _) in held.items()} | {"space": workspace.operand}

    def call(reads: tuple[str, ...], out: str, **attributes: Any) -> LibraryCall:
        given = {"padding": (1, 1), "stride": (1, 1), "dilation": (1, 1), "groups": 1, "has_bias": True}
        given |= {"has_added": "z" in reads} | attributes
        return LibraryCall("convolution", reads, (out, "space"), tuple(given.items()), "space")

    relu = {"activation": "relu"}
    calls = [
        call(("x", "a", "bias"), "y", stride=(2, 2), **relu),
        call(("y", "b", "bias"), "z"),
        call(("x", "c", "bias", "z"), "out", stride=(2, 2), padding=(0, 0), **relu),
    ]
    steps = [gpu().bind(each, operands, {}) for each in calls]
    for step in steps:
        step()
        gpu().synchronize()
    wanted, replay = fetch(operands["out"]), gpu().capture(steps)
    turns = 50
    for _ in range(turns):
        for name in ("y", "z", "out"):
            gpu().fill(operands[name].address, operands[name].span_nbytes, 0x11)
        replay()
        gpu().synchronize()
        assert np.array_equal(fetch(operands["out"]), wanted), "the graph's result is not that of the steps"
    for _ in range(turns):
        for step in steps:
            step()
        gpu().synchronize()
        assert np.array_equal(fetch(operands["out"]), wanted), "without waits between the steps it differs"
    return f"{turns} replays and {turns} runs on a stream as one step after the other"


def check_transposed_convolutions() -> str:
    worst = 0.0
    for dtype, stride, extra in itertools.product((DType.FLOAT32, DType.FLOAT16), (1, 2), (0, 1)):
        if extra >= stride:
            continue
        x, w = (RANDOM.standard_normal(s).astype(np.float32) for s in ((2, 16, 7, 9), (16, 8, 3, 3)))
        sizes = ((stride,) * 2, (1, 1), (1, 1), (extra,) * 2)
        wanted = transposed(rounded(x, dtype), rounded(w, dtype), *sizes)
        names = ("stride", "padding", "dilation", "output_padding")
        attributes = (*zip(names, sizes, strict=True), ("transposed", True), ("groups", 1))
        call = LibraryCall("convolution", ("x", "w"), ("out", "workspace"), attributes, "workspace")
        got = run_convolution(call, {"x": x, "w": w, "out": np.zeros(wanted.shape, np.float32)}, dtype)
        error = error_of(got, wanted)
        assert error < 2 * TOLERANCE[dtype], (dtype, stride, extra, error)
        worst = max(worst, error)
    return f"largest error {worst:.1e}"


def check_workspace_is_respected() -> str:
    x, w = place(np.ones((1, 16, 1024, 1), np.float32)), place(np.ones((128, 16, 64, 1), np.float32))
    attributes = (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1))
    out = place(np.ones((1, 128, 961, 1), np.float32))
    call = LibraryCall("convolution", ("x", "w"), ("out",), attributes)
    gpu().bind(call, {"x": x[0], "w": w[0], "out": out[0]}, {})()
    gpu().synchronize()
    assert (fetch(out[0]) == 1024).all()
    return "an engine without workspace"


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, mask: np.ndarray | None) -> np.ndarray:
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf) if causal else scores
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def check_attention() -> str:
    worst, count, seconds = 0.0, 0, 0.0
    cases = (
        ((1, 12, 128, 32), (1, 12, 128, 32)),
        ((2, 8, 100, 64), (2, 2, 77, 64)),
        ((1, 6, 257, 64), (1, 6, 257, 64)),
        ((1, 32, 1, 128), (1, 8, 512, 128)),
    )
    for dtype, (q_shape, k_shape), mode in itertools.product(
        (DType.FLOAT16, DType.BFLOAT16), cases, ("plain", "causal", "mask", "rows first")
    ):
        if mode == "causal" and q_shape[2] != k_shape[2]:
            continue
        arrays = {
            name: RANDOM.standard_normal(s).astype(np.float32)
            for name, s in zip("qkv", (q_shape, k_shape, k_shape), strict=True)
        }
        arrays["out"] = np.zeros(q_shape, np.float32)
        if mode == "rows first":  # as a projection leaves it: [batch, rows, heads, depth]
            arrays = {
                name: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for name, x in arrays.items()
            }
        mask = (
            RANDOM.standard_normal((1, 1, q_shape[2], k_shape[2])).astype(np.float32)
            if mode == "mask"
            else None
        )
        reads = ("q", "k", "v") if mask is None else ("q", "k", "v", "mask")
        arrays |= {} if mask is None else {"mask": mask}
        attributes = (("is_causal", mode == "causal"), ("has_mask", mask is not None), ("scale", None))
        call = LibraryCall("attention", reads, ("out", "workspace"), attributes, "workspace")
        start = time.perf_counter()
        got = run_convolution(call, arrays, dtype)
        seconds = max(seconds, time.perf_counter() - start)
        q, k, v = (rounded(arrays[name], dtype) for name in "qkv")
        wanted = attend(q, k, v, mode == "causal", None if mask is None else rounded(mask, dtype))
        error = error_of(got, wanted)
        assert error < 2 * TOLERANCE[dtype], (dtype, q_shape, mode, error)
        worst, count = max(worst, error), count + 1
    return f"{count} attentions, largest error {worst:.1e}; slowest bind and run {seconds * 1e3:.0f} ms"


def check_attention_speed() -> str:
    shape = (1, 12, 128, 32)
    arrays = {
        name: np.ascontiguousarray(RANDOM.standard_normal((1, 128, 12, 32)).astype(np.float32)).swapaxes(1, 2)
        for name in "qkvo"
    }
    placed = {name: place(array, DType.FLOAT16) for name, array in arrays.items()}
    operands = {name: operand for name, (operand, _) in placed.items()}
    call = LibraryCall("attention", ("q", "k", "v"), ("o",), (("scale", None),))
    step = gpu().bind(call, operands, {})
    fused = np.median([run[0] for run in gpu().timeline([[step] * 20], 20)]) / 20
    scores = place(np.zeros((12, 128, 128), np.float32), DType.FLOAT16)
    flat = {
        name: Operand(o.address, o.dtype, (12, 128, 32), (32, 384, 1), GPU) for name, o in operands.items()
    }
    flat["k"] = Operand(flat["k"].address, DType.FLOAT16, (12, 32, 128), (32, 1, 384), GPU)
    space = DeviceTensor.empty((4 << 20,), DType.UINT8, gpu())
    flat |= {"s": scores[0], "w": space.operand}
    first = gpu().bind(LibraryCall("matmul", ("q", "k"), ("s", "w"), (), "w"), flat, {})
    second = gpu().bind(LibraryCall("matmul", ("s", "v"), ("o", "w"), (), "w"), flat, {})
    products = np.median([run[0] for run in gpu().timeline([[first, second] * 20], 20)]) / 20
    return f"{shape}: fused {fused * 1e6:.2f} us, the two products alone {products * 1e6:.2f} us"


# --- graphs -------------------------------------------------------------------------------------------


def small_method(backend: CudaBackend) -> tuple[list[Callable[[], None]], np.ndarray, np.ndarray, list[Any]]:
    """Copy in, launch, product, copy out; and the pinned arrays for the input and the output."""
    pinned = [backend.allocate_host(64 * 64 * 4) for _ in range(2)]
    hosts = [
        np.frombuffer((ctypes.c_float * 4096).from_address(address), np.float32).reshape(64, 64)
        for address in pinned
    ]
    memory = [DeviceTensor.empty((64, 64), DType.FLOAT32, backend) for _ in range(3)]
    workspace = DeviceTensor.empty((1 << 20,), DType.UINT8, backend)
    operands = {name: tensor.operand for name, tensor in zip("xyz", memory, strict=True)}
    operands |= {"w": workspace.operand}
    operands |= {
        name: Operand(address, DType.FLOAT32, (64, 64), (64, 1), CPU)
        for name, address in zip(("in", "out"), pinned, strict=True)
    }
    program = (
        Copy(CopyKind.H2D, "in", "x"),
        Launch("add_scaled", (Ref("x"), Ref("x"), Ref("y"), 4096, 1.0), (16, 1, 1), ("x",), ("y",)),
        LibraryCall("matmul", ("x", "y"), ("z", "w"), (), "w"),
        Copy(CopyKind.D2H, "z", "out"),
    )
    return [backend.bind(instruction, operands, {}) for instruction in program], *hosts, [memory, workspace]


def check_capture_without_warm_up() -> str:
    backend = CudaBackend(GPU, 0)
    backend.load(list(KERNELS.values()))
    steps, x, out, _memory = small_method(backend)
    out[...] = -1
    replay = backend.capture(steps)
    assert (out == -1).all(), "a capture must not run anything"
    x[...] = RANDOM.standard_normal((64, 64))
    for _ in range(3):
        replay()
        backend.synchronize()
    wanted = x.astype(np.float64) @ (2 * x.astype(np.float64))
    assert error_of(out, wanted) < 1e-5
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        replay()
        backend.synchronize()
        times.append(time.perf_counter() - start)
    backend.close()
    return f"{replay.nodes} nodes, {replay.nbytes} bytes, replay {np.median(times) * 1e6:.1f} us"


def check_failed_capture() -> str:
    backend = CudaBackend(GPU, 0)
    backend.load(list(KERNELS.values()))
    steps, x, out, _memory = small_method(backend)
    error = raises(ExecutionError, lambda: backend.capture([*steps, backend.synchronize, *steps]))
    replay = backend.capture(steps)
    x[...] = np.eye(64)
    replay()
    backend.synchronize()
    assert np.array_equal(out, 2 * np.eye(64))
    backend.close()
    return error.why.split(":")[0] + ": " + error.why.split(":")[1].strip()


def check_callers_stream() -> str:
    backend = gpu()
    steps, x, out, _memory = small_method(backend)
    replay, cu = backend.capture(steps), backend.driver
    mine = driver.check(cu.cuStreamCreate(1), "make a stream")
    x[...] = 3 * np.eye(64)
    backend.use_stream(int(mine))
    replay()
    driver.check(cu.cuStreamSynchronize(mine), "wait")
    backend.use_stream(None)
    assert np.array_equal(out, 18 * np.eye(64))
    return "replayed on a foreign stream"


def check_threads_and_forks() -> str:
    results: dict[int, bool] = {}
    forks = [gpu().fork() for _ in range(3)]

    def work(number: int) -> None:
        steps, x, out, _memory = small_method(forks[number])
        replay = forks[number].capture(steps)
        good = True
        for turn in range(200):
            x[...] = (number + turn) * np.eye(64)
            replay()
            forks[number].synchronize()
            good &= bool(np.array_equal(out, 2 * (number + turn) ** 2 * np.eye(64)))
        results[number] = good

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), True), results
    return "3 threads with 3 forks, 200 replays each"


def check_memory_is_flat() -> str:
    backend = gpu()
    steps, x, out, _memory = small_method(backend)
    replay = backend.capture(steps)
    x[...] = RANDOM.standard_normal((64, 64))
    replay()
    backend.synchronize()
    first, before = out.copy(), backend.free_nbytes()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    for _ in range(10000):
        replay()
        backend.synchronize()
    seconds = time.perf_counter() - start
    after, grown = backend.free_nbytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
    assert before == after and grown < 1024, (before - after, grown)
    assert np.array_equal(first, out)
    return f"10,000 replays in {seconds:.2f} s: device flat, host grew {grown} KiB, results bit-identical"


def check_program_with_state() -> str:
    weight, x = (RANDOM.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    with programs.load(KERNELS["add_scaled"], weight) as program:
        method = program.method()
        for turn in (1, 2, 3):
            got = method(x)["y"]
            assert error_of(got, turn * x.astype(np.float64) @ weight.astype(np.float64)) < 3e-6, turn
        assert method.no_graph_reason == ""
        twin = program.clone()
        assert error_of(twin.method()(x)["y"], x.astype(np.float64) @ weight.astype(np.float64)) < 3e-6
        program.state.reset("total")
        first = method(x)["y"].tobytes()
        before = gpu().free_nbytes()
        start = time.perf_counter()
        for _ in range(5000):
            program.state.reset("total")
            assert method(x)["y"].tobytes() == first
        assert gpu().free_nbytes() == before
        twin.close()
    return f"3 calls, a clone, 5,000 calls bit-identical and flat in {time.perf_counter() - start:.2f} s"


def check_buckets() -> str:
    """Each declared size replays one graph of its own on the arena that all sizes share."""
    weight = RANDOM.standard_normal((64, 64)).astype(np.float32)
    sizes, rows = (1, 8, 256), list(range(9, 109))
    with programs.batched(KERNELS["add_scaled"], weight, sizes) as program:
        method = program.method()

        def call(count: int) -> float:
            x = RANDOM.standard_normal((count, 64)).astype(np.float32)
            start = time.perf_counter()
            got = method(x)["z"]
            seconds = time.perf_counter() - start
            wanted = x.astype(np.float64) @ weight.astype(np.float64) + 2.0 * x.astype(np.float64)
            assert error_of(got, wanted) < 3e-6, count
            return seconds

        for size in sizes:
            call(size)
            assert method.no_graph_reason == ""
        graphs = program.backends[GPU]._graphs
        assert len(graphs) == len(sizes), len(graphs)
        new = sorted(call(count) for count in rows)
        assert "none of the declared buckets" in method.no_graph_reason
        assert len(graphs) == len(sizes), len(graphs)
        call(rows[-1])
        assert method.no_graph_reason == "" and len(graphs) == len(sizes) + 1
        before = gpu().free_nbytes()
        times = {size: sorted(call(size) for _ in range(500)) for size in sizes}
        assert gpu().free_nbytes() == before and len(graphs) == len(sizes) + 1
        assert [use.calls for use in method.buckets] == [501] * 3 and method.other_calls == len(rows) + 1
        assert {use.no_graph_reason for use in method.buckets} == {""}
        taken = [use.graph_nbytes for use in method.buckets]
        assert None not in taken
        medians = ", ".join(f"{size}: {times[size][250] * 1e6:.0f} us" for size in sizes)
        return f"{medians}; a new size {new[50] * 1e6:.0f} us; graphs take {taken} bytes; memory flat"


def check_clones_in_threads() -> str:
    weight, x = (RANDOM.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    with programs.load(KERNELS["add_scaled"], weight) as program:
        clones = [program.clone() for _ in range(3)]
        wrong: list[int] = []

        def work(number: int) -> None:
            method = clones[number].method()
            for turn in range(1, 301):
                got = method(x)["y"]
                if (
                    turn % 100 == 0
                    and error_of(got, turn * x.astype(np.float64) @ weight.astype(np.float64)) > 1e-5
                ):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for clone in clones:
            clone.close()
    assert not wrong, wrong
    return "3 threads with 3 clones, 300 calls each"


def check_outputs_stay_on_the_device() -> str:
    weight, x = (RANDOM.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    with programs.load(KERNELS["add_scaled"], weight, device_output=True) as program:
        one, two = program.method()(x)["y"], program.method()(x)["y"]
        wanted = x.astype(np.float64) @ weight.astype(np.float64)
        assert isinstance(one, DeviceTensor) and one.pointer != two.pointer
        assert error_of(np.asarray(one.numpy()), wanted) < 3e-6
    assert error_of(np.asarray(two.numpy()), 2 * wanted) < 3e-6  # outlives its program
    return f"{two!r}"


def check_nothing_imported_torch() -> str:
    assert sys.modules.get("torch") is None and sys.modules.get("triton") is None
    return ", ".join(name for name in ("numpy", "cudnn", "cuda.core") if name in sys.modules)


# --- other libraries' tensors -------------------------------------------------------------------------

TORCH_TYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16",
    "float8_e5m2", "float8_e4m3fn",
)  # fmt: skip


def check_dlpack_with_torch() -> str:
    import torch

    done = []
    for name in TORCH_TYPES:
        dtype = getattr(torch, name)
        theirs = (torch.arange(24, device="cuda").reshape(4, 6) % 2).to(torch.float32).to(dtype).T
        ours = DeviceTensor.of(theirs)
        assert (ours.pointer, ours.shape, ours.strides) == (theirs.data_ptr(), (6, 4), theirs.stride()), name
        assert ours.dtype is DType.from_name(name)
        again = torch.from_dlpack(ours)
        assert (
            again.data_ptr() == theirs.data_ptr()
            and again.dtype == dtype
            and again.stride() == theirs.stride()
        )
        host = ours.numpy()
        got = host.float32() if isinstance(host, HostTensor) else host.astype(np.float32)
        assert np.array_equal(got, theirs.float().cpu().numpy()), name
        done.append(name)
    raises(UsageError, lambda: gpu().describe(torch.zeros(3)))
    raises(UsageError, lambda: gpu().describe(torch.zeros(3, device="cuda", requires_grad=True)))
    return f"{len(done)} types both ways"


def check_array_interface_with_torch() -> str:
    import torch

    class OnlyInterface:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        @property
        def __cuda_array_interface__(self) -> Any:
            return self.tensor.__cuda_array_interface__

    done = []
    for name in TORCH_TYPES[:10]:
        theirs = (torch.arange(24, device="cuda").reshape(4, 6) % 2).to(getattr(torch, name)).T
        ours = DeviceTensor.of(OnlyInterface(theirs))
        assert (ours.pointer, ours.shape, ours.strides) == (theirs.data_ptr(), (6, 4), theirs.stride()), name
        assert ours.dtype is DType.from_name(name), (name, ours.dtype)
        if name != "bfloat16":  # torch reads no bfloat16 through this interface
            again = torch.as_tensor(OnlyInterface(ours), device="cuda")
            assert again.data_ptr() == theirs.data_ptr() and torch.equal(again, theirs), name
        done.append(name)
    return f"{len(done)} types both ways"


def check_streams_are_ordered_with_torch() -> str:
    import torch

    for _ in range(20):
        big = torch.randn(4096, 4096, device="cuda")
        theirs = (big @ big @ big).sum() * 0 + torch.ones(1 << 20, device="cuda")  # late work on their stream
        clone = DeviceTensor.of(theirs).clone()  # on ours
        back = torch.from_dlpack(clone)
        assert float(back.sum()) == 1 << 20
    return "20 hand-overs behind late work"


def check_cupy() -> str:
    import cupy

    theirs = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    ours = DeviceTensor.of(theirs)
    assert ours.pointer == theirs.data.ptr
    assert float(cupy.asarray(ours[1]).sum()) == 22
    assert float(cupy.from_dlpack(ours[2]).sum()) == 38
    return "DLPack and array interface"


def check_jax() -> str:
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # it would take most of the device's memory
    import jax

    names = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool")
    with jax.enable_x64(True):
        for name in names:
            theirs = (jax.numpy.arange(24).reshape(4, 6) % 2).astype(name).block_until_ready()
            ours = DeviceTensor.of(theirs)
            assert (ours.pointer, ours.shape) == (theirs.unsafe_buffer_pointer(), (4, 6)), name
            assert ours.dtype is DType.from_name(name), (name, ours.dtype)
            again = jax.dlpack.from_dlpack(ours.clone())
            assert again.dtype == theirs.dtype and bool((again == theirs).all()), name
    data = RANDOM.standard_normal(1000).astype(np.float32)
    x, y = DeviceTensor.of(jax.numpy.asarray(data)), DeviceTensor.empty((1000,), DType.FLOAT32, gpu())
    y.write(data)
    in_place = jax.dlpack.from_dlpack(y)
    assert in_place.unsafe_buffer_pointer() == y.pointer
    assert np.array_equal(np.asarray(x.numpy()), data) and np.array_equal(np.asarray(in_place), data)
    return f"{len(names)} types both ways"


def check_two_gpus() -> str:
    if len(driver.devices()) < 2:
        return "skipped: there is one GPU"
    second = Device("cuda", 1)
    backends = [CudaBackend(GPU, 0), CudaBackend(second, 1)]
    backends[0].connect(backends[1])
    for backend in backends:
        backend.load(list(KERNELS.values()))
    x, y = (DeviceTensor.empty((1000,), DType.FLOAT32, backend) for backend in backends)
    z, back = (
        DeviceTensor.empty((1000,), DType.FLOAT32, backends[1]),
        DeviceTensor.empty((1000,), DType.FLOAT32, backends[0]),
    )
    data = RANDOM.standard_normal(1000).astype(np.float32)
    operands = {"x": x.operand, "y": y.operand, "z": z.operand, "back": back.operand}
    there, here = Copy(CopyKind.D2D, "x", "y"), Copy(CopyKind.D2D, "z", "back")
    double = Launch("add_scaled", (Ref("y"), Ref("y"), Ref("z"), 1000, 1.0), (4, 1, 1), ("y",), ("z",))
    steps = [
        backends[1].bind(there, operands, {}), backends[1].bind(double, operands, {}),
        backends[0].bind(here, operands, {}),
    ]  # fmt: skip
    x.write(data)
    for step in steps:
        step()
    backends[0].synchronize()
    assert np.array_equal(np.asarray(back.numpy()), 2 * data), "eager"
    # A direct copy between GPUs cannot be recorded (seen on two H200s); what follows must not suffer from it.
    raises(ExecutionError, lambda: backends[0].capture(steps))
    for scale in (1, 3, 5):
        x.write(scale * data)
        for step in steps:
            step()
        backends[0].synchronize()
        assert np.array_equal(np.asarray(back.numpy()), np.float32(scale) * data * 2), scale
    clone = x.clone(backends[1])
    assert np.array_equal(np.asarray(clone.numpy()), np.asarray(x.numpy()))
    raises(UsageError, lambda: backends[1].describe(x))
    return "copies both ways, a refused recording, a clone"


CHECKS: tuple[Callable[[], str], ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("check_")
)

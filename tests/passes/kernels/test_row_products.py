"""Products of few rows: the kernel against NumPy over sizes and types, and what a linear layer takes along."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import devplan
from devplan.passes import export as exporting
from devplan.passes.export import ExportResult
from devplan.passes.kernels.row_product import ACTIVATIONS, OPERATOR, blocks_for, to_steps
from devplan.passes.lowered.compile_kernels import canonical, compile_kernels
from devplan.passes.options import ExportOptions
from devplan.passes.source.load import resolve
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.passes.tape import READY, ExternCall, Window
from devplan.runtime.backend import Operand
from devplan.runtime.dtypes import DType
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.program import Device, Kernel, KernelParameter, Launch, LibraryCall, Method, Ref
from devplan.runtime.tensors.host import contiguous_strides
from devplan.tests.zoo.measure import load, without_code

MODELS = Path(devplan.__file__).parent / "configs" / "models"
CUDA = Device("cuda", 0)
pytestmark = pytest.mark.torch


# --- the kernel ---------------------------------------------------------------------------------------

ORACLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(-y)),
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "tanh": np.tanh,
    "gelu": lambda y: y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2,
    "gelu_tanh": lambda y: y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2,
}


def window(name: str, array: np.ndarray) -> Window:
    """The array as an operand, dense."""
    return Window(name, DType.from_name(str(array.dtype)), array.shape, contiguous_strides(array.shape))


def on_emulator(arrays: dict[str, np.ndarray | None], eps: float, activation: str, gated: bool) -> np.ndarray:
    """What the kernel writes for operands by name; ``output`` says where."""
    given_windows = {k: None if a is None else window(k, a) for k, a in arrays.items()}
    x, weight, bias, norm, added, output = (
        given_windows[k] for k in ("x", "weight", "bias", "norm", "added", "output")
    )
    assert output is not None
    call = ExternCall(OPERATOR, (x, weight, bias, norm, eps, added, activation, gated), {}, (output,))
    (step,) = to_steps(call)
    spec = canonical(step.kernel)
    backend, operands = EmulatorBackend(CUDA), dict[str, Operand]()
    for name in spec.call_names:
        array = arrays[name]
        assert array is not None
        address = backend.allocate(array.nbytes)
        backend.upload(address, memoryview(array.tobytes()))
        dtype = DType.from_name(str(array.dtype))
        operands[name] = Operand(address, dtype, array.shape, contiguous_strides(array.shape), CUDA)
    parameters = tuple(KernelParameter(*each) for each in spec.parameters)
    backend.load([Kernel(spec.name, parameters, (), spec.source, spec.constants)])
    grid = -(-output.sizes[1] // dict(spec.constants)["BLOCK_N"])  # type: ignore[operator]
    names = spec.call_names
    launch = Launch(spec.name, tuple(map(Ref, names)), (grid, 1, 1), names, ("output",))
    backend.bind(launch, operands, {})()
    made = np.empty_like(arrays["output"])
    backend.download(operands["output"].address, memoryview(made.reshape(-1)).cast("B"))
    return made


@given(
    rows=st.integers(1, 4),
    outputs=st.integers(1, 40),
    vectors=st.integers(1, 90),
    half=st.booleans(),
    fused=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_kernel_computes_what_numpy_does(
    rows: int,
    outputs: int,
    vectors: int,
    half: bool,
    fused: tuple[bool, bool, bool, bool],
    activation: str,
    seed: int,
) -> None:
    gated, has_bias, has_norm, has_added = fused
    kind = np.dtype(np.float16 if half else np.float32)
    columns, chance = vectors * 16 // kind.itemsize, np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return chance.standard_normal(shape).astype(kind)

    x, weight = normal(rows, columns), normal(outputs * (1 + gated), columns) / kind.type(math.sqrt(columns))
    bias = normal(len(weight)) if has_bias else None
    norm, added = normal(columns) if has_norm else None, normal(rows, outputs) if has_added else None
    arrays = {"x": x, "weight": weight, "bias": bias, "norm": norm, "added": added}
    ours = on_emulator({**arrays, "output": np.empty((rows, outputs), kind)}, 1e-5, activation, gated)

    wide = x.astype(np.float64)
    if norm is not None:
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * norm
    y = wide @ weight.astype(np.float64).T + (0 if bias is None else bias)
    y = ORACLES[activation](y[:, :outputs]) * (y[:, outputs:] if gated else 1)
    y = y + (0 if added is None else added)
    np.testing.assert_allclose(ours, y, rtol=1e-3 if half else 2e-5, atol=2e-3 if half else 2e-5)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "gated", "norm", "weight_rows"),
    [
        (1, 2560, 2048, False, True, 2),
        (1, 2048, 2048, False, False, 2),
        (1, 5632, 2048, True, True, 1),
        (1, 2048, 5632, False, False, 4),
        (4, 8, 64, False, False, 1),
    ],
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_step_is_whole_loads_of_sixteen_bytes_for_each_thread(
    rows: int, outputs: int, columns: int, gated: bool, norm: bool, weight_rows: int, itemsize: int
) -> None:
    blocks = blocks_for(rows, outputs, columns, itemsize, gated, norm)
    assert blocks.columns * itemsize in (blocks.warps * 32 * 16, blocks.warps * 32 * 32)
    assert blocks.rows == 1 or -(-outputs // blocks.rows) >= 264
    assert itemsize == 4 or blocks.rows == weight_rows


@pytest.mark.slow
def test_the_kernel_loads_sixteen_bytes_and_exchanges_nothing_before_the_end() -> None:
    half = np.dtype(np.float16)
    x, weight, norm = (
        window(n, np.empty(s, half)) for n, s in (("x", (1, 2048)), ("w", (2560, 2048)), ("n", 2048))
    )
    output = window("o", np.empty((1, 2560), half))
    call = ExternCall(OPERATOR, (x, weight, None, norm, 1e-5, None, "none", False), {}, (output,))
    (kernel,) = compile_kernels([canonical(to_steps(call)[0].kernel)], ("sm_80", "sm_90"), jobs=1)
    (text,) = (code.data.decode() for code in kernel.codes if code.form == "ptx")
    loads = [line for line in text.splitlines() if "ld.global" in line]
    assert loads
    assert all("v4.b32" in line for line in loads)
    assert "bar.sync" not in text[: text.index(loads[-1])]


# --- what a layer takes along ---------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """A function of an input and of two layers, a norm's weight among them."""

    def __init__(self, function: Callable[..., torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 96, bias=bias), torch.nn.Linear(48, 64, bias=bias)
        self.norm = torch.nn.RMSNorm(64, eps=1e-5)
        torch.nn.init.normal_(self.norm.weight)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def spelled_out(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """A norm as language models write it."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.first(m.norm.weight * scaled.to(x.dtype))


def spelled_out_in_float(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """A norm whose factors are near zero, as some language models write it."""
    wide = x.float()
    scaled = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * wide
    return m.first((scaled * (1.0 + m.norm.weight.float())).type_as(x))


def gated(m: Layers, x: torch.Tensor) -> torch.Tensor:
    gate, up = m.first(x).chunk(2, -1)
    return x + m.second(F.silu(gate) * up)


FUSED: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "a norm": (lambda m, x: m.first(m.norm(x)), 1),
    "a norm that is spelled out": (spelled_out, 1),
    "a norm in float, from zero": (spelled_out_in_float, 1),
    "a norm of the last position": (lambda m, x: m.first(m.norm(x)[:, -2:]), 1),
    "a norm with another reader": (lambda m, x: torch.cat([m.first(y := m.norm(x)), y], -1), 3),
    "relu": (lambda m, x: m.first(x).relu(), 1),
    "silu and a sum": (lambda m, x: F.silu(m.first(x)) + x[..., :1].expand(-1, -1, 96).contiguous(), 2),
    "gelu": (lambda m, x: F.gelu(m.first(x)), 1),
    "gelu by tanh": (lambda m, x: F.gelu(m.first(x), approximate="tanh"), 1),
    "a gate, then a residual": (gated, 2),
    "a sum that is broadcast stays apart": (lambda m, x: m.first(x) + x[..., :1], 2),
    "a sum with itself": (lambda m, x: (y := m.first(x)) + y, 2),
    "two layers that are added": (lambda m, x: m.first(x) + m.first(x.relu()), 3),
}


def export(source: ModelSource) -> ExportResult:
    """Export with kernels as the emulator needs them: their sources alone."""
    with mock.patch.object(exporting, "compile_kernels", without_code):
        return exporting.export(source, ExportOptions(device="cuda", architectures=("sm_90",)))


def exported(module: torch.nn.Module, x: torch.Tensor, tolerance: float = 4e-3) -> Method:
    """The method, after its result was compared with eager's."""
    result = export(ModelSource("layers", (MethodSource("forward", module.eval(), (x,)),)))
    given_x = x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    if x.dtype != torch.bfloat16:
        with load(result) as program:
            (ours,) = program.method("forward")(given_x).values()
        wanted = module(x)
        error = (torch.from_numpy(np.asarray(ours)).double() - wanted.double()).abs().max()
        assert error <= tolerance * wanted.abs().max()
    return result.planned.program.method("forward")


def kernels(method: Method) -> list[str]:
    """What is launched or called, without what tells equal names apart."""
    names = [i.kernel for i in method.instructions if isinstance(i, Launch)]
    own = ["row_product", "attention_parts", "attention_join"]
    found = [next((stem for stem in own if name.startswith(stem)), "generated") for name in names]
    return found + [i.function for i in method.instructions if isinstance(i, LibraryCall)]


@pytest.mark.parametrize("name", FUSED)
def test_a_layer_takes_along(name: str) -> None:
    function, count = FUSED[name]
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)).half()
    method = exported(Layers(function).half(), x)
    found = kernels(method)
    assert found.count("row_product") >= 1
    assert len(found) == count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_types_and_biases(dtype: torch.dtype, bias: bool) -> None:
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    method = exported(Layers(gated, bias).to(dtype), x, 1e-5 if dtype == torch.float32 else 4e-3)
    assert kernels(method) == ["row_product", "row_product"]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "is_taken"),
    [
        (4, 64, torch.float16, True),
        (5, 64, torch.float16, False),
        (1, 60, torch.float16, False),  # rows of 120 bytes do not begin at multiples of 16
        (1, 60, torch.float32, True),
        (1, 64, torch.float64, False),
    ],
)
def test_which_layers_are_taken(rows: int, columns: int, dtype: torch.dtype, is_taken: bool) -> None:
    layer = torch.nn.Linear(columns, 24).to(dtype)
    found = kernels(exported(layer, torch.ones(rows, columns, dtype=dtype)))
    assert found == ["row_product" if is_taken else "matmul"]


def test_only_constants_are_read_before_the_launches_before_have_ended() -> None:
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 24, bias=False).half()

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, weight * 2), self.layer.weight)

    inputs = (torch.ones(1, 32).half(), torch.ones(64, 32).half())
    planned = export(ModelSource("layers", (MethodSource("forward", Product(), inputs),))).planned
    sources = {kernel.name: kernel.source for kernel in planned.program.kernels}
    launches = [i for i in planned.program.method("forward").instructions if isinstance(i, Launch)]
    products = [sources[i.kernel] for i in launches if i.kernel.startswith("row_product")]
    assert [READY in source for source in products] == [False, True]


def test_a_table_that_all_layers_read_is_looked_up_once() -> None:
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False).half() for _ in range(10))
            self.register_buffer("table", torch.arange(64 * 16).reshape(64, 16).cos().half())

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            factor = self.table[position]
            for layer in self.layers:
                x = layer(x * factor)
            return x

    module, inputs = Turned().eval(), (torch.ones(1, 16).half(), torch.tensor([7]))
    result = export(ModelSource("layers", (MethodSource("forward", module, inputs),)))
    method = result.planned.program.method("forward")
    readers = [i for i in method.instructions if any(method.value(n).shape == (64, 16) for n in i.reads)]
    assert len(readers) == 1
    with load(result) as program:
        (ours,) = program.method("forward")(*(x.numpy() for x in inputs)).values()
    np.testing.assert_allclose(ours, module(*inputs).detach().numpy(), rtol=1e-2, atol=1e-3)


# --- a decoder ------------------------------------------------------------------------------------------


def test_a_decoder_layer_is_six_launches(golden: Any) -> None:
    decode = export(resolve(str(MODELS / "llama_decode.py"))).planned.program.method("decode")
    values = {value.name: value for value in decode.values}

    def words(names: tuple[str, ...]) -> str:
        return ", ".join(f"{values[n].dtype.name.lower()}{list(values[n].shape)}" for n in names)

    lines = [
        f"{name}: {words(i.reads)} -> {words(i.writes)}"
        for name, i in zip(
            kernels(decode), (i for i in decode.instructions if isinstance(i, Launch)), strict=True
        )
    ]
    layers = sum(line.startswith("attention_parts") for line in lines)
    assert len(lines) == 6 * layers + 2
    golden("\n".join(lines[1:7]) + "\n", "decoder_layer.txt")

"""Small modules lowered by Inductor, run on the emulator under their plan, against eager PyTorch.

The kernels are not compiled for a GPU here: only their sources and plans matter to the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from devplan.runtime import HostTensor, load_planned
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Kernel, KernelParameter

torch = pytest.importorskip("torch")
from functions import Function  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
F = torch.nn.functional


def without_code(specs: Sequence[Any], options: Any, progress: Any) -> tuple[Kernel, ...]:
    """Kernels with their sources and no machine code."""
    unique = {spec.name: spec for spec in specs}
    return tuple(
        Kernel(s.name, tuple(KernelParameter(*p) for p in s.parameters), (), s.source, s.constants)
        for s in unique.values()
    )


def emulate(module: Any, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Three calls on the emulator with poison; the last one's outputs."""
    from devplan.passes import export as way
    from devplan.passes.options import ExportOptions
    from devplan.passes.source.model import MethodSource, ModelSource

    monkeypatch.setattr(way, "_compile", without_code)
    source = ModelSource("model", (MethodSource("forward", module.eval(), tuple(inputs)),))
    result = way.export(source, ExportOptions(architectures=("sm_90",)))
    constants = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, constants, "emulator", poison=True) as program:
        for _ in range(3):
            outputs = program.method()(*map(on_host, inputs))
    return [np.asarray(value) for value in outputs.values()]


def on_host(tensor: Any) -> Any:
    if tensor.dtype is torch.bfloat16:
        return HostTensor(tensor.view(torch.uint16).numpy(), DType.BFLOAT16)
    return tensor.numpy()


def check(
    module: Any, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch, tolerance: float = 2e-5
) -> None:
    got = emulate(module, inputs, monkeypatch)
    with torch.no_grad():
        wanted = module(*inputs)
    flat = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    assert len(got) == len(flat)
    for mine, eager in zip(got, flat, strict=True):
        expected = eager.detach().to(torch.float64).numpy()
        np.testing.assert_allclose(mine.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def integers(high: int, *shape: int) -> Any:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


NN = torch.nn
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "layer norm": (Function(lambda m, x: m(x), NN.LayerNorm(384)), (normal(4, 7, 384),)),
    "softmax": (Function(lambda x: x.softmax(-1)), (normal(5, 33, 129),)),
    "long softmax": (Function(lambda x: x.softmax(-1)), (normal(3, 9000),)),
    "variance": (Function(lambda x: torch.var_mean(x, dim=(0, 2, 3))), (normal(4, 6, 9, 9),)),
    "max pool": (Function(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)), (normal(2, 5, 13, 17),)),
    "extremes": (Function(lambda x: (x.argmax(-1), x.argmin(0), *x.max(1))), (normal(33, 70),)),
    "embedding": (Function(lambda m, i: m(i), NN.Embedding(100, 48)), (integers(100, 4, 9),)),
    "concatenation": (Function(lambda a, b: torch.cat([a * 2, b + 1], 1)), (normal(4, 5, 6), normal(4, 3, 6))),
    "convolution": (
        Function(lambda c, n, x: n(c(x)).relu(), NN.Conv2d(5, 8, 3, 2, 1), NN.BatchNorm2d(8)),
        (normal(2, 5, 13, 17),),
    ),
    "transposed convolution": (
        Function(lambda c, x: c(x), NN.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1)),
        (normal(2, 6, 9, 11),),
    ),
    "activations": (
        Function(lambda x: (F.gelu(x), F.silu(x), F.mish(x), F.softplus(x), F.hardswish(x), F.elu(x))),
        (normal(500),),
    ),
    "functions": (
        Function(lambda x: (x.exp(), x.tanh(), x.erf(), x.abs().log1p(), x.abs().rsqrt(), x.asinh(), x.lgamma())),
        (normal(300),),
    ),
    "integers": (
        Function(lambda a, b: (a // b, a % b, torch.div(a, b, rounding_mode="trunc"), a >> 1, a.float() / b)),
        (integers(100, 64) - 50, integers(9, 64) + 1),
    ),
    "attention": (
        Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        (normal(2, 4, 33, 16), normal(2, 4, 33, 16) + 1, normal(2, 4, 33, 16) * 2),
    ),
    "scatter": (
        Function(lambda x, i, s: (x.scatter(1, i, s), x.index_copy(0, i[:3, 0] * 0 + 2, s[:3, :1] * x[:3]))),
        (normal(9, 9), integers(9, 9, 1), normal(9, 1)),
    ),
    "buckets": (Function(lambda x, b: torch.bucketize(x, b)), (normal(50), torch.linspace(-2, 2, 11))),
    "triangles": (Function(lambda x: (x.tril(), x.triu(1) + torch.arange(8))), (normal(8, 8),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_float32_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*CASES[name], monkeypatch)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_half_precision(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(torch, dtype)
    module = Function(
        lambda m, x, y: (x * y, x @ y.T, F.gelu(x), m(x).softmax(-1)), NN.LayerNorm(40).to(kind)
    )
    check(module, (normal(33, 40, dtype=kind), normal(33, 40, dtype=kind) + 1), monkeypatch, tolerance)

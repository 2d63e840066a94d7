"""Random modules through export, on random devices: the emulator's results are eager's, three calls in a row."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from devplan.passes.export import ExportResult, export  # noqa: E402
from devplan.passes.options import ExportOptions, IoRule, PlacementRule  # noqa: E402
from devplan.passes.placed.ledger import ledger  # noqa: E402
from devplan.passes.source.model import MethodSource, ModelSource  # noqa: E402
from devplan.runtime.errors import UsageError  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.runtime.program import CopyKind  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

N = 6
STEPS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "max": torch.maximum,
    "tanh": lambda a, b: torch.tanh(a),
    "matmul": lambda a, b: torch.tanh(a @ b),
    "softmax": lambda a, b: torch.softmax(a, -1),
    "sum": lambda a, b: a.sum(0, keepdim=True) + b,
    "cumsum": lambda a, b: torch.tanh(torch.cumsum(a, 0)),
    "sort": lambda a, b: torch.sort(a, dim=1)[0],
    "arange": lambda a, b: a + torch.arange(N, dtype=torch.float32),
    "gather": lambda a, b: torch.gather(a, 1, (b.abs() * 10).long() % N),
    "where": lambda a, b: torch.where(b > 0, a, b),
    "t": lambda a, b: a.t(),
    "reshape": lambda a, b: a.reshape(2, 3, N).reshape(N, N),
    "slice": lambda a, b: torch.cat([a[: N // 2], b[N // 2 :]]),
    "chunk": lambda a, b: torch.chunk(a, 2)[1].repeat(2, 1),
}


class Step(torch.nn.Module):  # type: ignore[misc]
    """One operation, in a module of its own so that rules can name it."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, a: Any, b: Any) -> Any:
        return STEPS[self.operation](a, b)


class RandomModule(torch.nn.Module):  # type: ignore[misc]
    """Steps on earlier results, inputs, a weight and state; several outputs, some of them twice or views."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(N, N))
        self.register_buffer("total", torch.zeros(N, N))
        names = [rng.choice(list(STEPS)) for _ in range(rng.randint(2, 12))]
        self.steps = torch.nn.ModuleList(Step(name) for name in names)
        known = 4
        self.reads: list[tuple[int, int]] = []
        for _ in names:
            self.reads.append((rng.randrange(max(0, known - 4), known), rng.randrange(known)))
            known += 1
        self.updates = rng.choice([None, rng.randrange(known)])
        self.outputs = [rng.randrange(4, known) for _ in range(rng.randint(1, 3))]
        self.view_of = rng.choice([None, rng.randrange(known)])

    def forward(self, x: Any, y: Any) -> Any:
        known = [x, y, self.weight, self.total]
        for step, (a, b) in zip(self.steps, self.reads, strict=True):
            known.append(step(known[a], known[b]))
        results = [known[index] + 0 if known[index] is self.total else known[index] for index in self.outputs]
        if self.view_of is not None:
            results.append(known[self.view_of][1:4] * 1 if self.view_of == 3 else known[self.view_of][1:4])
        if self.updates is not None:
            self.total.add_(torch.tanh(known[self.updates]))
        return tuple(results)


def rules(seed: int, module: RandomModule) -> tuple[PlacementRule, ...]:
    rng = random.Random(seed + 1000)
    devices = ["cpu", "cuda:0", "cuda:1"][: rng.randint(1, 3)] if rng.random() < 0.8 else ["cuda:0"]
    return tuple(PlacementRule(rng.choice(devices), module=f"steps.{i}") for i in range(len(module.steps)))


def io(seed: int) -> tuple[IoRule, ...]:
    return random.Random(seed + 2000).choice(
        [(), (IoRule("both", "device"),), (IoRule("h2d", "device", "*", "x"),)]
    )


@pytest.mark.parametrize("seed", (0, 2, 8))
def test_a_random_module_means_the_same_on_its_devices(seed: int) -> None:
    module = RandomModule(seed).eval()
    inputs = (torch.randn(N, N), torch.randn(N, N))
    source = ModelSource("random", (MethodSource("forward", module, inputs),))
    options = ExportOptions(
        placement=rules(seed, module), io=io(seed), allow_host_ops=True, architectures=("sm_90",)
    )
    result = _exported(source, options)
    constants = {digest: read() for digest, read in result.constants.items()}
    program = load_planned(result.planned, constants, "emulator", allow_torch_ops=True, poison=True)
    method = result.planned.program.methods[0]
    eager = RandomModule(seed).eval()
    for _ in range(3):
        given = [
            _on_its_device(program, method, port, tensor)
            for port, tensor in zip(method.inputs, inputs, strict=True)
        ]
        outputs = program.method("forward")(*given)
        with torch.no_grad():
            expected = eager(*inputs)
        for got, want in zip(outputs.values(), expected, strict=True):
            array = got if isinstance(got, np.ndarray) else got.numpy()
            np.testing.assert_allclose(array, want.detach().numpy(), rtol=1e-4, atol=1e-4)
    transfers = sum(n for kind, n in program.copies.counts.items() if kind is not CopyKind.LOCAL)
    assert transfers <= 3 * len(ledger(result.placed[0]))


def _exported(source: ModelSource, options: ExportOptions) -> ExportResult:
    """Export without the rules for steps of which nothing is left (folded, or never read): those are refused."""
    try:
        return export(source, options)
    except UsageError as error:
        assert "matches no operator" in str(error)
        kept = tuple(rule for rule in options.placement if f"`{rule.module}`" not in str(error))
        return _exported(source, replace(options, placement=kept))


def _on_its_device(program: Any, method: Any, port: Any, tensor: Any) -> Any:
    device = method.storage(method.value(port.value).storage).device
    return tensor.numpy() if device.kind == "cpu" else program.to_device(tensor.numpy(), device)

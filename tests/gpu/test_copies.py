"""Copies on real GPUs: no transfer with device input and output, and direct copies between two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from devplan.passes.export import export  # noqa: E402
from devplan.passes.options import ExportOptions, IoRule, PlacementRule  # noqa: E402
from devplan.passes.source.model import MethodSource, ModelSource  # noqa: E402
from devplan.runtime.engine import LoadedProgram  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.runtime.program import CopyKind  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]


class Chain(torch.nn.Module):  # type: ignore[misc]
    """Three layers, the last two in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(256, 512)
        self.rest = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))

    def forward(self, x: Any) -> Any:
        return self.rest(torch.relu(self.first(x)))


X = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))


def loaded(**options: Any) -> LoadedProgram:
    source = ModelSource("chain", (MethodSource("forward", Chain().eval(), (X,)),))
    architecture = driver.devices()[0].architecture
    result = export(source, ExportOptions(architectures=(architecture,), **options))
    constants = {digest: read() for digest, read in result.constants.items()}
    return load_planned(result.planned, constants, None, allow_torch_ops=True)


def transfers(program: LoadedProgram) -> int:
    return sum(count for kind, count in program.copies.counts.items() if kind is not CopyKind.LOCAL)


def recorded(call: Callable[[], Any], prefix: str) -> int:
    """How many of the GPU's activities whose name starts so CUPTI records (through torch's profiler) in a call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert any(not e.name.startswith("Memcpy") for e in events), (
        "CUPTI saw no kernel: this count proves nothing"
    )
    return sum(e.name.startswith(prefix) for e in events)


def expected() -> Any:
    with torch.no_grad():
        return Chain().eval()(X).numpy()


def test_device_io_makes_no_transfer() -> None:
    with loaded(io=(IoRule("both", "device"),)) as program:
        given = program.to_device(X.numpy())
        for _ in range(3):
            (output,) = program.method("forward")(given).values()
        np.testing.assert_allclose(output.numpy(), expected(), rtol=1e-4, atol=1e-4)
        assert transfers(program) == 0
        assert recorded(lambda: program.method("forward")(given), "Memcpy") == 0


def test_a_callers_torch_tensor_is_read_in_place() -> None:
    with loaded(io=(IoRule("both", "device"),)) as program:
        given = X.cuda()
        (output,) = program.method("forward")(given).values()
        np.testing.assert_allclose(output.numpy(), expected(), rtol=1e-4, atol=1e-4)
        assert recorded(lambda: program.method("forward")(given), "Memcpy") == 0


def test_host_io_makes_two() -> None:
    with loaded() as program:
        for _ in range(3):
            (output,) = program.method("forward")(X.numpy()).values()
        np.testing.assert_allclose(output, expected(), rtol=1e-4, atol=1e-4)
        assert transfers(program) == 6
        assert recorded(lambda: program.method("forward")(X.numpy()), "Memcpy HtoD") == 1
        assert recorded(lambda: program.method("forward")(X.numpy()), "Memcpy DtoH") == 1


def test_pinned_inputs_and_large_outputs_are_used_in_place() -> None:
    rows = torch.randn(512, 256, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = Chain().eval()(rows).numpy()
    source = ModelSource("chain", (MethodSource("forward", Chain().eval(), (rows,)),))
    architecture = driver.devices()[0].architecture
    result = export(source, ExportOptions(architectures=(architecture,)))
    constants = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, constants, None) as program:
        method, outputs = program.method("forward"), list[Any]()
        for given in (rows.numpy(), program.pin(rows.numpy()), rows.pin_memory(), rows.numpy()):
            (output,) = method(given).values()
            assert method.no_graph_reason == ""
            outputs.append(output)
        other = program.pin(-rows.numpy())
        (negative,) = method(other).values()
        for output in outputs:
            np.testing.assert_allclose(output, wanted, rtol=1e-3, atol=1e-3)
        assert np.abs(negative - wanted).max() > 0.1
        assert recorded(lambda: method(other), "Memcpy HtoD (Pinned") == 1
        assert recorded(lambda: method(other), "Memcpy DtoH (Device -> Pinned") == 1
    np.testing.assert_allclose(outputs[0], wanted, rtol=1e-3, atol=1e-3)  # outlives its program


def test_a_model_on_two_gpus_copies_directly() -> None:
    if len(driver.devices()) < 2:
        pytest.skip("one GPU")
    with loaded(placement=(PlacementRule("cuda:1", module="rest"),)) as program:
        for _ in range(3):
            (output,) = program.method("forward")(X.numpy()).values()
        np.testing.assert_allclose(output, expected(), rtol=1e-4, atol=1e-4)
        counts = program.copies.counts
        assert (counts[CopyKind.H2D], counts[CopyKind.D2D], counts[CopyKind.D2H]) == (3, 3, 3)

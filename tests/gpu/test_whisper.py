"""Whisper-small on a GPU: one encoding, and no copy in a step: even the token is read and written over the bus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

from devplan.passes.export import export  # noqa: E402
from devplan.passes.options import ExportOptions  # noqa: E402
from devplan.runtime.engine import LoadedProgram  # noqa: E402
from devplan.runtime.loading import load_planned  # noqa: E402
from devplan.tests.support import whisper  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.slow]
pytestmark += [pytest.mark.skipif(not READY, reason=REASON or "no GPU")]

STEPS = 16


@pytest.fixture(scope="module")
def program() -> Iterator[LoadedProgram]:
    result = export(whisper.source("full"), ExportOptions(architectures=(driver.devices()[0].architecture,)))
    constants = {digest: read() for digest, read in result.constants.items()}
    with load_planned(result.planned, constants, None) as opened:
        yield opened


def features() -> Any:
    return torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(5))


def test_a_step_makes_no_copy(program: LoadedProgram) -> None:
    """The token's two copies, all that the plan has, are saved: kernels use its 8 bytes where the host has them."""
    said = whisper.say(program, features(), STEPS)
    assert [step.copies for step in said] == [dict.fromkeys(whisper.ONE_TOKEN, (0, 0))] * STEPS
    assert program.method("decode").no_graph_reason == ""


def test_the_gpu_copies_nothing(program: LoadedProgram) -> None:
    whisper.say(program, features(), 2)
    token = torch.tensor([[whisper.START]])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(4):
            program.method("decode")(token)
        torch.cuda.synchronize()
    names = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert any(not name.startswith("Mem") for name in names), "CUPTI saw no kernel: this proves nothing"
    found = {
        kind: sum(name.startswith(f"Memcpy {kind}") for name in names) for kind in ("HtoD", "DtoH", "DtoD")
    }
    assert found == {"HtoD": 0, "DtoH": 0, "DtoD": 0}


def test_tokens_are_those_of_eager(program: LoadedProgram) -> None:
    said = [step.token for step in whisper.say(program, features(), STEPS)]
    assert said == whisper.say_eagerly(whisper.source("full"), features(), STEPS)[0]

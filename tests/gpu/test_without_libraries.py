"""Programs that need nothing but the driver, and configurations of kernels that were measured, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from devplan.passes.lowered.kernel_tuning import key_of  # noqa: E402
from devplan.passes.lowered.tune_kernels import tune_kernels  # noqa: E402
from devplan.runtime.measure.tune import Tuning, tune  # noqa: E402
from devplan.tests.support.exporting import assert_close, export_module, loaded  # noqa: E402
from devplan.tests.support.functions import Function  # noqa: E402
from devplan.tests.support.tiled_cases import (  # noqa: E402
    CONVOLUTIONS,
    HALF,
    HALVES,
    PRODUCTS,
    rand,
)

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]

LARGE = {
    f"{rows}x{columns}x{depth}": (
        lambda x, w: x @ w,
        (rand(rows, depth, dtype=HALF), rand(depth, columns, dtype=HALF, scale=depth**-0.5)),
    )
    for rows, columns, depth in ((128, 1536, 384), (1500, 768, 3072), (33, 4096, 4096), (4096, 4096, 64))
}
CASES: dict[str, Any] = {**PRODUCTS, **CONVOLUTIONS, **LARGE}


def here() -> tuple[str, ...]:
    return (driver.devices()[0].architecture,)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_eager(name: str) -> None:
    function, inputs = CASES[name]
    result = export_module(Function(function), inputs, architectures=here(), library_calls=False)
    with loaded(result, "cuda") as program:
        (got,) = program.method()(*inputs).values()
        assert not any(getattr(backend, "_libraries", None) for backend in program.backends.values())
        assert program.method().no_graph_reason == ""
    assert_close(got, function(*inputs), HALVES.get(inputs[0].dtype, 1e-5))


class Block(torch.nn.Module):  # type: ignore[misc]
    """A convolution and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(64, 64, 3, padding=1)
        self.up, self.down = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 64)

    def forward(self, x: Any) -> Any:
        x = self.convolution(x).relu().flatten(2).mT
        return self.down(torch.nn.functional.gelu(self.up(x)))


def test_what_was_measured_is_used_and_gives_the_same(tmp_path: Path) -> None:
    module, x = Block().half(), rand(4, 64, 28, 28, dtype=HALF)
    result = export_module(module, (x,), architectures=here(), library_calls=False)
    with loaded(result, "cuda") as program:
        method = program.method()
        (before,) = method(x).values()
        made, _ = tune(program, method)
        kernels, findings = tune_kernels(program, method)
    assert findings and all(found.best_seconds <= found.first_seconds for found in findings)
    for found in findings:
        print(f"{found.key}: {found.first_seconds * 1e6:.1f} us, best {found.best_seconds * 1e6:.1f} us")
    path = tmp_path / "gpu.json"
    Tuning(made.gpu, {}, {}, made.architecture, triton.__version__, kernels).save(path)
    again = export_module(module, (x,), architectures=here(), library_calls=False, tuning=path)
    configured = {key_of(kernel): kernel for kernel in again.planned.program.kernels}
    assert all(configured[key].num_warps == choice["num_warps"] for key, choice in kernels.items())
    with loaded(again, "cuda") as program:
        (after,) = program.method()(x).values()
    assert_close(after, torch.from_numpy(before), 1e-2)

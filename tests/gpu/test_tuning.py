"""Library algorithms that are measured on a GPU, embedded in an artifact and used there; threads beside a call."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load
from devplan.runtime.cuda import driver

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from devplan.runtime.artifact import write  # noqa: E402
from devplan.runtime.measure.tune import Tuning, tune  # noqa: E402
from devplan.tests.support.exporting import assert_close, export_module  # noqa: E402
from devplan.tests.support.tiled_cases import HALF, rand  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]


class Layers(torch.nn.Module):  # type: ignore[misc]
    """A convolution and products of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(64, 128, 3, padding=1)
        self.up, self.down = torch.nn.Linear(128, 3072), torch.nn.Linear(3072, 128)

    def forward(self, x: Any) -> Any:
        x = self.convolution(x).relu().flatten(2).mT
        return self.down(torch.nn.functional.gelu(self.up(x)))


def exported(path: Path, **options: Any) -> tuple[Path, Any, Any]:
    """The artifact, its module and its input, for this GPU."""
    module, x = Layers().half(), rand(8, 64, 28, 28, dtype=HALF)
    here = (driver.devices()[0].architecture,)
    result = export_module(module, (x,), architectures=here, **options)
    return write(path, result.planned, result.constants).path, module, x


def test_what_was_measured_is_embedded_used_and_gives_the_same(tmp_path: Path) -> None:
    plain, module, x = exported(tmp_path / "plain.pte")
    with load(plain, "cuda") as program:
        method = program.method()
        (before,) = method(x).values()
        assert program.tuning_note == ""
        made, findings = tune(program, method)
    assert {found.key.split()[0] for found in findings} == {"matmul", "convolution"}
    for found in findings:
        first, best = found.first_seconds * 1e6, found.best_seconds * 1e6
        print(
            f"{found.key[:70]}: {found.candidates} tried, {first:.1f} us, best {best:.1f} us ({found.best})"
        )
    # Any algorithm that is not the library's choice will do to see that embedded ones are taken.
    forced = replace(
        made, algorithms={f.key: 1 for f in findings if f.candidates > 1} | dict(made.algorithms)
    )
    for name, tuning in {"best": made, "forced": forced}.items():
        Tuning.save(tuning, tmp_path / "gpu.json")
        tuned, _, _ = exported(tmp_path / f"{name}.pte", tuning=tmp_path / "gpu.json")
        with load(tuned, "cuda") as program:
            (after,) = program.method()(x).values()
            assert program.method().no_graph_reason == ""
            if tuning.algorithms:
                assert program.tuning_note.startswith(f"using {len(tuning.algorithms)} library algorithm")
            again, _ = tune(program, program.method())  # against the libraries' choice, whatever is embedded
        assert set(again.versions) == set(made.versions)
        assert_close(after, torch.from_numpy(before), 1e-2)
    assert_close(before, module.float()(x.float()), 2e-2)


def test_threads_that_read_outputs_do_not_disturb_a_capture(tmp_path: Path) -> None:
    """Programs record their graphs while another thread copies a tensor of theirs."""
    path, _, x = exported(tmp_path / "model.pte")
    array = np.arange(1 << 20, dtype=np.float32)
    wrong: list[str] = []
    with load(path, "cuda") as program:
        (want,) = program.method()(x).values()
    for _ in range(10):
        with load(path, "cuda") as program:
            tensor, stop = program.to_device(array), threading.Event()

            def read(tensor: Any = tensor, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    if not np.array_equal(tensor.numpy(), array):
                        wrong.append("a copy")

            thread = threading.Thread(target=read)
            thread.start()
            try:
                (got,) = program.method()(x).values()
            finally:
                stop.set()
                thread.join()
            if not np.array_equal(got, want):
                wrong.append("a result")
            assert program.method().no_graph_reason == ""
            del tensor, read
    assert wrong == []

"""Kernels of detection on a GPU, against plain NumPy and eager on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402

from devplan.runtime.cpu import own  # noqa: E402
from devplan.runtime.cuda import driver  # noqa: E402
from devplan.tests.support.detection import torchvision_operators  # noqa: E402
from devplan.tests.support.functions import Function  # noqa: E402

READY, REASON = driver.cuda_available()

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.skipif(not READY, reason=REASON or "no GPU")]
OPERATORS = torchvision_operators()


def boxes(count: int, seed: int, size: float = 640.0) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=made) * size
    found = torch.cat([corner, corner + torch.rand(count, 2, generator=made) * size / 8], 1)
    return found, torch.randperm(count, generator=made) / count


@pytest.mark.parametrize("count", [1, 64, 300, 4507, 20000])
def test_the_same_boxes_are_kept_in_every_run(count: int) -> None:
    def kept(found: Any, scores: Any) -> Any:
        return (OPERATORS.nms(found, scores, 0.5),)

    with loaded(export_module(Function(kept), boxes(count, 0), architectures=("sm_90",)), "cuda") as program:
        for seed in (1, 2, 2, 2):
            found, scores = boxes(count, seed)
            order = scores.numpy().argsort()[::-1]
            made = own.kept_boxes(found.numpy()[order], None, None, 0.5)
            (got,) = program.method()(found.numpy(), scores.numpy()).values()
            np.testing.assert_array_equal(np.asarray(got), order[made[: made[-1]]])


@pytest.mark.parametrize("ratio", [2, 0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_regions_are_averaged(ratio: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    maps = torch.randn(2, 64, 50, 60, generator=torch.Generator().manual_seed(1)).to(kind).float()
    found = torch.cat([torch.arange(200)[:, None] % 2, boxes(200, 3, 200.0)[0]], 1).round()

    def function(maps: Any, found: Any) -> Any:
        given = maps.to(kind), found.to(kind)
        last = given[0].to(memory_format=torch.channels_last)
        return (
            OPERATORS.roi_align(*given, 0.25, 7, 7, ratio, True).float(),
            OPERATORS.roi_align(last, given[1], 0.25, 7, 7, ratio, False).float(),
        )

    program = export_module(Function(function), (maps, found), architectures=("sm_90",))
    # In float32 a sample's place, up to 60, is known to a few times 4e-6, and pixels differ by up to 6 from the next.
    limit = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    with loaded(program, "cuda") as running:
        results = running.method()(maps.numpy(), found.numpy()).values()
    rounded = found.to(kind).float().numpy()
    for got, aligned in zip(results, (True, False), strict=True):
        want = own.roi_align(maps.numpy(), rounded, 0.25, 7, 7, ratio, aligned, False)
        np.testing.assert_allclose(np.asarray(got), want, rtol=limit, atol=limit)

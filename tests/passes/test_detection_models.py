"""torchvision's detectors with small backbones, against eager: in float64, so that no score changes places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

from exporting import export_module, loaded  # noqa: E402
from torchvision.models import detection  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator  # noqa: E402
from torchvision.ops import MultiScaleRoIAlign  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
SIZE, CHANNELS, CLASSES = 64, 32, 3


class Backbone(torch.nn.Module):  # type: ignore[misc]
    """Feature maps of two levels."""

    out_channels = CHANNELS

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, CHANNELS, 8, stride=8)
        self.second = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        fine = torch.relu(self.first(x))
        return OrderedDict([("0", fine), ("1", torch.relu(self.second(fine)))])


class OneImage(torch.nn.Module):  # type: ignore[misc]
    """A detector of one image, whose results are tensors by name."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, image: Any) -> Any:
        return self.detector([image])[0]


def anchors(*sizes: int) -> Any:
    return AnchorGenerator(tuple((size,) for size in sizes), ((0.5, 1.0, 2.0),) * len(sizes))


SIZES: dict[str, Any] = {"min_size": SIZE, "max_size": SIZE}


def faster_rcnn() -> Any:
    return detection.FasterRCNN(
        Backbone(),
        CLASSES,
        rpn_anchor_generator=anchors(16, 32),
        box_roi_pool=MultiScaleRoIAlign(["0", "1"], 3, 2),
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=30,
        box_score_thresh=0.2,
        **SIZES,
    )


def retina_net() -> Any:
    return detection.RetinaNet(
        Backbone(), CLASSES, anchor_generator=anchors(16, 32), topk_candidates=40, score_thresh=0.3, **SIZES
    )


def fcos() -> Any:
    maker = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return detection.FCOS(Backbone(), CLASSES, anchor_generator=maker, topk_candidates=40, **SIZES)


def ssd() -> Any:
    maker = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.4, 0.8])
    head = detection.ssd.SSDHead([CHANNELS, CHANNELS], maker.num_anchors_per_location(), CLASSES)
    return detection.ssd.SSD(
        Backbone(), maker, (SIZE, SIZE), CLASSES, head=head, topk_candidates=40, score_thresh=0.2
    )


@pytest.mark.parametrize("build", [faster_rcnn, retina_net, fcos, ssd])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_detectors_find_what_they_find_in_eager(build: Callable[[], Any], device: str) -> None:
    torch.manual_seed(0)
    detector = build().double()
    for name, parameter in detector.named_parameters():
        if parameter.dim() > 1 and "bbox" not in name:  # they begin so small that all scores are alike
            torch.nn.init.normal_(parameter, std=2 / parameter[0].numel() ** 0.5)
    module = OneImage(detector).eval()
    images = [torch.rand(3, SIZE, SIZE, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        wanted = [module(image) for image in images]
    assert all(len(want["scores"]) > 2 and len(want["scores"].unique()) > 2 for want in wanted)
    program = export_module(module, (images[0],), device=device)
    with loaded(program, "emulator" if device == "cuda" else "cpu") as running:
        for image, want in zip(images, wanted, strict=True):
            got = running.method()(image.numpy())
            assert set(got) == set(want)
            for name, value in want.items():
                assert np.asarray(got[name]).shape == tuple(value.shape)
                np.testing.assert_allclose(np.asarray(got[name]), value.numpy(), rtol=1e-7, atol=1e-7)

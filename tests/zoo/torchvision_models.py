"""One small model of each torchvision classification family (its module), with random weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from devplan.passes.source.model import MethodSource, ModelSource

_SMALL = {
    "alexnet": "alexnet",
    "convnext": "convnext_tiny",
    "densenet": "densenet121",
    "efficientnet": "efficientnet_b0",
    "googlenet": "googlenet",
    "inception": "inception_v3",
    "maxvit": "maxvit_t",
    "mnasnet": "mnasnet0_5",
    "mobilenetv2": "mobilenet_v2",
    "mobilenetv3": "mobilenet_v3_small",
    "regnet": "regnet_y_400mf",
    "resnet": "resnet18",
    "shufflenetv2": "shufflenet_v2_x0_5",
    "squeezenet": "squeezenet1_1",
    "swin_transformer": "swin_v2_t",
    "vgg": "vgg11",
    "vision_transformer": "vit_b_16",
}
"""The smallest model of a family; a family that is not listed is taken by its first name."""
PIXELS = {"maxvit": 224, "vision_transformer": 224, "inception": 96, "alexnet": 96}
"""Where 64 pixels are too few, or another number than that of its training is refused."""


def _models() -> Any:
    _declare_operators()
    import torchvision.models

    return torchvision.models


def _declare_operators() -> None:
    """Name the operators of detection that torchvision describes on import but has in its library alone.

    The library of another torch version does not load; classification uses none of them.
    """
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", boxes)


def families() -> list[str]:
    """Modules of torchvision that register classification models; empty where it is not installed."""
    try:
        models = _models()
    except ImportError:
        return []
    return sorted(_members(models))


def _members(models: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in models.list_models(module=models):
        found[models.get_model_builder(name).__module__.rsplit(".", 1)[-1]].append(name)
    return found


def build(family: str) -> ModelSource:
    """The family's smallest model at a small number of pixels."""
    models = _models()
    name = _SMALL.get(family) or _members(models)[family][0]
    torch.manual_seed(0)
    network = models.get_model(name, weights=None, num_classes=10).eval()
    torch.manual_seed(1)
    pixels = PIXELS.get(family, 64)
    image = torch.randn(1, 3, pixels, pixels)
    return ModelSource(family, (MethodSource("forward", network, (image,)),), notes=(name,))

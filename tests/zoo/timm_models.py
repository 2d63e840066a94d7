"""One small model of each timm family (its module), with random weights."""

from __future__ import annotations

from typing import Any

import torch

from devplan.passes.source.model import MethodSource, ModelSource

from . import torchvision_stub

_SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xs",
    "tiny",
    "_t",
    "mini",
    "lite",
    "small",
    "_s",
    "_0",
    "18",
)
"""Words in the names of small models, smallest first."""
PIXELS = 96


def _timm() -> Any:
    torchvision_stub.install()
    import timm

    return timm


def families() -> list[str]:
    """Modules of timm that register models."""
    return sorted(_timm().list_modules())


def build(family: str) -> ModelSource:
    """The family's model whose name sounds smallest, at 96 pixels where it allows that, else at its own size."""
    timm = _timm()
    name = min(timm.list_models(module=family), key=_rank)
    torch.manual_seed(0)
    network = timm.create_model(name, pretrained=False, num_classes=10).eval()
    channels, *size = network.default_cfg["input_size"]
    for extent in ((PIXELS, PIXELS), tuple(size)):
        torch.manual_seed(1)
        image = torch.randn(1, channels, *extent)
        try:
            with torch.no_grad():
                network(image)
        except (AssertionError, RuntimeError, ValueError):
            continue
        return ModelSource(family, (MethodSource("forward", network, (image,)),), notes=(name,))
    raise RuntimeError(f"`{name}` takes no image")


def _rank(name: str) -> tuple[int, int, str]:
    found = [index for index, word in enumerate(_SMALL) if word in name]
    return (min(found, default=len(_SMALL)), len(name), name)

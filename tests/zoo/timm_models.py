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


def families(place: int = 0) -> list[str]:
    """Modules of timm that register more than ``place`` models."""
    timm = _timm()
    return [name for name in sorted(timm.list_modules()) if len(timm.list_models(module=name)) > place]


def build(family: str, place: int = 0) -> ModelSource:
    """The family's model whose name sounds smallest (``place`` 1: the one after it), at 96 pixels if it can be.

    What does not allow that is built at its own size.
    """
    timm = _timm()
    name = sorted(timm.list_models(module=family), key=_rank)[place]
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

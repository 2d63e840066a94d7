"""Functions of tensors as modules, and what becomes of them on the emulator beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from devplan.passes.source.model import MethodSource, ModelSource
from devplan.tests.zoo.measure import Row, measure


class Function(torch.nn.Module):
    """A function of tensors as a module; the modules that it takes in front of them are its parts."""

    def __init__(self, function: Callable[..., Any], *parts: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, torch.nn.ModuleList(parts)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*self.parts, *tensors)


def against_eager(function: Callable[..., Any], *inputs: torch.Tensor) -> Row:
    """The function exported for CUDA, its kernels as sources, and called once on the emulator."""
    source = ModelSource("function", (MethodSource("forward", Function(function), inputs),))
    return measure("function", "operators", lambda: source, "cuda", code=False, calls=1)

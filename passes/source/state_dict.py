"""A model's own tensors as the weights of a program that was exported without them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.dtypes import DType
from ...runtime.weights.recipes import Recipe
from ...runtime.weights.safetensors import all_tensors, open_safetensors
from ...runtime.weights.supply import Constants, Supply
from ..exported.contents import tensor_bytes
from ..exported.sizes import to_dtype

if TYPE_CHECKING:
    from ..export import ExportResult


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a state dict, on any device."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return to_dtype(self.tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    def read(self) -> memoryview:
        """Its bytes, row-major, on the host."""
        return tensor_bytes(self.tensor.detach().cpu().contiguous())

    def digest(self) -> str:
        """SHA-256 of its bytes."""
        return hashlib.sha256(self.read()).hexdigest()


def constants_with(
    result: ExportResult, weights: Mapping[str, Any] | None, files: Sequence[Path] = ()
) -> Mapping[str, memoryview]:
    """An export's constants by digest, with those that recipes make of a state dict or of weight files.

    UsageError when a tensor is missing or other than the model's.
    """
    read = {digest: reader() for digest, reader in result.constants.items()}
    if not result.recipes:
        return read
    recipes: list[Recipe] = list(result.recipes.values())
    supply = None
    if weights is not None:
        held = {name: HeldTensor(t) for name, t in weights.items() if isinstance(t, torch.Tensor)}
        supply = Supply.fitted("the given weights", held, recipes)
    elif files:
        tensors = all_tensors([open_safetensors(file) for file in files])
        supply = Supply.fitted(", ".join(file.name for file in files), tensors, recipes)
    on_host = {c.digest for c in result.planned.program.constants if c.device.kind == "cpu"}
    return Constants(read, result.recipes, supply, frozenset(on_host))

"""What the user's model file, attribute or saved program resolves to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..options import BucketRule
from .data_classes import know_data_classes


@dataclass(frozen=True)
class MethodSource:
    """One method to export: a module, its example inputs and its dynamic shapes.

    ``exported`` is set instead of being made when the source is a saved ``.pt2`` program.
    """

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    exported: torch.export.ExportedProgram | None = None
    buckets: tuple[BucketRule, ...] = ()
    """Sizes of its dynamic dimensions that the model file declares."""

    def __post_init__(self) -> None:
        know_data_classes((self.args, self.kwargs))


@dataclass(frozen=True)
class ModelSource:
    """All methods of a model; methods that share modules share their weights and buffers."""

    name: str
    """Stem of the artifact's file name."""
    methods: tuple[MethodSource, ...]
    file: Path | None = None
    notes: tuple[str, ...] = ()
    """What a person should know of how the source was read, such as a switch to evaluation mode."""

"""Everything an export can be told, as one value; flags and TOML files are read into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .targets import DEFAULT_ARCHITECTURES


@dataclass(frozen=True)
class PlacementRule:
    """Put what matches on ``device``. A pattern is a shell glob; an empty one matches everything."""

    device: str
    module: str = ""
    operator: str = ""
    method: str = ""


@dataclass(frozen=True)
class IoRule:
    """Where the caller keeps an input or output: ``device`` skips its copy.

    ``method`` and ``tensor`` are names or ``*``; later rules win.
    """

    direction: Literal["h2d", "d2h", "both"]
    location: Literal["host", "device"]
    method: str = "*"
    tensor: str = "*"


@dataclass(frozen=True)
class BucketRule:
    """Sizes of a dynamic dimension that get a plan and a CUDA graph of their own.

    ``dimension`` is the name of a `torch.export.Dim` or ``INPUT:NUMBER``, in every method that has it, or in
    one as ``METHOD.DIMENSION``. Later rules win.
    """

    dimension: str
    sizes: tuple[int, ...]
    """Rising and different."""


@dataclass(frozen=True)
class ExportOptions:
    """The settings of one export. The defaults are those of ``configs/default.toml``."""

    device: str = "cuda"
    dtype: str | None = None
    architectures: tuple[str, ...] = DEFAULT_ARCHITECTURES
    placement: tuple[PlacementRule, ...] = ()
    io: tuple[IoRule, ...] = ()
    buckets: tuple[BucketRule, ...] = ()
    allow_host_ops: bool = False
    allow_tf32: bool = False
    library_calls: bool = True
    library_workspace: int | None = None
    """Most bytes reserved for one library call; None takes the limits of `workspaces`."""
    tuning: Path | None = None
    """A file of `devplan tune`: kernels are compiled as it says, library algorithms are embedded."""
    device_planning: bool = True
    planning_effort: Literal["fast", "default", "max"] = "default"
    reorder: bool = True
    memory_budget: int | None = None
    quantize: str | None = None
    """``int8-weight-only`` or ``int4-weight-only[:GROUP]``; None leaves weights as they are."""
    weights: Literal["embed", "external", "reference", "none"] = "embed"
    weights_files: tuple[Path, ...] = ()
    """Safetensors files, or folders of them, for ``reference``."""
    pipeline: tuple[str, ...] | None = None
    """Pass names in order; None takes the built-in order."""
    pass_options: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    jobs: int = 0
    """Processes that compile kernels; 0 takes one per processor."""


Progress = Callable[[str, float, str], None]
"""Told (stage, fraction done from 0 to 1, detail) as an export goes on."""


def silent(stage: str, fraction: float, detail: str) -> None:
    """The progress of one who does not watch."""

"""Small models exported, loaded and compared with eager, without files in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from devplan.passes.export import ExportResult, export
from devplan.passes.options import ExportOptions
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.runtime import LoadedProgram, load_planned


def export_module(
    module: torch.nn.Module, args: tuple[Any, ...], *, dynamic_shapes: Any = None, **options: Any
) -> ExportResult:
    """Export one module as the method ``forward`` for one architecture."""
    method = MethodSource("forward", module.eval(), args, dynamic_shapes=dynamic_shapes)
    return export_methods([method], **options)


def export_methods(methods: Sequence[MethodSource], **options: Any) -> ExportResult:
    """Export several methods for one architecture."""
    options.setdefault("architectures", ("sm_80",))
    return export(ModelSource("test", tuple(methods)), ExportOptions(**options))


def loaded(result: ExportResult, device: str = "emulator", **options: Any) -> LoadedProgram:
    """A program ready to be called."""
    constants: Mapping[str, memoryview] = {digest: read() for digest, read in result.constants.items()}
    return load_planned(result.planned, constants, device=device, **options)


def assert_close(got: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Largest error relative to the largest wanted element."""
    want = wanted.detach().float().numpy()
    have = np.asarray(got).astype(np.float32)
    assert have.shape == want.shape
    scale = max(float(np.abs(want).max(initial=0.0)), 1.0)
    assert float(np.abs(have - want).max(initial=0.0)) <= tolerance * scale

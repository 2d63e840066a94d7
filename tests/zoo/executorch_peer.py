"""The same model through ExecuTorch's portable path on this machine: does it export, and what is planned.

``DEVPLAN_EXECUTORCH`` names the folder that ExecuTorch 1.5 is installed in (``pip install --target``, without its
dependencies); where it is not set, rows of this kind are ``absent`` and the table says "not measured".
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import Any

import torch

from devplan.passes.source.model import ModelSource

from .measure import Build, Row

DEVICE = "executorch"
"""What stands in a row's column of devices."""


def folder() -> str:
    """Where ExecuTorch is; empty where it is not."""
    return os.environ.get("DEVPLAN_EXECUTORCH", "")


def measure(name: str, group: str, build: Build) -> Row:
    """Build and export all methods as one program; planned bytes are those of all memory that it asks for."""
    warnings.simplefilter("ignore")
    row = Row(name, group, DEVICE)
    if not folder():
        row.status, row.error = "absent", "DEVPLAN_EXECUTORCH is not set"
        return row
    sys.path.append(folder())
    logging.disable(logging.WARNING)
    try:
        source = build()
    except Exception as error:
        row.status, row.error = "unbuilt", f"{type(error).__name__}: {error}"[:300]
        return row
    try:
        _export(row, source)
    except Exception as error:  # whatever it raises is what a user of it would see
        row.status = "refused"
        row.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return row


def _program(exir: Any, methods: Any, row: Row) -> Any:
    """With its check that all operators are in its set; without it where that refuses, which the row notes."""
    try:
        return exir.to_edge(methods).to_executorch()
    except Exception as error:
        if type(error).__name__ != "SpecViolationError":
            raise
        row.note = "without its check of operators"
        row.error = " ".join(str(error).split())[:200]
    return exir.to_edge(
        methods, compile_config=exir.EdgeCompileConfig(_check_ir_validity=False)
    ).to_executorch()


def _export(row: Row, source: ModelSource) -> None:
    # imported by name: it has no stubs, and is in no environment of ours
    exir: Any = __import__("executorch.exir", fromlist=["to_edge"])
    begin = time.perf_counter()
    with torch.no_grad():
        methods = {
            method.name: torch.export.export(
                method.module, method.args, method.kwargs, dynamic_shapes=method.dynamic_shapes, strict=False
            )
            for method in source.methods
        }
        program = _program(exir, methods, row)
    row.seconds = round(time.perf_counter() - begin, 2)
    plans = program.executorch_program.execution_plan
    row.methods = len(plans)
    # every method has memory of its own size; a runtime that runs them in turn needs the largest
    sizes = [sum(plan.non_const_buffer_sizes) for plan in plans]
    row.arena = max(sizes, default=0)
    for plan in plans:
        calls = sum(len(chain.instructions) for chain in plan.chains)
        row.kernels["portable"] = row.kernels.get("portable", 0) + calls

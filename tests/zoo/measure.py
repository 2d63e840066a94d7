"""One model on one device, from export to numbers, as a row of the table."""

from __future__ import annotations

import copy
import inspect
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree as pytree

from devplan.passes import export as exporting
from devplan.passes.options import ExportOptions
from devplan.passes.source.data_classes import know_data_classes
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.planner import PlanOptions, plan
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.emulator import EmulatorBackend, Machine
from devplan.runtime.engine import EngineOptions, LoadedProgram
from devplan.runtime.errors import DevplanError
from devplan.runtime.program import (
    CPU,
    Arena,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Kernel,
    Launch,
    LibraryCall,
    Method,
    PlannedProgram,
    Program,
    Role,
)

TOLERANCE = 2e-3
"""Of the largest expected value: float32 sums in another order, through dozens of layers."""


@dataclass
class Row:
    """How far a model came.

    ``status``: right, exported, wrong, refused (exit 3), failed, traceback, timeout, unbuilt (eager does not run
    it, or the recipe does not fit), absent (the peer is not here).
    """

    name: str
    group: str
    device: str
    status: str = "exported"
    error: str = ""
    seconds: float = 0.0
    run_seconds: float = 0.0
    max_error: float = 0.0
    methods: int = 0
    copies: int = 0
    arena: int = 0
    arena_given: int = 0
    """Bytes of the same program in the order in which it was lowered."""
    arena_tensors: int = 0
    """Bytes without what libraries were offered as workspace, which small models mostly consist of."""
    lower_bound: int = 0
    kernels: dict[str, int] = field(default_factory=dict[str, int])
    note: str = ""
    heard: float | None = None
    """How far other floating-point inputs move eager's results, like `max_error`; near it, right says nothing."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


Build = Callable[[], ModelSource]


def measure(
    name: str,
    group: str,
    build: Build,
    device: str,
    *,
    run: bool = True,
    code: bool = True,
    calls: int = 2,
    exported: Callable[[Row], None] = lambda row: None,
) -> Row:
    """Build, export, and compare with eager; on the emulator where the device is ``cuda``.

    ``exported`` is told as soon as the export is done.
    """
    warnings.simplefilter("ignore")
    row = Row(name, group, device)
    try:
        source = build()
        row.note = " ".join(source.notes)
        with torch.no_grad():
            expected = _eager(source, calls)
            row.heard = _heard(source, expected[::calls])
    except Exception as error:  # a model that eager cannot run says nothing of us
        row.status, row.error = "unbuilt", f"{type(error).__name__}: {error}"[:300]
        return row
    try:
        result = _export(row, source, device, code)
        exported(row)
        if run:
            begin = time.perf_counter()
            _compare(row, result, source, expected, calls)
            row.run_seconds = round(time.perf_counter() - begin, 2)
    except DevplanError as error:
        row.status = "refused" if error.code == 3 else "failed"
        row.error = f"{type(error).__name__}: {error}"[:600]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        row.status = "traceback"
        row.error = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {error}"[
            :600
        ]
    return row


def _export(row: Row, source: ModelSource, device: str, code: bool) -> exporting.ExportResult:
    options = ExportOptions(device=device, architectures=("sm_90",))
    lowered: list[Program] = []

    def planned(program: Program, given: PlanOptions | None = None) -> PlannedProgram:
        lowered.append(program)
        return plan(program, given)

    begin = time.perf_counter()
    with (
        mock.patch.object(exporting, "compile_kernels", exporting.compile_kernels if code else without_code),
        mock.patch.object(exporting, "plan", planned),
    ):
        result = exporting.export(source, options)
    row.seconds = round(time.perf_counter() - begin, 2)
    _describe(row, result.planned)
    row.arena_given = _arena(plan(lowered[0], PlanOptions(reorder=False)))
    row.arena_tensors = _arena(plan(_without_workspaces(lowered[0])))
    if row.arena > row.arena_given:
        raise AssertionError(f"reordered, the arena grew from {row.arena_given} to {row.arena} bytes")
    return result


def _without_workspaces(program: Program) -> Program:
    def emptied(method: Method) -> Method:
        storages = (replace(s, nbytes=0) if s.role is Role.WORKSPACE else s for s in method.storages)
        return replace(method, storages=tuple(storages))

    return replace(program, methods=tuple(map(emptied, program.methods)))


def _arena(planned: PlannedProgram) -> int:
    """Bytes of the arenas: the largest method's on each device, which the others share."""
    return sum(a.nbytes for a in _arenas(planned))


def _arenas(planned: PlannedProgram) -> list[Arena]:
    largest: dict[Device, Arena] = {}
    for arena in (a for m in planned.plan.methods for a in m.arenas if a.kind == "arena"):
        held = largest.get(arena.device)
        if held is None or arena.nbytes > held.nbytes:
            largest[arena.device] = arena
    return list(largest.values())


def without_code(specs: Sequence[Any], *rest: Any) -> tuple[Kernel, ...]:
    """Kernels as the emulator needs them: the sources alone."""
    from devplan.passes.lowered.compile_kernels import _kernel

    return tuple(_kernel(spec, []) for spec in {spec.name: spec for spec in specs}.values())


def _describe(row: Row, planned: PlannedProgram) -> None:
    program = planned.program
    row.methods = len(program.methods)
    found = Counter[str]()
    for method in program.methods:
        for instruction in method.instructions:
            if isinstance(instruction, Copy) and instruction.kind is not CopyKind.LOCAL:
                row.copies += 1
            found.update(_kind(instruction))
    row.kernels = dict(found)
    row.arena = _arena(planned)
    row.lower_bound = sum(a.lower_bound for a in _arenas(planned))


def _kind(instruction: Instruction) -> list[str]:
    """What does an instruction's work: a generated kernel, one written here, a library, the host."""
    if isinstance(instruction, Launch):
        return ["generated" if instruction.kernel.startswith("triton_") else "own"]
    if isinstance(instruction, LibraryCall):
        return [instruction.function]
    return ["host"] if isinstance(instruction, HostCall) else []


def _eager(source: ModelSource, calls: int) -> list[list[Any]]:
    """What the model itself returns, flat, call by call; the source's own modules keep their state."""
    modules = copy.deepcopy([method.module for method in source.methods])
    found: list[list[Any]] = []
    for method, module in zip(source.methods, modules, strict=True):
        for _ in range(calls):
            args, kwargs = copy.deepcopy((method.args, method.kwargs))
            result = module(*args, **kwargs)
            know_data_classes(result)
            found.append(pytree.tree_leaves(result))
            found[-1] = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in found[-1]]
    return found


def _heard(source: ModelSource, expected: list[list[Any]]) -> float | None:
    """The least change over methods with floating-point inputs, each at its first call; None without any."""
    changes: list[float] = []
    for method, wanted in zip(source.methods, expected, strict=True):
        leaves, spec = pytree.tree_flatten((method.args, method.kwargs))
        moved = [
            torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in leaves
        ]
        if all(a is b for a, b in zip(leaves, moved, strict=True)):
            continue
        args, kwargs = pytree.tree_unflatten(copy.deepcopy(moved), spec)
        try:
            found = pytree.tree_leaves(copy.deepcopy(method.module)(*args, **kwargs))
        except Exception:  # some take certain numbers only
            continue
        pairs = [(a, b) for a, b in zip(found, wanted, strict=False) if isinstance(b, torch.Tensor)]
        alike = [(a.detach().numpy(), b.detach().numpy()) for a, b in pairs if a.shape == b.shape]
        changes.append(max((_error(a, b) for a, b in alike), default=1.0))
    return min(changes, default=None)


def _compare(
    row: Row, result: exporting.ExportResult, source: ModelSource, expected: list[list[Any]], calls: int
) -> None:
    with load(result) as program:
        answers = iter(expected)
        for method in source.methods:
            for _ in range(calls):
                outputs = program.method(method.name)(*_inputs(method))
                _judge(row, method.name, list(outputs.values()), next(answers))
    if row.status == "exported":
        row.status = "right"


def load(result: exporting.ExportResult) -> LoadedProgram:
    """The program on the host and on emulated devices; storages are poisoned when they die."""
    machine = Machine()
    slots = {s.device for m in result.planned.program.methods for s in m.storages} - {CPU}
    backends: dict[Any, Any] = {CPU: CpuBackend(), **{d: EmulatorBackend(d, machine) for d in slots}}
    constants = {digest: read() for digest, read in result.constants.items()}
    return LoadedProgram(result.planned, constants, backends, EngineOptions(scrub=True, poison=True))


def _inputs(method: MethodSource) -> list[Any]:
    """Positional inputs, then keywords in the order of the signature, as `torch.export` flattens them."""
    order = list(inspect.signature(method.module.forward).parameters)
    names = sorted(method.kwargs, key=lambda name: order.index(name) if name in order else len(order))
    leaves = pytree.tree_leaves((method.args, {name: method.kwargs[name] for name in names}))
    return [leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _judge(row: Row, method: str, outputs: list[Any], expected: list[Any]) -> None:
    for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            continue
        a, e = np.asarray(ours), theirs.detach().numpy()
        if a.shape != e.shape or a.dtype != e.dtype:
            row.status = "wrong"
            row.error = row.error or f"{method} output {index}: {a.dtype}{a.shape}, eager {e.dtype}{e.shape}"
            continue
        error = _error(a, e)
        row.max_error = max(row.max_error, error)
        if not error <= TOLERANCE:
            row.status = "wrong"
            row.error = row.error or f"{method} output {index}: error {error:.3g} of the largest value"


def _error(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """The largest difference over the largest finite value; NaN and infinities must be in the same places."""
    if theirs.dtype.kind in "bui":
        return 0.0 if np.array_equal(ours, theirs) else 1.0
    a, e = ours.astype(np.complex128), theirs.astype(np.complex128)
    finite = np.isfinite(e)
    if not np.array_equal(np.isnan(a), np.isnan(e)) or not np.array_equal(np.isfinite(a), finite):
        return float("inf")
    scale = max(float(np.abs(e[finite]).max(initial=0.0)), 1e-3)
    return float(np.abs(a[finite] - e[finite]).max(initial=0.0)) / scale

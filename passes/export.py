"""The way down: a model source goes in, a planned program comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..planner import PlanOptions, check, plan
from ..runtime.errors import UsageError
from ..runtime.program import Kernel, Method, PlannedProgram, Program, Role
from ..runtime.weights.recipes import Recipe
from ..runtime.weights.safetensors import StoredTensor, all_tensors, open_safetensors, weight_files
from ..runtime.weights.supply import Supply
from .base import Stage
from .exported.boxes import pool_regions
from .exported.buckets import Buckets, check_declared, method_buckets
from .exported.capture import export_method
from .exported.complex_pairs import split_complex
from .exported.contents import Contents, declare, name_contents
from .exported.kept_attributes import kept_note, watched_attributes
from .exported.method import ExportedMethod, analyse, cast_methods
from .exported.ragged import pad_ragged
from .exported.random_numbers import count_random
from .exported.read_numbers import read_numbers
from .lowered.compile_kernels import compile_kernels
from .lowered.kernel_tuning import KernelTuning
from .lowered.method import LoweredMethod, lower_method
from .lowered.region import Lowering
from .lowered.solve_small import solve_small
from .lowered.supported import supports
from .options import ExportOptions, Progress, silent
from .pipeline import Observer, build_pipeline, run_stage
from .placed.from_exported import to_placed
from .placed.graph import PlacedGraph
from .quantized.torchao import unwrap
from .source.hollow import on_the_host, refuse_meta
from .source.model import ModelSource
from .tape import KernelSpec
from .targets import lowest


@dataclass(frozen=True)
class ExportResult:
    """A planned program with where its constants' bytes are, and what is worth telling of the way."""

    planned: PlannedProgram
    constants: Mapping[str, Callable[[], memoryview]]
    """SHA-256 digest -> its bytes, read when they are written."""
    placed: tuple[PlacedGraph, ...]
    seconds: Mapping[str, float]
    """Time spent in each stage."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict[str, Recipe])
    """Digest -> how files of weights make the constant at load, for those that are not in ``constants``."""


def export(
    source: ModelSource,
    options: ExportOptions,
    progress: Progress = silent,
    *,
    observe: Observer | None = None,
    folder: Path | None = None,
) -> ExportResult:
    """Export all methods of a model.

    ``observe`` is told of every pass that ran; ``folder`` is what pass files of the pipeline are relative to.

    Raises UnsupportedOperatorError (exit 3) for what cannot be exported, BudgetError (5) above the memory
    budget, UsageError (2) for options that contradict each other or the model.
    """
    clock = _Clock(progress)
    tuning = KernelTuning.read(options.tuning, options.architectures)
    stored = _stored_weights(options)
    is_hollow = options.weights in ("reference", "none")
    if is_hollow and options.quantize is not None:
        what = f"cannot use `--quantize` with `--weights {options.weights}`"
        why = "the model is built without its weights, so that there are none to round"
        raise UsageError(what, why=why, hint="use `--weights embed` or `external`")
    rules = (*(rule for method in source.methods for rule in method.buckets), *options.buckets)
    check_declared(source.methods, rules)
    with clock.stage("export"):
        methods: Sequence[ExportedMethod] = _export_methods(source, options, progress)
        own = {method.name: method.buckets for method in source.methods}
        buckets = method_buckets({method.name: method.symbols for method in methods}, own, options.buckets)
        contents = name_contents(methods, are_given=is_hollow)
        passes = build_pipeline(options, {"supports": supports, "contents": contents}, folder=folder)
        methods = run_stage(passes, Stage.EXPORTED, methods, observe=observe)
        for method in methods if options.device != "cpu" else ():
            solve_small(method)
    with clock.stage("place"):
        placed = run_stage(passes, Stage.PLACED, [to_placed(m) for m in methods], observe=observe)
    with clock.stage("lower"):
        lowered = _lower(methods, placed, contents, options, tuning, progress)
    with clock.stage("compile"):
        specs = [spec for one in lowered for spec in one.kernels]
        kernels = _compile(specs, options, progress)
    with clock.stage("plan"):
        if options.weights == "reference":
            contents.supplier = Supply.fitted(_label(options), stored, _recipes(lowered, contents))
        program = assemble([one.method for one in lowered], contents, kernels, options.architectures)
        program = _with_notes(*tuning.embedded(program))
        (program,) = run_stage(passes, Stage.PROGRAM, [program], observe=observe)
        if not options.device_planning:
            program = replace(program, methods=tuple(_without_buckets(m, buckets) for m in program.methods))
        planned = plan(program, _plan_options(options, buckets))
        check(planned)
    readers, recipes = _readers(planned.program, contents)
    return ExportResult(planned, readers, tuple(placed), clock.seconds, recipes)


def _stored_weights(options: ExportOptions) -> Mapping[str, StoredTensor]:
    """What is in the weight files, of which the headers alone are read."""
    files = weight_files(options.weights_files) if options.weights == "reference" else ()
    return all_tensors([open_safetensors(file) for file in files])


def _label(options: ExportOptions) -> str:
    return ", ".join(path.name for path in options.weights_files)


def _recipes(lowered: Sequence[LoweredMethod], contents: Contents) -> list[Recipe]:
    """Of all constants that the methods read."""
    read = {s.content: s for one in lowered for s in one.method.storages if s.role is Role.CONSTANT}
    return [recipe for name in read if (recipe := contents.recipe(name)) is not None]


def _export_methods(source: ModelSource, options: ExportOptions, progress: Progress) -> list[ExportedMethod]:
    methods: list[ExportedMethod] = []
    unwrapped, notes = unwrap(source.methods, pack_weights=options.device != "cpu")
    cast = cast_methods(unwrapped, options.dtype)
    calls = torch.zeros((), dtype=torch.int64)
    if options.weights not in ("reference", "none"):
        refuse_meta(cast)
    with on_the_host(cast):
        for index, method in enumerate(cast):
            progress("export", index / len(source.methods), method.name)
            with watched_attributes(method.module) as kept:
                methods.append(analyse(method, export_method(method)))
            split_complex(methods[-1])
            read_numbers(methods[-1])
            pool_regions(methods[-1])
            pad_ragged(methods[-1])
            count_random(methods[-1], calls)
            methods[-1].notes = tuple(filter(None, [notes.get(method.name), kept_note(kept)]))
    return sorted(methods, key=lambda method: method.name)


def _lower(
    methods: Sequence[ExportedMethod],
    placed: Sequence[PlacedGraph],
    contents: Contents,
    options: ExportOptions,
    tuning: KernelTuning,
    progress: Progress,
) -> list[LoweredMethod]:
    target = lowest(options.architectures)
    how = Lowering(target, options.allow_tf32, options.library_calls, tuning.final, options.library_workspace)
    lowered: list[LoweredMethod] = []
    for index, (method, graph) in enumerate(zip(methods, placed, strict=True)):

        def report(done: int, total: int, index: int = index, name: str = method.name) -> None:
            progress("lower", (index + done / max(total, 1)) / len(methods), name)

        lowered.append(lower_method(method, graph, contents, how, report))
    return lowered


def _compile(specs: Sequence[KernelSpec], options: ExportOptions, progress: Progress) -> tuple[Kernel, ...]:
    if not specs:
        return ()

    def report(done: int, total: int) -> None:
        progress("compile", done / max(total, 1), f"{done}/{total} kernels")

    return compile_kernels(specs, options.architectures, options.jobs, report)


def assemble(
    methods: Sequence[Method], contents: Contents, kernels: Sequence[Kernel], architectures: Sequence[str]
) -> Program:
    """Methods, what they hold, and their kernels as one program."""
    held = [(m.name, s) for m in methods for s in m.storages if s.role in (Role.CONSTANT, Role.STATE)]
    constants, state, names = declare(contents, held)
    renamed = tuple(_with_contents(method, names) for method in methods)
    return Program(renamed, constants, state, tuple(kernels), tuple(architectures) if kernels else ())


def _with_contents(method: Method, names: Mapping[tuple[str, str], str]) -> Method:
    storages = tuple(
        replace(s, content=names[s.content, str(s.device)]) if s.content else s for s in method.storages
    )
    return replace(method, storages=storages)


def _with_notes(program: Program, notes: tuple[str, ...]) -> Program:
    """The program with what a person should know."""
    methods = (replace(method, notes=(*method.notes, *notes)) for method in program.methods)
    return replace(program, methods=tuple(methods)) if notes else program


def _without_buckets(method: Method, buckets: Buckets) -> Method:
    if method.name not in buckets:
        return method
    note = f"buckets of `{method.name}` have no plans and no graphs: device planning is off"
    return replace(method, notes=(*method.notes, note))


def _plan_options(options: ExportOptions, buckets: Buckets) -> PlanOptions:
    return PlanOptions(
        effort=options.planning_effort,
        reorder=options.reorder,
        static=options.device_planning,
        memory_budget=options.memory_budget,
        buckets=buckets,
    )


def _readers(
    program: Program, contents: Contents
) -> tuple[dict[str, Callable[[], memoryview]], dict[str, Recipe]]:
    """Digest -> reader or recipe, for all constants and initial state of the program."""
    wanted = {c.digest for c in program.constants} | {s.initial for s in program.state if s.initial}
    readers: dict[str, Callable[[], memoryview]] = {}
    recipes: dict[str, Recipe] = {}
    for name, digest in contents.digests.items():
        recipe = contents.recipe(name)
        if digest in wanted and recipe is not None:
            recipes.setdefault(digest, recipe)
        elif digest in wanted:

            def read(name: str = name) -> memoryview:
                return contents.read(name)

            readers.setdefault(digest, read)
    return readers, recipes


class _Clock:
    """Tells the progress when a stage begins and ends, and keeps how long it took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._progress(name, 0.0, "")
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self._progress(name, 1.0, "")

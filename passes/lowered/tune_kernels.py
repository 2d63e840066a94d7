"""Measuring configurations of a program's kernels on the GPU at hand: blocks, warps and stages.

Each distinct kernel of a method is compiled in several configurations and timed where it stands, on the
memory and with the arguments of its launch. Kernels whose addresses depend on data are left alone, since what
they read is overwritten by then, and so are those whose programs wait for each other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ...runtime.backend import Operand, Step
from ...runtime.dtypes import DType
from ...runtime.expr import Expr, Size, evaluate
from ...runtime.measure.tune import CALLS_PER_RUN, RUNS, WORTH_IT, Finding, state_values
from ...runtime.program import Kernel, Launch, Ref
from ..kernels import tiled_convolution, tiled_product
from ..kernels.tiles import candidates, cost
from ..size_arithmetic import substitute
from ..tape import KernelSpec
from ..targets import target_of
from .compile_kernels import canonical, compile_candidates
from .kernel_tuning import BLOCKS, TILED, key_of, reconfigured, stem_of

if TYPE_CHECKING:
    from ...runtime.calls.bound import Bound
    from ...runtime.cuda.backend import CudaBackend
    from ...runtime.engine import LoadedMethod, LoadedProgram

_MOST = 12
"""Configurations of a product that are measured: the best by the cost model."""
_TYPES = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16, "fp32": DType.FLOAT32}
_GRIDS = {"product": tiled_product.GRID, "convolution": tiled_convolution.GRID}
_WAITING = ("ws_ptr", "sem_ptr")
"""Parameters by which programs of one launch wait for each other."""
Choice = Mapping[str, int]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class _Case:
    """A kernel, a launch of it, and what it may be replaced by."""

    kernel: Kernel
    launch: Launch
    backend: CudaBackend
    choices: tuple[Choice, ...]


def tune_kernels(
    program: LoadedProgram,
    method: LoadedMethod,
    jobs: int = 0,
    report: Report = lambda done, total: None,
    known: Container[str] = (),
) -> tuple[dict[str, dict[str, int]], list[Finding]]:
    """The best configurations by key, and what was measured. The method must have been called before.

    The arena's contents are overwritten; state is not. ``report`` is told how many kernels are done and how
    many there are. Kernels whose key is ``known`` are passed over.
    """
    bound = method.bound
    assert bound is not None
    chosen: dict[str, dict[str, int]] = {}
    findings: list[Finding] = []
    cases = [case for case in _cases(program, method, bound) if key_of(case.kernel) not in known]
    for done, case in enumerate(cases):
        report(done, len(cases))
        finding, best = _measure(case, bound.operands, bound.bindings, jobs)
        findings.append(finding)
        if best is not None:
            chosen[finding.key] = dict(best)
    if cases:
        report(len(cases), len(cases))
    return chosen, findings


def _cases(program: LoadedProgram, method: LoadedMethod, bound: Bound) -> Iterator[_Case]:
    """One launch of each kernel that can be measured."""
    kernels = {kernel.name: kernel for kernel in program.planned.program.kernels}
    state, seen = state_values(method.description), set[str]()
    for launch in method.description.instructions:
        if not isinstance(launch, Launch) or launch.kernel in seen or state.intersection(launch.writes):
            continue
        seen.add(launch.kernel)
        kernel = kernels[launch.kernel]
        if is_measurable(kernel):
            sizes = _sizes(kernel, launch, bound.bindings)
            backend: Any = program.backends[bound.operands[launch.writes[0]].device]
            architecture = str(backend.info.architecture)
            yield _Case(kernel, launch, backend, tuple(choices_for(kernel, sizes, architecture)))


def _sizes(kernel: Kernel, launch: Launch, bindings: Mapping[str, int]) -> dict[str, int]:
    """Sizes by name: those known at compile time, and those that the launch passes."""
    passed = zip((p.name for p in kernel.parameters), launch.arguments, strict=True)
    known = {name: value for name, value in kernel.constants if isinstance(value, int)}
    return known | {
        name: evaluate(value, bindings) for name, value in passed if isinstance(value, int | Expr)
    }


def is_measurable(kernel: Kernel) -> bool:
    """Whether a kernel may be launched when the memory that it reads has other contents."""
    if any(parameter.name.startswith(_WAITING) for parameter in kernel.parameters):
        return False
    stem = stem_of(kernel.name)
    if not stem.startswith("triton_"):
        return stem in (*TILED, "row_product", "depthwise", "attention", "quantized_row", "quantized_tile")
    return not _depends_on_data(kernel.source)


def _depends_on_data(source: str) -> bool:
    """Whether a generated kernel computes an address from what it loaded: Inductor names that ``tmp``."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr in ("load", "store") or node.func.attr.startswith("atomic"):
            names = {each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name)}
            if any(name.startswith("tmp") for name in names):
                return True
    return False


def choices_for(kernel: Kernel, sizes: Mapping[str, int], architecture: str) -> Iterator[Choice]:
    """Configurations other than the kernel's own, the most promising first."""
    own = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    is_tiled = stem_of(kernel.name) in TILED
    if is_tiled:
        own |= {name: int(str(value)) for name, value in kernel.constants if name in BLOCKS}
    made = _tiles(kernel, sizes, architecture) if is_tiled else _warps(kernel)
    seen = [own]
    for choice in made:
        if choice not in seen:
            seen.append(choice)
            yield choice


def _tiles(kernel: Kernel, sizes: Mapping[str, int], architecture: str) -> Iterator[dict[str, int]]:
    dtype = _TYPES.get(kernel.parameters[0].type.lstrip("*"))
    if dtype is None:
        return
    if stem_of(kernel.name) == "product":
        shape = tuple(sizes.get(name, 0) or 1 for name in ("M", "N", "K", "ITEMS"))
        divides = 0
    else:
        depth = sizes["TAPS"] * sizes["CHANNELS"]
        shape = (sizes.get("PIXELS", 0) or 1, sizes["OUTPUTS"], depth, sizes["GROUPS"])
        divides = sizes["CHANNELS"]
    target = target_of(architecture)
    tiles = sorted(candidates(dtype), key=lambda tile: cost(tile, shape, dtype, target))
    if any(divides % tile.depth == 0 for tile in tiles):
        tiles = [tile for tile in tiles if divides % tile.depth == 0]
    for tile in tiles[:_MOST]:
        for warps in (tile.num_warps, 12 - tile.num_warps if tile.rows * tile.columns >= 64 * 64 else 0):
            if warps:
                yield {**tile.constants, "num_warps": warps, "num_stages": tile.num_stages}


def _warps(kernel: Kernel) -> Iterator[dict[str, int]]:
    """Half and twice as many warps, and a stage more or less where there is a loop."""
    stages = [kernel.num_stages]
    if " for " in kernel.source:
        stages += [s for s in (kernel.num_stages - 1, kernel.num_stages + 1) if 1 <= s <= 5]
    for warps in (kernel.num_warps, kernel.num_warps // 2, kernel.num_warps * 2):
        for count in stages:
            if 1 <= warps <= 16:
                yield {"num_warps": warps, "num_stages": count}


def spec_of(kernel: Kernel, launch: Launch, operands: Mapping[str, Operand]) -> KernelSpec:
    """A kernel of an artifact as it was before it was compiled; the launch tells what divides by 16."""
    names = [parameter.name for parameter in kernel.parameters]
    aligned: list[str] = []
    for name, argument in zip(names, launch.arguments, strict=True):
        value = operands[argument.name].address if isinstance(argument, Ref) else argument
        if isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0:
            aligned.append(name)
    stem = stem_of(kernel.name)
    return KernelSpec(
        name=stem,
        source=kernel.source.replace(f"def {kernel.name}(", f"def {stem}("),
        parameters=tuple((p.name, p.type) for p in kernel.parameters),
        constants=kernel.constants,
        divisible_by_16=tuple(aligned),
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        grid=_GRIDS.get(stem, ("", "", "")),
        call_names=tuple(names),
    )


def _measure(
    case: _Case,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    jobs: int,
) -> tuple[Finding, Choice | None]:
    backend = case.backend
    spec = spec_of(case.kernel, case.launch, operands)
    specs = [canonical(reconfigured(spec, choice)) for choice in case.choices]
    compiled = compile_candidates(specs, backend.info.architecture, jobs)
    steps: list[Step] = [backend.bind(case.launch, operands, bindings)]
    ready: list[Choice] = []
    for choice, made in zip(case.choices, specs, strict=True):
        if made.name in compiled:
            kernel = compiled[made.name]
            backend.load([kernel])
            steps.append(backend.bind(_relaunched(case.launch, kernel, made), operands, bindings))
            ready.append(choice)
    runs = backend.timeline([[step] * CALLS_PER_RUN for step in steps], RUNS)
    seconds = [median(run[place] for run in runs) / CALLS_PER_RUN for place in range(len(steps))]
    best = min(range(len(steps)), key=seconds.__getitem__)
    is_better = best > 0 and seconds[best] <= WORTH_IT * seconds[0]
    number = best - 1 if is_better else None
    finding = Finding(key_of(case.kernel), len(ready), number, seconds[0], seconds[best])
    return finding, ready[best - 1] if is_better else None


def _relaunched(launch: Launch, kernel: Kernel, spec: KernelSpec) -> Launch:
    """The launch with another kernel, and the grid that belongs to its blocks."""
    if stem_of(kernel.name) not in TILED:
        return replace(launch, kernel=kernel.name)
    passed: Sequence[Any] = launch.arguments
    given: dict[str, Any] = {**dict(zip(spec.call_names, passed, strict=True)), **dict(kernel.constants)}
    sizes: dict[str, Size] = {name: value for name, value in given.items() if isinstance(value, int | Expr)}
    x, y, z = (substitute(text, sizes) for text in spec.grid)
    return replace(launch, kernel=kernel.name, grid=(x, y, z))

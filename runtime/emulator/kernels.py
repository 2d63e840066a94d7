"""Launches of interpreted kernels: arguments, the grid in chunks, and what to do when programs diverge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import Operand
from ..errors import ArtifactError, DevplanError, ExecutionError
from ..expr import Expr, evaluate
from ..program import Kernel, Launch, Ref
from . import types
from .access import LOCAL, Running
from .source import Compiled, compile_kernel
from .tensor import Divergence, Memory, Tensor

CHUNK_ELEMENTS = 1 << 19
"""Elements of one tensor that a chunk of programs should have: keeps NumPy busy, and stays in the cache."""


def kernel_function(kernel: Kernel) -> Compiled:
    """The kernel's compiled source; ArtifactError when it is missing, refused or of another signature."""
    if not kernel.source:
        raise ArtifactError(f"kernel `{kernel.name}` carries no source", hint="run the program on CUDA")
    compiled = compile_kernel(kernel.source, kernel.name)
    given = {parameter.name for parameter in kernel.parameters} | {name for name, _ in kernel.constants}
    missing = [name for name in compiled.names if name not in given]
    if missing:
        raise ArtifactError(f"kernel `{kernel.name}` takes `{missing[0]}`, which the artifact does not give")
    return compiled


def bind_launch(
    kernel: Kernel,
    launch: Launch,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    memory: Callable[[Operand], tuple[Memory, int]],
) -> Callable[[], None]:
    """A step that runs the launch. ``memory`` gives the block an operand lies in, and its offset there."""
    compiled = kernel_function(kernel)
    if len(launch.arguments) != len(kernel.parameters):
        raise ArtifactError(
            f"a launch of `{kernel.name}` has {len(launch.arguments)} arguments",
            why=f"the kernel has {len(kernel.parameters)} parameters",
        )
    arguments: dict[str, Any] = {name: value for name, value in kernel.constants if name in compiled.names}
    for parameter, given in zip(kernel.parameters, launch.arguments, strict=True):
        made = _argument(types.parse(parameter.type), given, operands, bindings, memory)
        if parameter.name in compiled.names:
            arguments[parameter.name] = made
    grid = tuple(evaluate(size, bindings) for size in launch.grid)
    chunk = max(1, CHUNK_ELEMENTS // _block_elements(kernel))

    def step() -> None:
        try:
            run_grid(compiled, arguments, (grid[0], grid[1], grid[2]), chunk)
        except DevplanError as error:
            why = "; ".join(part for part in (error.why, str(launch.origin)) if part)
            raise type(error)(f"kernel `{kernel.name}`: {error.what}", why=why, hint=error.hint) from error
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, ArithmeticError) as error:
            what = f"the emulator cannot run kernel `{kernel.name}`"
            raise ExecutionError(what, why=f"{type(error).__name__}: {error} ({launch.origin})") from error

    return step


def _argument(
    dtype: types.Type,
    given: Any,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    memory: Callable[[Operand], tuple[Memory, int]],
) -> Tensor:
    if isinstance(given, Ref):
        if not dtype.is_ptr():
            raise ArtifactError(f"`{given.name}` is passed for a parameter of type `{dtype}`")
        block, offset = memory(operands[given.name])
        return Tensor(np.array([offset], np.int64), dtype, block)
    value = evaluate(given, bindings) if isinstance(given, Expr) else given
    if not isinstance(value, bool | int | float) or dtype.is_ptr():
        raise ArtifactError(f"{value!r} is passed for a parameter of type `{dtype}`")
    return Tensor(np.array([value]).astype(dtype.held), dtype)


def _block_elements(kernel: Kernel) -> int:
    """Elements of the largest block that one program handles, as its compile-time arguments tell."""
    product = 1
    for name, value in kernel.constants:
        if name.upper().endswith("BLOCK") or name.upper().startswith("BLOCK"):
            product *= value if isinstance(value, int) and value > 0 else 1
    return product if product > 1 else 1024


def run_grid(
    compiled: Compiled, arguments: Mapping[str, Any], grid: tuple[int, int, int], chunk: int
) -> None:
    """Run all programs of a grid, ``chunk`` at a time, or one by one where they go different ways."""
    total = grid[0] * grid[1] * grid[2]
    chunk = total if compiled.whole_grid else chunk
    begin = 0
    with np.errstate(all="ignore"):
        while begin < total:
            end = min(begin + chunk, total)
            if not _run_chunk(compiled, arguments, grid, begin, end):
                if compiled.whole_grid:
                    raise ArtifactError("programs that wait for each other go different ways")
                chunk = 1
                continue
            begin = end


def _run_chunk(
    compiled: Compiled, arguments: Mapping[str, Any], grid: tuple[int, int, int], begin: int, end: int
) -> bool:
    """Run programs [begin, end); False, with all writes taken back, when they diverge."""
    index = np.arange(begin, end)
    programs = (index % grid[0], index // grid[0] % grid[1], index // (grid[0] * grid[1]))
    may_diverge = compiled.may_diverge and end - begin > 1
    LOCAL.running = running = Running(programs, grid, [] if may_diverge else None)
    try:
        compiled.function(**arguments)
    except Divergence:
        _take_back(running.undo)
        return False
    finally:
        LOCAL.running = None
    return True


def _take_back(undo: Sequence[Callable[[], None]] | None) -> None:
    if undo is None:
        raise ExecutionError("programs of a kernel diverge where nothing branches")
    for restore in reversed(undo):
        restore()

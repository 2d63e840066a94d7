"""Kernels run by Triton's own interpreter on the emulator's memory: the device ``emulator:triton``.

Slower than the emulator's own engine by orders of magnitude, and needs torch and triton; it is there to check
that engine against. Sources pass the same checks, see the same names, and touch the blocks that they are
given. Programs run one after another, so that kernels whose programs wait for each other are refused.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from ..backend import Operand
from ..errors import ArtifactError, DevplanError, ExecutionError
from ..expr import Expr, evaluate
from ..program import Kernel, Launch, Ref
from . import grids, types
from .source import check_kernel
from .triton_builder import allowed
from .triton_copy import LOCK, Interpreter, interpreter

Bounds = Callable[[Operand], tuple[int, int] | None]
"""First and one past the last address of the block of device memory that an operand lies in."""


def bind_launch(
    kernel: Kernel,
    launch: Launch,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    bounds: Bounds,
) -> Callable[[], None]:
    """A step that runs the launch; see `kernels.bind_launch`. DeviceError without torch or triton."""
    made = interpreter()
    function = _compiled(kernel)
    if len(launch.arguments) != len(kernel.parameters):
        raise ArtifactError(
            f"a launch of `{kernel.name}` has {len(launch.arguments)} arguments",
            why=f"the kernel has {len(kernel.parameters)} parameters",
        )
    arguments: dict[str, Any] = dict(kernel.constants)
    blocks: set[tuple[int, int]] = set()
    for parameter, given in zip(kernel.parameters, launch.arguments, strict=True):
        if isinstance(given, Ref) and (block := bounds(operands[given.name])) is not None:
            blocks.add(block)
        arguments[parameter.name] = _argument(made, parameter.type, given, operands, bindings)
    missing = [name for name in function.arg_names if name not in arguments]
    if missing:
        raise ArtifactError(f"kernel `{kernel.name}` takes `{missing[0]}`, which the artifact does not give")
    grid = tuple(evaluate(size, bindings) for size in launch.grid)
    if grids.WHOLE_GRID in kernel.source and grid[0] > 1:
        raise ExecutionError(
            f"Triton's interpreter cannot run kernel `{kernel.name}`",
            why="its programs wait for each other, and the interpreter runs one after another",
            hint="run it on `emulator`",
        )

    def step() -> None:
        try:
            with LOCK, allowed(sorted(blocks)), np.errstate(all="ignore"):
                function.run(grid=grid, warmup=False, **arguments)
        except made.module.InterpreterError as error:
            raise _failure(kernel, launch, error) from error

    return step


def _failure(kernel: Kernel, launch: Launch, error: BaseException) -> DevplanError:
    """What was at the bottom of an error of the interpreter, with the kernel and the user's line."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, DevplanError):
        why = "; ".join(part for part in (cause.why, str(launch.origin)) if part)
        return type(cause)(f"kernel `{kernel.name}`: {cause.what}", why=why, hint=cause.hint)
    if isinstance(cause, AssertionError):
        return ExecutionError(f"kernel `{kernel.name}`: a kernel's assertion fails", why=str(cause))
    what = f"Triton's interpreter cannot run kernel `{kernel.name}`"
    return ExecutionError(what, why=f"{type(cause).__name__}: {cause} ({launch.origin})")


def _argument(
    made: Interpreter, text: str, given: Any, operands: Mapping[str, Operand], bindings: Mapping[str, int]
) -> Any:
    """A launch's argument as the interpreter's tensor: an address, or a number of the declared type."""
    kind = types.parse(text)
    if isinstance(given, Ref):
        if kind.element_ty is None:
            raise ArtifactError(f"`{given.name}` is passed for a parameter of type `{kind}`")
        pointer = made.tl.pointer_type(made.tl.dtype(kind.element_ty.name))
        address = np.array([operands[given.name].address], np.uint64)
        return made.tl.tensor(made.module.TensorHandle(address, pointer), pointer)
    value = evaluate(given, bindings) if isinstance(given, Expr) else given
    if not isinstance(value, bool | int | float) or kind.is_ptr():
        raise ArtifactError(f"{value!r} is passed for a parameter of type `{kind}`")
    dtype = made.tl.dtype(kind.name)
    return made.tl.tensor(made.module.TensorHandle(np.array([value]).astype(kind.held), dtype), dtype)


def _compiled(kernel: Kernel) -> Any:
    if not kernel.source:
        raise ArtifactError(f"kernel `{kernel.name}` carries no source", hint="run the program on CUDA")
    return _interpreted(kernel.source, kernel.name, tuple(name for name, _ in kernel.constants))


@lru_cache(maxsize=1024)
def _interpreted(source: str, name: str, constants: tuple[str, ...]) -> Any:
    """The interpreter's function of a checked source text."""
    checked, made = check_kernel(source, name), interpreter()
    for argument in checked.functions[name].args.args:
        if argument.arg in constants:
            argument.annotation = ast.Name("constexpr", ast.Load())
    text = ast.unparse(checked.tree)
    path = f"<triton {name} {abs(hash((source, constants))):x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # it reads the source
    scope: dict[str, Any] = _names(made)
    exec(compile(text, path, "exec", dont_inherit=True), scope)
    for each in checked.functions:
        scope[each] = made.module.InterpretedFunction(scope[each])
    return scope[name]


def _names(made: Interpreter) -> dict[str, Any]:
    """The global names of kernels; ``__tl`` is for the interpreter, and no source may use such a name."""
    libdevice = _Facade(made.tl.extra.libdevice)
    mathematics = _Facade(made.tl.math)
    tl = _Facade(
        made.tl,
        math=mathematics,
        core=_Only(get_int_dtype=made.tl.core.get_int_dtype),
        extra=_Only(libdevice=libdevice),
    )
    held: dict[str, Any] = made.helpers.__dict__
    helpers = {name: f for name, f in held.items() if isinstance(f, made.module.InterpretedFunction)}
    helpers |= {"if_mask": _if_mask, "constexpr_next_power_of_2": made.triton.next_power_of_2}
    builtins = (range, float, int, bool, len, min, max, abs, tuple, list)
    return {
        "__name__": "devplan_kernels", "__tl": made.tl, "__builtins__": {"AssertionError": AssertionError},
        "tl": tl, "libdevice": libdevice, "tl_math": mathematics, "math": mathematics,
        "triton": _Only(cdiv=made.triton.cdiv, language=tl), "triton_helpers": _Only(**helpers),
        "constexpr": made.tl.constexpr, "__not": _negation, "__and": _joined("logical_and"),
        "__or": _joined("logical_or"), **{each.__name__: each for each in builtins},
    }  # fmt: skip


class _Only:
    """A namespace of these names."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class _Facade:
    """What a module holds now, as the interpreter replaces it, but not the modules that it imports."""

    def __init__(self, module: ModuleType, **instead: Any) -> None:
        self._module, self._instead = module, instead

    def __getattr__(self, name: str) -> Any:
        value = self._instead.get(name) if name in self._instead else getattr(self._module, name)
        if isinstance(value, ModuleType):
            raise ArtifactError(f"a kernel uses the module `{name}`")
        return value


def _if_mask(mask: Any, value: Any) -> Any:
    return None if mask is None else value


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "handle")


def _negation(value: Any) -> Any:
    return value.__not__() if _is_tensor(value) else not value


def _joined(name: str) -> Callable[..., Any]:
    """``and`` or ``or``: of tensors element by element, as the compiler has it."""

    def join(*values: Any) -> Any:
        made = values[0]
        for value in values[1:]:
            if _is_tensor(made) or _is_tensor(value):
                first, second = (made, value) if _is_tensor(made) else (value, made)
                made = getattr(first, name)(second)
            else:
                made = (made and value) if name == "logical_and" else (made or value)
        return made

    return join

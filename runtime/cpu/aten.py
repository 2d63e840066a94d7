"""Host operators through torch: the only module of the runtime that knows it, imported when one is bound."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import ArtifactError, DeviceError, ExecutionError
from ..expr import Expr
from ..program import Argument, Device, HostCall, Ref


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceError(
            "this program runs operators on the host and needs torch",
            why=str(error),
            hint="install `torch`, or export without host operators",
        ) from error


def torch_dtype(dtype: DType) -> Any:
    """Torch's element type."""
    return getattr(_torch(), str(dtype))


def tensor_at(operand: Operand) -> Any:
    """A torch tensor over host memory at an address. It owns nothing."""
    torch, kind = _torch(), torch_dtype(operand.dtype)
    if operand.numel == 0:
        return torch.empty_strided(operand.shape, operand.strides, dtype=kind)
    buffer = (ctypes.c_char * operand.span_nbytes).from_address(operand.address)
    flat = torch.frombuffer(buffer, dtype=kind)
    return flat.as_strided(operand.shape, operand.strides)


def bind_operator(call: HostCall, operands: Mapping[str, Operand], bindings: Mapping[str, int]) -> Step:
    """The operator with its tensors made once.

    ArtifactError when torch has no such operator or the arguments do not fit its schema.
    """
    overload = find_overload(call.target)
    schema = overload._schema
    wanted = [argument for argument in schema.arguments if not argument.is_out]
    results = [argument for argument in schema.arguments if argument.is_out]
    if len(call.arguments) > len(wanted) or (results and len(results) != len(call.writes)):
        raise ArtifactError(f"`{call.target}` does not take these arguments", why=str(schema))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument, given in zip(wanted, call.arguments, strict=False):
        value = _convert(given, str(argument.type), operands, bindings)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    outs = [tensor_at(operands[name]) for name in call.writes]
    if not results:
        return _functional_step(call, overload, positional, named, outs)
    named |= {argument.name: out for argument, out in zip(results, outs, strict=True)}
    return _out_step(call, overload, positional, named, outs)


def find_overload(target: str) -> Any:
    """The operator named ``namespace::name.overload``; ArtifactError when torch has none."""
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(_torch().ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError) as error:
        raise ArtifactError(f"torch has no operator `{target}`", why=str(error).splitlines()[0]) from error


def _out_step(call: HostCall, overload: Any, args: list[Any], named: dict[str, Any], outs: list[Any]) -> Step:
    shapes = [out.shape for out in outs]
    pairs = list(zip(outs, shapes, strict=True))
    run = _located(call, lambda: overload(*args, **named))

    def step() -> None:
        run()
        for out, shape in pairs:
            if out.shape != shape:  # torch resizes `out`, and the arena would not see the result
                raise ExecutionError(
                    f"`{call.target}` made a result of shape {tuple(out.shape)} instead of {tuple(shape)}",
                    why=str(call.origin),
                )

    return step


def _functional_step(
    call: HostCall, overload: Any, args: list[Any], named: dict[str, Any], outs: list[Any]
) -> Step:
    """An operator without an out variant: its result is copied into place."""
    run = _located(call, lambda: overload(*args, **named))

    def step() -> None:
        result = run()
        made = tuple(cast("Sequence[Any]", result)) if isinstance(result, list | tuple) else (result,)
        for out, value in zip(outs, made, strict=True):
            if out.shape != value.shape or out.dtype != value.dtype:
                raise ExecutionError(
                    f"`{call.target}` made {value.dtype}{tuple(value.shape)}, planned was "
                    f"{out.dtype}{tuple(out.shape)}",
                    why=str(call.origin),
                )
            out.copy_(value)

    return step


def _located(call: HostCall, run: Callable[[], Any]) -> Callable[[], Any]:
    """The operator's own errors, with its name and place."""

    def located() -> Any:
        try:
            return run()
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            why = f"{str(error).splitlines()[0]} ({call.origin})"
            raise ExecutionError(f"`{call.target}` failed on the host", why=why) from error

    return located


def _convert(given: Argument, kind: str, operands: Mapping[str, Operand], bindings: Mapping[str, int]) -> Any:
    """A literal or reference as torch takes it, by the schema's type where the literal is a name."""
    if isinstance(given, Ref):
        return tensor_at(operands[given.name])
    if isinstance(given, tuple):
        return [_convert(item, kind, operands, bindings) for item in given]
    if isinstance(given, Expr):
        return given.evaluate(bindings)
    if isinstance(given, DType):
        return torch_dtype(given)
    if isinstance(given, Device):
        return _torch().device(str(given))
    if isinstance(given, str) and not kind.startswith(("str", "Optional[str]")):
        return getattr(_torch(), given.removeprefix("torch."))  # memory formats and layouts
    return given

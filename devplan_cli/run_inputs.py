"""Inputs of a method: from files, and random for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.dtypes import DType
from ..runtime.errors import UsageError
from ..runtime.expr import Size
from ..runtime.program import Method, Value
from ..runtime.tensors.host import HostTensor, is_native
from .tensor_files import read_many, read_one
from .words import shape as shape_words

_INTEGERS_BELOW = 2
"""Random integers are 0 and 1: valid as token ids and indices whatever the table's size."""


def gather_inputs(
    method: Method,
    single: Sequence[str] = (),
    file: Path | None = None,
    shapes: Sequence[str] = (),
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """All inputs by name, and the names of those that are random.

    Dynamic dimensions that no given input and no shape fixes have ``sizes``, by symbol, or their bound.

    Raises:
        UsageError: a name that the method does not have, a file or shape that cannot be read, or a dynamic
            dimension that neither a given input nor ``--shape`` fixes.
    """
    names = [port.name for port in method.inputs if port.value]
    given: dict[str, Any] = {}
    if file is not None:
        given |= read_many(file)
        _check_names(given, names, method.name, f"`{file}`")
    for text in single:
        name, path = _split(text, "--input", "NAME=FILE.npy")
        _check_names([name], names, method.name, f"`--input {text}`")
        given[name] = read_one(Path(path))
    _check_once(single, "--input")
    _check_once(shapes, "--shape")
    wanted = dict(_parse_shape(text) for text in shapes)
    _check_names(wanted, names, method.name, "`--shape`")
    bindings = _bindings(method, given, wanted, sizes or {})
    generator = np.random.default_rng(seed)
    missing = [name for name in names if name not in given]
    for name in missing:
        given[name] = _random(_value(method, name), wanted.get(name), bindings, generator, name)
    for port in method.inputs:
        if not port.value:
            given.setdefault(port.name, port.literal)
    return {port.name: given[port.name] for port in method.inputs}, missing


def _check_once(texts: Sequence[str], option: str) -> None:
    names = [text.partition("=")[0] for text in texts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"cannot use `{option}`", why=f"`{twice[0]}` is given twice", hint="give it once")


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not (name and equals and rest):
        raise UsageError(f"cannot use `{option} {text}`", why=f"expected `{form}`")
    return name, rest


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, extents = _split(text, "--shape", "NAME=1x98")
    parts = [] if extents == "scalar" else extents.split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(
            f"cannot use `--shape {text}`", why="expected numbers with `x` between them, as in `x=1x98`"
        )
    return name, tuple(int(part) for part in parts)


def _check_names(found: Iterable[str], names: list[str], method: str, where: str) -> None:
    for name in found:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`; " if close else ""
            listed = ", ".join(f"`{n}`" for n in names) or "none"
            why = f"method `{method}` has no such input"
            raise UsageError(
                f"unknown input `{name}` in {where}", why=why, hint=f"{hint}its inputs are {listed}"
            )


def _value(method: Method, name: str) -> Value:
    return method.value(next(port.value for port in method.inputs if port.name == name))


def _bindings(
    method: Method,
    given: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Sizes of the dynamic dimensions, read from the inputs and shapes that are given."""
    bindings: dict[str, int] = {}
    shapes = {name: tuple(np.shape(tensor)) for name, tensor in given.items()} | dict(wanted)
    for symbol in method.symbols:
        if symbol.input in shapes and symbol.dimension < len(shapes[symbol.input]):
            bindings[symbol.name] = shapes[symbol.input][symbol.dimension]
        elif symbol.input not in given:
            bindings.setdefault(symbol.name, sizes.get(symbol.name, symbol.upper))
    return bindings


def _random(
    value: Value,
    wanted: tuple[int, ...] | None,
    bindings: Mapping[str, int],
    generator: np.random.Generator,
    name: str,
) -> Any:
    expected = tuple(_extent(size, bindings) for size in value.shape)
    if wanted is not None and wanted != expected:
        why = f"the program takes {shape_words(value.shape)}"
        raise UsageError(f"cannot use `--shape {name}={shape_words(wanted)}`", why=why)
    return random_tensor(value.dtype, expected, generator)


def _extent(size: Size, bindings: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else size.evaluate(bindings)


def random_tensor(dtype: DType, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    """Normal numbers, fair coins for booleans, 0 and 1 for integers."""
    if dtype.is_floating:
        array = generator.standard_normal(shape, np.float32)
        return array.astype(str(dtype)) if is_native(dtype) else HostTensor.from_float32(array, dtype)
    return generator.integers(0, _INTEGERS_BELOW, shape).astype(str(dtype))

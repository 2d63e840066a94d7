"""The names and bounds that a user gave dynamic dimensions, by input and dimension."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..inductor.interfaces import pytree
from ..narrow import is_mapping, is_sequence
from ..source.model import MethodSource

Place = tuple[str, int]
"""An input's public name and a dimension of it."""


@dataclass(frozen=True)
class Declared:
    """What ``dynamic_shapes`` says: one entry per dimension that is marked dynamic."""

    dims: Mapping[Place, torch.export.Dim]
    """Dimensions with a `Dim` of their own, which has a name and bounds."""
    roots: Mapping[Place, torch.export.Dim]
    """Dimensions that are computed from a `Dim`, as ``2 * n`` is, with what they are computed from."""
    is_complete: bool
    """Whether these are all: false where torch is to find out (hints, expressions, saved programs)."""


def declared(method: MethodSource) -> Declared:
    """The dimensions that the method's ``dynamic_shapes`` name."""
    if method.exported is not None:
        return Declared({}, {}, False)
    try:
        entries = list(_entries(method))
    except (AttributeError, LookupError, TypeError, ValueError):  # torch says better what is wrong with them
        return Declared({}, {}, False)
    dims = {place: entry for place, entry in entries if type(entry) is torch.export.Dim}
    derived = {place: getattr(entry, "root", None) for place, entry in entries}
    roots = {place: root for place, root in derived.items() if isinstance(root, torch.export.Dim)}
    return Declared(dims, roots, len(dims) == len(entries))


def parameter_names(method: MethodSource, count: int) -> list[str]:
    """Public names of the first ``count`` positional arguments: parameters of ``forward``, or ``input0``."""
    names: list[str] = []
    for parameter in _parameters(method)[:count]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return names + [f"input{index}" for index in range(len(names), count)]


def _parameters(method: MethodSource) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method.module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _entries(method: MethodSource) -> Iterator[tuple[Place, Any]]:
    """Every entry of ``dynamic_shapes`` that marks a dimension, with its place."""
    shapes = method.dynamic_shapes
    if isinstance(shapes, torch.export.ShapesCollection):
        collected: Any = shapes
        shapes = collected.dynamic_shapes(method.module, method.args, method.kwargs)
    if not shapes:
        return
    names = parameter_names(method, len(method.args))
    specs = _positional(method, shapes)
    for index, (name, value) in enumerate(zip(names, method.args, strict=True)):
        yield from _walk(name, value, specs[index] if index < len(specs) else None)
    if is_mapping(shapes):
        for name, value in method.kwargs.items():
            yield from _walk(name, value, shapes.get(name))
    else:
        for (name, value), spec in zip(method.kwargs.items(), shapes[len(method.args) :], strict=False):
            yield from _walk(name, value, spec)


def _positional(method: MethodSource, shapes: Any) -> list[Any]:
    """The entries of the positional arguments in order; a variadic parameter's come as one tuple."""
    if not is_mapping(shapes):
        return list(shapes)
    specs: list[Any] = []
    for parameter in _parameters(method):
        spec = shapes.get(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            specs += list(spec) if is_sequence(spec) else []
            break
        specs.append(spec)
    return specs


def _walk(name: str, value: Any, spec: Any) -> Iterator[tuple[Place, Any]]:
    if spec is None:
        return
    if isinstance(value, torch.Tensor) and (is_mapping(spec) or is_sequence(spec)):
        pairs = spec.items() if is_mapping(spec) else enumerate(spec)
        for dimension, entry in pairs:
            if entry is not None and not isinstance(entry, int):
                yield (name, int(dimension) % max(value.ndim, 1)), entry
    elif is_mapping(value) and is_mapping(spec):
        for key, inner in value.items():
            yield from _walk(f"{name}.{key}", inner, spec.get(key))
    elif is_sequence(value) and is_sequence(spec):
        for index, (inner, part) in enumerate(zip(value, spec, strict=False)):
            yield from _walk(f"{name}.{index}", inner, part)
    else:  # a container of the user's own: torch knows how to look into it
        for entry in pytree.tree_leaves(spec):
            if entry is not None:
                yield (name, -1), ...

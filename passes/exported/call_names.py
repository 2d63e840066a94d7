"""Names in a call of a module: what its inputs may be called, and what its outputs are called."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from ..inductor.interfaces import pytree


def parameters_of(module: torch.nn.Module) -> dict[str, inspect.Parameter] | None:
    """The parameters of ``forward`` by name; None where they cannot be told.

    A wrapper may take more than the function that it wraps, and a hook may change what it is given.
    """
    forward: Any = module.forward
    if hasattr(forward, "__wrapped__") or vars(module).get("_forward_pre_hooks"):
        return None
    try:
        return dict(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return None


def wrong_name(module: torch.nn.Module, names: Iterable[object]) -> tuple[str, str] | None:
    """The first name that is no input of the module, and which are; None when all are."""
    parameters = parameters_of(module)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    valid = [name for name, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY]
    for name in names:
        if name not in valid:
            near = get_close_matches(str(name), valid, n=1)
            hint = f"did you mean `{near[0]}`; " if near else ""
            return str(name), f"{hint}its inputs are {', '.join(f'`{each}`' for each in valid) or 'none'}"
    return None


def misfit(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the module cannot be called so, as Python says it; empty when it can."""
    parameters = parameters_of(module)
    if parameters is None:
        return ""
    try:
        inspect.Signature(list(parameters.values())).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def output_names(spec: Any, count: int) -> list[str]:
    """A name for each of ``count`` flat outputs: ``output``, ``output0`` and on, or the keys of a dict.

    Where anything has a key, names are paths: ``hidden.0``, ``output1.mask``. Dicts, named tuples, data
    classes and model outputs that torch knows have keys. Numbers where names would not tell outputs apart.
    """
    numbered = ["output"] if count == 1 else [f"output{index}" for index in range(count)]
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(count), spec))
    except Exception:  # a type of the user's own that cannot be made from numbers, or has no keys
        return numbered
    steps = [[_key(part) for part in path] for path, _ in paths]
    if not any(isinstance(step, str) for path in steps for step in path):
        return numbered  # nothing has a key
    names = [".".join(map(str, _headed(path))) for path in steps]
    return names if len(names) == count == len(set(names)) else numbered


def _key(part: Any) -> int | str:
    """A step of a path: an index of a sequence, else a key or attribute by its name."""
    if hasattr(part, "idx"):
        return int(part.idx)
    return str(part.key) if hasattr(part, "key") else str(getattr(part, "name", part))


def _headed(path: Sequence[int | str]) -> Sequence[int | str]:
    """The path with a word in front of a leading number."""
    return path if path and isinstance(path[0], str) else [f"output{path[0]}", *path[1:]]

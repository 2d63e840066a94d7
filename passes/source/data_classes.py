"""Data classes and caches in what models take and return: torch knows those that are registered alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import torch

from ..inductor.interfaces import pytree
from ..narrow import is_mapping, is_sequence
from .caches import is_cache, know_caches


def know_data_classes(value: Any) -> None:
    """Register every data class within a value, so that its fields are seen as those of a dict would be.

    Caches of keys and values as `transformers` returns them, too.
    """
    if is_mapping(value):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            _register(type(value))
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif is_cache(value):
        know_caches()
    if is_sequence(value):
        for each in value:
            know_data_classes(each)


def _register(kind: type[Any]) -> None:
    with contextlib.suppress(ValueError):  # not made of its fields alone: refused where it is met
        torch.export.register_dataclass(kind)


@contextlib.contextmanager
def known_results(module: torch.nn.Module) -> Generator[None]:
    """While active, data classes that the module returns are registered."""
    hook = module.register_forward_hook(lambda _module, _inputs, result: know_data_classes(result))
    try:
        yield
    finally:
        hook.remove()

"""timm without torchvision: just enough names for its models to import, none of which they call."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, ClassVar


class _Absent(types.ModuleType):
    """A module that has every name; each is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"BILINEAR": "bilinear", "BICUBIC": "bicubic", "NEAREST": "nearest"})
        for constant in ("BOX", "HAMMING", "LANCZOS"):
            setattr(made, constant, constant.lower())
        setattr(self, name, made)
        return made


def install() -> None:
    """Stand in for torchvision where it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in (
        "torchvision",
        "torchvision.ops",
        "torchvision.ops.misc",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.datasets",
        "torchvision.utils",
    ):
        module = _Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

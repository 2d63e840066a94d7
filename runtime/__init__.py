"""Load and run an artifact. Imports neither torch nor the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import LoadedProgram
    from .loading import load_planned
    from .method import LoadedMethod
    from .start import load
    from .tensors.host import HostTensor

_HOMES = {
    "HostTensor": "tensors.host",
    "LoadedMethod": "method",
    "LoadedProgram": "engine",
    "load": "start",
    "load_planned": "loading",
}

__all__ = ["HostTensor", "LoadedMethod", "LoadedProgram", "load", "load_planned"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: NumPy and the engine are not needed to inspect."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")

"""Export PyTorch models to planned device programs, and run them without torch.

This folder is the package ``devplan``: ``planner/text.py`` is ``devplan.planner.text``. Importing it costs
nothing: `export` brings torch in when it is first called, `load` never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .passes.api import Exported as Exported
    from .passes.api import export as export
    from .runtime.engine import LoadedProgram as LoadedProgram
    from .runtime.start import load as load
    from .runtime.tensors.tensor import DeviceTensor as DeviceTensor

__version__ = "0.1.0"
__all__ = ["DeviceTensor", "Exported", "LoadedProgram", "__version__", "export", "load"]


_HOMES = {
    "DeviceTensor": "runtime.tensors.tensor",
    "Exported": "passes.api",
    "export": "passes.api",
    "LoadedProgram": "runtime.engine",
    "load": "runtime.start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    from importlib import import_module

    try:
        home = import_module(f".{_HOMES[name]}", __name__)
    except ModuleNotFoundError as error:
        from .runtime.errors import EXPORT_PACKAGES, not_installed

        if error.name not in EXPORT_PACKAGES:
            raise
        raise not_installed(error.name, "cannot export") from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)

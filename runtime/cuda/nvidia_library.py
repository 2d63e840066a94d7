"""Where NVIDIA's libraries are: in the wheels of `devplan[cuda]`, in a toolkit, or on the loader's path."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceError
from . import warm

_HINT = 'install it: `pip install "devplan[cuda]"`, or export with `--no-library-calls`'


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """What the plan offered a library's call and what the chosen algorithm needs, in bytes."""

    function: str
    offered: int
    needed: int


def load(name: str, title: str) -> tuple[ctypes.CDLL, str]:
    """Load a library by NVIDIA's short name (``cublasLt``); give it and its path.

    Raises:
        DeviceError: it is nowhere, with the command that installs it.
    """
    warm.wait_for_library(name)
    if (mapped := warm.mapped_library(name)) is not None:  # and importing the pathfinder takes 40 ms
        return ctypes.CDLL(mapped), mapped
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
    except ImportError as error:
        raise DeviceError(
            f"cannot look for {title}", why=str(error), hint="pip install cuda-python"
        ) from error
    try:
        found: Any = pathfinder.load_nvidia_dynamic_lib(name)
    except RuntimeError as error:
        raise DeviceError(f"{title} was not found", why=str(error).splitlines()[0], hint=_HINT) from error
    path = str(found.abs_path or name)
    try:
        return ctypes.CDLL(path), path
    except OSError as error:
        raise DeviceError(f"{title} cannot be loaded", why=str(error), hint=_HINT) from error

"""Whose code a frame of Python runs: torch's, ours, Python's own, or the user's."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent
_INSTALLED_TORCH = ("/site-packages/torch/", "/dist-packages/torch/")
"""Parts of paths that a program exported on another machine brings along."""

_OURS = tuple(Path(__file__).parents[2] / room for room in ("passes", "planner", "runtime", "devplan_cli"))
_PYTHON = Path(sysconfig.get_path("stdlib"))
_PACKAGES = ("site-packages", "dist-packages")


def is_torchs(file: str) -> bool:
    """Whether the file is part of torch."""
    path = file.replace("\\", "/")
    return Path(file).is_relative_to(_TORCH) or any(part in path for part in _INSTALLED_TORCH)


def is_users(file: str) -> bool:
    """Whether the file is none of torch's, of ours (whatever our folder is called) or of Python's."""
    path = Path(file)
    pythons = path.is_relative_to(_PYTHON) and not any(part in path.parts for part in _PACKAGES)
    return not ("<" in file or pythons or is_torchs(file) or any(path.is_relative_to(room) for room in _OURS))

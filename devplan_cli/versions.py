"""Versions of what devplan builds on, read from package metadata: nothing heavy is imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from ..runtime.errors import DevplanError, not_installed

FORMAT = "ET12"
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}
"""The Triton that each PyTorch's compiler was made for, as its CUDA wheels require it."""


def installed(name: str) -> str:
    """The version of a distribution, or ``absent``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def version_lines() -> list[str]:
    """What ``devplan --version`` prints."""
    from .. import __version__

    names = ("torch", "triton", "cuda-python")
    rows = [("devplan", __version__), ("format", FORMAT), *((name, installed(name)) for name in names)]
    return [f"{name} {number}" for name, number in rows]


def wanted_triton(torch: str) -> str:
    """``3.7`` for torch 2.13: from torch's own metadata where it says so, else from our table, else empty."""
    for requirement in _requirements("torch"):
        if match := re.match(r"(?:pytorch-)?triton\s*\(?==\s*(\d+\.\d+)", requirement):
            return match[1]
    return TRITON_OF_TORCH.get(_minor(torch), "")


def triton_mismatch() -> tuple[str, str]:
    """(what is wrong, the mend) when Triton and PyTorch do not belong together; empty texts else."""
    torch, triton = installed("torch"), installed("triton")
    if torch == "absent" or triton == "absent":
        return "", ""
    wanted = wanted_triton(torch)
    if not wanted or _minor(triton) == wanted:
        return "", ""
    return f"triton {triton} does not belong to torch {torch}", f'pip install "triton=={wanted}.*"'


def require_export(device: str) -> list[str]:
    """Notes on what is installed; `DevplanError` with the command that mends it when an export cannot be."""
    torch = installed("torch")
    if torch == "absent":
        raise not_installed("torch", "cannot export")
    if device == "cuda" and installed("triton") == "absent":
        wanted = wanted_triton(torch)
        package = f'"triton=={wanted}.*"' if wanted else "triton"
        raise DevplanError(
            "cannot export for CUDA", why="triton is not installed", hint=f"pip install {package}"
        )
    problem, mend = triton_mismatch()
    return [f"{problem}; if kernels fail to compile: {mend}"] if problem and device == "cuda" else []


def _requirements(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])

"""The checks of `doctor`. Each finds out one thing, without importing anything heavy, and knows the mend."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gpus, versions
from .words import size

_OLDEST_DRIVER = 12000
_LEAST_FREE = 1 << 30
_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. ``needed_for`` lists ``export``, ``run``, ``emulator``, ``cpu``."""

    name: str
    ok: bool
    found: str
    needed_for: tuple[str, ...]
    mend: str = ""


def all_checks() -> list[Finding]:
    """Everything, in the order in which a person would mend it."""
    return [check() for check in CHECKS]


def document(findings: list[Finding]) -> dict[str, Any]:
    """For JSON: what can be done here, and all findings."""
    rows = [{**vars(finding), "needed_for": list(finding.needed_for)} for finding in findings]
    return {"can": abilities(findings), "checks": rows}


def abilities(findings: list[Finding]) -> dict[str, bool]:
    """Whether each use is possible here: no check that it needs has failed."""
    uses = ("export", "run", "emulator", "cpu")
    return {use: all(f.ok for f in findings if use in f.needed_for) for use in uses}


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    mend = "install Python 3.11 or newer"
    return Finding(
        "python", sys.version_info[:2] >= _PYTHON, found, ("export", "run", "emulator", "cpu"), mend
    )


def _torch() -> Finding:
    found = versions.installed("torch")
    mend = 'pip install "devplan[export]"'
    return Finding("torch", found != "absent", found, ("export", "cpu"), mend)


def _triton() -> Finding:
    found, torch = versions.installed("triton"), versions.installed("torch")
    wanted = versions.wanted_triton(torch) if torch != "absent" else ""
    package = f'"triton=={wanted}.*"' if wanted else '"devplan[export]"'
    return Finding("triton", found != "absent", found, ("export",), f"pip install {package}")


def _match() -> Finding:
    problem, mend = versions.triton_mismatch()
    torch, triton = versions.installed("torch"), versions.installed("triton")
    both = "absent" not in (torch, triton)
    found = problem or (f"torch {torch} with triton {triton}" if both else "not both installed")
    return Finding("triton matches torch", not problem, found, ("export",), mend)


def _ptxas() -> Finding:
    spec = importlib.util.find_spec("triton") if versions.installed("triton") != "absent" else None
    folder = Path(spec.origin).parent if spec and spec.origin else None
    tools = sorted(folder.glob("backends/nvidia/bin/ptxas*")) if folder else []
    found = ", ".join(tool.name for tool in tools) or "absent"
    return Finding("ptxas in triton", bool(tools), found, ("export",), "reinstall triton from its own wheel")


def _cuda_python() -> Finding:
    found = versions.installed("cuda-python")
    return Finding("cuda-python", found != "absent", found, ("run",), "pip install cuda-python")


def _driver() -> Finding:
    version = gpus.driver_version()
    mend = "install the NVIDIA driver; exporting and the emulator need none"
    if version is None:
        return Finding("NVIDIA driver", False, "absent", ("run",), mend)
    found = f"for CUDA {version // 1000}.{version % 1000 // 10}"
    return Finding(
        "NVIDIA driver", version >= _OLDEST_DRIVER, found, ("run",), "install a driver for CUDA 12 or newer"
    )


def _gpus() -> Finding:
    present = gpus.present_gpus()
    found = "; ".join(f"{gpu.name} ({gpu.architecture}, {size(gpu.nbytes)})" for gpu in present) or "none"
    mend = "run on a machine with a GPU, or here on the emulator"
    return Finding("GPU", bool(present), found, ("run",), mend)


def _library(name: str, files: tuple[str, ...], folder: str, mend: str) -> Finding:
    where = _find_library(files, folder)
    return Finding(name, bool(where), where or "absent", ("run",), mend)


def _find_library(files: tuple[str, ...], folder: str) -> str:
    """The wheel's copy, else the system's."""
    for entry in sys.path:
        for file in files:
            hits = sorted(Path(entry).glob(f"nvidia/{folder}/lib/{file}")) if entry else []
            if hits:
                return str(hits[0])
    for file in files:
        try:
            ctypes.CDLL(file)
            return file
        except OSError:
            continue
    return ""


def _cublaslt() -> Finding:
    files = ("libcublasLt.so.13", "libcublasLt.so.12")
    return _library("cuBLASLt", files, "*", 'pip install "devplan[cuda]"')


def _cudnn() -> Finding:
    return _library("cuDNN", ("libcudnn.so.9",), "cudnn", 'pip install "devplan[cuda]"')


def _cudnn_frontend() -> Finding:
    found = versions.installed("nvidia-cudnn-frontend")
    return Finding("cuDNN frontend", found != "absent", found, ("run",), 'pip install "devplan[cuda]"')


def _cache() -> Finding:
    base = Path(os.environ.get("DEVPLAN_CACHE_DIR") or Path.home() / ".cache" / "devplan")
    existing = next(folder for folder in (base, *base.parents) if folder.is_dir())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    found = f"{base}, {size(free)} free" + ("" if writable else ", not writable")
    mend = "free some space, or point DEVPLAN_CACHE_DIR at another folder"
    return Finding("kernel cache", writable and free >= _LEAST_FREE, found, ("export",), mend)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _triton, _match, _ptxas, _cache,
    _cuda_python, _driver, _gpus, _cublaslt, _cudnn, _cudnn_frontend,
)  # fmt: skip

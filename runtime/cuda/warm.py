"""Starting a GPU and mapping libraries in the background, while Python imports and files are read.

Making a context takes the driver 0.2 to 0.4 s, and mapping cuBLASLt's half gigabyte is not free either. Both
happen outside Python's lock, so that a cold start pays only for the longest of them. This module and what it
imports are the first that `load` imports, and stay small: nothing waits for cuda-python here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .native import map_library, native_driver

if TYPE_CHECKING:
    from ..dtypes import DType

_DRIVER, _CUBLASLT, _CUDNN = "driver", "cublasLt", "cudnn"
_begun: dict[str, threading.Thread] = {}
_contexts: dict[int, int] = {}
_taken: set[int] = set()
_mapped: dict[str, str] = {}
_lock = threading.Lock()


def begin_driver() -> None:
    """Start initialising the driver. Makes no context; what goes wrong is raised by who needs it later."""
    _begin(_DRIVER, _initialise)


def begin_context(ordinal: int) -> None:
    """Start making the primary context of a GPU; `take_context` gets it."""
    begin_driver()
    _begin(f"context {ordinal}", lambda: _make_context(ordinal))


def begin_cublaslt(ordinal: int, dtype: DType) -> None:
    """Start mapping cuBLASLt, where a wheel has it, and make its first choice of an algorithm.

    That one takes 0.2 s, those that follow a few microseconds. Elsewhere it is found when it is needed.
    """
    _begin(_CUBLASLT, lambda: _prepare_cublaslt(ordinal, dtype))


def begin_cudnn() -> None:
    """Start mapping cuDNN, where a wheel has it; elsewhere it is found when it is needed."""
    _begin(_CUDNN, _map_cudnn)


def take_context(ordinal: int) -> int | None:
    """The handle of the context that was begun, its release the taker's now; None when there is none."""
    _wait(f"context {ordinal}")
    with _lock:
        if ordinal in _taken:
            return None
        _taken.add(ordinal)
        return _contexts.get(ordinal)


def wait_for_library(name: str) -> None:
    """Wait until ``cublasLt`` or ``cudnn`` is ready, if it was begun."""
    _wait(name)


def mapped_library(name: str) -> str | None:
    """The path of ``cublasLt`` where it was mapped from a wheel, to be asked for once it was waited for."""
    return _mapped.get(name)


def _begin(name: str, work: Callable[[], None]) -> None:
    with _lock:
        if name not in _begun:
            # Python waits for it where a process ends early, as after bad input: a daemon thread that comes
            # back from the driver then would abort the process, and its exit code would be lost.
            _begun[name] = threading.Thread(target=work, name=f"devplan {name}", daemon=False)
            _begun[name].start()


def _wait(name: str) -> None:
    thread = _begun.get(name)
    if thread is not None:
        thread.join()


def _initialise() -> None:
    driver = native_driver()
    if driver is not None:
        driver.initialise()


def _make_context(ordinal: int) -> None:
    _wait(_DRIVER)
    driver = native_driver()
    context = driver.retain_context(ordinal) if driver is not None else None
    if context is not None:
        _contexts[ordinal] = context


def _prepare_cublaslt(ordinal: int, dtype: DType) -> None:
    path = find_cublaslt()
    if path is None:
        return
    if not map_library(path, os.RTLD_NOW | os.RTLD_GLOBAL):
        return  # who needs it says why
    _mapped[_CUBLASLT] = str(path)
    _wait(f"context {ordinal}")
    context, driver = _contexts.get(ordinal), native_driver()
    if context is not None and driver is not None and driver.enter(context):
        from .cublaslt_api import first_heuristic

        first_heuristic(path, dtype)


def _map_cudnn() -> None:
    folder = find_cudnn()
    if folder is None:
        return
    for part in ("", "_graph", "_heuristic", "_engines_precompiled", "_engines_runtime_compiled"):
        path = folder / f"libcudnn{part}.so.9"
        if path.exists():
            map_library(path, os.RTLD_NOW | os.RTLD_GLOBAL)


def find_cublaslt() -> Path | None:
    """cuBLASLt in NVIDIA's wheels along ``sys.path``, or None."""
    return _find("nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12")


def find_cudnn() -> Path | None:
    """The folder of cuDNN in NVIDIA's wheels along ``sys.path``, or None."""
    found = _find("nvidia/cudnn/lib/libcudnn.so.9")
    return found.parent if found else None


def _find(*places: str) -> Path | None:
    for folder in map(Path, filter(None, sys.path)):
        for place in places:
            if (path := folder / place).exists():
                return path
    return None

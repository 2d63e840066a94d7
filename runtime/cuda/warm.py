"""Starting a GPU and mapping libraries in the background, while Python imports and files are read.

Making a context takes the driver 0.2 to 0.4 s, and mapping cuBLASLt's half gigabyte is not free either. Both
happen outside Python's lock, so that a cold start pays only for the longest of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DevplanError

_DRIVER, _CUBLASLT = "driver", "cublasLt"
_begun: dict[str, threading.Thread] = {}
_contexts: dict[int, Any] = {}
_lock = threading.Lock()


def begin_driver() -> None:
    """Start initialising the driver. Makes no context; what goes wrong is raised by who needs it later."""
    _begin(_DRIVER, _initialise)


def begin_context(ordinal: int) -> None:
    """Start making the primary context of a GPU; `take_context` gets it."""
    begin_driver()
    _begin(f"context {ordinal}", lambda: _make_context(ordinal))


def begin_cublaslt() -> None:
    """Start mapping cuBLASLt, where a wheel has it; elsewhere it is found when it is needed."""
    _begin(_CUBLASLT, _map_cublaslt)


def take_context(ordinal: int) -> Any:
    """The context that was begun, whose release is the taker's now; None when there is none to take."""
    _wait(f"context {ordinal}")
    with _lock:
        _begun.pop(f"context {ordinal}", None)
        return _contexts.pop(ordinal, None)


def wait_for_cublaslt() -> None:
    """Wait until the mapping that was begun is done, if one was."""
    _wait(_CUBLASLT)


def _begin(name: str, work: Callable[[], None]) -> None:
    with _lock:
        if name not in _begun:
            _begun[name] = threading.Thread(target=work, name=f"devplan {name}", daemon=True)
            _begun[name].start()


def _wait(name: str) -> None:
    thread = _begun.get(name)
    if thread is not None:
        thread.join()


def _initialise() -> None:
    from .driver import initialise

    try:
        initialise()
    except DevplanError:
        return


def _make_context(ordinal: int) -> None:
    from .driver import initialise

    _wait(_DRIVER)
    try:
        cu = initialise()
    except DevplanError:
        return
    status, device = cu.cuDeviceGet(ordinal)
    if not status:
        status, context = cu.cuDevicePrimaryCtxRetain(device)
        if not status:
            _contexts[ordinal] = context


def _map_cublaslt() -> None:
    path = find_cublaslt()
    if path is not None:
        # `ctypes.CDLL` holds Python's lock while it maps; a foreign call of `dlopen` itself does not.
        opens = ctypes.CDLL(None).dlopen
        opens.restype, opens.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        opens(os.fsencode(path), os.RTLD_NOW | os.RTLD_GLOBAL)


def find_cublaslt() -> Path | None:
    """cuBLASLt in NVIDIA's wheels along ``sys.path``, or None."""
    for folder in map(Path, filter(None, sys.path)):
        for place in ("nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"):
            if (path := folder / place).exists():
                return path
    return None

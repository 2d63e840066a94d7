"""The driver's first calls by ctypes, which need nothing imported: cuda-python's module takes 0.05 to 0.1 s.

What goes wrong here is not told: whoever needs the driver asks it again through cuda-python, and reports.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

_DRIVER = Path("libcuda.so.1")


class NativeDriver:
    """``libcuda`` as the loader finds it. The handles are those that cuda-python wraps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._initialise, self._get = library.cuInit, library.cuDeviceGet
        self._retain, self._enter = library.cuDevicePrimaryCtxRetain, library.cuCtxSetCurrent

    def initialise(self) -> bool:
        """Start the driver; whether it did."""
        return not self._initialise(0)

    def retain_context(self, ordinal: int) -> int | None:
        """Make the primary context of a GPU, or count it once more; None where that fails."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if self._get(ctypes.byref(device), ctypes.c_int(ordinal)):
            return None
        if self._retain(ctypes.byref(context), device):
            return None
        return context.value

    def enter(self, context: int) -> bool:
        """Make a context current on the calling thread; whether it is."""
        return not self._enter(ctypes.c_void_p(context))


@cache
def native_driver() -> NativeDriver | None:
    """The driver, or None where the loader finds none, or one without these calls."""
    try:
        map_library(_DRIVER, os.RTLD_NOW)
        return NativeDriver(ctypes.CDLL(str(_DRIVER)))
    except (OSError, AttributeError):
        return None


def map_library(path: Path, mode: int) -> bool:
    """Map a library outside Python's lock, which `ctypes.CDLL` holds meanwhile; whether that went well."""
    opens = ctypes.CDLL(None).dlopen
    opens.restype, opens.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return bool(opens(os.fsencode(path), mode))

"""Let a CPU build of PyTorch switch to CUDA devices that only exist as fake tensors.

Some of PyTorch's Python bindings (`Tensor.contiguous`, indexing) set the current device before they dispatch,
fake tensors included, and a build without CUDA has nothing to set it with. PyTorch itself puts a guard that
does nothing in place where a CUDA build finds no GPU; for CPU builds this module borrows the guard of the
``meta`` device, which does nothing either.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META, _DEVICE_TYPES = 1, 14, 20


@contextlib.contextmanager
def cuda_guard() -> Iterator[None]:
    """While active, code that sets the current CUDA device does so without effect instead of failing."""
    registry = _registry()
    if registry is None or registry[_CUDA] or not registry[_META]:
        yield
        return
    registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = None


def _registry() -> ctypes.Array[ctypes.c_void_p] | None:
    """PyTorch's table of guards by device type; None where the library has another name or form."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):
        return (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(str(path)), _REGISTRY)
    return None

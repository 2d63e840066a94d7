"""The emulator: a device made of host memory, which needs neither a GPU nor torch nor triton.

Generated kernels run as NumPy operations over all programs of a grid at once (`tensor.py`), library calls in
NumPy (`library.py`), copies as copies between blocks that cannot be mistaken for each other (`backend.py`).
"""

from __future__ import annotations

from .backend import EmulatorBackend, Machine

__all__ = ["EmulatorBackend", "Machine"]

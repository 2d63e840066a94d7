"""Padding that survives fusion.

Inductor writes a masked load with its padding value as one ``tl.load``. Where the kernel itself computed
what is loaded there is no load, only a value in a register, and the padding is lost: a padded average pool
over one pixel that is fused with what computes it sums the pixel nine times. Here such a value is padded by
a ``where``.

A load from a place that is a constant has no mask at all, though it may stand where a mask hides it because
that place is outside of the tensor. Such a one reads the first element instead, which the mask hides as well.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import virtualized
from torch._inductor.codegen.triton import TritonKernel, TritonKernelOverrides

_V: Any = virtualized.V
_ops: Any = virtualized.ops
OWNER: Any = TritonKernelOverrides
ATTRIBUTE = "masked"
_by_inductor: Any = OWNER.masked
KERNEL: Any = TritonKernel
LOAD = "load"
_load_by_inductor: Any = KERNEL.load


def _masked(mask: Any, body: Any, other: Any) -> Any:
    if not _reads_register(body):
        return _by_inductor(mask, body, other)
    with _V.kernel.mask_loads(mask, value=None) as inner:
        result = body()
    padding = _ops.constant(bool(other) if result.bounds.is_bool else other, result.dtype)
    made = _ops.where(inner, result, padding)
    return getattr(made, "value", made)


MASKED = staticmethod(_masked)
"""What stands in for the attribute."""


def _reads_register(body: Any) -> bool:
    """Whether a masked body is a load of a buffer that the kernel has just computed."""
    outputs = body.graph.find_nodes(op="output")
    loads = [arg for node in outputs for arg in node.args if getattr(arg, "target", None) == "load"]
    return any(load.args[1] in _V.kernel.cse.store_cache for load in loads)


def load_inside(kernel: Any, name: str, index: Any) -> Any:
    """What stands in for the kernel's ``load``."""
    if kernel._load_mask is not None and not index.free_symbols:
        place = int(index.expand(identity=True))
        if place < 0 or place >= _extent(name):
            index = index * 0
    return _load_by_inductor(kernel, name, index)


def _extent(name: str) -> float:
    """Elements of a buffer's storage; infinity where that is not known."""
    held = _V.graph.try_get_buffer(name)
    size: Any = None if held is None else held.get_layout().storage_size()
    return int(size) if isinstance(size, int) or getattr(size, "is_number", False) else float("inf")

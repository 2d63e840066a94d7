"""Padding that survives fusion.

Inductor writes a masked load with its padding value as one ``tl.load``. Where the kernel itself computed
what is loaded there is no load, only a value in a register, and the padding is lost: a padded average pool
over one pixel that is fused with what computes it sums the pixel nine times. Here such a value is padded by
a ``where``.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import virtualized
from torch._inductor.codegen.triton import TritonKernelOverrides

_V: Any = virtualized.V
_ops: Any = virtualized.ops
OWNER: Any = TritonKernelOverrides
ATTRIBUTE = "masked"
_by_inductor: Any = OWNER.masked


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

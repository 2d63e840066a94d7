"""Which operators a device's backend can run, asked before anything is lowered."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...runtime.program import Device
from ..inductor.interfaces import is_composite
from ..inductor.overloads import is_overload
from .decompositions import host_replacements, replacements
from .library_calls import has_library_call

_PLAIN_LINEAR_ALGEBRA = {
    "norm", "vector_norm", "matrix_norm", "multi_dot", "vecdot", "diagonal", "cross", "matmul", "vander",
}  # fmt: skip
"""What of ``linalg`` is made of products and sums; all else factorises a matrix."""


def supports(operator: str, device: Device) -> str | None:
    """None if the device runs the operator, else the reason why not."""
    if device.kind == "cpu":
        is_ours = operator.startswith("devplan.") and resolve(operator) not in host_replacements()
        return "its kernel is for GPUs" if is_ours else None
    return _on_cuda(operator)


@lru_cache(maxsize=4096)
def _on_cuda(operator: str) -> str | None:
    overload = resolve(operator)
    if overload is None:
        return None  # higher-order operators are judged by their bodies
    if overload in replacements() or has_library_call(operator):
        return None
    from ..inductor.lowering import has_cuda_lowering

    if torch.Tag.nondeterministic_seeded in overload.tags and not is_composite(overload):
        return "it draws random numbers that have no rule here: make them an input of the model"
    if _factorises(operator):
        return "it factorises a matrix, which has no kernel here"
    if has_cuda_lowering(overload) or is_composite(overload):
        return None
    return "no kernel is generated for it and no library has one"


def _factorises(operator: str) -> bool:
    """Whether an operator ends in a matrix factorization, whatever composes it."""
    name = operator.split(".")[1]
    return name.startswith("linalg_") and name.removeprefix("linalg_") not in _PLAIN_LINEAR_ALGEBRA


def resolve(operator: str) -> Any:
    """The overload of a name such as ``aten.add.Tensor``; None when torch has none of that name."""
    owner: Any = torch.ops
    for part in operator.split("."):
        if not hasattr(owner, part):
            return None
        owner = getattr(owner, part)
    return owner if is_overload(owner) else None

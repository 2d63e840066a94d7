"""The few PTX instructions that generated kernels hold as inline assembly."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArtifactError
from .functions import fma, pair, reciprocal_root, unary
from .tensor import Tensor
from .types import FLOAT32, Type

_INSTRUCTION = re.compile(r"\s*([a-z0-9.]+)\s+\$0((?:\s*,\s*\$\d+)+)\s*;?\s*")
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "fma": fma,
    "add": pair(np.add),
    "sub": pair(np.subtract),
    "mul": pair(np.multiply),
    "div": pair(np.true_divide),
    "max": pair(np.fmax),
    "min": pair(np.fmin),
    "ex2": unary(np.exp2),
    "lg2": unary(np.log2),
    "sqrt": unary(np.sqrt),
    "rsqrt": unary(reciprocal_root),
    "rcp": unary(np.reciprocal),
    "tanh": unary(np.tanh),
    "sin": unary(np.sin),
    "cos": unary(np.cos),
    "neg": unary(np.negative),
    "abs": unary(np.abs),
}


def inline_asm_elementwise(
    asm: str,
    constraints: str,
    args: Sequence[Tensor],
    dtype: Type = FLOAT32,
    is_pure: bool = True,
    pack: int = 1,
) -> Tensor:
    """``tl.inline_asm_elementwise`` for one float32 instruction; ArtifactError for any other text."""
    match = _INSTRUCTION.fullmatch(asm)
    if match is None or pack != 1 or dtype is not FLOAT32:
        raise ArtifactError(f"the emulator cannot run the assembly `{asm}`", hint="run the program on CUDA")
    name, *modifiers = match.group(1).split(".")
    if name not in _OPERATIONS or modifiers[-1:] != ["f32"] or {"sat", "rz", "rm", "rp"} & set(modifiers):
        raise ArtifactError(f"the emulator cannot run the assembly `{asm}`", hint="run the program on CUDA")
    operands: list[Any] = [args[int(number) - 1] for number in re.findall(r"\$(\d+)", match.group(2))]
    return _OPERATIONS[name](*operands)

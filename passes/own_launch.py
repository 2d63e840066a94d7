"""A launch of a kernel written here: what is known of its sizes becomes constants, the rest is passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.dtypes import DType
from ..runtime.expr import Size
from .tape import KernelSpec, OwnLaunch, Window

_TYPES = {
    DType.FLOAT16: "*fp16",
    DType.BFLOAT16: "*bf16",
    DType.FLOAT32: "*fp32",
    DType.FLOAT64: "*fp64",
    DType.INT32: "*i32",
    DType.INT64: "*i64",
}
"""Pointers in Triton's words."""


def own_launch(
    source: str,
    windows: Mapping[str, Window],
    sizes: Mapping[str, Size],
    constants: Mapping[str, Any],
    grid: tuple[str, str, str],
    writes: Sequence[Window],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
) -> OwnLaunch:
    """One launch of ``source``, a text with the fields ``{runtime}`` and ``{constants}`` in its signature.

    Its parameters are ``windows`` in their order, then those of ``sizes`` that are no numbers (64-bit
    integers), then the others and ``constants`` at compile time. ``grid`` are expressions over them.
    """
    runtime = {name: size for name, size in sizes.items() if not isinstance(size, int)}
    known = {**constants, **{name: size for name, size in sizes.items() if isinstance(size, int)}}
    parameters = (
        *((name, _TYPES[window.dtype]) for name, window in windows.items()),
        *((name, "i64") for name in runtime),
    )
    spec = KernelSpec(
        name=source.split("(", 1)[0].split()[-1],
        source=source.format(
            runtime="".join(f", {name}" for name in runtime),
            constants="".join(f", {name}: tl.constexpr" for name in known),
        ),
        parameters=parameters,
        constants=tuple(known.items()),
        divisible_by_16=tuple(name for name, window in windows.items() if window.is_aligned),
        num_warps=num_warps,
        num_stages=num_stages,
        grid=grid,
        call_names=tuple(name for name, _ in parameters),
    )
    return OwnLaunch(spec, (*windows.values(), *runtime.values()), tuple(writes))

"""A launch of a kernel written here: what is known of its sizes becomes constants, the rest is passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..tape import READY, KernelSpec, OwnLaunch, Window

TYPES = {
    DType.BOOL: "*i1",
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
    updates: Sequence[Window] = (),
    counts: Mapping[str, Size] | None = None,
    types: Mapping[str, str] | None = None,
    read_early: tuple[str, ...] = (),
    hints: str = "",
    num_warps: int = 4,
    num_stages: int = 2,
) -> OwnLaunch:
    """One launch of ``source``, a text with the fields ``{runtime}`` and ``{constants}`` in its signature.

    Its parameters are ``windows`` in their order, then ``counts`` (32-bit integers, always passed), then
    those of ``sizes`` that are no numbers (64-bit integers); the other sizes and ``constants`` are known at
    compile time. ``grid`` are expressions over them. ``types`` names pointers that are not their window's
    type. Where the text has the line `tape.READY` (its field ``{ready}``), only the windows of ``read_early``
    are read before it.
    """
    counts, types = counts or {}, types or {}
    runtime = {name: size for name, size in sizes.items() if not isinstance(size, int)}
    known = {**constants, **{name: size for name, size in sizes.items() if isinstance(size, int)}}
    parameters = (
        *((name, types.get(name) or TYPES[window.dtype]) for name, window in windows.items()),
        *((name, "i32") for name in counts),
        *((name, "i64") for name in runtime),
    )
    aligned = [name for name, window in windows.items() if window.is_aligned]
    aligned += [name for name, count in counts.items() if isinstance(count, int) and count % 16 == 0]
    text = source.format(
        ready=READY,
        runtime="".join(f", {name}" for name in runtime),
        constants="".join(f", {name}: tl.constexpr" for name in known),
    )
    spec = KernelSpec(
        name=source.split("(", 1)[0].split()[-1],
        source=text,
        parameters=parameters,
        constants=tuple(known.items()),
        divisible_by_16=tuple(aligned),
        num_warps=num_warps,
        num_stages=num_stages,
        grid=grid,
        call_names=tuple(name for name, _ in parameters),
        read_early=read_early if READY in text else (),
        hints=hints,
    )
    return OwnLaunch(
        spec, (*windows.values(), *counts.values(), *runtime.values()), tuple(writes), tuple(updates)
    )

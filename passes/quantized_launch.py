"""Launches of the kernels that read packed weights: what they have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..runtime.dtypes import DType
from ..runtime.expr import Size
from .attention import TYPES
from .quantized_weight import CHUNK, words_per_chunk
from .tape import READY, KernelSpec, LaunchArgument, OwnLaunch, Window

_TYPES = TYPES | {DType.INT64: "*i64", DType.INT32: "*i32"}


def weight_windows(operands: tuple[Any, ...]) -> dict[str, Window]:
    """x, words, scales, zeros and bias by name; scales stand in for what there is not."""
    x, words, scales, zeros, bias = operands[:5]
    return {
        "x": x,
        "words": words,
        "scales": scales,
        "zeros": scales if zeros is None else zeros,
        "bias": scales if bias is None else bias,
    }


def weight_constants(operands: tuple[Any, ...]) -> dict[str, Any]:
    """What kernels know of the weight. RUN: positions of a chunk that are surely in one group."""
    x, words, scales, zeros, bias, bits, group = operands[:7]
    height = words_per_chunk(bits)
    return {
        "CHUNKS": words.sizes[1] // height,
        "H": height,
        "N": words.sizes[0],
        "K": x.sizes[1],
        "BITS": bits,
        "RUN": math.gcd(group, CHUNK) // height if group else 32 // bits,
        "GROUP": group,
        "GROUPS": scales.sizes[1],
        "HAS_ZEROS": zeros is not None,
        "HAS_BIAS": bias is not None,
    }


def launch(
    source: str,
    windows: Mapping[str, Window],
    sizes: Mapping[str, Size],
    strides: Mapping[str, Size],
    constants: dict[str, Any],
    grid: tuple[str, str, str],
    writes: Window,
    options: tuple[int, int],
) -> OwnLaunch:
    """One launch: strides that are known become constants, the others are passed."""
    runtime = {name: stride for name, stride in strides.items() if not isinstance(stride, int)}
    constants = constants | {name: stride for name, stride in strides.items() if isinstance(stride, int)}
    parameters = (
        *((name, "*u32" if name == "words" else _TYPES[window.dtype]) for name, window in windows.items()),
        *((name, "i32") for name in sizes),
        *((name, "i64") for name in runtime),
    )
    aligned = [name for name, window in windows.items() if window.is_aligned]
    if "rows" in sizes and isinstance(sizes["rows"], int) and sizes["rows"] % 16 == 0:
        aligned.append("rows")
    source_text = source.format(
        ready=READY,
        runtime="".join(f", {name}" for name in runtime),
        constants="".join(f", {name}: tl.constexpr" for name in constants),
    )
    spec = KernelSpec(
        name=source.split("(", 1)[0].split()[-1],
        source=source_text,
        parameters=parameters,
        constants=tuple(constants.items()),
        divisible_by_16=tuple(aligned),
        num_warps=options[0],
        num_stages=options[1],
        grid=grid,
        call_names=tuple(name for name, _ in parameters),
        read_early=("words", "scales", "zeros", "bias") if READY in source_text else (),
    )
    arguments: tuple[LaunchArgument, ...] = (*windows.values(), *sizes.values(), *runtime.values())
    return OwnLaunch(spec, arguments, (writes,))

"""Launches of the kernels that read packed weights: what they have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.expr import Size
from ..kernels.own_launch import own_launch
from ..tape import OwnLaunch, Window
from .weight import CHUNK, words_per_chunk

_READ_EARLY = ("words", "scales", "zeros", "bias")


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
    """One launch of a kernel that reads a weight before it waits; ``options`` are warps and stages."""
    return own_launch(
        source, windows, strides, constants, grid, (writes,),
        counts=sizes, types={"words": "*u32"}, read_early=_READ_EARLY,
        num_warps=options[0], num_stages=options[1],
    )  # fmt: skip

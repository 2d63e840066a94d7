"""Convolutions as kernels of ours, for programs that shall need no library (`--no-library-calls`).

Each is a matrix product that is never written out: rows are the result's pixels, columns its channels, and
what is summed over are the kernel's taps times the input's channels. An input's pixel follows from the
result's and the tap; in a transposed convolution only where the stride divides. One and two dimensions are
three, of which the first have extent 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from ...runtime.expr import Size
from ..lowered.library_calls import Call
from ..size_arithmetic import product as product_of
from ..size_arithmetic import scaled
from ..tape import OwnLaunch, Window
from ..targets import Target
from .own_launch import own_launch
from .tiled_product import arithmetic
from .tiles import Tile, choose_tile

GRID = ("-(PIXELS // -BLOCK_M)", "-(OUTPUTS // -BLOCK_N)", "GROUPS")

_SOURCE = """\
@triton.jit
def convolution(x, weight, bias, added, output{runtime}{constants}):
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    is_pixel = p < PIXELS
    is_output = n < OUTPUTS
    out_w = p % OUT_W
    out_h = p // OUT_W % OUT_H
    out_d = p // (OUT_W * OUT_H) % OUT_D
    image = (p // (OUT_W * OUT_H * OUT_D)).to(tl.int64)
    x += group * CHANNELS * x_c
    weight += group * weight_g
    sums = tl.zeros([BLOCK_M, BLOCK_N], {sums})
    for start in range(0, TAPS * CHANNELS, BLOCK_K):
        if CHANNELS % BLOCK_K == 0:
            tap = start // CHANNELS + tl.zeros([1], tl.int32)
            c = tl.multiple_of(start % CHANNELS, BLOCK_K) + k
            is_inside = k < BLOCK_K
        else:
            tap = (start + k) // CHANNELS
            c = (start + k) % CHANNELS
            is_inside = start + k < TAPS * CHANNELS
        tap_w = tap % KERNEL_W
        tap_h = tap // KERNEL_W % KERNEL_H
        tap_d = tap // (KERNEL_W * KERNEL_H)
        is_there = is_pixel[:, None] & is_inside[None, :]
        if TRANSPOSED:
            w = out_w[:, None] + PAD_W - tap_w[None, :] * DILATION_W
            h = out_h[:, None] + PAD_H - tap_h[None, :] * DILATION_H
            d = out_d[:, None] + PAD_D - tap_d[None, :] * DILATION_D
            is_there &= (w % STRIDE_W == 0) & (h % STRIDE_H == 0) & (d % STRIDE_D == 0)
            is_there &= (w >= 0) & (h >= 0) & (d >= 0)
            w = w // STRIDE_W
            h = h // STRIDE_H
            d = d // STRIDE_D
        else:
            w = out_w[:, None] * STRIDE_W - PAD_W + tap_w[None, :] * DILATION_W
            h = out_h[:, None] * STRIDE_H - PAD_H + tap_h[None, :] * DILATION_H
            d = out_d[:, None] * STRIDE_D - PAD_D + tap_d[None, :] * DILATION_D
            is_there &= (w >= 0) & (h >= 0) & (d >= 0)
        is_there &= (w < IN_W) & (h < IN_H) & (d < IN_D)
        at = image[:, None] * x_n + d * x_d + h * x_h + w * x_w + c[None, :] * x_c
        left = tl.load(x + at, mask=is_there, other=0)
        taps = tap_d * weight_d + tap_h * weight_h + tap_w * weight_w + c * weight_c
        right = tl.load(
            weight + taps[:, None] + n[None, :] * weight_k,
            mask=is_inside[:, None] & is_output[None, :],
            other=0,
        )
        {multiply}
    n = group * OUTPUTS + n
    if HAS_BIAS:
        sums += tl.load(bias + n * bias_n, mask=is_output, other=0).to({sums})[None, :]
    mask = is_pixel[:, None] & is_output[None, :]
    if HAS_ADDED:
        at = image * added_n + out_d * added_d + out_h * added_h + out_w * added_w
        sums += tl.load(added + at[:, None] + n[None, :] * added_c, mask=mask, other=0).to({sums})
    sums = {activated}
    at = image * output_n + out_d * output_d + out_h * output_h + out_w * output_w
    tl.store(output + at[:, None] + n[None, :] * output_c, sums.to(output.dtype.element_ty), mask=mask)
"""


def to_steps(call: Call, target: Target) -> tuple[OwnLaunch, ...]:
    """The kernel for one library call ``convolution``; see `runtime.library` for its operands."""
    given = dict(call.attributes)
    x, weight, *rest = call.reads
    bias = rest.pop(0) if given["has_bias"] else None
    added = rest.pop(0) if given["has_added"] else None
    groups, is_transposed = int(str(given["groups"])), bool(given["transposed"])
    rank, out = len(x.sizes) - 2, call.out
    channels, outputs = _count(x.sizes[1]) // groups, _count(out.sizes[1]) // groups
    kernel = [_count(size) for size in weight.sizes[2:]]
    pixels = product_of((out.sizes[0], *out.sizes[2:]))
    depth = channels * math.prod(kernel)
    tile = _dividing(choose_tile(pixels, outputs, depth, x.dtype, target, groups), channels)
    constants: dict[str, Size] = {
        **tile.constants,
        "GROUPS": groups,
        "CHANNELS": channels,
        "OUTPUTS": outputs,
        "TAPS": math.prod(kernel),
        "TRANSPOSED": is_transposed,
        "HAS_BIAS": bias is not None,
        "HAS_ADDED": added is not None,
    }
    for name, word, missing in (("stride", "STRIDE", 1), ("padding", "PAD", 0), ("dilation", "DILATION", 1)):
        numbers = [int(str(number)) for number in cast("Sequence[object]", given[name])]
        constants |= _named(word, _three(numbers * rank if len(numbers) == 1 else numbers, missing))
    constants |= _named("KERNEL", _three(kernel, 1))
    sizes: dict[str, Size] = {"PIXELS": pixels}
    sizes |= _named("IN", _three(x.sizes[2:], 1)) | _named("OUT", _three(out.sizes[2:], 1))
    for name, window in (("x", x), ("added", added), ("output", out)):
        sizes |= _strides(name, window, "nc")
    sizes |= _strides("weight", weight, "ck" if is_transposed else "kc")
    share = channels if is_transposed else outputs
    sizes["weight_g"] = scaled(weight.strides[0], share)
    sizes["bias_n"] = 0 if bias is None else bias.strides[0]
    windows = {"x": x, "weight": weight, "bias": bias or x, "added": added or x, "output": out}
    source = arithmetic(_SOURCE, x.dtype, str(given["activation"]), allow_tf32=bool(given["allow_tf32"]))
    launch = own_launch(
        source,
        windows,
        sizes,
        constants,
        GRID,
        (out,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return (launch,)


def _dividing(tile: Tile, channels: int) -> Tile:
    """The tile with steps that stay within one tap, where the number of channels allows."""
    depth = tile.depth
    while depth > 16 and channels % depth:
        depth //= 2
    if channels % depth:
        return tile
    return Tile(tile.rows, tile.columns, depth, tile.num_warps, tile.num_stages)


def _count(size: Size) -> int:
    assert isinstance(size, int)  # channels and kernels are weights' sizes
    return size


def _three(values: Sequence[Size], missing: int) -> tuple[Size, ...]:
    return (*([missing] * (3 - len(values))), *values)


def _named(name: str, values: Sequence[Size]) -> dict[str, Size]:
    return {f"{name}_{axis}": value for axis, value in zip("DHW", values, strict=True)}


def _strides(name: str, window: Window | None, first: str) -> dict[str, Size]:
    """Strides by axis: two named ones and three dimensions."""
    if window is None:
        return dict.fromkeys((f"{name}_{axis}" for axis in f"{first}dhw"), 0)
    spatial = _three(tuple(window.strides[2:]), 0)
    return dict(
        zip((f"{name}_{axis}" for axis in f"{first}dhw"), (*window.strides[:2], *spatial), strict=True)
    )

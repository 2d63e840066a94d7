"""Depthwise convolution as a kernel of ours: channels-last, with bias, sum and activation.

Libraries run one as a grouped convolution with as many groups as channels, which on an H200 took 7 to 12
microseconds where the bytes need less than two. Each program computes a block of pixels by a block of
channels; the taps are unrolled, neighbouring channels are neighbouring lanes. Instructions are what it costs:
taps lie at fixed distances from one address, and weights are stored with their channels side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...runtime.expr import Size
from ..size_arithmetic import product
from ..tape import ExternCall, OwnLaunch, Window
from .own_launch import own_launch

OPERATOR = "devplan.depthwise_convolution.default"

_SOURCE = """\
@triton.jit
def depthwise(x, weight, bias, added, output, pixels{runtime}{constants}):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = p % OUT_W
    row = (p // OUT_W) % OUT_H
    image = (p // (OUT_W * OUT_H)).to(tl.int64)
    is_pixel = p < pixels
    is_channel = c < CHANNELS
    top = row * STRIDE_H - PAD_H
    left = column * STRIDE_W - PAD_W
    corner = (x + image * x_n + top * x_h + left * x_w)[:, None] + c[None, :]
    sums = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for tap_h in tl.static_range(KERNEL_H):
        for tap_w in tl.static_range(KERNEL_W):
            h = top + tap_h * DILATION_H
            w = left + tap_w * DILATION_W
            is_inside = is_pixel & (h >= 0) & (h < IN_H) & (w >= 0) & (w < IN_W)
            value = tl.load(
                corner + (tap_h * DILATION_H * x_h + tap_w * DILATION_W * x_w),
                mask=is_inside[:, None] & is_channel[None, :],
                other=0.0,
            )
            factor = tl.load(
                weight + c * weight_c + tap_h * weight_h + tap_w * weight_w, mask=is_channel, other=0.0
            )
            sums += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + c, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    place = image * output_n + row * output_h + column * output_w
    mask = is_pixel[:, None] & is_channel[None, :]
    if HAS_ADDED:
        sums += tl.load(added + place[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION != 0:
        sums = tl.maximum(sums, 0.0)
    if ACTIVATION == 2:
        sums = tl.minimum(sums, 6.0)
    tl.store(output + place[:, None] + c[None, :], sums.to(output.dtype.element_ty), mask=mask)
"""

_ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2}

_WIDTHS = (64, 32, 16)
"""Blocks of channels: 32 bytes are the least that memory hands out."""
_ELEMENTS = 2048


@dataclass(frozen=True)
class Blocks:
    """What a program computes, and the warps that do it."""

    pixels: int
    channels: int
    warps: int = 4


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel's launch for one call of the operator."""
    return to_steps_with(call, blocks_for(call.outs[0].sizes[1]))


def blocks_for(channels: Size) -> Blocks:
    """The blocks for so many channels: few lanes without any, and 16 elements for each thread.

    Of those that `tests/bench/bench_depthwise.py` tries on an H200, within 12 % of the fastest at each of
    MobileNet v2's shapes, 1 or 32 images: 16 by 64 took up to 2.2 times as long.
    """
    count = channels if isinstance(channels, int) else max(_WIDTHS)
    width = min(_WIDTHS, key=lambda width: (-(-count // width) * width, -width))
    return Blocks(_ELEMENTS // width, width)


def to_steps_with(call: ExternCall, blocks: Blocks) -> tuple[OwnLaunch, ...]:
    """The launch with blocks of a given shape."""
    x, weight, bias, added, stride, padding, dilation, activation = call.operands
    output = call.outs[0]
    batch, channels, out_h, out_w = output.sizes
    constants: dict[str, Any] = {
        "BLOCK_P": blocks.pixels,
        "BLOCK_C": blocks.channels,
        "CHANNELS": channels,
        "KERNEL_H": weight.sizes[2],
        "KERNEL_W": weight.sizes[3],
        **{f"STRIDE_{axis}": int(n) for axis, n in zip("HW", stride, strict=True)},
        **{f"PAD_{axis}": int(n) for axis, n in zip("HW", padding, strict=True)},
        **{f"DILATION_{axis}": int(n) for axis, n in zip("HW", dilation, strict=True)},
        "HAS_BIAS": bias is not None,
        "HAS_ADDED": added is not None,
        "ACTIVATION": _ACTIVATIONS[str(activation)],
    }
    sizes = {"IN_H": x.sizes[2], "IN_W": x.sizes[3], "OUT_H": out_h, "OUT_W": out_w}
    sizes |= (
        _strides("x", x, "n_hw") | _strides("output", output, "n_hw") | _strides("weight", weight, "c_hw")
    )
    given = {"x": x, "weight": weight, "bias": bias, "added": added, "output": output}
    windows = {name: x if window is None else window for name, window in given.items()}
    counts = {"pixels": product((batch, out_h, out_w))}
    grid = ("-(pixels // -BLOCK_P)", "-(CHANNELS // -BLOCK_C)", "1")
    launch = own_launch(
        _SOURCE, windows, sizes, constants, grid, (output,), counts=counts, num_warps=blocks.warps
    )
    return (launch,)


def _strides(name: str, window: Window, axes: str) -> dict[str, Size]:
    """Strides by axis; ``_`` skips the axis of channels, which is dense."""
    pairs = zip(axes, window.strides, strict=True)
    return {f"{name}_{axis}": stride for axis, stride in pairs if axis != "_"}

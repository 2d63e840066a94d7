"""One step of a recurrent layer as a kernel of ours, launched once a frame.

A step is a product of the last hidden state with the recurrent weights, and the gates' arithmetic. Each
program makes some hidden units of some rows of the batch, all their gates, so that nothing is written but the
new state; the frames' hidden states are the output, and every launch reads its predecessor's. Written out for
a compiler, a step is a product and a fused kernel, and 160 frames of three layers took minutes to export.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runtime.dtypes import DType
from ..tape import Allocate, ExternCall, KernelSpec, OwnLaunch, Window
from .own_launch import TYPES
from .own_operators import own_operator

OPERATOR = "devplan.recurrent.default"
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MANY_ROWS = 16
"""From as many on, rows of the batch are multiplied as a matrix."""


@own_operator(
    "recurrent(Tensor x, Tensor hidden, Tensor? cell, Tensor weight, Tensor? bias, str kind, bool backwards)"
    " -> Tensor"
)
def _fake(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    backwards: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0] + int(cell is not None), *hidden.shape)


def is_possible(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes frames (projected, first) and recurrent weights like these."""
    return (
        x.device.type == "cuda"
        and x.dim() == 3
        and x.dtype in _DTYPES
        and x.dtype == weight.dtype
        and all(isinstance(extent, int) for extent in x.shape)
        and x.shape[0] > 0
    )


def recurrent(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    *,
    backwards: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states [frames, batch, units] by frame, and the last cell state of an LSTM.

    ``x`` [frames, batch, gates * units] holds the products with the inputs, biases added, except that a GRU's
    recurrent ``bias`` is given apart. ``backwards`` begins with the last frame.
    """
    dense = [t if t is None else t.contiguous() for t in (hidden, cell, weight, bias)]
    x = x if x.stride(-1) == 1 else x.contiguous()
    made: torch.Tensor = torch.ops.devplan.recurrent(x, *dense, kind, backwards)
    return (made, None) if cell is None else (made[:-1], made[-1])


_SOURCE = """\
@triton.jit
def recurrent_step(x, hidden, cell, weight, bias, cells, output, now, before{constants}):
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    is_unit = j < UNITS
    is_row = b < ROWS
    mask = is_row[:, None] & is_unit[None, :]
    spot = b[:, None] * UNITS + j[None, :]
    last = hidden
    if before >= 0:
        last = output + before.to(tl.int64) * (ROWS * UNITS)
    sum_0 = tl.zeros([BLOCK_B, BLOCK_J], tl.float32)
    sum_1 = tl.zeros([BLOCK_B, BLOCK_J], tl.float32)
    sum_2 = tl.zeros([BLOCK_B, BLOCK_J], tl.float32)
    sum_3 = tl.zeros([BLOCK_B, BLOCK_J], tl.float32)
    for first in range(0, UNITS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        is_inner = k < UNITS
        both = is_row[:, None] & is_inner[None, :]
        h = tl.load(last + b[:, None] * UNITS + k[None, :], mask=both, other=0.0)
        place = weight + j[:, None] * UNITS + k[None, :]
        tile = is_unit[:, None] & is_inner[None, :]
        w_0 = tl.load(place, mask=tile, other=0.0)
        if GATES > 1:
            w_1 = tl.load(place + UNITS * UNITS, mask=tile, other=0.0)
            w_2 = tl.load(place + 2 * UNITS * UNITS, mask=tile, other=0.0)
        if GATES > 3:
            w_3 = tl.load(place + 3 * UNITS * UNITS, mask=tile, other=0.0)
        if BLOCK_B > 1:
            sum_0 = tl.dot(h, tl.trans(w_0), sum_0, input_precision="ieee")
            if GATES > 1:
                sum_1 = tl.dot(h, tl.trans(w_1), sum_1, input_precision="ieee")
                sum_2 = tl.dot(h, tl.trans(w_2), sum_2, input_precision="ieee")
            if GATES > 3:
                sum_3 = tl.dot(h, tl.trans(w_3), sum_3, input_precision="ieee")
        else:
            wide = h.to(tl.float32)
            sum_0 += tl.sum(wide * w_0.to(tl.float32), 1)[None, :]
            if GATES > 1:
                sum_1 += tl.sum(wide * w_1.to(tl.float32), 1)[None, :]
                sum_2 += tl.sum(wide * w_2.to(tl.float32), 1)[None, :]
            if GATES > 3:
                sum_3 += tl.sum(wide * w_3.to(tl.float32), 1)[None, :]
    if HAS_BIAS:
        sum_0 += tl.load(bias + j, mask=is_unit, other=0.0).to(tl.float32)[None, :]
        if GATES > 1:
            sum_1 += tl.load(bias + UNITS + j, mask=is_unit, other=0.0).to(tl.float32)[None, :]
            sum_2 += tl.load(bias + 2 * UNITS + j, mask=is_unit, other=0.0).to(tl.float32)[None, :]
    given = x + now.to(tl.int64) * x_t + b[:, None] * x_b + j[None, :]
    x_0 = tl.load(given, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        i = tl.sigmoid(x_0 + sum_0)
        f = tl.sigmoid(tl.load(given + UNITS, mask=mask, other=0.0).to(tl.float32) + sum_1)
        g = libdevice.tanh(tl.load(given + 2 * UNITS, mask=mask, other=0.0).to(tl.float32) + sum_2)
        o = tl.sigmoid(tl.load(given + 3 * UNITS, mask=mask, other=0.0).to(tl.float32) + sum_3)
        if before >= 0:
            c = tl.load(cells + spot, mask=mask, other=0.0)
        else:
            c = tl.load(cell + spot, mask=mask, other=0.0).to(tl.float32)
        c = f * c + i * g
        tl.store(cells + spot, c, mask=mask)
        tl.store(output + FRAMES * (ROWS * UNITS) + spot, c.to(output.dtype.element_ty), mask=mask)
        new = o * libdevice.tanh(c)
    if KIND == 1:
        r = tl.sigmoid(x_0 + sum_0)
        z = tl.sigmoid(tl.load(given + UNITS, mask=mask, other=0.0).to(tl.float32) + sum_1)
        n = libdevice.tanh(tl.load(given + 2 * UNITS, mask=mask, other=0.0).to(tl.float32) + r * sum_2)
        new = (1.0 - z) * n + z * tl.load(last + spot, mask=mask, other=0.0).to(tl.float32)
    if KIND == 2:
        new = libdevice.tanh(x_0 + sum_0)
    if KIND == 3:
        new = tl.maximum(x_0 + sum_0, 0.0)
    tl.store(output + now.to(tl.int64) * (ROWS * UNITS) + spot, new.to(output.dtype.element_ty), mask=mask)
"""


def to_steps(call: ExternCall) -> Sequence[Allocate | OwnLaunch]:
    """One launch for each frame; an LSTM's cells are kept in float32 between them."""
    x, hidden, cell, weight, bias, kind, backwards = call.operands
    output = call.outs[0]
    frames, rows, _ = x.sizes
    assert isinstance(frames, int)
    window = Window(f"{output.buffer}_cells", DType.FLOAT32, hidden.sizes, hidden.strides)
    is_lstm = cell is not None
    cells = window if is_lstm else hidden
    windows = (x, hidden, cell or hidden, weight, bias or weight, cells, output)
    spec = _spec(windows, str(kind), bias is not None)
    writes = (cells, output) if is_lstm else (output,)
    made: list[Allocate | OwnLaunch] = []
    if is_lstm:
        made.append(Allocate(window, rows * hidden.sizes[1] * 4))
    order = list(range(frames))[:: -1 if backwards else 1]
    for before, now in zip([-1, *order], order, strict=False):
        made.append(OwnLaunch(spec, (*windows, now, before), writes))
    return made


def _spec(windows: tuple[Window, ...], kind: str, has_bias: bool) -> KernelSpec:
    x, hidden = windows[:2]
    rows, units = hidden.sizes
    assert isinstance(rows, int) and isinstance(units, int)
    is_matrix = rows >= _MANY_ROWS
    width = max(16, 1 << (units - 1).bit_length())
    constants: dict[str, Any] = {
        "BLOCK_B": 16 if is_matrix else 1,
        "BLOCK_J": 16 if is_matrix else 4,
        "BLOCK_K": min(width, 64 if is_matrix else 512),
        "ROWS": rows,
        "UNITS": units,
        "FRAMES": x.sizes[0],
        "GATES": GATES[kind],
        "KIND": list(GATES).index(kind),
        "HAS_BIAS": has_bias,
        "x_t": x.strides[0],
        "x_b": x.strides[1],
    }
    names = ("x", "hidden", "cell", "weight", "bias", "cells", "output")
    types = tuple((name, TYPES[window.dtype]) for name, window in zip(names, windows, strict=True))
    parameters = (*types, ("now", "i32"), ("before", "i32"))
    return KernelSpec(
        name="recurrent_step",
        source=_SOURCE.format(constants="".join(f", {name}: tl.constexpr" for name in constants)),
        parameters=parameters,
        constants=tuple(constants.items()),
        divisible_by_16=tuple(n for n, w in zip(names, windows, strict=True) if w.is_aligned),
        num_warps=4,
        num_stages=2,
        grid=("-(UNITS // -BLOCK_J)", "-(ROWS // -BLOCK_B)", "1"),
        call_names=tuple(name for name, _ in parameters),
    )

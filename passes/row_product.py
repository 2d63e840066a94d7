"""Products of one to four rows as a kernel of ours, with what stands before and behind them in a decoder.

With so few rows a product only reads its weight: the time is the weight's bytes over the bandwidth, and what
libraries lose is reading in blocks made for tensor cores and, between small products, launches. Here each
program reads some rows of the weight once, 16 bytes a thread and load, with the next block on its way while
one is multiplied, and adds in float32. A root-mean-square norm in front needs no pass of its own, since its
factor can be applied to the finished sums: sum(x * g * w) / rms(x) = sum(x / rms(x) * g * w).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .builder import product
from .own_launch import TYPES
from .own_operators import own_operator
from .tape import READY, ExternCall, KernelSpec, OwnLaunch, Window

_READ_ONCE_NBYTES = 4 << 20
"""Weights from this size on give way in the cache to what is read again soon."""

OPERATOR = "devplan.row_product.default"
MOST_ROWS = 4
"""With more, tensor cores are worth their block sizes."""

_PROGRAMS = 264
"""Two for each of the 132 multiprocessors of an H200."""


@own_operator(
    "row_product(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, Tensor? added,"
    " str activation, bool is_gated) -> Tensor"
)
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    added: torch.Tensor | None,
    activation: str,
    is_gated: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if is_gated else 1))


ACTIVATIONS = {
    "none": "{0}",
    "relu": "tl.maximum({0}, 0.0)",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "tanh": "libdevice.tanh({0})",
    "gelu": "{0} * 0.5 * (1.0 + libdevice.erf({0} * 0.7071067811865476))",
    "gelu_tanh": (
        "{0} * 0.5 * (1.0 + libdevice.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))"
    ),
}
"""What may follow a product, in Triton's words."""


@dataclass(frozen=True)
class Blocks:
    """A program's shape: weight rows, columns of one step, and warps, which share the columns."""

    rows: int
    columns: int
    warps: int


def blocks_for(rows: int, outputs: int, columns: int, itemsize: int, is_gated: bool) -> Blocks:
    """The shape for x[rows, columns] times weight[outputs, columns], by size alone.

    A thread loads 16 bytes of a row in a step, so that the row of x needs no exchange between threads, and
    the program two rows of the weight (one of each half where they gate each other). On an H200 that is
    faster than 32 bytes, 8 warps or more rows in a decoder's step of 154 launches, of which each begins while
    the one before ends (`tests/bench/bench_decoder_step.py`).
    """
    warps = 4
    step = 32 * 16 // itemsize
    while warps > 1 and columns <= warps * step // 2:
        warps //= 2
    has_pairs = not is_gated and -(-outputs // 2) >= _PROGRAMS
    return Blocks(2 if has_pairs else 1, warps * step, warps)


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator, in the shape that `blocks_for` finds best."""
    x, weight, is_gated = call.operands[0], call.operands[1], bool(call.operands[7])
    outputs = weight.sizes[0] // (2 if is_gated else 1)
    return to_steps_with(
        call, blocks_for(x.sizes[0], outputs, weight.sizes[1], weight.dtype.itemsize, is_gated)
    )


def to_steps_with(call: ExternCall, blocks: Blocks) -> tuple[OwnLaunch, ...]:
    """The same in a given shape."""
    x, weight, bias, norm, eps, added, activation, is_gated = call.operands
    output = call.outs[0]
    outputs, columns = output.sizes[1], weight.sizes[1]
    constants: dict[str, Any] = {
        "BLOCK_N": blocks.rows,
        "BLOCK_K": blocks.columns,
        "OUTPUTS": outputs,
        "COLUMNS": columns,
        "EPS": float(eps),
        "weight_n": weight.strides[0],
        "x_m": x.strides[0],
        "output_m": output.strides[0],
        "added_m": 0 if added is None else added.strides[0],
    }
    given = {"x": x, "weight": weight, "bias": bias, "norm": norm, "added": added, "output": output}
    windows = {name: window for name, window in given.items() if window is not None}
    parameters = tuple((name, TYPES[window.dtype]) for name, window in windows.items())
    source = _source(x.sizes[0], given, tuple(constants), str(activation), bool(is_gated))
    spec = KernelSpec(
        name="row_product",
        source=source,
        parameters=parameters,
        constants=tuple(constants.items()),
        divisible_by_16=tuple(name for name, window in windows.items() if window.is_aligned),
        num_warps=blocks.warps,
        num_stages=1,
        grid=("-(OUTPUTS // -BLOCK_N)", "1", "1"),
        call_names=tuple(windows),
        read_early=("weight", "bias", "norm"),
    )
    return (OwnLaunch(spec, tuple(windows.values()), (output,)),)


def _nbytes(weight: Window | None) -> int:
    assert weight is not None
    numel = product(weight.sizes)
    assert isinstance(numel, int)
    return numel * weight.dtype.itemsize


def _source(
    rows: int, given: dict[str, Window | None], constants: Sequence[str], activation: str, is_gated: bool
) -> str:
    """The kernel's text: the rows of x unrolled, and no more than what the call asks for."""
    names = [name for name, window in given.items() if window is not None]
    weights = {"w": "weight", "u": "weight + OUTPUTS * weight_n"} if is_gated else {"w": "weight"}
    biases = dict(zip(weights, ("bias", "bias + OUTPUTS"), strict=False)) if "bias" in names else {}
    once = ', eviction_policy="evict_first"' if _nbytes(given["weight"]) >= _READ_ONCE_NBYTES else ""
    streams = {each: (f"{pointer} + at", "is_output[:, None] & ", once) for each, pointer in weights.items()}
    if "norm" in names:
        streams["g"] = ("norm + k", "", "")
    lines = [
        "@triton.jit",
        f"def row_product({', '.join(names)}{''.join(f', {name}: tl.constexpr' for name in constants)}):",
        "    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        "    k = tl.arange(0, BLOCK_K)[None, :]",
        "    is_output = n < OUTPUTS",
        "    at = n.to(tl.int64)[:, None] * weight_n + k",
        *(
            f"    {each} = tl.load({pointer}, mask={mask}(k < COLUMNS), other=0.0{once})"
            for each, (pointer, mask, once) in streams.items()
        ),
        *(f"    b_{each} = {_vector(pointer)}" for each, pointer in biases.items()),
        READY,
    ]
    if "added" in names:
        lines += [f"    added{m} = {_vector(f'added + {m} * added_m')}" for m in range(rows)]
    lines += _loop(rows, streams, weights)
    for m in range(rows):
        lines += _row_end(m, list(weights), names, activation)
    return "\n".join(lines) + "\n"


def _vector(pointer: str) -> str:
    """A number for each output."""
    return f"tl.load({pointer} + n, mask=is_output, other=0.0).to(tl.float32)"


def _loop(rows: int, streams: Mapping[str, tuple[str, str, str]], weights: Iterable[str]) -> list[str]:
    """The sums over the columns; a step's constants were loaded in the step before."""
    has_norm = "g" in streams
    lines = [
        f"    sums_{w}{m} = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)" for m in range(rows) for w in weights
    ]
    lines += [f"    squares{m} = tl.zeros([1, BLOCK_K], tl.float32)" for m in range(rows) if has_norm]
    lines += [
        "    for begin in range(0, COLUMNS, BLOCK_K):",
        "        c = begin + k",
        *(
            f"        next_{each} = tl.load({pointer} + begin + BLOCK_K, "
            f"mask={mask}(c + BLOCK_K < COLUMNS), other=0.0{once})"
            for each, (pointer, mask, once) in streams.items()
        ),
    ]
    for m in range(rows):
        lines.append(f"        x{m} = tl.load(x + {m} * x_m + c, mask=c < COLUMNS, other=0.0).to(tl.float32)")
        if has_norm:
            lines += [f"        squares{m} += x{m} * x{m}", f"        x{m} = x{m} * g.to(tl.float32)"]
        lines += [f"        sums_{each}{m} += {each}.to(tl.float32) * x{m}" for each in weights]
    return lines + [f"        {each} = next_{each}" for each in streams]


def _row_end(m: int, weights: Sequence[str], names: Sequence[str], activation: str) -> list[str]:
    """From the sums of one row to what is stored."""
    lines: list[str] = []
    if "norm" in names:
        lines.append(f"    scale = 1.0 / tl.sqrt(tl.sum(squares{m}, 1) / COLUMNS + EPS)")
    for each in weights:
        scale, bias = " * scale" if "norm" in names else "", f" + b_{each}" if "bias" in names else ""
        lines.append(f"    y_{each} = tl.sum(sums_{each}{m}, 1){scale}{bias}")
    if activation != "none":
        lines.append(f"    y_w = {ACTIVATIONS[activation].format('y_w')}")
    if len(weights) > 1:
        lines.append("    y_w = y_w * y_u")
    if "added" in names:
        lines.append(f"    y_w += added{m}")
    at = f"output + {m} * output_m + n"
    return [*lines, f"    tl.store({at}, y_w.to(output.dtype.element_ty), mask=is_output)"]

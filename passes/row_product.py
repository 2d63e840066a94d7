"""Products of one to four rows as a kernel of ours, with what stands before and behind them in a decoder.

With so few rows a product only reads its weight: the time is the weight's bytes over the bandwidth, and what
libraries lose is reading in blocks made for tensor cores and, between small products, launches. Here each
program reads some rows of the weight once, 16 bytes a thread and load, with the next block on its way while
one is multiplied, and adds in float32. A root-mean-square norm in front needs no pass of its own, since its
factor can be applied to the finished sums: sum(x * g * w) / rms(x) = sum(x / rms(x) * g * w).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..runtime.expr import Size
from .builder import product
from .own_launch import TYPES
from .own_operators import own_operator
from .tape import READY, ExternCall, KernelCall, KernelSpec, OwnLaunch, Step, Window

_AHEAD_NBYTES = 16 << 20
"""Of an L2 cache of 50 MB, which also holds what is being read."""
_LINE = 128
"""Bytes of a line of the cache."""
_READ_ONCE_NBYTES = 4 << 20
"""Weights from this size on give way in the cache to what is read again soon."""
_HINTS = """\
    lines = tl.program_id(0).to(tl.int64) * AHEAD + tl.arange(0, {step})
    for begin in tl.static_range(0, AHEAD, {step}):
        address = (ahead + (lines + begin) * {line}).to(tl.int64)
        tl.inline_asm_elementwise(
            "{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }}",
            "=r,l,r",
            [address, (lines + begin < {lines}).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
"""

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

    A thread loads at least 16 bytes of a row, so that the row of x needs no exchange between threads. On an
    H200, of shapes with 1 to 8 weight rows, 1 to 8 warps and 16 or 32 bytes of a row for each thread, two
    rows and 32 bytes are within a few percent of the best where one step covers the row, and four rows where
    it takes several (`tests/bench/bench_row_product.py`). Registers hold 8 sums or 16 for each row of x and
    of the weight, which bounds the latter.
    """
    warps = 4
    step = 32 * 16 // itemsize
    while warps > 1 and columns <= warps * step // 2:
        warps //= 2
    factor = 2 if columns > warps * step and rows <= 2 else 1
    streams = 2 if is_gated else 1
    most = (2 if columns <= factor * warps * step else 4) // streams
    most = max(1, min(most, 8 // (rows * streams * factor)))
    while most > 1 and -(-outputs // most) < _PROGRAMS:
        most //= 2
    return Blocks(most, factor * warps * step, warps)


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
    ahead, lines = call.keywords.get("ahead"), 0
    if ahead is not None:
        given["ahead"], lines = ahead, _lines(ahead)
        constants["AHEAD"] = _share(lines, outputs, blocks)
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
        hints=""
        if ahead is None
        else _HINTS.format(line=_LINE // ahead.dtype.itemsize, lines=lines, step=32 * blocks.warps),
    )
    return (OwnLaunch(spec, tuple(windows.values()), (output,)),)


def looking_ahead(steps: Sequence[Step], inputs: Collection[str]) -> list[Step]:
    """The steps of a tape, in which a product after other work fetches what the next product will read.

    While a decoder's attention runs, nothing reads weights. The product behind it is launched already and
    waits: it can have the weights of the product after it brought into the L2 cache meanwhile. ``inputs``
    names the tape's inputs, which are there from the start.
    """
    made = list(steps)
    products = [
        i for i, step in enumerate(steps) if isinstance(step, ExternCall) and step.operator == OPERATOR
    ]
    for before, at, after in zip(products, products[1:], products[2:], strict=False):
        step, following = made[at], made[after]
        assert isinstance(step, ExternCall) and isinstance(following, ExternCall)
        has_others = any(isinstance(each, ExternCall | KernelCall) for each in steps[before + 1 : at])
        weight = following.operands[1]
        if has_others and weight.buffer in inputs:
            made[at] = replace(step, keywords={**step.keywords, "ahead": weight})
    return made


def _share(lines: int, outputs: Size, blocks: Blocks) -> int:
    """Lines that one of a launch's programs fetches: whole turns of all its threads."""
    assert isinstance(outputs, int)
    threads = 32 * blocks.warps
    return -(-lines // (-(-outputs // blocks.rows) * threads)) * threads


def _lines(weight: Window) -> int:
    """How many lines of a weight are fetched ahead."""
    return min(_nbytes(weight), _AHEAD_NBYTES) // _LINE


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

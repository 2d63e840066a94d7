"""Products of one to four rows as a kernel of ours, with what stands before and behind them in a decoder.

With so few rows a product only reads its weight: the time is the weight's bytes over the bandwidth, and what
libraries lose is reading in blocks made for tensor cores and, between small products, launches. Here each
program reads some rows of the weight once, 16 bytes a thread and load, with the next block on its way while
one is multiplied, and adds in float32. A root-mean-square norm in front needs no pass of its own, since its
factor can be applied to the finished sums: sum(x * g * w) / rms(x) = sum(x / rms(x) * g * w).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..size_arithmetic import product
from ..tape import READY, ExternCall, KernelSpec, OwnLaunch, Window
from .own_launch import TYPES
from .own_operators import own_operator

_MOST_WRITTEN_OUT = 12
"""Steps of a program's loop over the columns."""
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
    """A program's shape: weight rows, columns of one step, and warps, which share the columns.

    ``depth`` steps of the weight are on their way before the first is multiplied.
    """

    rows: int
    columns: int
    warps: int
    depth: int = 1


def blocks_for(
    rows: int, outputs: int, columns: int, itemsize: int, is_gated: bool, has_norm: bool
) -> Blocks:
    """The shape for x[rows, columns] times weight[outputs, columns], by size alone.

    A thread loads 16 bytes of a row in a step, so that the row of x needs no exchange between threads, or
    twice 16 where there is no norm, whose weight takes registers as well. A program reads two rows of the
    weight (one of each half where they gate each other), or four where it takes several steps of the longer
    kind. All of it as was fastest on an H200 in a decoder's step, where each launch begins while the one
    before ends and loads what it can (`tests/bench/bench_decoder_step.py`). Registers hold 8 sums or 16 for
    each row of x and of the weight, which bounds the latter.
    """
    warps, most = 4, 1 if is_gated else 2
    step = 32 * 16 // itemsize
    while warps > 1 and columns <= warps * step // 2:
        warps //= 2
    if not has_norm and rows <= 2 and columns > warps * step:
        step *= 2
        most = most * 2 if columns > warps * step and rows == 1 else most
    while most > 1 and -(-outputs // most) < _PROGRAMS:
        most //= 2
    return Blocks(most, warps * step, warps)


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator, in the shape that `blocks_for` finds best."""
    x, weight, is_gated, has_norm = *call.operands[:2], bool(call.operands[7]), call.operands[3] is not None
    outputs, columns = weight.sizes[0] // (2 if is_gated else 1), weight.sizes[1]
    blocks = blocks_for(x.sizes[0], outputs, columns, weight.dtype.itemsize, is_gated, has_norm)
    return to_steps_with(call, blocks)


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
    source = _source(x.sizes[0], given, tuple(constants), str(activation), bool(is_gated), blocks)
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
    rows: int,
    given: dict[str, Window | None],
    constants: Sequence[str],
    activation: str,
    is_gated: bool,
    blocks: Blocks,
) -> str:
    """The kernel's text: the rows of x unrolled, and no more than what the call asks for."""
    names = [name for name, window in given.items() if window is not None]
    weight, output = given["weight"], given["output"]
    assert weight is not None and output is not None
    outputs, columns = output.sizes[1], weight.sizes[1]
    assert isinstance(outputs, int) and isinstance(columns, int)
    weights = {"w": "weight", "u": "weight + OUTPUTS * weight_n"} if is_gated else {"w": "weight"}
    biases = dict(zip(weights, ("bias", "bias + OUTPUTS"), strict=False)) if "bias" in names else {}
    once = ', eviction_policy="evict_first"' if _nbytes(weight) >= _READ_ONCE_NBYTES else ""
    mask = "is_output[:, None]" if outputs % blocks.rows else ""
    streams = {each: (f"{pointer} + at", mask, once) for each, pointer in weights.items()}
    if "norm" in names:
        streams["g"] = ("norm + k", "", "")
    steps = _Steps(rows, streams, tuple(weights), columns, blocks)
    lines = [
        "@triton.jit",
        f"def row_product({', '.join(names)}{''.join(f', {name}: tl.constexpr' for name in constants)}):",
        "    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        "    k = tl.arange(0, BLOCK_K)[None, :]",
        "    is_output = n < OUTPUTS",
        "    at = n.to(tl.int64)[:, None] * weight_n + k",
        *steps.early(),
        *(f"    b_{each} = {_vector(pointer)}" for each, pointer in biases.items()),
        READY,
    ]
    if "added" in names:
        lines += [f"    added{m} = {_vector(f'added + {m} * added_m')}" for m in range(rows)]
    lines += steps.rest()
    for m in range(rows):
        lines += _row_end(m, list(weights), names, activation)
    return "\n".join(lines) + "\n"


def _vector(pointer: str) -> str:
    """A number for each output."""
    return f"tl.load({pointer} + n, mask=is_output, other=0.0).to(tl.float32)"


@dataclass(frozen=True)
class _Steps:
    """The sums over the columns. Few steps are written out, so that each load stands as far ahead as it may.

    ``streams`` are what is read along the columns besides x: a pointer, a mask and a policy by name; those of
    ``weights`` are multiplied by x, and `g` is the norm's weight.
    """

    rows: int
    streams: Mapping[str, tuple[str, str, str]]
    weights: tuple[str, ...]
    columns: int
    blocks: Blocks

    @property
    def _count(self) -> int:
        return -(-self.columns // self.blocks.columns)

    @property
    def _is_written_out(self) -> bool:
        return self._count <= _MOST_WRITTEN_OUT

    def early(self) -> list[str]:
        """Loads that wait for no launch."""
        depth = min(self.blocks.depth, self._count) if self._is_written_out else 1
        return [line for step in range(depth) for line in self._loads(step)]

    def rest(self) -> list[str]:
        """From what was loaded early to the sums."""
        made = [
            f"    sums_{w}{m} = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)"
            for m in range(self.rows)
            for w in self.weights
        ]
        if "g" in self.streams:
            made += [f"    squares{m} = tl.zeros([1, BLOCK_K], tl.float32)" for m in range(self.rows)]
        if not self._is_written_out:
            return made + self._loop()
        made += self._x(0)
        for step in range(self._count):
            if step + self.blocks.depth < self._count:
                made += self._loads(step + self.blocks.depth)
            made += self._x(step + 1) if step + 1 < self._count else []
            made += self._products(_named(step), "    ")
        return made

    def _loop(self) -> list[str]:
        made = [
            "    for begin in range(0, COLUMNS, BLOCK_K):",
            "        c = begin + k",
            *(
                f"        next_{each} = tl.load({pointer} + begin + BLOCK_K, "
                f"mask={f'{mask} & ' if mask else ''}(c + BLOCK_K < COLUMNS), other=0.0{policy})"
                for each, (pointer, mask, policy) in self.streams.items()
            ),
            *(
                f"        x{m} = tl.load(x + {m} * x_m + c, mask=c < COLUMNS, other=0.0)"
                for m in range(self.rows)
            ),
        ]
        made += self._products(lambda name: f"{name}_0" if name in self.streams else name, "        ")
        return made + [f"        {each}_0 = next_{each}" for each in self.streams]

    def _loads(self, step: int) -> list[str]:
        return [
            f"    {each}_{step} = {self._load(f'{pointer} + {step} * BLOCK_K', mask, step, policy)}"
            for each, (pointer, mask, policy) in self.streams.items()
        ]

    def _x(self, step: int) -> list[str]:
        return [
            f"    x{m}_{step} = {self._load(f'x + {m} * x_m + k + {step} * BLOCK_K', '', step, '')}"
            for m in range(self.rows)
        ]

    def _load(self, pointer: str, mask: str, step: int, policy: str) -> str:
        """A load of one step, masked where it has to be."""
        is_whole = (step + 1) * self.blocks.columns <= self.columns
        masks = [each for each in (mask, "" if is_whole else f"(k + {step} * BLOCK_K < COLUMNS)") if each]
        given = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({pointer}{given}{policy})"

    def _products(self, name: Callable[[str], str], indent: str) -> list[str]:
        """Add one step's products; ``name`` says what its operands are called."""
        made: list[str] = []
        for m in range(self.rows):
            made.append(f"wide = {name(f'x{m}')}.to(tl.float32)")
            if "g" in self.streams:
                made += [f"squares{m} += wide * wide", f"wide = wide * {name('g')}.to(tl.float32)"]
            made += [f"sums_{each}{m} += {name(each)}.to(tl.float32) * wide" for each in self.weights]
        return [indent + line for line in made]


def _named(step: int) -> Callable[[str], str]:
    """What operands of one step are called."""
    return lambda name: f"{name}_{step}"


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

"""The Triton kernel for several rows of x and a packed weight on the tensor cores, written for its groups.

The product is computed as weight times x transposed: the operand that is unpacked in registers is then the
one that the hardware takes from registers. A step is a chunk of 128 columns. Words are loaded in the layout
of that operand's 16 columns, and the values at each position of a word are joined behind one another
(`_joined`), which is where the packed layout has them: so the compiler moves nothing between threads, x comes
in rows of 256 bytes, and there is one wait for the tensor cores where there would be one a position.

A code becomes a float without a conversion: or-ed into the mantissa of a power of two, it is what is left
when that is taken away. In float16 two codes are dealt with in one instruction, which rounds a product with
a scale once more than float32 does (less than a hundredth of the step between two codes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..kernels.grouped_product import ROWS_OF_A_TILE
from ..tape import SETTLED
from .weight import bias_of, words_per_chunk

_HEAD = """\
@triton.jit
def quantized_tile(x, words, scales, zeros, bias, output, rows{runtime}{constants}):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    split = tl.program_id(2)
    is_row = (m < rows)[None, :]
    first = split * PART
    end = tl.minimum(first + PART, CHUNKS)
    output += (split * rows + m)[None, :] * N
"""

_EXPERTS = """\
@triton.jit
def quantized_experts(x, words, scales, zeros, bias, ends, output{runtime}{constants}):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
[rows of a tile]
    is_row = (m < stop)[None, :]
    first = 0
    end = tl.where(group < MATRICES, CHUNKS, 0)
    matrix = tl.minimum(group, MATRICES - 1).to(tl.int64) * N
    words += matrix * (CHUNKS * H)
    scales += matrix * GROUPS
    zeros += matrix * GROUPS
    output += m[None, :] * N
"""

_STEPS = """\
    i = tl.arange(0, H)
    is_column = n < N
    x += m[None, :] * x_m
    words += n[:, None] * (CHUNKS * H) + i[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(first, end):
        packed = tl.load(words + chunk * H, mask=is_column[:, None], other=0)
"""

_TAIL = """\
    if GROUP == 0:
        sums *= tl.load(scales + n, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(output + n[:, None], sums.to(output.dtype.element_ty), mask=is_column[:, None] & is_row)
"""


class Arithmetic(Enum):
    """What a weight is unpacked in."""

    HALVES = "float16"
    """Where x and the scales are of it."""
    SINGLES = "float32, rounded to the type of x"
    LOOP = "float32, with a product for each position of the words"
    """For x in float32, which no tensor core takes: few values are in registers at a time."""


@dataclass(frozen=True)
class Tile:
    """What a kernel's text depends on."""

    bits: int
    run: int
    """Positions of a word that share a group of columns, surely."""
    has_groups: bool
    has_zeros: bool
    arithmetic: Arithmetic
    has_experts: bool = False
    """Rows are in groups, with a matrix for each (`grouped_product`)."""


def tile_text(tile: Tile) -> str:
    """The kernel's source."""
    body = list[str]()
    positions = range(32 // tile.bits)
    is_loop = tile.arithmetic is Arithmetic.LOOP
    if not is_loop:
        body += _value("chunk * 128 + tl.arange(0, 128)")
    for position in positions:
        column = position * words_per_chunk(tile.bits)
        if tile.has_groups and position % tile.run == 0:
            body += _scale(tile, column)
        body += (_in_halves if tile.arithmetic is Arithmetic.HALVES else _in_float32)(tile, position)
        if is_loop:
            body += _value(f"chunk * 128 + {column} + i")
            body.append(f'sums = tl.dot(w{position}, value, sums, input_precision="ieee")')
    if not is_loop:
        axes = ", ".join(map(str, (0, *range(2, len(positions).bit_length() + 1), 1)))
        joined = _joined([f"w{position}" for position in positions])
        body.append(f"weight = tl.reshape(tl.permute({joined}, ({axes})), [BLOCK_N, 128])")
        body += ["sums = tl.dot(weight, value, sums)", SETTLED.strip()]
    head = _EXPERTS.replace("[rows of a tile]\n", ROWS_OF_A_TILE) if tile.has_experts else _HEAD
    return head + _STEPS + "".join(f"        {line}\n" for line in body) + _TAIL


def _value(columns: str) -> Iterator[str]:
    yield f"k = ({columns})[:, None]"
    yield "value = tl.load(x + k, mask=is_row if K % 128 == 0 else is_row & (k < K), other=0.0)"


def _joined(names: Sequence[str]) -> str:
    """Values as one tensor with a new dimension of two for every bit of their index, the lowest bit last."""
    return names[0] if len(names) == 1 else f"tl.join({_joined(names[::2])}, {_joined(names[1::2])})"


def _scale(tile: Tile, column: int) -> Iterator[str]:
    cast = "" if tile.arithmetic is Arithmetic.HALVES else ".to(tl.float32)"
    yield f"which = n * GROUPS + (chunk * 128 + {column}) // GROUP"
    yield f"scale = tl.load(scales + which, mask=is_column, other=0.0){cast}[:, None]"
    if tile.has_zeros:
        yield f"zero = tl.load(zeros + which, mask=is_column, other=0.0){cast}[:, None]"


def _in_float32(tile: Tile, position: int) -> Iterator[str]:
    """Codes are masked where they stand in a half of a word, so they come out times a power of two."""
    at, mask, name = tile.bits * position, (1 << tile.bits) - 1, f"w{position}"
    half, shift = "packed" if at < 16 else "(packed >> 16)", at % 16
    yield f"{name} = (({half} & {mask << shift}) | 0x4B000000).to(tl.float32, bitcast=True)"
    yield f"{name} -= {float((1 << 23) + (bias_of(tile.bits) << shift))}"
    if tile.has_groups:
        yield f"{name} *= scale * {1 / (1 << shift)}"
    elif shift:
        yield f"{name} *= {1 / (1 << shift)}"
    if tile.has_zeros:
        yield f"{name} += zero"
    yield f"{name} = {name}.to(x.dtype.element_ty)"


def _in_halves(tile: Tile, position: int) -> Iterator[str]:
    """The same with 1024, whose mantissa in float16 has room for 10 bits."""
    byte, shift = divmod(tile.bits * position, 8)
    mask, name = (1 << tile.bits) - 1, f"w{position}"
    moved = f"(packed >> {8 * byte})" if byte else "packed"
    yield f"{name} = (({moved} & {mask << shift}) | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)"
    if shift:
        yield f"{name} = {name} * {1 / (1 << shift)} - {float((1024 >> shift) + bias_of(tile.bits))}"
    else:
        yield f"{name} -= {float(1024 + bias_of(tile.bits))}"
    if tile.has_groups:
        yield f"{name} = {name} * scale" + (" + zero" if tile.has_zeros else "")

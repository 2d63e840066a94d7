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

from .quantized_weight import bias_of, words_per_chunk

_HEAD = """\
@triton.jit
def quantized_tile(x, words, scales, zeros, bias, output, rows{runtime}{constants}):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    i = tl.arange(0, H)
    is_row = (m < rows)[None, :]
    is_column = n < N
    x += m.to(tl.int64)[None, :] * x_m
    words += n[:, None] * (CHUNKS * H) + i[None, :]
    first = split * PART
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(first, tl.minimum(first + PART, CHUNKS)):
        packed = tl.load(words + chunk * H, mask=is_column[:, None], other=0)
        k = (chunk * 128 + tl.arange(0, 128))[:, None]
        value = tl.load(x + k, mask=is_row if K % 128 == 0 else is_row & (k < K), other=0.0)
"""

_TAIL = """\
        sums = tl.dot(weight, value, sums)
    if GROUP == 0:
        sums *= tl.load(scales + n, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)[:, None]
    output += (split * rows + m).to(tl.int64)[None, :] * N
    tl.store(output + n[:, None], sums.to(output.dtype.element_ty), mask=is_column[:, None] & is_row)
"""


def tile_text(bits: int, run: int, *, has_groups: bool, has_zeros: bool, in_halves: bool) -> str:
    """The kernel's source; ``run`` positions of a word share a group, ``in_halves`` computes in float16."""
    body = list[str]()
    positions = 32 // bits
    for position in range(positions):
        if has_groups and position % run == 0:
            body += _scale(
                position * words_per_chunk(bits), has_zeros, "" if in_halves else ".to(tl.float32)"
            )
        unpacked = _in_halves if in_halves else _in_float32
        body += unpacked(bits, position, has_groups, has_zeros)
    axes = ", ".join(map(str, (0, *range(2, 2 + positions.bit_length() - 1), 1)))
    joined = _joined([f"w{position}" for position in range(positions)])
    body.append(f"weight = tl.reshape(tl.permute({joined}, ({axes})), [BLOCK_N, 128])")
    return _HEAD + "".join(f"        {line}\n" for line in body) + _TAIL


def _joined(names: Sequence[str]) -> str:
    """Values as one tensor with a new dimension of two for every bit of their index, the lowest bit last."""
    return names[0] if len(names) == 1 else f"tl.join({_joined(names[::2])}, {_joined(names[1::2])})"


def _scale(column: int, has_zeros: bool, cast: str) -> Iterator[str]:
    yield f"which = n * GROUPS + (chunk * 128 + {column}) // GROUP"
    yield f"scale = tl.load(scales + which, mask=is_column, other=0.0){cast}[:, None]"
    if has_zeros:
        yield f"zero = tl.load(zeros + which, mask=is_column, other=0.0){cast}[:, None]"


def _in_float32(bits: int, position: int, has_groups: bool, has_zeros: bool) -> Iterator[str]:
    """Codes are masked where they stand in a half of a word, so they come out times a power of two."""
    shift, mask, name = bits * position % 16, (1 << bits) - 1, f"w{position}"
    half = "packed" if bits * position < 16 else "(packed >> 16)"
    yield f"{name} = (({half} & {mask << shift}) | 0x4B000000).to(tl.float32, bitcast=True)"
    yield f"{name} -= {float((1 << 23) + (bias_of(bits) << shift))}"
    if has_groups:
        yield f"{name} *= scale * {1 / (1 << shift)}"
    elif shift:
        yield f"{name} *= {1 / (1 << shift)}"
    if has_zeros:
        yield f"{name} += zero"
    yield f"{name} = {name}.to(x.dtype.element_ty)"


def _in_halves(bits: int, position: int, has_groups: bool, has_zeros: bool) -> Iterator[str]:
    """The same with 1024, whose mantissa in float16 has room for 10 bits."""
    byte, shift = divmod(bits * position, 8)
    mask, name = (1 << bits) - 1, f"w{position}"
    moved = f"(packed >> {8 * byte})" if byte else "packed"
    yield f"{name} = (({moved} & {mask << shift}) | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)"
    if shift:
        yield f"{name} = {name} * {1 / (1 << shift)} - {float((1024 >> shift) + bias_of(bits))}"
    else:
        yield f"{name} -= {float(1024 + bias_of(bits))}"
    if has_groups:
        yield f"{name} = {name} * scale" + (" + zero" if has_zeros else "")

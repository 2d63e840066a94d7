"""The Triton kernels of products with quantised weights; `quantized_linear` says when which one runs."""

from __future__ import annotations

ROW = """\
@triton.jit
def quantized_row(x, words, scales, zeros, bias, norm, added, output, one{constants}):
{select}    r = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + r % BLOCK_N
    is_row = n < OUTPUTS
    n += r // BLOCK_N * OUTPUTS
    c = tl.arange(0, BLOCK_C)
    i = tl.arange(0, H)
    words += n[:, None, None] * (CHUNKS * H) + c[None, :, None] * H + i[None, None, :]
    is_inside = is_row[:, None] & (c < CHUNKS)[None, :]
    packed = tl.load(words, mask=is_inside[:, :, None], other=0)
    if HAS_BIAS:
        base = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
    if GROUP == 0:
        factor = tl.load(scales + n, mask=is_row, other=0.0).to(tl.float32)
{ready}
    sums = tl.zeros([ROWS, BLOCK_C, H], tl.float32)
    squares = tl.zeros([1, BLOCK_C, H], tl.float32)
    for begin in range(0, CHUNKS, BLOCK_C):
        chunk = begin + c
        is_inside = is_row[:, None] & (chunk < CHUNKS)[None, :]
        if CHUNKS > BLOCK_C:
            is_next = is_row[:, None] & (chunk + BLOCK_C < CHUNKS)[None, :]
            following = tl.load(words + (begin + BLOCK_C) * H, mask=is_next[:, :, None], other=0)
        upper = packed >> 16
        for group in tl.static_range(32 // BITS // RUN):
            if GROUP != 0:
                which = n[:, None] * GROUPS + (chunk[None, :] * 128 + group * RUN * H) // GROUP
                scale = tl.load(scales + which, mask=is_inside, other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros + which, mask=is_inside, other=0.0).to(tl.float32)
            products = tl.zeros([ROWS, BLOCK_C, H], tl.float32)
            total = tl.zeros([1, BLOCK_C, H], tl.float32)
            for inner in tl.static_range(RUN):
                position = group * RUN + inner
                k = chunk[None, :, None] * 128 + position * H + i[None, None, :]
                value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
                if HAS_NORM:
                    squares += value * value
                    value *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
                shift = BITS * position % 16
                half = packed if BITS * position < 16 else upper
                number = ((half & (((1 << BITS) - 1) << shift)) | one).to(tl.float32, bitcast=True)
                code = number - (8388608.0 + (1 << (BITS - 1 + shift)))
                products += code * (value * (1.0 / (1 << shift)))
                total += value
            if GROUP != 0:
                products *= scale[:, :, None]
            sums += products
            if HAS_ZEROS:
                sums += total * zero[:, :, None]
        if CHUNKS > BLOCK_C:
            packed = following
    result = tl.sum(tl.sum(sums, 2), 1)
    if HAS_NORM:
        result *= 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 2), 1) / K + EPS)
    if GROUP == 0:
        result *= factor
    if HAS_BIAS:
        result += base
    if IS_GATED:
        halves = tl.reshape(result, [2, BLOCK_N])
        half = tl.arange(0, 2)[:, None]
        result = tl.sum(tl.where(half == 0, halves, 0.0), 0)
        gated = tl.sum(tl.where(half == 1, halves, 0.0), 0)
        result = ({activated}) * gated
    else:
        result = {activated}
    m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_ADDED:
        result += tl.load(added + m, mask=m < OUTPUTS, other=0.0).to(tl.float32)
{kept}    tl.store(output + m, result.to(output.dtype.element_ty), mask=m < OUTPUTS)
"""
"""One row of x: each program reads BLOCK_N rows of the weight once, from end to end, with the next words on
their way while some are multiplied, and the first before x is there.

A code becomes a float without a conversion: or-ed into the mantissa of 2**23 (``one``, a parameter, so that
mask and or stay one instruction), it is what is left when 2**23 is taken away. Codes are masked where they
stand, so they come out times 2**shift, which x makes up for; all of that is exact. Where the result gates
itself, a program has the same rows of both halves. A norm's factor is applied to the sums (`row_product`).
"""

JOIN = """\
@triton.jit
def quantized_join(parts, bias, output, elements{constants}):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < elements
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(parts + split * elements + at, mask=is_inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + at % N, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(output + at, sums.to(output.dtype.element_ty), mask=is_inside)
"""
"""The sum of the parts that programs made among whom the columns were split."""

EXPAND = """\
@triton.jit
def quantized_expand(words, scales, zeros, output{constants}):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, H)
    n = r // CHUNKS
    chunk = r % CHUNKS
    is_inside = n < N
    packed = tl.load(words + r.to(tl.int64)[:, None] * H + i[None, :], mask=is_inside[:, None], other=0)
    output += (n.to(tl.int64) * K)[:, None]
    for group in tl.static_range(32 // BITS // RUN):
        which = n * GROUPS
        if GROUP != 0:
            which += (chunk * 128 + group * RUN * H) // GROUP
        scale = tl.load(scales + which, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zeros + which, mask=is_inside, other=0.0).to(tl.float32)
        for inner in tl.static_range(RUN):
            position = group * RUN + inner
            code = ((packed >> (BITS * position)) & ((1 << BITS) - 1)) | 0x4B000000
            weight = (code.to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))) * scale[:, None]
            if HAS_ZEROS:
                weight += zero[:, None]
            k = (chunk * 128)[:, None] + (position * H + i)[None, :]
            tl.store(output + k, weight.to(output.dtype.element_ty), mask=is_inside[:, None] & (k < K))
"""
"""A weight as a plain matrix [N, K]. A program takes some chunks of rows, one after the other: the 16 or 32
columns at a position of a chunk's words are neighbours, and a thread stores 16 bytes of them."""

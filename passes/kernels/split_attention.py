"""Attention of few query rows to many keys: the keys are split among programs, then joined.

When one token is decoded, a block of query rows per program would leave most of a GPU idle while a few
programs read the cache from end to end. Here each program takes one span of the keys (flash-decoding; Dao,
Haziza, Massa and Sizov, 2023) for all query heads that share a key head, so that the cache is read once; a
second kernel joins the partial results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...runtime.dtypes import DType
from ..size_arithmetic import product
from ..tape import Allocate, ExternCall, OwnLaunch, Window
from .attention import block_of, operands_of, scaling, strides_by_name, to_launch
from .own_launch import own_launch

_MOST_ROWS = 16
_MOST_FETCHED_NBYTES = 8 << 20
"""Of keys, and of values: a small part of the L2 cache of a GPU whose kernels wait by themselves (50 MB)."""
FEWEST_KEYS = 256
_FEWEST_STEPS = 4
"""Of a program, where there are more programs than a GPU needs to be busy."""


@dataclass(frozen=True)
class Shape:
    """Keys of one step, programs in all, warps and stages of a program."""

    keys: int = 32
    programs: int = 256
    """So many at least where there are keys for them: two for each of a GPU's 108 to 132 multiprocessors."""
    most_programs: int = 1024
    """Up to so many where each still takes some steps: more of them have more loads under way."""
    warps: int = 4
    stages: int = 2


_PARTS = """\
@triton.jit
def attention_parts(query, key, value, mask, sums, marks<operands>, columns{runtime}{constants}):
    split = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch = pair // KEY_HEADS
    key_head = pair % KEY_HEADS
    p = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = key_head * GROUP + p // ROWS
    m = p % ROWS
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    in_head = d < HEAD
    in_value = e < HEAD_E
    in_rows = p < GROUP * ROWS
    key += batch * key_b + key_head * key_h
    value += batch * value_b + key_head * value_h
    blocks = tl.cdiv(tl.cdiv(columns, BLOCK_N), SPLITS)
    first = split * blocks * BLOCK_N
{ready}
    row_mask = in_rows[:, None] & in_head[None, :]
    query += batch * query_b
    q = tl.load(
        query + head[:, None] * query_h + m[:, None] * query_m + d[None, :], mask=row_mask, other=0.0
    )
    biggest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
<before>    for begin in range(first, tl.minimum(first + blocks * BLOCK_N, columns), BLOCK_N):
        c = begin + n
        in_columns = c < columns
        k = tl.load(
            key + c[None, :] * key_m + d[:, None], mask=in_columns[None, :] & in_head[:, None], other=0.0
        )
        v = tl.load(
            value + c[:, None] * value_m + e[None, :], mask=in_columns[:, None] & in_value[None, :], other=0.0
        )
<within>        allowed = in_columns[None, :] & in_rows[:, None]
        if MASKED:  # loaded ahead of the product, which it does not need
            at = mask + batch * mask_b + head[:, None] * mask_h + m[:, None] * mask_m + c[None, :] * mask_n
            given = tl.load(at, mask=allowed, other=0)
        scores = tl.dot(q, k)
        if CAP > 0:
            scores = 2 * CAP * tl.sigmoid(scores * (2 * INNER)) - CAP
        scores *= SCALE
        if MASKED:
            if ADDITIVE:
                scores += given.to(tl.float32) * 1.4426950408889634
            else:
                allowed = allowed & (given != 0)
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(biggest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(biggest - base)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        biggest = higher
    row = (pair * (GROUP * ROWS) + p) * SPLITS + split
    tl.store(sums + row[:, None] * HEAD_E + e[None, :], result, mask=in_rows[:, None] & in_value[None, :])
    tl.store(marks + row * 2, biggest, mask=in_rows)
    tl.store(marks + row * 2 + 1, total, mask=in_rows)
"""
"""A span's unscaled sums, and as its marks the largest score (base 2) and the total of the weights."""

_FETCHES = """\
    nbytes = tl.minimum(blocks * BLOCK_N, columns - first) * {row}
    tl.inline_asm_elementwise(
        "{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.s32 p, t, 0; setp.gt.and.s32 p, $2, 0, p;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }}",
        "=r,l,r",
        [({name} + first * {name}_m).to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
"""
"""Brings a program's span of the keys or values into the L2 cache while it waits for the launch before."""

_BEFORE = """\
    place = tl.load(position).to(tl.int64)
    place = tl.where(place < 0, place + columns, place)
    newest_key += batch * newest_key_b + key_head * newest_key_h
    newest_value += batch * newest_value_b + key_head * newest_value_h
    fresh_key = tl.load(newest_key + d, mask=in_head, other=0.0)
    fresh_value = tl.load(newest_value + e, mask=in_value, other=0.0)
    if TABLE > 0:
        other = (d + HEAD // 2) % HEAD
        cosines = tl.load(cosine + d % TABLE, mask=in_head, other=0.0).to(tl.float32)
        sines = tl.load(sine + d % TABLE, mask=in_head, other=0.0).to(tl.float32)
        sines = tl.where(d < HEAD // 2, -sines, sines)
        others = query + head[:, None] * query_h + m[:, None] * query_m + other[None, :]
        others = tl.load(others, mask=row_mask, other=0.0).to(tl.float32)
        q = (q.to(tl.float32) * cosines[None, :] + others * sines[None, :]).to(query.dtype.element_ty)
        others = tl.load(newest_key + other, mask=in_head, other=0.0).to(tl.float32)
        fresh_key = (fresh_key.to(tl.float32) * cosines + others * sines).to(key.dtype.element_ty)
    end = tl.minimum(first + blocks * BLOCK_N, columns)
    is_here = (place >= first) & (place < end) & (tl.program_id(2) == 0)
    tl.store(key + place * key_m + d, fresh_key, mask=in_head & is_here)
    tl.store(value + place * value_m + e, fresh_value, mask=in_value & is_here)
"""
"""What `cached_attention` takes along: queries and the newest key are turned, and the caches updated."""

_WITHIN = """\
        k = tl.where((c == place)[None, :], fresh_key[:, None], k)
        v = tl.where((c == place)[:, None], fresh_value[None, :], v)
"""

_JOIN = """\
@triton.jit
def attention_join(sums, marks, sinks, output, rows{runtime}{constants}):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    in_splits = s < SPLITS
    at = row * SPLITS + s
    biggest = tl.load(marks + at * 2, mask=in_splits, other=float("-inf"))
    total = tl.load(marks + at * 2 + 1, mask=in_splits, other=0.0)
    where = in_splits[:, None] & (d < HEAD)[None, :]
    parts = tl.load(sums + at[:, None] * HEAD + d[None, :], mask=where, other=0.0)
    batch = row // (HEADS * ROWS)
    head = row // ROWS % HEADS
    highest = tl.max(biggest, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    factor = tl.exp2(biggest - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * factor, 0)
    if SINKS:
        whole += tl.exp2(sink - highest)
    result = tl.sum(parts * factor[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    output += batch * output_b + head * output_h + (row % ROWS) * output_m
    tl.store(output + d, result.to(output.dtype.element_ty), mask=d < HEAD)
"""


def to_steps(call: ExternCall, shape: Shape = Shape()) -> tuple[Allocate | OwnLaunch, ...]:
    """What one call of the operator becomes: one kernel, or two with a temporary between them."""
    splits = splits_of(call, shape)
    return (to_launch(call),) if splits is None else _steps(call, shape, splits, _Taken({}))


@dataclass(frozen=True)
class _Taken:
    """What the kernel takes along: more operands by name, and how many cosines there are."""

    operands: dict[str, Window]
    table: int = 0


def _steps(call: ExternCall, shape: Shape, splits: int, taken: _Taken) -> tuple[Allocate | OwnLaunch, ...]:
    query, output = call.operands[0], call.outs[0]
    batch, heads, rows, _ = query.sizes
    head = call.operands[2].sizes[3]
    count = batch * heads * rows
    sums = _temporary(f"{output.buffer}_sums", (count, splits, head))
    marks = _temporary(f"{output.buffer}_marks", (count, splits, 2))
    parts = _parts(call, shape, sums.window, marks.window, taken)
    return (sums, marks, parts, _join(call, sums.window, marks.window))


def to_cached_steps(call: ExternCall, shape: Shape = Shape()) -> tuple[Allocate | OwnLaunch, ...]:
    """The same for `cached_attention`."""
    query, key, value, cosine, sine, position, keys, values, mask, scale = call.operands
    taken = {"newest_key": key, "newest_value": value, "position": position}
    taken |= {"cosine": query, "sine": query} if cosine is None else {"cosine": cosine, "sine": sine}
    table = 0 if cosine is None else cosine.sizes[0]
    plain = replace(call, operands=(query, keys, values, mask, scale, False))
    return _steps(plain, shape, splits_of(plain, shape) or 1, _Taken(taken, table))


def splits_of(call: ExternCall, shape: Shape = Shape()) -> int | None:
    """Into how many spans a call's keys are split; None where one kernel over query blocks is as good."""
    query, key, _, _, _, is_causal, _, _ = operands_of(call)
    batch, heads, rows, _ = query.sizes
    columns = key.sizes[2]
    if is_causal or not all(isinstance(size, int) for size in query.sizes) or rows > _MOST_ROWS:
        return None  # row m of a causal product sees the first m + 1 keys only
    if isinstance(columns, int) and columns < FEWEST_KEYS:
        return None
    key_heads = key.sizes[1]
    packed = heads // key_heads * rows
    programs = batch * key_heads * math.ceil(packed / _block_m(packed))
    blocks = math.ceil(columns / shape.keys) if isinstance(columns, int) else 64
    more = min(math.ceil(shape.most_programs / programs), blocks // _FEWEST_STEPS)
    splits = min(max(math.ceil(shape.programs / programs), more), blocks)
    if isinstance(columns, int):
        splits = math.ceil(blocks / math.ceil(blocks / splits))  # none of them empty
    return splits if splits > 1 or heads > key_heads else None


def _block_m(packed: int) -> int:
    return min(64, max(16, 1 << (packed - 1).bit_length()))


def _temporary(name: str, sizes: tuple[int, int, int]) -> Allocate:
    rows, splits, width = sizes
    window = Window(name, DType.FLOAT32, sizes, (splits * width, width, 1))
    return Allocate(window, rows * splits * width * 4)


def _parts(call: ExternCall, shape: Shape, sums: Window, marks: Window, taken: _Taken) -> OwnLaunch:
    query, key, value, mask, scale, _, _, cap = operands_of(call)
    batch, heads, rows, head = query.sizes
    key_heads, head_e = key.sizes[1], value.sizes[3]
    packed = heads // key_heads * rows
    constants: dict[str, Any] = {
        "BLOCK_M": _block_m(packed),
        "BLOCK_N": shape.keys,
        "BLOCK_D": block_of(head),
        "BLOCK_E": block_of(head_e),
        "SPLITS": sums.sizes[1],
        **scaling(scale, cap),
        "KEY_HEADS": key_heads,
        "GROUP": heads // key_heads,
        "ROWS": rows,
        "HEAD": head,
        "HEAD_E": head_e,
        "MASKED": mask is not None,
        "ADDITIVE": mask is not None and mask.dtype is not DType.BOOL,
    }
    newest = {name: window for name, window in taken.operands.items() if name.startswith("newest")}
    strides = strides_by_name({"query": query, "key": key, "value": value, **newest}, mask)
    windows = {
        "query": query,
        "key": key,
        "value": value,
        "mask": query if mask is None else mask,
        "sums": sums,
        "marks": marks,
        **taken.operands,
    }
    before, within = (_BEFORE, _WITHIN) if taken.operands else ("", "")
    constants |= {"TABLE": taken.table} if taken.operands else {}
    text = _PARTS.replace("<before>", before).replace("<within>", within)
    text = text.replace("<operands>", "".join(f", {name}" for name in taken.operands))
    caches = (key, value) if taken.operands else ()
    hints = "".join(
        _FETCHES.format(name=name, row=each.sizes[3] * each.dtype.itemsize)
        for name, each in (("key", key), ("value", value))
        if _is_worth_fetching(each)
    )
    grid = ("SPLITS", f"{batch} * KEY_HEADS", "-(GROUP * ROWS // -BLOCK_M)")
    return own_launch(
        text, windows, strides, constants, grid, (sums, marks, *caches), updates=caches,
        counts={"columns": key.sizes[2]}, num_warps=shape.warps, num_stages=shape.stages, hints=hints,
    )  # fmt: skip


def _is_worth_fetching(window: Window) -> bool:
    """Whether keys or values fit into the cache, rows one behind the other, at multiples of 16 bytes."""
    sizes, (batch, heads, rows, last) = window.sizes, window.strides
    strides = (batch, heads, rows)
    if not all(isinstance(each, int) for each in (*sizes, *strides)) or rows != sizes[3] or last != 1:
        return False
    numel = product(sizes)
    return (
        isinstance(numel, int)
        and numel * window.dtype.itemsize <= _MOST_FETCHED_NBYTES
        and window.is_aligned
        and all(isinstance(each, int) and each * window.dtype.itemsize % 16 == 0 for each in strides)
    )


def _join(call: ExternCall, sums: Window, marks: Window) -> OwnLaunch:
    query, output, given = call.operands[0], call.outs[0], operands_of(call)[6]
    _, heads, rows, _ = query.sizes
    _, splits, head = sums.sizes
    assert isinstance(splits, int) and isinstance(head, int)
    constants: dict[str, Any] = {
        "BLOCK_S": 1 << (splits - 1).bit_length(),
        "BLOCK_D": block_of(head),
        "SPLITS": splits,
        "HEADS": heads,
        "ROWS": rows,
        "HEAD": head,
        "SINKS": given is not None,
    }
    sinks = marks if given is None else given
    windows = {"sums": sums, "marks": marks, "sinks": sinks, "output": output}
    strides = strides_by_name({"output": output})
    grid, shape = ("rows", "1", "1"), Shape()
    return own_launch(
        _JOIN, windows, strides, constants, grid, (output,),
        counts={"rows": sums.sizes[0]}, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip

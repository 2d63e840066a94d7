"""Kernels of a 1.1 B-parameter decoder's step for `bench_decoder_step.py`, with what may be tried on them.

Every kernel has four slots of hints: an address, the bytes that one program fetches into the L2 cache, the first
program that does, and how many do (`prefetch`). They are run-time arguments, so that a search needs no compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench_row_product import Shape, call_for

from devplan.passes.kernels.row_product import Blocks, to_steps_with
from devplan.passes.lowered.compile_kernels import canonical
from devplan.passes.tape import READY, KernelSpec
from devplan.runtime.dtypes import DType

HEADS, KEY_HEADS, KEYS, HEAD = 32, 4, 2048, 64
GROUP = HEADS // KEY_HEADS
SLOTS = 4
WORDS = ("at", "share", "first", "count")
HINTS = tuple(f"{name}{i}" for i in range(SLOTS) for name in WORDS)
TYPES = {"at": "i64", "share": "i32", "first": "i32", "count": "i32"}

_BEGINS = "    tl.extra.cuda.gdc_launch_dependents()\n"
_WAITS = "    tl.extra.cuda.gdc_wait()\n"
_FETCH = """\
    here{i} = {program} - first{i}
    tl.inline_asm_elementwise(
        "{{ .reg .pred p, q; .reg .b32 t; .reg .b64 e; mov.u32 t, %tid.x; setp.eq.s32 p, t, 0;"
        " setp.lt.and.u32 q, $3, $4, p; {policy}"
        " @q cp.async.bulk.prefetch.L2.global{hint}; mov.u32 $0, 0; }}",
        "=r,l,r,r,r", [at{i} + here{i}.to(tl.int64) * share{i}, share{i}, here{i}, count{i}],
        dtype=tl.int32, is_pure=False, pack=1,
    )
"""
_STAYS = {"policy": "", "hint": " [$1], $2"}
_GIVES_WAY = {
    "policy": "createpolicy.fractional.L2::evict_first.b64 e, 1.0;",
    "hint": ".L2::cache_hint [$1], $2, e",
}


def prefetch(program: str, stays: bool) -> str:
    """Lines that fetch what the slots say; ``program`` is an expression."""
    policy = _STAYS if stays else _GIVES_WAY
    return "".join(_FETCH.format(i=i, program=program, **policy) for i in range(SLOTS))


def without_hints(source: str) -> str:
    """The text with the wait."""
    return source.replace(READY, (_BEGINS + _WAITS).rstrip())


def with_hints(source: str, program: str, place: str) -> str:
    """The text with the wait and hints: before the wait, or at the end, or none."""
    hints = prefetch(program, "stays" in place)
    ready = _BEGINS + (hints if place.startswith("before") else "") + _WAITS
    return source.replace(f"{READY}\n", ready) + (hints if place == "end" else "")


def typed(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Hints' parameters."""
    return tuple((name, TYPES[name[:-1]]) for name in names)


def product_kernel(shape: Shape, blocks: Blocks, place: str) -> KernelSpec:
    """A product's kernel."""
    spec = to_steps_with(call_for(shape, 1, DType.FLOAT16), blocks)[0].kernel
    if place == "none":
        return canonical(replace(spec, source=without_hints(spec.source)))
    assert ", BLOCK_N: tl.constexpr" in spec.source
    source = spec.source.replace(", BLOCK_N: tl.constexpr", f", {', '.join(HINTS)}, BLOCK_N: tl.constexpr", 1)
    source = with_hints(source, "tl.program_id(0)", place)
    return canonical(replace(spec, source=source, parameters=spec.parameters + typed(HINTS)))


ROTARY = """\
@triton.jit
def rotary(x, cosine, sine, position, query, keys, values, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
{ready}
    head = tl.program_id(0)
    d = tl.arange(0, D)
    half: tl.constexpr = D // 2
    this = tl.load(x + head * D + d).to(tl.float32)
    other = tl.load(x + head * D + (d + half) % D).to(tl.float32)
    c = tl.load(cosine + d % half).to(tl.float32)
    s = tl.load(sine + d % half).to(tl.float32)
    at = tl.load(position)
    turned = (this * c + tl.where(d < half, -other, other) * s).to(tl.float16)
    if head < H:
        tl.store(query + head * D + d, turned)
    elif head < H + G:
        tl.store(keys + ((head - H) * N + at) * D + d, turned)
    else:
        tl.store(values + ((head - H - G) * N + at) * D + d, this.to(tl.float16))
"""
"""As generated for a rotary embedding and the update of a cache."""

ATTENTION = """\
@triton.jit
def attention_step(x, cosine, sine, position, query, keys, values, mask, sums, marks, arrived, output,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, TURNS: tl.constexpr,
    JOINS: tl.constexpr):
    split = tl.program_id(0)
    pair = tl.program_id(1) * HEADS // GROUP
    first_head = tl.program_id(1) * HEADS
    n = split * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    half: tl.constexpr = D // 2
    keys += pair * KEYS * D
    values += pair * KEYS * D
{early}{ready}{late}
    m = tl.arange(0, ROWS)
    head = first_head + m
    in_rows = m < HEADS
    allowed = tl.load(mask + n)
    if TURNS:
        at = tl.load(position)
        c = tl.load(cosine + d % half).to(tl.float32)
        s = tl.load(sine + d % half).to(tl.float32)
        sign = tl.where(d < half, -1.0, 1.0)
        row = head[:, None] * D
        q = tl.load(x + row + d[None, :], mask=in_rows[:, None], other=0.0).to(tl.float32)
        other = tl.load(x + row + ((d + half) % D)[None, :], mask=in_rows[:, None], other=0.0).to(tl.float32)
        q = (q * c[None, :] + (sign * s)[None, :] * other).to(tl.float16)
        fresh = tl.load(x + (H + pair) * D + d).to(tl.float32)
        other = tl.load(x + (H + pair) * D + (d + half) % D).to(tl.float32)
        fresh = (fresh * c + sign * s * other).to(tl.float16)
        given = tl.load(x + (H + G + pair) * D + d)
        is_new = n == at
        k = tl.where(is_new[None, :], fresh[:, None], k)
        v = tl.where(is_new[:, None], given[None, :], v)
        if (at // BLOCK_N == split) & (first_head % GROUP == 0):
            tl.store(keys + at * D + d, fresh)
            tl.store(values + at * D + d, given)
    else:
        q = tl.load(query + head[:, None] * D + d[None, :], mask=in_rows[:, None], other=0.0)
    scores = tl.where(allowed[None, :], tl.dot(q, k) * SCALE, float("-inf"))
    biggest = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(biggest == float("-inf"), 0.0, biggest)[:, None])
    total = tl.sum(weights, 1)
    result = tl.dot(weights.to(v.dtype), v)
    row = head * SPLITS + split
    tl.store(sums + row[:, None] * D + d[None, :], result, mask=in_rows[:, None])
    tl.store(marks + row * 2, biggest, mask=in_rows)
    tl.store(marks + row * 2 + 1, total, mask=in_rows)
    if JOINS:
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tl.program_id(1), 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(arrived + tl.program_id(1), 0)
            h = first_head + tl.arange(0, HEADS)
            at_part = h[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
            highs = tl.load(marks + at_part * 2, cache_modifier=".cg")
            totals = tl.load(marks + at_part * 2 + 1, cache_modifier=".cg")
            part = tl.load(sums + at_part[:, :, None] * D + d[None, None, :], cache_modifier=".cg")
            factor = tl.exp2(highs - tl.max(highs, 1)[:, None])
            whole = tl.sum(totals * factor, 1)
            joined = tl.sum(part * factor[:, :, None], 1) / whole[:, None]
            tl.store(output + h[:, None] * D + d[None, :], joined.to(tl.float16))
"""
"""Parts of one block of keys. JOINS: the last program of the same HEADS query heads joins them; TURNS takes the rotary
embedding and the update of the cache along. One position is always allowed, so that no row is empty in all."""

_FETCHES = """\
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b64 e; mov.u32 t, %tid.x; setp.eq.s32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $3; @p cp.async.bulk.prefetch.L2.global [$2], $3; mov.u32 $0, 0; }",
        "=r,l,l,r", [(keys + split * BLOCK_N * D).to(tl.int64), (values + split * BLOCK_N * D).to(tl.int64),
        BLOCK_N * D * 2], dtype=tl.int32, is_pure=False, pack=1,
    )
"""
_LOADS = """\
    k = tl.load(keys + n[None, :] * D + d[:, None])
    v = tl.load(values + n[:, None] * D + d[None, :])
"""


def rotary() -> KernelSpec:
    """Rotates queries and keys and writes keys and values to the cache."""
    text = ROTARY.format(ready=READY)
    pointers = ("x", "cosine", "sine", "position", "query", "keys", "values")
    constants = (("H", HEADS), ("G", KEY_HEADS), ("D", HEAD), ("N", KEYS))
    return _spec("rotary", without_hints(text), pointers, constants, 1)


def attention(keys: int, warps: int, heads: int, turns: bool, joins: bool, ahead: str) -> KernelSpec:
    """``keys`` and ``heads`` of a program; ``ahead``: the cache is loaded or fetched before the wait, or neither."""
    before = {"": "", "load": _LOADS, "fetch": _FETCHES}[ahead]
    after = "" if ahead == "load" else "\n" + _LOADS
    text = ATTENTION.format(ready=READY, early=before, late=after)
    pointers = (
        *("x", "cosine", "sine", "position", "query", "keys", "values", "mask"),
        *("sums", "marks", "arrived", "output"),
    )
    constants = (
        ("GROUP", GROUP), ("ROWS", 16), ("SPLITS", KEYS // keys), ("BLOCK_N", keys), ("KEYS", KEYS), ("D", HEAD),
        ("H", HEADS), ("G", KEY_HEADS), ("SCALE", HEAD**-0.5 * 1.4426950408889634), ("HEADS", heads),
        ("TURNS", turns), ("JOINS", joins),
    )  # fmt: skip
    return _spec("attention_step", without_hints(text), pointers, constants, warps)


_POINTERS = {"position": "*i64", "mask": "*i1", "sums": "*fp32", "marks": "*fp32", "arrived": "*i32"}


def _spec(
    name: str, source: str, pointers: tuple[str, ...], constants: tuple[tuple[str, Any], ...], warps: int
) -> KernelSpec:
    parameters = tuple((each, _POINTERS.get(each, "*fp16")) for each in pointers)
    return canonical(
        KernelSpec(name, source, parameters, constants, pointers, warps, 1, ("1", "1", "1"), tuple(pointers))
    )

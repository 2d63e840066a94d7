"""Attention as one generated kernel that never writes the score matrix.

The algorithm is FlashAttention-2 (Dao, 2023): a block of query rows stays on chip, key and value blocks
stream past it, and a running maximum and sum rescale what was added up so far. Operands may be strided, so
that the heads of a fused projection are read where they are, and the result lies row by row ([B, M, H, D] in
memory), so that the projection behind it needs no transposition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.dtypes import DType
from ...runtime.errors import UnsupportedOperatorError
from ...runtime.expr import Size
from ..tape import ExternCall, OwnLaunch, Window
from .own_launch import own_launch
from .own_operators import own_operator

OPERATOR = "devplan.attention.default"


@own_operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool is_causal, "
    "Tensor? sinks=None, float cap=0.0) -> Tensor"
)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


@own_operator(
    "capped_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, float scale, "
    "float cap, bool enable_gqa) -> Tensor"
)
def _fake_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    cap: float,
    enable_gqa: bool,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


CAPPED = torch.ops.devplan.capped_attention.default
"""Attention with capped scores or sinks, in an exported graph: `decompositions.capped_attention` runs it."""


def is_fusable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether the kernel is right and fast for these operands: half precision, four dimensions, D <= 256.

    Values may have heads of another size than queries and keys.
    """
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not all(isinstance(head, int) and 0 < head <= 256 for head in (query.shape[-1], value.shape[-1])):
        return False
    heads = (query.shape[1], key.shape[1], value.shape[1])
    if not all(isinstance(count, int) and count > 0 for count in heads):
        return False
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        return False
    return mask is None or mask.dim() <= 4


def in_four_dimensions(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    has_groups: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention's operands as [batch, heads, rows, D], where they have another number of dimensions.

    Of three dimensions, the first becomes the batch, which may be dynamic, unless heads share keys.
    """
    rank = query.dim()
    if rank == 4 or not rank == key.dim() == value.dim() or (mask is not None and mask.dim() > rank):
        return query, key, value, mask
    if rank > 4:
        lead = query.shape[: rank - 3]
        if key.shape[: rank - 3] != lead or value.shape[: rank - 3] != lead:
            return query, key, value, mask
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, rank - 4)
        return query.flatten(0, rank - 4), key.flatten(0, rank - 4), value.flatten(0, rank - 4), mask
    if rank == 3 and has_groups:
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
    if rank == 2:
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask
    return query, key, value, mask


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """The operator, on operands whose last dimension is dense and a mask that is not yet broadcast.

    The mask keeps its rank: a view of what is computed would be computed anew for every layer. With a
    ``cap``, scores are ``cap * tanh(scale * score)`` before masks.
    ``sinks`` [heads] are scores without values.
    """
    if scale <= 0:  # the kernel takes maxima before it scales
        query, scale = query * scale, 1.0
    query, key, value = _of_one_batch(query, key, value)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if mask is not None:
        for dimension, stride in enumerate(mask.stride()):
            if stride == 0:
                mask = mask.narrow(dimension, 0, 1)
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    sinks = None if sinks is None else sinks.contiguous()
    given = (query, key, value, mask, scale, is_causal, sinks, float(cap))
    made: torch.Tensor = torch.ops.devplan.attention(*given)
    return made


def _of_one_batch(*operands: torch.Tensor) -> list[torch.Tensor]:
    """Operands whose batch of one is read again for each of the others' batch."""
    batch = next((t.shape[0] for t in operands if not is_one(t.shape[0])), 1)
    return [t.expand(batch, -1, -1, -1) if is_one(t.shape[0]) else t for t in operands]


def is_one(extent: int | torch.SymInt) -> bool:
    """Whether an extent is known to be 1; asks nothing of one that is dynamic."""
    return isinstance(extent, int) and extent == 1


_SOURCE = """\
@triton.jit
def attention(query, key, value, mask, sinks, output, rows, columns{runtime}{constants}):
    start = tl.program_id(0) * BLOCK_M
    pair = tl.program_id(1).to(tl.int64)
    batch = pair // HEADS
    head = pair % HEADS
    m = start + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    in_head = d < HEAD
    in_value = e < HEAD_E
    query += batch * query_b + head * query_h
    key += batch * key_b + (head // GROUP) * key_h
    value += batch * value_b + (head // GROUP) * value_h
    row_mask = (m[:, None] < rows) & in_head[None, :]
    q = tl.load(query + m[:, None] * query_m + d[None, :], mask=row_mask, other=0.0)
    biggest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        biggest = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    sums = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    stop = columns
    whole = columns
    if CAUSAL:
        stop = tl.minimum(columns, start + BLOCK_M)
        whole = tl.minimum(columns, start)
    if MASKED:
        whole = 0
    whole = whole // BLOCK_N * BLOCK_N
    for checked in tl.static_range(2):
        if checked == 0:
            first = 0
            last = whole
        else:
            first = whole
            last = stop
        for begin in range(first, last, BLOCK_N):
            c = begin + n
            in_columns = c < columns
            at = key + c[None, :] * key_m + d[:, None]
            if checked == 0 and BLOCK_D == HEAD:
                k = tl.load(at)
            else:
                k = tl.load(at, mask=in_columns[None, :] & in_head[:, None], other=0.0)
            scores = tl.dot(q, k)
            if CAP > 0:
                scores = 2 * CAP * tl.sigmoid(scores * (2 * INNER)) - CAP
            if checked == 1:
                allowed = in_columns[None, :] & (m[:, None] < rows)
                if MASKED:
                    at = mask + batch * mask_b + head * mask_h + m[:, None] * mask_m + c[None, :] * mask_n
                    given = tl.load(at, mask=allowed, other=0)
                    if ADDITIVE:
                        scores += given.to(tl.float32) * (1.4426950408889634 / SCALE)
                    else:
                        allowed = allowed & (given != 0)
                if CAUSAL:
                    allowed = allowed & (c[None, :] <= m[:, None])
                scores = tl.where(allowed, scores, float("-inf"))
            higher = tl.maximum(biggest, tl.max(scores, 1) * SCALE)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * SCALE - base[:, None])
            shrink = tl.exp2(biggest - base)
            total = total * shrink + tl.sum(weights, 1)
            at = value + c[:, None] * value_m + e[None, :]
            if checked == 0 and BLOCK_E == HEAD_E:
                v = tl.load(at)
            else:
                v = tl.load(at, mask=in_columns[:, None] & in_value[None, :], other=0.0)
            sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            biggest = higher
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    output += batch * output_b + head * output_h
    at = output + m[:, None] * output_m + e[None, :]
    in_output = (m[:, None] < rows) & in_value[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=in_output)
"""
"""Rows that may see nothing give zeros, as eager's attention does."""

_FEW_PROGRAMS, _PROGRAMS_OF_WIDE_HEADS = 24, 96


@dataclass(frozen=True)
class Blocks:
    """Rows and keys of a block, and how the kernel is compiled for it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def to_launch(call: ExternCall) -> OwnLaunch:
    """The kernel's launch for one call of the operator."""
    query, key, value, mask, scale, is_causal, sinks, cap = operands_of(call)
    output = call.outs[0]
    batch, heads, rows, head = query.sizes
    if not (isinstance(heads, int) and isinstance(head, int) and isinstance(key.sizes[1], int)):
        raise UnsupportedOperatorError("attention needs a static number of heads", why=str(call.origin))
    head_e = value.sizes[3]
    assert isinstance(head_e, int)
    blocks = _blocks(batch, heads, rows, max(head, head_e))
    constants: dict[str, Any] = {
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.keys,
        "BLOCK_D": block_of(head),
        "BLOCK_E": block_of(head_e),
        **scaling(scale, cap),
        "SINKS": sinks is not None,
        "HEADS": heads,
        "GROUP": heads // key.sizes[1],
        "HEAD": head,
        "HEAD_E": head_e,
        "CAUSAL": bool(is_causal),
        "MASKED": mask is not None,
        "ADDITIVE": mask is not None and mask.dtype is not DType.BOOL,
    }
    strides = strides_by_name({"query": query, "key": key, "value": value, "output": output}, mask)
    mask, sinks = (query if window is None else window for window in (mask, sinks))
    windows = {"query": query, "key": key, "value": value, "mask": mask, "sinks": sinks, "output": output}
    pairs = batch * heads if isinstance(batch, int) else f"({batch}) * {heads}"
    return own_launch(
        _SOURCE, windows, strides, constants, ("-(rows // -BLOCK_M)", str(pairs), "1"), (output,),
        counts={"rows": rows, "columns": key.sizes[2]},
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def operands_of(call: ExternCall) -> tuple[Any, ...]:
    """Query, key, value, mask, scale, whether it is causal, sinks, cap; a call may leave out defaults."""
    return (*call.operands, *(None, 0.0)[len(call.operands) - 6 :])


def scaling(scale: float, cap: float) -> dict[str, float]:
    """Constants for scores in base 2; with a cap, ``scale`` stands within its tanh."""
    base = 1.0 if cap else float(scale)
    return {"SCALE": base / math.log(2), "CAP": float(cap), "INNER": float(scale)}


def strides_by_name(windows: Mapping[str, Window], mask: Window | None = None) -> dict[str, Size]:
    """Strides in elements as ``query_b``, ``query_h``, ``query_m``; the mask's are 0 where it broadcasts."""
    named: dict[str, Size] = {}
    for name, window in windows.items():
        named |= {f"{name}_{axis}": stride for axis, stride in zip("bhm", window.strides, strict=False)}
    if "query" not in windows:
        return named
    given: list[Size] = []
    if mask is not None:
        given = [0 if n == 1 else s for n, s in zip(mask.sizes, mask.strides, strict=True)]
    strides = (*[0] * (4 - len(given)), *given)
    return named | {f"mask_{axis}": stride for axis, stride in zip("bhmn", strides, strict=True)}


def block_of(head: int) -> int:
    """Columns of a block that holds a head: a power of two, as wide as the tensor cores need it at least."""
    return max(16, 1 << (head - 1).bit_length())


def _blocks(batch: Size, heads: int, rows: Size, head: int) -> Blocks:
    """Block sizes that were fastest on an H200 (`tests/bench/bench_attention.py`).

    Blocks of 128 rows only where there are many rows and many waves of them, or wide heads; fewer than 64
    only where the whole grid would be a few programs. Heads over 64 take two stages: some GPUs have 100 KiB
    of shared memory.
    """
    wide = block_of(head)
    pairs = batch * heads if isinstance(batch, int) else None
    if wide > 64:
        block_m = _fitting(64 if wide > 128 else 128, rows, pairs, _PROGRAMS_OF_WIDE_HEADS)
        return Blocks(block_m, 32 if wide > 128 else 64, 8 if block_m >= 128 else 4, 2)
    if isinstance(rows, int) and rows >= 1024 and (pairs is None or pairs >= 128):
        return Blocks(128, 64, 8, 3)
    return Blocks(_fitting(64, rows, pairs, _FEW_PROGRAMS), 64, 4, 3)


def _fitting(block_m: int, rows: Size, pairs: int | None, programs: int) -> int:
    """So many rows at most that there are enough programs; at least 16, for the tensor cores."""
    if not isinstance(rows, int) or pairs is None:
        return block_m
    while block_m > 16 and pairs * -(-rows // block_m) < programs:
        block_m //= 2
    return block_m

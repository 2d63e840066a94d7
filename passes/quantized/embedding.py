"""Embeddings whose table is quantised: rows of the packed matrix that a tied head reads, too."""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.expr import Size
from ..kernels.own_operators import own_operator
from ..tape import ExternCall, OwnLaunch
from .launch import launch
from .weight import CHUNK, words_per_chunk

OPERATOR = "devplan.quantized_embedding.default"

_SOURCE = """\
@triton.jit
def quantized_embedding(ids, words, scales, output, rows{constants}):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.arange(0, H)
    at = tl.load(ids + row).to(tl.int64)
    scale = tl.load(scales + at).to(tl.float32)
    words += at * (CHUNKS * H) + c[:, None] * H + i[None, :]
    packed = tl.load(words, mask=(c < CHUNKS)[:, None], other=0)
    for position in tl.static_range(32 // BITS):
        k = c[:, None] * 128 + position * H + i[None, :]
        code = ((packed >> (BITS * position)) & ((1 << BITS) - 1)).to(tl.float32) - (1 << (BITS - 1))
        tl.store(output + row * K + k, code * scale, mask=k < K)
"""
"""One program for a row and 16 chunks of it."""


@own_operator("quantized_embedding(Tensor ids, Tensor words, Tensor scales, int columns) -> Tensor")
def _fake(ids: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.empty((*ids.shape, columns), dtype=torch.float32, device=ids.device)


def on_ids(ids: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The operator on a dense list of ids."""
    flat = ids.reshape(-1).contiguous()
    made: torch.Tensor = torch.ops.devplan.quantized_embedding(flat, words, scales, columns)
    return made.reshape(*ids.shape, columns)


def to_steps(call: ExternCall) -> tuple[OwnLaunch, ...]:
    """The kernel for one call of the operator; tables have 8 bits and a scale for each row."""
    ids, words, scales, columns = call.operands
    height = words_per_chunk(8)
    constants: dict[str, Any] = {
        "CHUNKS": words.sizes[1] // height,
        "H": height,
        "K": columns,
        "BITS": 8,
        "BLOCK_C": min(16, 1 << (-(columns // -CHUNK) - 1).bit_length()),
    }
    windows = {"ids": ids, "words": words, "scales": scales, "output": call.outs[0]}
    rows: Size = ids.sizes[0]
    grid = ("rows", "-(CHUNKS // -BLOCK_C)", "1")
    return (launch(_SOURCE, windows, {"rows": rows}, {}, constants, grid, call.outs[0], (4, 2)),)

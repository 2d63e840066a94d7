"""Decompositions of our own, where torch's would lose precision, speed or the way to a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention in the inputs' own precision, the softmax in float32.

    torch's math decomposition widens half-precision operands to float32 first, which keeps the tensor
    cores idle. Shapes as `torch.nn.functional.scaled_dot_product_attention`; dropout is ignored, as in
    evaluation.
    """
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1)).to(torch.float32) * scale
    if is_causal:
        rows, columns = query.size(-2), key.size(-2)
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1).to(value.dtype), value)


def table() -> dict[Any, Callable[..., Any]]:
    """Operator -> decomposition, for tracing a region on the target."""
    return {aten.scaled_dot_product_attention.default: attention}

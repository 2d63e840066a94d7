"""``x[mask] = values`` as a choice between elements, where Inductor leaves boolean indices to a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """As ``aten.index_put`` with one boolean mask, behind full slices; NotImplemented for other indices.

    ``values`` are one for all true elements, or, where no slice is in front, one for each in their order.
    """
    mask, lead = indices[-1], len(indices) - 1
    if mask is None or mask.dtype != torch.bool or any(index is not None for index in indices[:-1]):
        return NotImplemented
    inner = x.dim() - lead - mask.dim()
    at = values.dim() - inner - 1  # the dimension that counts the true elements
    if at >= 0 and values.size(at) == 1:
        values = values.reshape(*values.shape[:at], *[1] * mask.dim(), *values.shape[at + 1 :])
    elif at == 0 and lead == 0:
        place = (mask.flatten().cumsum(0) - 1).clamp(0, values.size(0) - 1)
        values = values[place].reshape(*mask.shape, *values.shape[1:])
    elif at >= 0:
        return NotImplemented
    chosen = mask.reshape(*mask.shape, *[1] * inner)
    return torch.where(chosen, x + values if accumulate else values.to(x.dtype), x)

"""Operators in terms of others, where neither Inductor nor PyTorch takes them apart for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import embedding_bag as bag_kernel
from ..kernels import grouped_product as grouped_kernel


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """As ``aten.histc``; equal ``min`` and ``max`` stand for the range of the data."""
    flat = x.flatten()
    low, high = _range(flat) if min == max else (min, max)
    position = ((flat - low) * bins / (high - low)).floor().to(torch.int64)
    position = torch.where(flat == high, bins - 1, position)
    found = position[None, :] == torch.arange(bins, device=x.device)[:, None]
    return (found & (flat >= low) & (flat <= high)).sum(1).to(x.dtype)


def _range(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest element; one below and above where they are equal."""
    low, high = flat.amin(), flat.amax()
    is_single = low == high
    return torch.where(is_single, low - 1, low), torch.where(is_single, high + 1, high)


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """As ``aten._adaptive_avg_pool3d``: means of windows, one dimension after the other."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return _means(x.to(wide), output_size).to(x.dtype)


def _means(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for dim, extent in zip(range(-len(output_size), 0), output_size, strict=True):
        at = torch.arange(x.size(dim), device=x.device)[None, :]
        cell = torch.arange(extent, device=x.device)[:, None]
        begin, end = cell * x.size(dim) // extent, -((cell + 1) * -x.size(dim) // extent)
        weight = ((at >= begin) & (at < end)).to(x.dtype) / (end - begin)
        x = torch.matmul(x.movedim(dim, -1), weight.to(x.dtype).t()).movedim(-1, dim)
    return x


def cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """As ``aten._cdist_forward``: distances between all rows of x and all rows of y."""
    return _length((x.unsqueeze(-2) - y.unsqueeze(-3)).abs(), p)


def take(x: Tensor, index: Tensor) -> Tensor:
    """As ``aten.take``: elements of the flat tensor, of which the index may be a scalar."""
    return x.reshape(-1)[index.reshape(-1)].reshape(index.shape)


def var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """As ``aten.var_mean`` of no elements, which has no mean; else NotImplemented."""
    if 0 not in x.shape:
        return NotImplemented
    mean = torch.mean(x, dim, keepdim)
    return torch.var(x, dim, correction=correction, keepdim=keepdim), mean


def pdist(x: Tensor, p: float = 2) -> Tensor:
    """As ``aten._pdist_forward``: distances between every two rows of x."""
    first, second = torch.triu_indices(x.size(0), x.size(0), 1, device=x.device).unbind(0)
    return _length((x.index_select(0, first) - x.index_select(0, second)).abs(), p)


def _length(difference: Tensor, p: float) -> Tensor:
    """The p-norm of the last dimension of what is not negative."""
    if p == 0:
        return (difference != 0).sum(-1).to(difference.dtype)
    if p == 1:
        return difference.sum(-1)
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    return difference.amax(-1) if p == float("inf") else difference.pow(p).sum(-1).pow(1 / p)


def digamma(x: Tensor) -> Tensor:
    """As ``aten.digamma``: reflected to where it is positive, shifted by 10, then its series there.

    Abramowitz and Stegun, 6.3.6, 6.3.7 and 6.3.18.
    """
    given = x if x.dtype == torch.float64 else x.to(torch.float32)
    is_low = given <= 0
    first = torch.where(is_low, 1 - given, given)
    shift, at = torch.zeros_like(first), first + 10
    for step in range(10):
        shift = shift - 1 / (first + step)
    square, series = 1 / (at * at), torch.zeros_like(at)
    for factor in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = (series + factor) * square
    made = shift + at.log() - 0.5 / at - series
    turned = math.pi * torch.fmod(given, 1.0)
    low = torch.where(given == given.floor(), math.nan, made - math.pi / turned.tan())
    low = torch.where(given == 0, torch.copysign(torch.full_like(given, math.inf), -given), low)
    kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.where(is_low, low, made).to(kind)


def rrelu(
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """As ``aten.rrelu_with_noise`` in evaluation, where nothing is random; else NotImplemented."""
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """As ``aten.empty`` with zeros, so that what a program returns of it does not depend on other tensors."""
    return torch.full(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def empty_strided(size: Sequence[int], stride: Sequence[int], **rest: Any) -> Tensor:
    """As ``aten.empty_strided`` and ``aten.empty_permuted``, likewise; layouts are chosen later."""
    return empty(size, **rest)


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """As ``aten._trilinear``: the product of three expanded tensors, summed."""
    for dim in expand1:
        a = a.unsqueeze(dim)
    for dim in expand2:
        b = b.unsqueeze(dim)
    for dim in expand3:
        c = c.unsqueeze(dim)
    return (a * b * c).sum(list(sumdim))


def padded_embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``aten.embedding_bag.padding_idx``, where a negative index counts from the end."""
    padding_idx: Any = rest[-1]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.size(0)
    given: Sequence[Any] = (*rest[:-1], padding_idx)
    return embedding_bag(weight, indices, offsets, *given)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``aten._embedding_bag``: sums (mode 0), means (1) or maxima (2) of rows, bag by bag.

    On the host, too: the operator itself resizes results there that are planned.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    position = torch.arange(indices.numel(), device=indices.device)
    bag = (starts[None, :] <= position[:, None]).sum(1) - 1
    member = bag[None, :] == torch.arange(starts.numel(), device=indices.device)[:, None]
    if include_last_offset:
        member = member & (position < offsets[-1])[None, :]
    padding_idx = -1 if padding_idx is None else padding_idx
    if padding_idx >= 0:
        member = member & (indices != padding_idx)[None, :]
    counts = member.sum(1)
    if weight.is_cuda and bag_kernel.is_possible(weight, indices, offsets):
        given = (weight, indices, offsets, per_sample_weights, mode, padding_idx, include_last_offset)
        return bag_kernel.bags(*given), bag, counts, torch.zeros_like(counts)
    rows = weight.index_select(0, indices)
    if mode == 2:
        kept = torch.where(member[:, :, None], rows[None], float("-inf")).amax(1)
        output = torch.where(counts[:, None] > 0, kept, 0)
    else:
        share = member.to(rows.dtype)
        share = share if per_sample_weights is None else share * per_sample_weights[None, :]
        output = torch.mm(share, rows)
        output = output / counts.clamp(min=1)[:, None] if mode == 1 else output
    return output, bag, counts, torch.zeros_like(counts)


def integer_power(base: Tensor, exponent: Tensor) -> Any:
    """As ``aten.pow`` of integers, by squaring, bit by bit; NotImplemented for others.

    A negative power is 0 but for bases of 1 and -1, as in eager. Powers above 255 are taken for what does not
    overflow in them (0, 1 and -1) and for even bases, which have become 0.
    """
    kind = torch.result_type(base, exponent)
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        return NotImplemented
    base, exponent = base.to(kind), exponent.to(kind)
    power, factor = torch.ones_like(base | exponent), base
    bits = torch.iinfo(kind).bits - int(kind.is_signed)
    for bit in range(min(bits, 8)):
        power = torch.where(((exponent >> bit) & 1) != 0, power * factor, power)
        factor = factor * factor
    if bits > 8:
        power = torch.where((exponent > 255) & (base & 1 == 0), 0, power)
    if not kind.is_signed:
        return power
    inverse = torch.where(base == 1, 1, torch.where(base == -1, 1 - 2 * (exponent & 1), 0)).to(kind)
    return torch.where(exponent < 0, inverse, power)


def integer_power_of(base: float, exponent: Tensor) -> Any:
    """As ``aten.pow.Scalar``, likewise."""
    kind = torch.result_type(exponent, base)
    if kind.is_floating_point or kind.is_complex:
        return NotImplemented
    return integer_power(torch.full((), base, dtype=kind, device=exponent.device), exponent)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """As ``aten.addmm`` and ``aten.baddbmm`` where libraries do not add such a tensor; else NotImplemented.

    They add a matrix as large as the product, times any factor, or a row as it is, and no integers, whose
    factors eager cuts to integers. Sizes are compared as texts: a comparison of dynamic ones would be a
    condition on them.
    """
    rows, columns = a.size(-2), b.size(-1)
    shape, whole = list(map(str, added.shape)), list(map(str, (*a.shape[:-2], rows, columns)))
    is_row = a.dim() == 2 and beta == 1 and shape in ([str(columns)], ["1", str(columns)])
    is_whole = shape == whole and ("0" not in map(str, added.stride()) or "1" in whole)
    if a.is_floating_point() and (beta == 0 or is_row or is_whole):
        return NotImplemented
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    added = added if beta == 1 else added * beta
    return product + (added if added.dim() else added.reshape(1))


def addbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As ``aten.addbmm``: a batch of products, summed."""
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    return torch.bmm(a, b).sum(0) * alpha + added * beta


def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """As ``aten.nonzero_static``: the first ``size`` indices of non-zero elements, then ``fill_value``."""
    if 0 in x.shape:
        return torch.full((size, x.dim()), fill_value, dtype=torch.int64, device=x.device)
    mask = (x != 0).flatten()
    rank = torch.cumsum(mask.to(torch.int64), 0) - 1
    place = torch.where(mask & (rank < size), rank, size)
    position = torch.arange(mask.numel(), device=x.device, dtype=torch.int32)
    empty = torch.full((size + 1,), -1, dtype=torch.int32, device=x.device)
    found = empty.scatter(0, place, position)[:size].to(torch.int64)
    columns: list[Tensor] = []
    rest = found
    for extent in reversed(x.shape):
        columns.insert(0, torch.where(found < 0, fill_value, rest % extent))
        rest = rest // extent
    return torch.stack(columns, 1) if columns else found.new_zeros((size, 0))


def resize_antialiased(
    x: Tensor, output_size: Sequence[int], align_corners: bool, scales: Sequence[float | None], reach: int
) -> Tensor:
    """Separable resampling; the filter (reach 1: triangle, 2: cubic) spans a result's source pixels."""
    for dim, extent, given in zip((-2, -1), output_size, scales, strict=True):
        scale = 1 / given if given else x.size(dim) / extent
        if align_corners:
            scale = (x.size(dim) - 1) / (extent - 1) if extent > 1 else 0.0
        x = _resample(x, dim, extent, scale, reach)
    return x


def _resample(x: Tensor, dim: int, extent: int, scale: float, reach: int) -> Tensor:
    stretch = max(scale, 1.0)
    centre = (torch.arange(extent, device=x.device) + 0.5) * scale
    distance = (torch.arange(x.size(dim), device=x.device)[None, :] + 0.5 - centre[:, None]).abs() / stretch
    if reach == 1:
        weight = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    weight = (weight / weight.sum(1, keepdim=True)).to(x.dtype)
    return torch.matmul(x.movedim(dim, -1), weight.t()).movedim(-1, dim)


def upsample_bilinear_aa(
    x: Tensor, output_size: Sequence[int], align_corners: bool, h: float | None = None, w: float | None = None
) -> Tensor:
    """As ``aten._upsample_bilinear2d_aa``."""
    return resize_antialiased(x, output_size, align_corners, (h, w), 1)


def upsample_bicubic_aa(
    x: Tensor, output_size: Sequence[int], align_corners: bool, h: float | None = None, w: float | None = None
) -> Tensor:
    """As ``aten._upsample_bicubic2d_aa``."""
    return resize_antialiased(x, output_size, align_corners, (h, w), 2)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x [rows, k] times their group's matrix [groups, k, n]; ``ends`` are where the groups end.

    For few rows the matrices are gathered; else every group's product is made and the right one kept.
    """
    row = torch.arange(x.size(0), device=x.device)
    group = (ends[None, :] <= row[:, None]).sum(1)
    known = group.clamp(max=weight.size(0) - 1)
    if x.size(0) <= weight.size(0):
        return torch.bmm(x.unsqueeze(1), weight.index_select(0, known)).squeeze(1)
    output = x.new_zeros((x.size(0), weight.size(-1)))
    for index in range(weight.size(0)):
        output = torch.where((group == index)[:, None], torch.mm(x, weight[index]), output)
    return output


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As ``aten._grouped_mm`` for rows in groups and for equal batches."""
    return _grouped(grouped_on_cuda, x, weight, ends, bias, dtype)


def grouped_mm_on_host(
    x: Tensor,
    weight: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The same without a kernel of ours."""
    return _grouped(grouped_product, x, weight, ends, bias, dtype)


def _grouped(
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    ends: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    if bias is not None or weight.dim() != 3 or x.dim() != (3 if ends is None else 2):
        raise NotImplementedError(
            "of grouped products, those of rows in groups and of equal batches are here"
        )
    made = torch.bmm(x, weight) if ends is None else product(x, weight, ends)
    return made if dtype is None else made.to(dtype)


def grouped_on_cuda(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product` by the kernel for it, where that takes the operands."""
    if grouped_kernel.is_possible(x, weight):
        return grouped_kernel.grouped(x, weight, ends)
    return grouped_product(x, weight, ends)

"""Decompositions of our own, where torch's would lose precision, speed or the way to a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..kernels import boxes, recurrent, roi_align, small_matrices
from ..kernels.attention import CAPPED, fused, in_four_dimensions, is_fusable
from ..quantized.embedding import on_ids
from ..quantized.experts import on_rows as experts_on_rows
from ..quantized.linear import on_rows
from . import more_decompositions as more
from . import order, patches, pooling, scattering
from .grid_sampling import grid_sampler, grid_sampler_3d

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
    return capped_attention(query, key, value, attn_mask, None, scale, 0.0, enable_gqa, is_causal=is_causal)


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    cap: float,
    enable_gqa: bool,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """The same with scores ``cap * tanh(scale * score)``, where a cap is given, and a score more per head."""
    given = in_four_dimensions(query, key, value, mask, enable_gqa)
    if query.device.type == "cuda" and is_fusable(*given):
        made = fused(*given, scale, is_causal, sinks, cap)
        return made if query.dim() == 4 else made.reshape(*query.shape[:-1], value.size(-1))
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1)).to(torch.float32) * scale
    scores = cap * torch.tanh(scores) if cap else scores
    if is_causal:
        rows, columns = query.size(-2), key.size(-2)
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = torch.where(allowed, scores, -math.inf)
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        scores = torch.where(mask, scores, -math.inf) if is_boolean else scores + mask
    if sinks is not None:
        more = sinks.to(torch.float32).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1]
    elif mask is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = aten._safe_softmax(scores, -1)  # a row that may see nothing gives zeros, as in eager
    return torch.matmul(weights.to(value.dtype), value)


_EMBEDDING_BAGS = (
    aten.embedding_bag.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
)


def replacements() -> dict[Any, Callable[..., Any]]:
    """Operator -> what runs in its place when a region is traced on the target.

    A view becomes a reshape: layouts can differ from eager's there (attention's result does).
    """
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten.grid_sampler.default: grid_sampler,
        torch.ops.devplan.quantized_linear.default: on_rows,
        torch.ops.devplan.quantized_embedding.default: on_ids,
        torch.ops.devplan.quantized_experts.default: experts_on_rows,
        **host_replacements(),
        aten._grouped_mm.default: more.grouped_mm,
        **_of_other_libraries(more.grouped_on_cuda),
    }


def on_cuda() -> dict[Any, Callable[..., Any]]:
    """Decompositions of our own on the target; NotImplemented leaves an operator to Inductor."""
    return {
        aten.sort.default: order.sort_default,
        aten.sort.stable: order.sort,
        aten.argsort.stable: order.argsort,
        aten.searchsorted.Tensor: order.searchsorted,
        aten.bucketize.Tensor: order.bucketize,
        aten.topk.default: order.topk,
        aten.kthvalue.default: order.kthvalue,
        aten.median.dim: order.median_dim,
        aten.median.default: order.median,
        aten.nanmedian.dim: order.nanmedian_dim,
        aten.nanmedian.default: order.nanmedian,
        aten.histc.default: more.histc,
        aten.addmm.default: more.addmm,
        aten.baddbmm.default: more.addmm,
        aten.addbmm.default: more.addbmm,
        aten.index_put.default: scattering.index_put,
        aten.convolution.default: patches.convolution,
        aten.avg_pool2d.default: pooling.average(2),
        aten.avg_pool3d.default: pooling.average(3),
        aten._adaptive_avg_pool2d.default: pooling.adaptive_average,
        aten._adaptive_avg_pool3d.default: more.adaptive_avg_pool,
        aten.adaptive_max_pool3d.default: pooling.adaptive_maximum,
        aten._cdist_forward.default: more.cdist,
        aten.pow.Tensor_Tensor: more.integer_power,
        aten.pow.Scalar: more.integer_power_of,
        aten.take.default: more.take,
        aten.var_mean.correction: more.var_mean,
        aten._pdist_forward.default: more.pdist,
        aten._trilinear.default: more.trilinear,
        aten.rrelu_with_noise.default: more.rrelu,
        aten.empty.memory_format: more.empty,
        aten.empty_strided.default: more.empty_strided,
        aten.empty_permuted.default: more.empty_strided,
        **dict.fromkeys(_EMBEDDING_BAGS, more.embedding_bag),
        aten.embedding_bag.padding_idx: more.padded_embedding_bag,
        aten.scatter.src: scattering.scatter,
        aten.scatter.value: scattering.scatter_value,
        aten.scatter.reduce: scattering.scatter_with,
        aten.scatter.value_reduce: scattering.scatter_value_with,
        aten.scatter_add.default: scattering.scatter_add,
        aten.scatter_reduce.two: scattering.scatter_reduce,
        aten.index_reduce.default: scattering.index_reduce,
        aten.grid_sampler_3d.default: grid_sampler_3d,
        aten.digamma.default: more.digamma,
        aten.nonzero_static.default: more.nonzero_static,
        aten._upsample_bilinear2d_aa.default: more.upsample_bilinear_aa,
        aten._upsample_bicubic2d_aa.default: more.upsample_bicubic_aa,
    }


def host_replacements() -> dict[Any, Callable[..., Any]]:
    """The same for regions on the host."""
    return {
        aten.view.default: aten.reshape.default,
        CAPPED: capped_attention,
        aten.lstm.input: recurrent.lstm,
        aten.gru.input: recurrent.gru,
        **dict.fromkeys(_EMBEDDING_BAGS, more.embedding_bag),
        aten.embedding_bag.padding_idx: more.padded_embedding_bag,
        aten._grouped_mm.default: more.grouped_mm_on_host,
        torch.ops.devplan.kept_boxes.default: boxes.kept,
        torch.ops.devplan.roi_align.default: roi_align.pooled,
        torch.ops.devplan.eliminated.default: small_matrices.eliminated,
        torch.ops.devplan.cholesky.default: small_matrices.cholesky,
        aten.rnn_tanh.input: recurrent.simple(torch.tanh),
        aten.rnn_relu.input: recurrent.simple(torch.relu),
        aten.lstm_cell.default: recurrent.lstm_cell,
        aten.gru_cell.default: recurrent.gru_cell,
        aten.rnn_tanh_cell.default: recurrent.simple_cell(torch.tanh),
        aten.rnn_relu_cell.default: recurrent.simple_cell(torch.relu),
        **_of_other_libraries(more.grouped_product),
    }


def _of_other_libraries(product: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """Operators that libraries register, where those are loaded; ``product`` is that of rows in groups."""
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if grouped is None else {grouped.default: product}

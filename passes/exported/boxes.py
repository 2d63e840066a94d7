"""Operators of detection that torchvision has compiled code for, as operators of ours.

`nms` keeps as many boxes as data says, at most all of them: its rule is one of `ragged`'s. torchvision's own
models ask in Python how many there are, which no trace knows; `traced_detection` spells that in sizes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..inductor.overloads import arguments
from ..kernels import boxes as _kept  # registers what the rules below call
from ..kernels import roi_align as _pooled
from ..kernels.own_operators import own_operator
from .ragged_order import in_order
from .ragged_rules import Call, Ragged, bounds_of, counted_by, tensors

if TYPE_CHECKING:
    from .method import ExportedMethod

__all__ = ["batched_nms", "nms", "pool_regions", "pooled", "traced_detection"]
assert _kept.OPERATOR and _pooled.OPERATOR


@own_operator("batched_nms(Tensor boxes, Tensor scores, Tensor groups, float threshold) -> Tensor")
def _fake(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty(size, dtype=torch.int64)


def nms(call: Call) -> Ragged:
    """As ``torchvision::nms``: places of boxes [N, 4] that no box with a better score covers, best first."""
    boxes, scores, threshold = call.args
    return _kept_of(call, boxes, scores, None, threshold)


def batched_nms(call: Call) -> Ragged:
    """As ``torchvision.ops.batched_nms``: boxes cover those of their own group only."""
    boxes, scores, groups, threshold = call.args
    return _kept_of(call, boxes, scores, groups, threshold)


def _kept_of(call: Call, boxes: Any, scores: Any, groups: Any, threshold: float) -> Ragged:
    given = [each for each in (boxes, scores, groups) if each is not None]
    if len({isinstance(each, Ragged) for each in given}) > 1:
        raise call.refuse()
    count: Any = None
    if isinstance(boxes, Ragged):
        if boxes.axis != -2:
            raise call.refuse()
        count = scores.count
        order = in_order(scores, descending=True)[1]
        boxes, groups = boxes.data, groups if groups is None else groups.filled(0)
    else:
        order = torch.ops.aten.sort.stable(scores, stable=True, dim=0, descending=True)[1]
    if groups is not None:
        groups = groups.to(torch.int64).index_select(0, order)
    made = torch.ops.devplan.kept_boxes(boxes.index_select(0, order), groups, count, float(threshold))
    most = bounds_of(boxes.size(0))[1]
    room = boxes.size(0)
    declared = bounds_of(counted_by(tensors(call.node)[0]))[1]
    if declared is not None and most is not None and declared < most:
        room = declared
    return Ragged(order.index_select(0, made[:room]), made[-1], -1, most)


def pooled(call: Call) -> Ragged:
    """``devplan::roi_align`` of regions whose number depends on data: those behind the count are empty."""
    maps, regions, *how = call.args
    if isinstance(maps, Ragged) or not isinstance(regions, Ragged) or regions.axis != -2:
        raise call.refuse()
    made = call.target(maps, regions.filled(0), *how, **call.kwargs)
    return Ragged(made, regions.count, -4, regions.most)


def pool_regions(method: ExportedMethod) -> None:
    """Let ``torchvision::roi_align`` and ``ps_roi_align`` of a graph be ``devplan::roi_align``, in place."""
    for node in list(method.graph.graph.nodes):
        name = str(node.target)
        if node.op != "call_function" or name not in _POOLS:
            continue
        names = [argument.name for argument in arguments(node.target)]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        by_position = "aligned" not in names
        args = (*(given[each] for each in names[:6]), given.get("aligned", True), by_position)
        with method.graph.graph.inserting_before(node):
            made = method.graph.graph.call_function(torch.ops.devplan.roi_align.default, args)
        value = node.meta["val"]
        made.meta = {**node.meta, "val": value[0] if by_position else value}
        _replace(method, node, made)
    method.graph.recompile()


_POOLS = ("torchvision.roi_align.default", "torchvision.ps_roi_align.default")


def _replace(method: ExportedMethod, node: torch.fx.Node, made: torch.fx.Node) -> None:
    parts = [node] if isinstance(node.meta["val"], Tensor) else list(node.users)
    for part in parts:
        if part is node or part.args[1] == 0:  # the other result is for gradients
            part.replace_all_uses_with(made)
            method.rename_ends(part.name, made.name)
        if part is not node and not part.users:
            method.graph.graph.erase_node(part)
    if not node.users:
        method.graph.graph.erase_node(node)


# --- torchvision's models while they are traced --------------------------------------------------------


def _batched(boxes: Any, scores: Any, idxs: Any, iou_threshold: Any) -> Any:
    return torch.ops.devplan.batched_nms(boxes, scores, idxs, iou_threshold)


def _fewer(input: Any, orig_kval: Any, axis: Any) -> Any:
    return torch.sym_min(orig_kval, input.size(axis))  # type: ignore[no-untyped-call]


def _found(dets: Any, scores: Any, iou_threshold: Any) -> Any:
    if dets.dim() != 2 or dets.size(1) != 4 or scores.dim() != 1:
        raise ValueError("boxes should have the shape [N, 4], scores [N]")
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _over_levels(
    x_filtered: Any, boxes: Any, output_size: Any, sampling_ratio: Any, scales: Any, mapper: Any
) -> Any:
    rois = _convert_to_roi_format(boxes)  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore
    made: Any = None
    levels: Any = mapper(boxes)[:, None, None, None] if len(x_filtered) > 1 else None
    for level in range(len(x_filtered)):
        pooled = roi_align(  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore
            x_filtered[level], rois, output_size, scales[level], sampling_ratio
        )
        made = pooled if made is None else torch.where(levels == level, pooled, made)
    return made


def _decoded(self: Any, rel_codes: Any, boxes: Any) -> Any:
    whole = torch.cat(boxes, 0)
    made = self.decode_single(rel_codes.reshape(whole.shape[0], rel_codes.numel() // whole.shape[0]), whole)
    return made.reshape(whole.shape[0], made.shape[1] // 4, 4)


_SPELLED: dict[tuple[str, str], Any] = {
    ("torchvision._meta_registrations", "meta_nms"): _found,  # theirs says that two boxes or more are kept
    ("torchvision.ops.boxes", "batched_nms"): _batched,
    ("torchvision.ops.poolers", "_multiscale_roi_align"): _over_levels,
    ("torchvision.models.detection._utils", "_topk_min"): _fewer,
    ("torchvision.models.detection._utils", "BoxCoder.decode"): _decoded,
}
"""(module, function) -> what it computes, without asking how much there is."""


@contextlib.contextmanager
def traced_detection() -> Generator[None]:
    """While active, functions of torchvision ask for no size that depends on data; nothing is imported.

    Their code is exchanged, not their names, which other modules have taken over.
    """
    with contextlib.ExitStack() as stack:
        for (module, name), spelled in _SPELLED.items():
            function: Any = sys.modules.get(module)
            for part in name.split("."):
                function = getattr(function, part, None)
            if isinstance(function, FunctionType):
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = spelled.__code__
        yield

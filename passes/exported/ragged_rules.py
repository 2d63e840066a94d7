"""What operators become when sizes depend on data: see `ragged`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.interfaces import depends_on_data, pytree
from ..inductor.overloads import is_overload, overload_name, packet_name
from .origins import origin_of
from .sizes import bound_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Ragged:
    """A tensor of which the first ``count`` along ``axis`` (counted from the right, negative) are real."""

    data: Any
    count: Any
    axis: int
    most: int | None = None
    """How much the count can be at all, where that is known: what the mask has."""

    def filled(self, value: float | bool) -> Tensor:
        """The data with ``value`` behind the count."""
        data: Tensor = self.data
        extent = data.size(self.axis)
        real = torch.arange(extent, device=data.device) < self.count
        real = real.reshape([extent] + [1] * (-self.axis - 1))
        return torch.where(real, data, torch.full((), value, dtype=data.dtype, device=data.device))


def tensors(node: torch.fx.Node) -> list[Tensor]:
    """The tensors that a node makes."""
    value: Any = node.meta.get("val")
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore
    return [v for v in values if isinstance(v, Tensor)]


def ragged_axes(value: Tensor) -> list[int]:
    """The dimensions, counted from the right, whose size depends on data."""
    found = [isinstance(e, torch.SymInt) and depends_on_data(e) for e in value.shape]
    return [at - value.dim() for at, is_ragged in enumerate(found) if is_ragged]


def symbols_of(value: Tensor) -> set[str]:
    """The names of the sizes of a tensor that depend on data."""
    return {str(value.shape[axis]) for axis in ragged_axes(value)}


def counted_by(value: Tensor) -> Any:
    """The size of a tensor that depends on data, or the first dimension's, where none does."""
    axes = ragged_axes(value)
    return value.shape[axes[0]] if axes else value.shape[0]


def bounds_of(extent: Any) -> tuple[int, int | None]:
    """Inclusive bounds of a size, as torch knows them from operators and from `torch._check`."""
    return bound_of(None, extent) if isinstance(extent, torch.SymInt) else (int(extent), int(extent))


def finds(node: torch.fx.Node) -> torch.fx.Node | None:
    """The mask whose true elements an operator's result has in number; None for other operators."""
    name, args = str(node.target), list[Any](node.args)
    if name == "aten.index.Tensor":
        masks = [i for i in args[1] if isinstance(i, torch.fx.Node) and i.meta["val"].dtype == torch.bool]
        return masks[0] if masks else None
    found: torch.fx.Node | None = None
    if name in ("aten.nonzero.default", "aten.argwhere.default", "aten.nonzero_numpy.default") or (
        name == "aten.where.default" and len(args) == 1
    ):
        found = args[0]
    elif name == "aten.masked_select.default":
        is_whole = args[0].meta["val"].shape == args[1].meta["val"].shape
        found = args[1] if is_whole else node  # a mask that is repeated has more
    return found


def filled_by_mask(node: torch.fx.Node) -> torch.fx.Node | None:
    """The mask at whose true elements an operator puts values, of which there must be as many."""
    if not str(node.target).startswith("aten.index_put"):
        return None
    indices: Any = node.args[1]
    masks = [i for i in indices if isinstance(i, torch.fx.Node) and i.meta["val"].dtype == torch.bool]
    return masks[0] if masks else None


def note_bounds(nodes: Iterable[torch.fx.Node]) -> None:
    """Let all that look for the true elements of one mask know the least bound that was declared for any."""
    least: dict[torch.fx.Node, int] = {}
    finders = [(node, mask) for node in nodes if (mask := finds(node)) is not None]
    for node, mask in finders:
        bound = bounds_of(counted_by(tensors(node)[0]))[1]
        if bound is not None:
            least[mask] = min(bound, least.get(mask, bound))
    for node, mask in finders:
        node.meta[_BOUND] = least.get(mask)


def note_equal(nodes: Iterable[torch.fx.Node]) -> None:
    """Let all operators know which sizes are one: of what one mask finds, or what is asserted to be equal."""
    first: dict[torch.fx.Node, Any] = {}
    equal: dict[Any, Any] = {}
    for node in nodes:
        node.meta[_EQUAL] = equal
        mask = finds(node)
        extent: Any = None if mask is None else counted_by(tensors(node)[0])
        if mask is not None and isinstance(extent, torch.SymInt):
            equal[extent.node.expr] = first.setdefault(mask, extent.node.expr)
        sides = node.all_input_nodes if node.target is operator.eq else []
        if len(sides) == 2 and isinstance(node.meta.get("val"), torch.SymBool):
            left, right = (size_key(side.meta["val"], node) for side in sides)
            if left.is_symbol and right.is_symbol and left != right:
                equal[right] = left


_BOUND = "bound of what is found"
_EQUAL = "sizes that are one"


def bounded(node: torch.fx.Node) -> int:
    """The declared bound of the size that an operator's result has; UnsupportedOperatorError without one."""
    bound = bounds_of(counted_by(tensors(node)[0]))[1]
    if bound is None:
        raise unbounded(node)
    return bound


def unbounded(node: torch.fx.Node) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"a size of `{node.target}` depends on data and has no bound",
        why=str(origin_of([node])),
        hint="declare one: `torch._check(n <= bound)`",
    )


def refusal(node: torch.fx.Node) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator `{node.target}` cannot work on a size that depends on data",
        why=str(origin_of([node])),
        hint="use an operator with a fixed size, such as `torch.nonzero_static` or `torch.where`",
    )


def rule_of(node: torch.fx.Node) -> Callable[..., Any]:
    """What runs in place of a node: makers of such sizes, reducers of them, or the operator itself."""
    target: Any = node.target
    if not is_overload(target):
        raise refusal(node)
    name = packet_name(target)
    if name in _OF_SIZES:
        return lambda *args, **kwargs: _of_size(Call(node, target, args, kwargs))
    if name in _RULES:
        return lambda *args, **kwargs: _RULES[name](Call(node, target, args, kwargs))
    if torch.Tag.pointwise in target.tags or name in _BY_ROW:
        return lambda *args, **kwargs: _as_it_is(Call(node, target, args, kwargs))
    raise refusal(node)


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, of which some are `Ragged`."""

    node: torch.fx.Node
    target: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The operator's, without library and overload."""
        return packet_name(self.target)

    @property
    def overload(self) -> str:
        """``Tensor`` of ``aten.index.Tensor``."""
        return overload_name(self.target)

    def ragged(self) -> list[Ragged]:
        """Those arguments."""
        leaves = pytree.tree_leaves((list(self.args), self.kwargs), is_leaf=lambda x: isinstance(x, Ragged))
        return [leaf for leaf in leaves if isinstance(leaf, Ragged)]

    def bound(self) -> int | None:
        """The most elements that what it finds was declared to have; None where nothing was."""
        known: int | None = self.node.meta.get(_BOUND)
        return known

    def run(self) -> Any:
        """The operator on the padded data."""

        def data(value: Any) -> Any:
            if not isinstance(value, Ragged):
                return value
            is_place = self.name in _BY_PLACE and value.data.dtype in (torch.int64, torch.int32)
            return value.filled(0) if is_place else value.data

        args, kwargs = pytree.tree_map(data, (list(self.args), self.kwargs))
        return self.target(*args, **kwargs)

    def refuse(self) -> UnsupportedOperatorError:
        """The refusal of it."""
        return refusal(self.node)


_BY_ROW = {
    "_to_copy", "to", "clone", "alias", "detach", "contiguous", "linear", "mm", "addmm", "matmul", "bmm",
    "embedding", "layer_norm", "rms_norm", "native_layer_norm", "unsqueeze", "squeeze", "select", "slice",
    "transpose", "t", "permute", "glu", "dropout", "cumsum", "index_select", "view", "_unsafe_view",
    "reshape", "flatten", "unflatten", "expand", "zeros_like", "ones_like", "full_like", "empty_like",
    "conv2d", "convolution", "__and__", "__or__", "__xor__",
    "stack", "cat", "fill", "copy", "select_scatter", "slice_scatter", "gather",
}  # fmt: skip
"""Operators that may keep rows apart; `_as_it_is` checks that they do."""

_BY_PLACE = {"index", "index_select", "embedding", "gather"}
"""Operators that read where integers say; what is behind the count might lead out of the tensor."""

_MIXES = {
    "softmax", "log_softmax", "_softmax", "_log_softmax", "select", "slice", "layer_norm", "rms_norm",
    "native_layer_norm", "cat", "glu", "gather", "select_scatter", "slice_scatter",
}  # fmt: skip
"""Those of them that mix what is along the dimensions that they name, which the axis must not be among."""


def _as_it_is(call: Call) -> Any:
    """The operator on padded data: rows stay apart, and the result has the axis where the graph says."""
    given = call.ragged()
    value = call.node.meta["val"]
    if not isinstance(value, Tensor):
        raise call.refuse()
    if not given and not ragged_axes(value):
        return call.run()  # arithmetic with a count
    if not given:
        raise call.refuse()
    axes = ragged_axes(value) or [-value.dim()]  # a count that is known is no symbol
    if call.name in _MIXES and any(_names_axis(call, each) for each in given):
        raise call.refuse()
    extent = given[0].data.size(given[0].axis)
    is_one = len({str(each.data.size(each.axis)) for each in given}) == 1
    if call.name in _VIEWS and len(given) == len(axes) == 1 and (times := _multiple(call, axes[0])) != 1:
        return _regrouped(call, axes[0], times)
    if len(axes) != 1 or not is_one or not _of_one_symbol(call.node):
        raise call.refuse()
    if "conv" in call.name and (given[0].axis != -4 or given[0] is not call.args[0]):
        raise call.refuse()
    made = _sized(call, extent)
    wanted = [extent if at - value.dim() == axes[0] else e for at, e in enumerate(value.shape)]
    if [str(each) for each in made.shape] != [str(each) for each in wanted]:
        raise call.refuse()
    return replace(given[0], data=made, axis=axes[0])


_VIEWS = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}


def _multiple(call: Call, axis: int) -> Fraction:
    """How many times the size that depends on data a view's result has, a fraction where it has less."""
    (given,) = _extents([n for n in call.node.all_input_nodes if tensors(n)])
    ratio: Any = (call.node.meta["val"].shape[axis].node.expr / given.node.expr).simplify()
    return Fraction(int(ratio.p), int(ratio.q)) if ratio.is_Rational else Fraction(1)


def _regrouped(call: Call, axis: int, times: Fraction) -> Ragged:
    """Rows that become several each, or several that become one: those behind the count stay behind it."""
    (given,) = call.ragged()
    value = call.node.meta["val"]
    extent = given.data.size(given.axis)
    shape = list(value.shape)
    if not isinstance(extent, int) or (extent * times).denominator != 1:
        raise call.refuse()
    shape[axis] = int(extent * times)
    if math.prod(shape[:axis]) != math.prod(given.data.shape[: given.axis]):
        raise call.refuse()  # the rows would not be whole any more
    count = given.count * times.numerator // times.denominator
    return Ragged(given.data.reshape(shape), count, axis, shape[axis])


def _of_one_symbol(node: torch.fx.Node) -> bool:
    """Whether all sizes that depend on data are one and the same, and not one of them a multiple."""
    given = {size_key(extent, node) for extent in _extents(node.all_input_nodes)}
    made, equal = _extents([node]), node.meta[_EQUAL]
    target: Any = node.target
    if len(given) == 1 and torch.Tag.pointwise in target.tags:  # torch names the size of a broadcast anew
        (one,) = given
        equal |= {extent.node.expr: one for extent in made if size_key(extent, node) != one}
    return len(given | {size_key(extent, node) for extent in made}) <= 1


def _extents(nodes: Sequence[torch.fx.Node]) -> list[Any]:
    values = [value for each in nodes for value in tensors(each)]
    return [value.shape[axis] for value in values for axis in ragged_axes(value)]


def size_key(extent: Any, node: torch.fx.Node) -> Any:
    """A size as something to compare by: those that are equal, as far as is known, are one."""
    equal: dict[Any, Any] = node.meta[_EQUAL]
    expression = extent.node.expr
    while equal.get(expression, expression) != expression:
        expression = equal[expression]
    return expression


def _sized(call: Call, extent: Any) -> Any:
    """Run it, views with the sizes that the result has in the graph."""
    if call.name not in ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "expand"):
        return call.run()
    value, given = call.node.meta["val"], call.ragged()[0]
    (axis,) = ragged_axes(value)
    shape = [extent if at - value.dim() == axis else e for at, e in enumerate(value.shape)]
    if call.name == "expand":
        return given.data.expand(shape)
    if math.prod(shape[:axis]) != math.prod(given.data.shape[: given.axis]):
        raise call.refuse()  # the rows would not be whole any more
    return given.data.reshape(shape)


def _names_axis(call: Call, each: Ragged) -> bool:
    """Whether an operator works along the axis (its dimensions come second, or behind what is put)."""
    if "norm" in call.name:
        return -each.axis <= len(call.args[1])
    at = 2 if call.name.endswith("_scatter") else 1
    if at == 2 and each is not call.args[0]:
        return False  # what is put in has a dimension less
    given = call.args[at] if len(call.args) > at else call.kwargs.get("dim", -1 if call.name == "glu" else 0)
    rank: int = each.data.dim()
    return int(given) % rank - rank == each.axis


def _nonzero(call: Call) -> Any:
    """Indices [elements of the mask, dimensions]; those behind the count are of element 0."""
    mask = call.args[0]
    return found_by(mask.filled(False) if isinstance(mask, Ragged) else mask, call.bound())


def found_by(mask: Tensor, bound: Any) -> Ragged:
    """Where a mask is true, in as many rows as it can be true, or as were declared (symbolic where given)."""
    numel: Any = mask.numel()
    most = bounds_of(numel)[1]
    assert most is not None  # dynamic dimensions have a declared maximum
    size = numel if bound is None or (isinstance(bound, int) and bound >= most) else bound
    return Ragged(torch.nonzero_static(mask, size=size, fill_value=0), (mask != 0).sum(), -2, most)


def _where(call: Call) -> Any:
    """The indices by dimension, where only a mask is given; else the choice, element by element."""
    if len(call.args) > 1:
        return _as_it_is(call)
    mask = call.args[0]
    if isinstance(mask, Tensor) and mask.dim() == 0:
        return _by_dimension(found_by(mask.reshape(1), call.bound()))
    return _by_dimension(_nonzero(call))


def _by_dimension(indices: Ragged) -> list[Ragged]:
    return [replace(indices, data=column, axis=-1) for column in indices.data.unbind(1)]


def _columns(indices: Sequence[Any], bound: Any) -> tuple[list[Any], Any]:
    """Indices with a mask spelled as those of its dimensions; and their count (None without a mask)."""
    found: list[Any] = []
    count: Any = None
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            places = found_by(index, bound)
            found += _by_dimension(places)
            count = places.count
        else:
            found.append(index)
            count = index.count if isinstance(index, Ragged) else count
    return found, count


def _index(call: Call) -> Any:
    """Rows by mask or by indices."""
    x, indices = call.args
    if isinstance(x, Ragged):
        return _index_ragged(call, x, indices)
    is_exact = not ragged_axes(tensors(call.node)[0])
    if is_exact and indices[0] is None:
        raise call.refuse()
    columns, _ = _columns(indices, call.bound())
    return _as_it_is(replace(call, args=(x, columns)))


def _index_ragged(call: Call, x: Ragged, indices: Sequence[Any]) -> Any:
    """Rows of what has a size that depends on data: by a mask as long, or by places in it."""
    index = indices[0]
    if x.axis != -x.data.dim() or len(indices) != 1 or index is None:
        raise call.refuse()
    given = index.data if isinstance(index, Ragged) else index
    if given.dtype == torch.bool:
        if given.dim() != 1 or not isinstance(index, Ragged):
            raise call.refuse()
        found = found_by(index.filled(False), call.bound())
        return replace(found, data=x.data[found.data[:, 0]], axis=x.axis)
    places = index.filled(0) if isinstance(index, Ragged) else index
    made = x.data[torch.where(places < 0, places + x.count, places)]
    return replace(index, data=made, axis=index.axis + x.axis + 1) if isinstance(index, Ragged) else made


def _masked_select(call: Call) -> Any:
    x, mask = call.args
    if isinstance(x, Ragged) or isinstance(mask, Ragged):
        raise call.refuse()
    if x.shape != mask.shape:  # else left alone, so that the same mask elsewhere is not searched again
        broadcast: Any = torch.broadcast_tensors
        x, mask = broadcast(x, mask)
    if not x.dim():
        x, mask = x.reshape(1), mask.reshape(1)
    places = found_by(mask, call.bound())
    return replace(places, data=x[tuple(places.data.unbind(1))], axis=-1)


def _index_put(call: Call) -> Tensor:
    """Values at indices; those behind the count go to a place of their own, which is cut off."""
    x, indices, values, *rest = call.args
    given = values.data if isinstance(values, Ragged) else values
    columns, count = _columns(indices, given.size(values.axis) if isinstance(values, Ragged) else None)
    if isinstance(x, Ragged) or any(column is None for column in columns) or count is None:
        raise call.refuse()
    extents, inner = x.shape[: len(columns)], x.shape[len(columns) :]
    flat = x.reshape(-1, *inner)
    place: Any = 0
    for extent, column in zip(extents, columns, strict=True):
        at = column.data if isinstance(column, Ragged) else column
        place = place * extent + torch.where(at < 0, at + extent, at)
    place = Ragged(place, count, -1).filled(flat.size(0))
    wider = torch.cat([flat, flat.new_zeros((1, *inner))])
    made: Tensor = aten.index_put.default(wider, [place], given, bool(rest and rest[0]))
    return made[:-1].reshape(x.shape)


def _masked_scatter(call: Call) -> Tensor:
    """Elements of the source in their order, of which no more are read than are real."""
    x, mask, source = call.args
    if isinstance(x, Ragged) or isinstance(mask, Ragged) or source.axis != -source.data.dim():
        raise call.refuse()
    broadcast: Any = torch.broadcast_tensors
    x, mask = broadcast(x, mask)
    place = mask.flatten().cumsum(0).reshape(x.shape) - 1
    return torch.where(mask, source.data.flatten()[place.clamp(min=0)], x)


def _pad(call: Call) -> Any:
    """Rows are padded each by itself; behind the last row nothing can be added."""
    x, pads, *_ = call.args
    if not isinstance(x, Ragged) or any(pads[2 * (-x.axis - 1) :][:2]):
        raise call.refuse()
    return _as_it_is(call)


def _index_add(call: Call) -> Tensor:
    x, dim, index, source = call.args
    if isinstance(x, Ragged) or not isinstance(index, Ragged) or not isinstance(source, Ragged):
        raise call.refuse()
    made: Tensor = call.target(x, dim, index.data, source.filled(0), **call.kwargs)
    return made


def _reduction(fill: Callable[[Tensor], float | bool]) -> Callable[[Call], Any]:
    """A reduction for which elements of a certain value do not count."""

    def reduce(call: Call) -> Any:
        x, *rest = call.args
        value = call.node.meta["val"]
        if not isinstance(x, Ragged) or not isinstance(value, Tensor):
            raise call.refuse()
        if ragged_axes(value):
            return _as_it_is(call)
        is_flat = call.name.startswith("arg") and (not rest or rest[0] is None)
        if is_flat and x.axis != -x.data.dim():
            raise call.refuse()  # positions would count the rows behind the count
        return call.target(x.filled(fill(x.data)), *rest, **call.kwargs)

    return reduce


def _unbind(call: Call) -> Any:
    x, *rest = call.args
    dim = int(rest[0]) if rest else 0
    dim = dim - x.data.dim() if dim >= 0 else dim
    if dim == x.axis:
        raise call.refuse()
    axis = x.axis + 1 if dim > x.axis else x.axis
    return [replace(x, data=part, axis=axis) for part in x.data.unbind(dim)]


def _softmax(call: Call) -> Any:
    x, *rest = call.args
    if isinstance(x, Ragged) and _names_axis(call, x):
        return replace(x, data=call.target(x.filled(float("-inf")), *rest, **call.kwargs))
    return _as_it_is(call)


def _mean(call: Call) -> Any:
    x, *rest = call.args
    if ragged_axes(call.node.meta["val"]):
        return _as_it_is(call)
    total = x.filled(0).sum(*rest, **call.kwargs)
    others = x.data.numel() // x.data.size(x.axis) // total.numel()
    return (total / (x.count * others)).to(total.dtype)


def _least(x: Tensor) -> float:
    return float("-inf") if x.is_floating_point() else int(torch.iinfo(x.dtype).min)


def _most(x: Tensor) -> float:
    return float("inf") if x.is_floating_point() else int(torch.iinfo(x.dtype).max)


_OF_SIZES = {"zeros", "ones", "full", "empty", "expand", "arange", "slice"}
"""Operators that may be told a size."""


def _of_size(call: Call) -> Any:
    """An operator that is told a size, at the bound where that depends on data."""
    from .ragged_sizes import by_size, count_of, cut

    if not call.ragged() and (count := count_of(call)) is not None:
        return by_size(call, count)
    is_cut = call.name == "slice" and isinstance(call.args[0], Ragged) and _names_axis(call, call.args[0])
    return cut(call) if is_cut else _as_it_is(call)


def _cat(call: Call) -> Any:
    from .ragged_sizes import join

    found = call.ragged()
    pieces: list[Any] = call.args[0]
    dim = int(call.args[1]) if len(call.args) > 1 else 0
    along = {each.axis == (dim - each.data.dim() if dim >= 0 else dim) for each in found}
    is_row = all(isinstance(p, Ragged) or p.dim() == found[0].data.dim() for p in pieces)
    return join(call) if along == {True} and is_row else _as_it_is(call)


def _split(call: Call) -> Any:
    from .ragged_sizes import split

    return split(call) if call.ragged() else call.run()


def _scatter(call: Call) -> Any:
    """What is behind the count goes to a place of its own, behind the tensor, which is cut off."""
    x, dim, index, source, *rest = call.args
    if not isinstance(x, Tensor) or not isinstance(index, Ragged) or not isinstance(source, Ragged):
        raise call.refuse()
    dim = int(dim) % x.dim()
    if {index.axis, source.axis} != {dim - x.dim()} or not x.numel():
        raise call.refuse()
    wide = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    made: Tensor = call.target(wide, dim, index.filled(x.size(dim)), source.data, *rest, **call.kwargs)
    return made.narrow(dim, 0, x.size(dim))


def _new(call: Call) -> Any:
    """Only the type is that of the rows, where all sizes are told and known."""
    from .ragged_sizes import by_size, count_of

    if not ragged_axes(call.node.meta["val"]):
        x, *rest = call.args
        return call.target(x.data if isinstance(x, Ragged) else x, *rest, **call.kwargs)
    x, *rest = call.args
    count = count_of(call)
    if count is None:
        raise call.refuse()
    return by_size(replace(call, args=(x.data if isinstance(x, Ragged) else x, *rest)), count)


def _order(call: Call) -> Any:
    from . import ragged_order

    rules: dict[str, Callable[[Call], Any]] = {
        "sort": ragged_order.sort,
        "argsort": ragged_order.argsort,
        "topk": ragged_order.topk,
    }
    return rules[call.name](call)


def _repeat_interleave(call: Call) -> Any:
    from .ragged_sizes import repeat_interleave

    return repeat_interleave(call)


def _unique(call: Call) -> Any:
    from . import ragged_unique as rules

    by_name = {"_unique2": rules.unique, "unique_dim": rules.unique_dim}
    return by_name.get(call.name, rules.unique_consecutive)(call)


def _boxes(call: Call) -> Any:
    from . import boxes

    by_name = {"torchvision::nms": boxes.nms, "devplan::batched_nms": boxes.batched_nms}
    return by_name.get(call.name, boxes.pooled)(call)


_RULES: dict[str, Callable[[Call], Any]] = {
    "torchvision::nms": _boxes,
    "devplan::batched_nms": _boxes,
    "devplan::roi_align": _boxes,
    "_unique2": _unique,
    "unique_dim": _unique,
    "unique_consecutive": _unique,
    "nonzero": _nonzero,
    "argwhere": _nonzero,
    "nonzero_numpy": _where,
    "where": _where,
    "index": _index,
    "repeat_interleave": _repeat_interleave,
    "masked_select": _masked_select,
    "masked_scatter": _masked_scatter,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "index_put": _index_put,
    "index_add": _index_add,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _new),
    "unbind": _unbind,
    "split_with_sizes": _split,
    "cat": _cat,
    "sort": _order,
    "argsort": _order,
    "topk": _order,
    "softmax": _softmax,
    "_softmax": _softmax,
    "log_softmax": _softmax,
    "_log_softmax": _softmax,
    "mean": _mean,
    "sum": _reduction(lambda x: 0),
    "prod": _reduction(lambda x: 1),
    "any": _reduction(lambda x: False),
    "all": _reduction(lambda x: True),
    "max": _reduction(_least),
    "amax": _reduction(_least),
    "argmax": _reduction(_least),
    "min": _reduction(_most),
    "amin": _reduction(_most),
    "argmin": _reduction(_most),
}

"""The eager model's side of a verification: its example inputs, at other sizes too, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.errors import UsageError
from ..runtime.expr import Expr, evaluate
from ..runtime.program import Method
from .run_inputs import random_tensor

if TYPE_CHECKING:
    from ..passes.source.model import MethodSource


def example_leaves(source: MethodSource, method: Method, seed: int) -> list[Any]:
    """The example inputs in the order of the method's inputs; random ones where the source has none."""
    leaves = flat_inputs(source, [port.name for port in method.inputs])
    if not leaves and method.inputs:
        import torch

        generator = np.random.default_rng(seed)
        values = [method.value(port.value) for port in method.inputs]
        shapes = [tuple(size for size in value.shape if isinstance(size, int)) for value in values]
        return [
            torch.as_tensor(np.asarray(random_tensor(value.dtype, shape, generator)))
            for value, shape in zip(values, shapes, strict=True)
        ]
    if len(leaves) != len(method.inputs):
        why = f"the source's example has {len(leaves)} inputs, the artifact takes {len(method.inputs)}"
        raise UsageError(
            f"cannot verify method `{method.name}`", why=why, hint="verify against its own SOURCE"
        )
    return leaves


def flat_inputs(source: MethodSource, names: list[str]) -> list[Any]:
    """Example inputs in the order of the method's inputs: positional ones, then keywords.

    Keywords go by their names where the inputs bear those, since versions of torch order them differently.
    """
    from torch.utils import _pytree as pytree

    positional: list[Any] = pytree.tree_leaves(source.args)
    later = names[len(positional) :]
    if set(later) == set(source.kwargs):
        return [*positional, *(source.kwargs[name] for name in later)]
    keyword: list[Any] = pytree.tree_leaves(list(source.kwargs.values()))
    return [*positional, *keyword]


def run_eagerly(source: MethodSource, leaves: Sequence[Any]) -> list[Any]:
    """The model's own outputs for copies of the inputs, flat."""
    import torch
    from torch.utils import _pytree as pytree

    from ..passes.source.data_classes import know_data_classes
    from ..passes.source.user_code import blame

    args, kwargs = source.args, source.kwargs
    if leaves and not (args or kwargs):
        args = tuple(leaves)

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    fresh: Any = pytree.tree_map(copied, (args, kwargs))
    try:
        result = source.module(*fresh[0], **fresh[1])
        know_data_classes(result)
        outputs: list[Any] = pytree.tree_leaves(result)
    except (Exception, SystemExit) as error:
        raise blame(error, source.name, None, "running it eagerly") from error
    return outputs


def at_sizes(
    source: MethodSource, method: Method, leaves: Sequence[Any], sizes: Sequence[int]
) -> tuple[MethodSource, list[Any]]:
    """A method's example with these sizes of its symbols: rows are repeated in turn, or cut off.

    Args:
        source: whose arguments become the resized ones.
        method: whose inputs the leaves are.
        leaves: the example's flat inputs, in the order of the method's.
        sizes: of the method's symbols, in their order.
    """
    from torch.utils import _pytree as pytree

    bindings = {symbol.name: size for symbol, size in zip(method.symbols, sizes, strict=True)}
    made = [
        _resized(leaf, method, port.value, bindings) if port.value else leaf
        for port, leaf in zip(method.inputs, leaves, strict=True)
    ]
    by_identity = {id(leaf): new for leaf, new in zip(leaves, made, strict=True)}

    def swapped(leaf: Any) -> Any:
        return by_identity.get(id(leaf), leaf)

    args, kwargs = pytree.tree_map(swapped, (source.args, source.kwargs))
    return replace(source, args=args, kwargs=kwargs), made


def _resized(leaf: Any, method: Method, value: str, bindings: Mapping[str, int]) -> Any:
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    for dimension, extent in enumerate(method.value(value).shape):
        if isinstance(extent, Expr):
            rows = torch.arange(evaluate(extent, bindings)) % max(leaf.shape[dimension], 1)
            leaf = leaf.index_select(dimension, rows)
    return leaf

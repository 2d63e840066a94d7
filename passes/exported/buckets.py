"""Declared buckets: rules about dimensions become sizes of each method's symbols."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ...runtime.errors import UsageError
from ...runtime.program import Symbol
from ..options import BucketRule
from ..source.model import MethodSource
from .dimensions import declared

LIMIT = 64
"""Most buckets of one method: each has a plan in the artifact and, once it is called, a graph."""
Buckets = dict[str, tuple[tuple[int, ...], ...]]
"""By method: sizes of its symbols, in their order."""


@dataclass(frozen=True)
class Dimension:
    """A dynamic dimension of a method as rules may name it."""

    method: str
    names: tuple[str, ...]
    lower: int
    upper: int

    def is_meant(self, name: str) -> bool:
        """Whether a rule's name is one of its own, alone or after its method's."""
        return name in self.names or name in (f"{self.method}.{own}" for own in self.names)

    def __str__(self) -> str:
        return f"`{self.names[0]}` of `{self.method}` from {self.lower} to {self.upper}"


def check_declared(sources: Iterable[MethodSource], rules: Sequence[BucketRule]) -> None:
    """Refuse what `dynamic_shapes` alone shows to be wrong, before anything is exported.

    Raises:
        UsageError: as `method_buckets`. Nothing is refused where torch is to find dimensions itself.
    """
    found: list[Dimension] = []
    for source in sources:
        said = declared(source)
        if not said.is_complete:
            return
        places: dict[str, list[str]] = {}
        dims = {dim.__name__: dim for dim in said.dims.values()}
        for (name, dimension), dim in said.dims.items():
            places.setdefault(dim.__name__, [dim.__name__]).append(f"{name}:{dimension}")
        for label, names in places.items():
            named: Any = dims[label]
            upper = named.max if isinstance(named.max, int) else 1 << 40  # torch's own infinity
            found.append(Dimension(source.name, tuple(names), max(int(named.min), 1), upper))
    for rule in rules:
        _meant(rule, found)


def method_buckets(
    symbols: Mapping[str, Sequence[Symbol]],
    own: Mapping[str, Sequence[BucketRule]],
    rules: Sequence[BucketRule],
) -> Buckets:
    """The buckets of each method: all combinations of its dimensions' sizes.

    A dimension without sizes stays at its bound in all of them; a method none of whose dimensions has sizes
    has no buckets.

    Args:
        symbols: of each method.
        own: rules that a model file gives for one method.
        rules: rules of the configuration, which win.

    Raises:
        UsageError: a rule names no dimension, a size is out of bounds (valid names and bounds are told), or
            there are more than `LIMIT` combinations.
    """
    chosen: dict[tuple[str, str], tuple[int, ...]] = {}
    every = [dimension_of(method, symbol) for method, each in symbols.items() for symbol in each]
    for method, mine in own.items():
        within = [dimension for dimension in every if dimension.method == method]
        _choose(chosen, mine, within)
    _choose(chosen, rules, every)
    buckets: Buckets = {}
    for method, each in symbols.items():
        names = [dimension_of(method, symbol).names[0] for symbol in each]
        if any((method, name) in chosen for name in names):
            axes = [chosen.get((method, name), (s.upper,)) for name, s in zip(names, each, strict=True)]
            buckets[method] = _combined(method, axes)
    return buckets


def dimension_of(method: str, symbol: Symbol) -> Dimension:
    """A symbol as rules may name it: by its label, and by the input that it is read from."""
    place = f"{symbol.input}:{symbol.dimension}"
    return Dimension(method, tuple(dict.fromkeys((symbol.title, place))), symbol.lower, symbol.upper)


def _choose(
    chosen: dict[tuple[str, str], tuple[int, ...]], rules: Iterable[BucketRule], every: Sequence[Dimension]
) -> None:
    for rule in rules:
        for dimension in _meant(rule, every):
            chosen[dimension.method, dimension.names[0]] = rule.sizes


def _meant(rule: BucketRule, every: Sequence[Dimension]) -> list[Dimension]:
    """The dimensions that a rule names, each of which must admit all of its sizes."""
    meant = [dimension for dimension in every if dimension.is_meant(rule.dimension)]
    what = f"cannot use buckets of `{rule.dimension}`"
    if not meant:
        listed = ", ".join(map(str, every)) or "none: export with `dynamic_shapes`"
        names = [name for dimension in every for name in dimension.names]
        near = get_close_matches(rule.dimension, names, n=1, cutoff=0.6)
        hint = f"did you mean `{near[0]}`; " if near else ""
        why = "no method has a dynamic dimension of that name"
        raise UsageError(what, why=why, hint=f"{hint}dynamic dimensions are {listed}")
    for dimension in meant:
        outside = [size for size in rule.sizes if not dimension.lower <= size <= dimension.upper]
        if outside:
            word = ", ".join(map(str, outside))
            why = f"{dimension} does not admit {word}"
            hint = "take sizes within the bounds, or widen those of the `Dim`"
            raise UsageError(what, why=why, hint=hint)
    return meant


def _combined(method: str, axes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > LIMIT:
        numbers = " x ".join(str(len(axis)) for axis in axes if len(axis) > 1)
        raise UsageError(
            f"method `{method}` would have {count} buckets",
            why=f"{numbers} combinations; at most {LIMIT} are planned",
            hint="declare fewer sizes",
        )
    return tuple(itertools.product(*axes))

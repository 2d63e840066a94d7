"""Find dynamic dimensions that were taken to be less than what was declared.

Torch notes a condition on a symbol wherever code asks about a dynamic size. What is traced and lowered then
holds for the sizes that meet the condition alone, and nothing else says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.program import Symbol

_MOST_SIZES = 4096
_TRACED_FROM = 2


class Narrowing:
    """Watches the conditions on symbols while a region is traced and lowered."""

    def __init__(self, shape_env: Any, symbols: Sequence[Symbol]) -> None:
        self._env, self._symbols = shape_env, {symbol.name: symbol for symbol in symbols}
        self._seen = 0 if shape_env is None else len(shape_env.guards)

    def check(self, where: str) -> None:
        """UnsupportedOperatorError if a new condition excludes declared sizes; ``where`` is what asked."""
        if self._env is None:
            return
        new, self._seen = self._env.guards[self._seen :], len(self._env.guards)
        for guard in new:
            self._judge(guard.expr, where)

    def _judge(self, condition: Any, where: str) -> None:
        names = [str(symbol) for symbol in condition.free_symbols]
        if isinstance(condition, sympy.Ne) or not names or not set(names) <= set(self._symbols):
            return  # the general case was chosen
        values = excluded_sizes(condition, self._symbols)
        if values is not None:
            self._refuse(names, values, condition, where)

    def _refuse(self, names: Sequence[str], values: dict[str, int], condition: Any, where: str) -> None:
        first = self._symbols[names[0]]
        text = str(condition)
        for name in names:
            text = text.replace(name, self._symbols[name].title)
        raise UnsupportedOperatorError(
            f"dimension {first.dimension} of input `{first.input}` (`{first.title}`) cannot be dynamic here",
            why=f"{where} was made for `{text}`, which does not hold for size {values[names[0]]}",
            hint="declare a smaller range, or export one artifact for each size",
        )


def excluded_sizes(condition: Any, symbols: Mapping[str, Symbol]) -> dict[str, int] | None:
    """The first declared sizes, by the names of their symbols, for which a condition is false."""
    names = [str(symbol) for symbol in condition.free_symbols]
    for sizes in _sizes([symbols[name] for name in names]):
        values = dict(zip(names, sizes, strict=True))
        if condition.subs({s: values[str(s)] for s in condition.free_symbols}) == sympy.false:
            return values
    return None


def _sizes(symbols: Sequence[Symbol]) -> Iterable[tuple[int, ...]]:
    """Declared sizes: all of them where they are few, else some between and at the ends."""
    each = max(int(_MOST_SIZES ** (1 / len(symbols))), 2)
    return itertools.product(*(_some(symbol, each) for symbol in symbols))


def _some(symbol: Symbol, count: int) -> Iterable[int]:
    low = min(max(symbol.lower, _TRACED_FROM), symbol.upper)
    span = symbol.upper - low
    if span < count:
        return range(low, symbol.upper + 1)
    return [low + span * step // (count - 1) for step in range(count)]

"""Arithmetic of sizes that may depend on dynamic dimensions: products, sums, strides, and names put in.

Free of torch, as `Size` is; `exported/sizes.py` makes sizes of torch's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..runtime.errors import PassError
from ..runtime.expr import Expr, Size, evaluate


def scaled(size: Size, factor: int) -> Size:
    """``size * factor``."""
    return size * factor if isinstance(size, int) else Expr(f"({size}) * {factor}")


def plus(left: Size, right: Size) -> Size:
    """``left + right``."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if left == 0:
        return right
    return left if right == 0 else Expr(f"({left}) + ({right})")


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of all sizes; 1 for none."""
    known, texts = 1, list[str]()
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            texts.append(f"({size})")
    if not texts or known == 0:
        return known
    return Expr(" * ".join(texts if known == 1 else [*texts, str(known)]))


def is_dense(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether the elements fill one run without gaps or overlaps, in any order of dimensions."""
    expected: Size = 1
    pairs = [(st, sh) for st, sh in zip(strides, shape, strict=True) if sh != 1]
    if all(isinstance(n, int) for pair in pairs for n in pair):
        pairs.sort(key=lambda pair: (int(str(pair[0])), int(str(pair[1]))))
    else:
        pairs.reverse()
    for stride, extent in pairs:
        if str(stride) != str(expected) and not _same(stride, expected):
            return False
        expected = product((expected, extent))
    return True


def _same(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for a few values of their symbols (they are polynomials here)."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    names = {n for size in (left, right) if isinstance(size, Expr) for n in size.symbols}
    probes = ({n: base + 7 * i for i, n in enumerate(sorted(names))} for base in (3, 10, 101))
    return all(evaluate(left, probe) == evaluate(right, probe) for probe in probes)


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements."""
    strides: list[Size] = []
    for index in range(len(shape)):
        rest = tuple(extent if isinstance(extent, Expr) else max(extent, 1) for extent in shape[index + 1 :])
        strides.append(product(rest))
    return tuple(strides)


def substitute(expression: str, arguments: Mapping[str, Size]) -> Size:
    """A Python size expression over names, with the names replaced by sizes and folded if all are known."""

    def named(match: re.Match[str]) -> str:
        name = match.group(0)
        return f"({arguments[name]})" if name in arguments else name

    result = Expr(re.sub(r"[A-Za-z_]\w*", named, expression))
    try:
        return result if result.symbols else result.evaluate({})
    except (ValueError, SyntaxError) as error:
        raise PassError(f"launch grid `{expression}` is no size expression", why=str(error)) from error

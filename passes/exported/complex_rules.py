"""What each operator does to pairs of real tensors: arguments are pairs where the operator's are complex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..inductor.overloads import Overload, packet_name
from . import fourier
from .fourier import Pair


def rule_of(target: Overload) -> Callable[..., Any] | None:
    """The rule of an operator; None where there is none."""
    packet = packet_name(target)
    if packet in _RULES:
        return _RULES[packet]
    if packet in _CREATIONS:
        return lambda *args, **kwargs: _created(target, args, kwargs)
    if packet in _BY_PART:
        values = _BY_PART[packet]
        return lambda *args, **kwargs: _by_part(target, values, args, kwargs)
    return None


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The type of a complex number's parts."""
    return dtype.to_real() if dtype.is_complex else dtype


def _by_part(
    target: Callable[..., Any], values: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An operator on the real parts, then on the imaginary ones.

    Arguments at ``values`` are elements of the result: what is real among them has an imaginary part of zero.
    """
    kwargs = {k: real_type(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
    found = [
        target(*[_part(a, index, at in values) for at, a in enumerate(args)], **kwargs) for index in (0, 1)
    ]
    return tuple(part for each in found for part in (each if isinstance(each, list | tuple) else (each,)))


def _part(value: Any, index: int, element: bool) -> Any:
    if isinstance(value, list) or (isinstance(value, tuple) and not _is_pair(value)):
        return [_part(v, index, element) for v in value]  # pyright: ignore
    if isinstance(value, tuple | complex):
        return _pair(value)[index]
    if element and index and isinstance(value, Tensor | float | int):
        return torch.zeros_like(value) if isinstance(value, Tensor) else 0
    return value


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value)  # pyright: ignore


def _created(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """A tensor of one value: what is real in it has an imaginary part of zero."""
    kwargs = {k: real_type(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
    name = str(target).split(".")[1]
    at = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(name)
    like = [a[0] if _is_pair(a) else a for a in args]
    if at is None:
        made = target(*like, **kwargs)
        return made, torch.zeros_like(made)
    parts = [target(*like[:at], part, *like[at + 1 :], **kwargs) for part in _pair(args[at])]
    return parts[0], parts[1]


def _pair(value: Any) -> Pair:
    """Any operand as a pair, of numbers where it is one; what is real has an imaginary part of zero."""
    parts: Any = value
    if isinstance(value, Tensor):
        parts = value, torch.zeros_like(value)
    elif not isinstance(value, tuple):
        parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    held: Pair = parts
    return held


def _is_complex(value: Any) -> bool:
    return isinstance(value, tuple | complex)


def _multiply(x: Any, y: Any) -> Pair:
    if not _is_complex(x):
        x, y = y, x
    if _is_complex(y):
        return fourier.multiply(_pair(x), _pair(y))
    re, im = _pair(x)
    return re * y, im * y


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Pair:
    (a, b), (c, d) = _pair(x), _pair(y if alpha == 1 else _multiply(y, complex(alpha)))
    broadcast: Any = torch.broadcast_tensors
    re, im = broadcast(torch.add(a, c), torch.add(b, d) if isinstance(b, Tensor) else torch.add(d, b))
    return re, im


def _subtract(x: Any, y: Any, *, alpha: Any = 1) -> Pair:
    return _add(x, y, alpha=-alpha)


def _subtract_from(x: Any, y: Any, *, alpha: Any = 1) -> Pair:
    return _add(_multiply(x, -complex(alpha)), y)


def _divide(x: Any, y: Any) -> Pair:
    if not _is_complex(y):
        return x[0] / y, x[1] / y
    c, d = _pair(y)
    re, im = _multiply(x, (c, -d))
    size = c * c + d * d
    return re / size, im / size


def _reciprocal(x: Pair) -> Pair:
    size = x[0] * x[0] + x[1] * x[1]
    return x[0] / size, -x[1] / size


def _magnitude(x: Pair) -> Tensor:
    return torch.sqrt(x[0] * x[0] + x[1] * x[1])


def _power(x: Any, y: Any) -> Pair:
    if isinstance(y, int | float) and y == 2:
        return fourier.multiply(x, x)
    if _is_complex(x) and not _is_complex(y):
        re, im = _pair(x)
        return _polar(_magnitude((re, im)) ** y, torch.atan2(im, re) * y)
    if _is_complex(x):
        return _exponential(_multiply(_logarithm(x), y))
    base = x if isinstance(x, Tensor) else torch.full((), x)
    return _exponential(_multiply(_logarithm(_pair(base)), y))


def _square_root(x: Pair) -> Pair:
    return _polar(torch.sqrt(_magnitude(x)), torch.atan2(x[1], x[0]) / 2)


def _logarithm(x: Pair) -> Pair:
    return torch.log(_magnitude(x)), torch.atan2(x[1], x[0])


def _sine(x: Pair) -> Pair:
    return torch.sin(x[0]) * torch.cosh(x[1]), torch.cos(x[0]) * torch.sinh(x[1])


def _cosine(x: Pair) -> Pair:
    return torch.cos(x[0]) * torch.cosh(x[1]), -torch.sin(x[0]) * torch.sinh(x[1])


def _sign(x: Pair) -> Pair:
    size = _magnitude(x)
    scale = torch.where(size == 0, 0, 1 / size)
    return x[0] * scale, x[1] * scale


def _product(x: Any, y: Any) -> Pair:
    if not (_is_complex(x) and _is_complex(y)):
        (a, b), (c, d) = _pair(x), _pair(y)
        return torch.matmul(a, c), torch.matmul(b, c) if _is_complex(x) else torch.matmul(a, d)
    (a, b), (c, d) = x, y
    return torch.matmul(a, c) - torch.matmul(b, d), torch.matmul(a, d) + torch.matmul(b, c)


def _product_added(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Pair:
    done = _product(x, y)
    return _add(bias if beta == 1 else _multiply(bias, complex(beta)), done, alpha=alpha)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    if not wanted:
        return x
    dtype = real_type(wanted[0])
    if not isinstance(x, tuple):
        return x.to(dtype), torch.zeros_like(x, dtype=dtype)
    re, im = _pair(x)
    return (re.to(dtype), im.to(dtype)) if wanted[0].is_complex else re.to(dtype)


def _exponential(x: Pair) -> Pair:
    return _polar(torch.exp(x[0]), x[1])


def _from_last(x: Tensor) -> Pair:
    return x.select(-1, 0), x.select(-1, 1)


def _to_last(x: Pair) -> Tensor:
    return torch.stack(x, -1)


def _together(re: Tensor, im: Tensor) -> Pair:
    broadcast: Any = torch.broadcast_tensors
    re, im = broadcast(re, im)
    return re, im


def _polar(size: Tensor, angle: Tensor) -> Pair:
    return size * torch.cos(angle), size * torch.sin(angle)


def _real(x: Pair) -> Tensor:
    return x[0]


def _imaginary(x: Pair) -> Tensor:
    return x[1]


def _conjugate(x: Pair) -> Pair:
    return x[0], -x[1]


def _same(x: Pair) -> Pair:
    return x


def _angle(x: Pair) -> Tensor:
    return torch.atan2(x[1], x[0])


def _where(condition: Tensor, x: Any, y: Any) -> Pair:
    (a, b), (c, d) = _pair(x), _pair(y)
    return torch.where(condition, a, c), torch.where(condition, b, d)


def _equal(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = _pair(x), _pair(y)
    return torch.logical_and(torch.eq(a, c), torch.eq(b, d))


def _unequal(x: Any, y: Any) -> Tensor:
    return torch.logical_not(_equal(x, y))


def _norm(x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(_magnitude(x), *args, **kwargs)
    return found


def _is_nan(x: Pair) -> Tensor:
    return torch.logical_or(torch.isnan(x[0]), torch.isnan(x[1]))


_RULES: dict[str, Callable[..., Any]] = {
    "view_as_complex": _from_last,
    "view_as_real": _to_last,
    "complex": _together,
    "polar": _polar,
    "real": _real,
    "imag": _imaginary,
    "conj": _conjugate,
    "_conj": _conjugate,
    "_conj_physical": _conjugate,
    "conj_physical": _conjugate,
    "resolve_conj": _same,
    "abs": _magnitude,
    "angle": _angle,
    "sgn": _sign,
    "exp": _exponential,
    "log": _logarithm,
    "sqrt": _square_root,
    "sin": _sine,
    "cos": _cosine,
    "pow": _power,
    "reciprocal": _reciprocal,
    "mul": _multiply,
    "add": _add,
    "sub": _subtract,
    "rsub": _subtract_from,
    "div": _divide,
    "mm": _product,
    "bmm": _product,
    "matmul": _product,
    "addmm": _product_added,
    "baddbmm": _product_added,
    "eq": _equal,
    "ne": _unequal,
    "isnan": _is_nan,
    "linalg_vector_norm": _norm,
    "_to_copy": _to,
    "to": _to,
    "_fft_c2c": fourier.complex_to_complex,
    "_fft_r2c": fourier.real_to_complex,
    "_fft_c2r": fourier.complex_to_real,
    "where": _where,
}

_CREATIONS = {
    "full", "zeros", "ones", "empty", "scalar_tensor", "full_like", "ones_like", "new_full", "new_zeros",
    "new_ones",
}  # fmt: skip
"""Operators that make a tensor of one value."""

_BY_PART: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand",
            "slice", "select", "alias", "detach", "clone", "contiguous", "flip", "roll", "index", "unbind",
            "index_select", "gather", "repeat", "neg", "sum", "mean", "zeros_like", "empty_like",
            "lift_fresh_copy", "cumsum", "unfold", "diagonal", "narrow", "movedim", "tile", "split",
            "split_with_sizes", "chunk",
        ),
        (),
    ),
    "cat": (0,),
    "stack": (0,),
    "slice_scatter": (1,),
    "select_scatter": (1,),
    "copy": (1,),
    "fill": (1,),
    "constant_pad_nd": (2,),
    "masked_fill": (2,),
    "index_put": (2,),
    "index_copy": (3,),
    "index_add": (3,),
    "scatter": (3,),
    "scatter_add": (3,),
}  # fmt: skip
"""Operators that do to a complex tensor what they do to its parts; which of their arguments are elements."""

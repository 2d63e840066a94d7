"""Element functions of interpreted kernels: the namespaces ``libdevice`` and ``tl_math``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..tensors.host import Array
from . import special, types
from .tensor import Tensor, as_tensor, binary, divide
from .types import FLOAT32, INT1, INT32, INT64, Type

Elementwise = Callable[..., Tensor]


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.is_floating() else tensor.to(FLOAT32)


def unary(function: Callable[[Array], Any]) -> Elementwise:
    """A function of one real argument; the result has the argument's type, integers become float32."""

    def call(x: Any, **hints: Any) -> Tensor:
        given = _floating(as_tensor(x))
        made = np.asarray(function(given.data)).astype(given.dtype.held, copy=False)
        return Tensor(types.settle(made, given.dtype), given.dtype)

    return call


def test(function: Callable[[Array], Any]) -> Elementwise:
    """A question about one real argument."""

    def call(x: Any) -> Tensor:
        return Tensor(np.asarray(function(_floating(as_tensor(x)).data), bool), INT1)

    return call


def rounded_to(function: Callable[[Array], Any], dtype: Type) -> Elementwise:
    """A function of one real argument whose result is an integer."""

    def call(x: Any) -> Tensor:
        given = _floating(as_tensor(x))
        return Tensor(types.cast(np.asarray(function(given.data)), given.dtype, dtype), dtype)

    return call


def pair(function: Callable[[Array, Array], Any]) -> Elementwise:
    """A function of two real arguments."""

    def call(x: Any, y: Any, **hints: Any) -> Tensor:
        first = x if isinstance(x, Tensor) else None
        second = y if isinstance(y, Tensor) else None
        return binary(function, _floating(as_tensor(x, second)), _floating(as_tensor(y, first)))

    return call


def absolute(x: Any) -> Tensor:
    """The absolute value; integers stay integers."""
    given = as_tensor(x)
    return Tensor(np.abs(given.data), given.dtype)


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """Product and sum with one rounding (float32 through float64)."""
    a, b, c = (_floating(as_tensor(value)) for value in (x, y, z))
    if a.dtype is not FLOAT32:
        return a * b + c
    wide = a.to(types.FLOAT64) * b.to(types.FLOAT64) + c.to(types.FLOAT64)
    return wide.to(FLOAT32)


def ldexp(x: Any, exponent: Any) -> Tensor:
    """``x * 2 ** exponent``."""
    given = _floating(as_tensor(x))
    return Tensor(np.ldexp(given.data, as_tensor(exponent).data.astype(np.int32)), given.dtype)


def ilogb(x: Any) -> Tensor:
    """The binary exponent."""
    return Tensor((np.frexp(_floating(as_tensor(x)).data)[1] - 1).astype(np.int32), INT32)


def umulhi(x: Any, y: Any) -> Tensor:
    """The upper half of an unsigned product."""
    left, right = as_tensor(x), as_tensor(y)
    if left.dtype.primitive_bitwidth == 64:
        return Tensor(_high_64(left.data.astype(np.uint64), right.data.astype(np.uint64)), types.UINT64)
    product = left.data.astype(np.uint32).astype(np.uint64) * right.data.astype(np.uint32).astype(np.uint64)
    return Tensor((product >> np.uint64(32)).astype(np.uint32), types.UINT32)


def _high_word(left: Any, right: Any) -> int:
    return (int(left) * int(right)) >> 64


_high_64 = np.vectorize(_high_word, otypes=[np.uint64])


def div_rn(x: Any, y: Any) -> Tensor:
    """Division, correctly rounded."""
    return divide(as_tensor(x, y if isinstance(y, Tensor) else None), y)


def _away_from_zero(x: Array) -> Array:
    return np.asarray(np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x))


def reciprocal_root(x: Array) -> Array:
    """One over the square root."""
    return np.asarray(x.dtype.type(1) / np.sqrt(x))


def _power(x: Array, y: Array) -> Array:
    return np.asarray(np.power(x, y))


def _sigmoid(x: Array) -> Array:
    return np.asarray(x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x)))


_UNARY: dict[str, Callable[[Array], Any]] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "logb": lambda x: np.floor(np.log2(np.abs(x))),
    "sqrt": np.sqrt, "sqrt_rn": np.sqrt, "rsqrt": reciprocal_root, "rsqrt_rn": reciprocal_root,
    "cbrt": np.cbrt,
    "rcp_rn": lambda x: x.dtype.type(1) / x,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "sinpi": special.sinpi, "cospi": special.cospi,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint,
    "round": _away_from_zero, "fabs": np.abs,
    "erf": special.erf, "erfc": special.erfc, "erfinv": special.erfinv, "lgamma": special.lgamma,
    "erfcx": special.erfcx, "tgamma": special.tgamma,
    "cyl_bessel_i0": partial(special.bessel_i, 0), "cyl_bessel_i1": partial(special.bessel_i, 1),
    "j0": partial(special.bessel_j, 0), "j1": partial(special.bessel_j, 1),
    "y0": partial(special.bessel_y, 0), "y1": partial(special.bessel_y, 1),
    "fast_expf": np.exp, "fast_logf": np.log, "fast_sinf": np.sin, "fast_cosf": np.cos, "fast_tanhf": np.tanh,
}  # fmt: skip

_PAIRS: dict[str, Callable[[Array, Array], Any]] = {
    "pow": _power, "powi": _power, "fmod": np.fmod, "atan2": np.arctan2, "hypot": np.hypot,
    "copysign": np.copysign, "nextafter": np.nextafter, "fmax": np.fmax, "fmin": np.fmin,
    "remainder": lambda x, y: x - np.rint(x / y) * y, "fdim": lambda x, y: np.maximum(x - y, 0),
    "mul_rn": np.multiply, "fast_dividef": np.true_divide, "fast_powf": _power,
}  # fmt: skip


def libdevice() -> SimpleNamespace:
    """The functions of NVIDIA's device library that generated kernels call."""
    made: dict[str, Elementwise] = {name: unary(function) for name, function in _UNARY.items()}
    made |= {name: pair(function) for name, function in _PAIRS.items()}
    made |= {name: test(function) for name, function in (("isnan", np.isnan), ("isinf", np.isinf))}
    made |= {name: test(np.isfinite) for name in ("finitef", "isfinited")}
    made |= {"signbit": test(np.signbit), "signbitf": test(np.signbit), "signbitd": test(np.signbit)}
    made |= {"llrint": rounded_to(np.rint, INT64), "llround": rounded_to(_away_from_zero, INT64)}
    made |= {"abs": absolute, "fma": fma, "ldexp": ldexp, "ilogb": ilogb, "umulhi": umulhi, "div_rn": div_rn}
    return SimpleNamespace(**made)


def math_functions() -> dict[str, Any]:
    """The functions of ``tl.math``, which ``tl`` itself also offers."""
    names = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "sqrt_rn", "rsqrt", "floor", "ceil", "erf")
    made: dict[str, Any] = {name: unary(_UNARY[name]) for name in names}
    made |= {"abs": absolute, "fma": fma, "umulhi": umulhi, "div_rn": div_rn, "sigmoid": unary(_sigmoid)}
    return made | {"fdiv": div_rn}

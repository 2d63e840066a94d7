"""NVIDIA's device library for Triton's interpreter, which has none: torch's functions in float64, rounded.

Not those of `functions.py`, so that the two engines check each other.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensors.host import Array

if TYPE_CHECKING:
    from .triton_copy import Interpreter

Function = Callable[..., Any]
Unary = Callable[[Any], Any]
Binary = Callable[[Any, Any], Any]


def install(made: Interpreter) -> None:
    """Give ``triton.language.extra.libdevice`` of the interpreter's Triton its functions."""
    library, torch = made.tl.extra.libdevice, importlib.import_module("torch")
    wrap = _Wrap(made, torch)
    reals: dict[str, Function] = {**_unary(torch), **_pairs(torch), "fma": _fma}
    for name, function in reals.items():
        setattr(library, name, wrap.real(function))
    for name, function in _exact(torch).items():
        setattr(library, name, wrap.exact(function))
    for dtype, functions in ((made.tl.int32, _to_int32(torch)), (made.tl.int64, _to_int64(torch))):
        for name, function in functions.items():
            setattr(library, name, wrap.exact(function, dtype))
    library.umulhi = made.tl.umulhi


class _Wrap:
    """Functions of torch tensors as functions of the interpreter's tensors."""

    def __init__(self, made: Interpreter, torch: Any) -> None:
        self._tl, self._module, self._torch = made.tl, made.module, torch

    def real(self, function: Function) -> Function:
        """Computed in float64 and rounded to the type of the first argument."""

        def call(*arguments: Any) -> Any:
            given = [self._tensor(argument) for argument in arguments]
            wide = [self._values(tensor).to(self._torch.float64) for tensor in given]
            return self._made(given, function(*wide).numpy(), given[0].dtype)

        return call

    def exact(self, function: Function, dtype: Any = None) -> Function:
        """Computed in the arguments' own type; the result has ``dtype``, or the first argument's type."""

        def call(*arguments: Any) -> Any:
            given = [self._tensor(argument) for argument in arguments]
            return self._made(given, function(*map(self._values, given)).numpy(), dtype or given[0].dtype)

        return call

    def _tensor(self, value: Any) -> Any:
        return self._module.interpreter_semantic.to_tensor(value)

    def _values(self, tensor: Any) -> Any:
        return self._torch.from_numpy(np.array(tensor.handle.data))

    def _made(self, given: list[Any], values: Array, dtype: Any) -> Any:
        handle = self._module.TensorHandle(values.astype(self._module._get_np_dtype(dtype)), dtype)
        is_block = any(tensor.type.is_block() for tensor in given)
        return self._tl.tensor(handle, self._tl.block_type(dtype, list(values.shape)) if is_block else dtype)


def _unary(torch: Any) -> dict[str, Unary]:
    special = torch.special
    named = (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor", "ceil", "trunc", "erf",
        "erfc", "erfinv", "lgamma",
    )  # fmt: skip
    made: dict[str, Unary] = {name: getattr(torch, name) for name in named}
    others: dict[str, Unary] = {
        "exp10": lambda x: torch.pow(10.0, x), "logb": lambda x: torch.floor(torch.log2(torch.abs(x))),
        "sqrt_rn": torch.sqrt, "rsqrt_rn": torch.rsqrt, "rcp_rn": torch.reciprocal,
        "cbrt": lambda x: torch.copysign(torch.pow(torch.abs(x), 1.0 / 3.0), x),
        "sinpi": lambda x: torch.sin(math.pi * x), "cospi": lambda x: torch.cos(math.pi * x),
        "rint": torch.round, "nearbyint": torch.round, "round": lambda x: _half_away(torch, x),
        "erfcx": special.erfcx, "tgamma": lambda x: _gamma(torch, x), "normcdf": special.ndtr,
        "cyl_bessel_i0": special.i0, "cyl_bessel_i1": special.i1, "j0": special.bessel_j0,
        "j1": special.bessel_j1, "y0": special.bessel_y0, "y1": special.bessel_y1,
        "fast_expf": torch.exp, "fast_logf": torch.log, "fast_sinf": torch.sin, "fast_cosf": torch.cos,
        "fast_tanhf": torch.tanh,
    }  # fmt: skip
    return made | others


def _pairs(torch: Any) -> dict[str, Binary]:
    return {
        "pow": torch.pow, "powi": torch.pow, "fmod": torch.fmod, "atan2": torch.atan2, "hypot": torch.hypot,
        "fdim": lambda x, y: torch.clamp(x - y, min=0.0), "mul_rn": torch.mul, "div_rn": torch.div,
        "remainder": lambda x, y: x - torch.round(x / y) * y, "ldexp": torch.ldexp,
        "fast_dividef": torch.div, "fast_powf": torch.pow,
    }  # fmt: skip


def _exact(torch: Any) -> dict[str, Function]:
    return {
        "abs": torch.abs, "fabs": torch.abs, "copysign": torch.copysign, "nextafter": torch.nextafter,
        "fmax": torch.fmax, "fmin": torch.fmin,
    }  # fmt: skip


def _to_int32(torch: Any) -> dict[str, Unary]:
    return {
        "isnan": torch.isnan, "isinf": torch.isinf, "finitef": torch.isfinite, "isfinited": torch.isfinite,
        "signbit": torch.signbit, "signbitf": torch.signbit, "signbitd": torch.signbit,
        "ilogb": lambda x: torch.frexp(x)[1] - 1,
    }  # fmt: skip


def _to_int64(torch: Any) -> dict[str, Unary]:
    return {"llrint": torch.round, "llround": lambda x: _half_away(torch, x)}


def _fma(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def _half_away(torch: Any, x: Any) -> Any:
    return torch.copysign(torch.floor(torch.abs(x) + 0.5), x)


def _gamma(torch: Any, x: Any) -> Any:
    """The gamma function through its logarithm: negative in every other interval, none at -1, -2, ..."""
    floor = torch.floor(x)
    odd = (x < 0) & (floor.remainder(2) == 1)
    made = torch.where(odd, -1.0, 1.0) * torch.exp(torch.lgamma(x))
    made = torch.where(x == 0, torch.copysign(made, x), made)
    return torch.where((x < 0) & (floor == x), math.nan, made)

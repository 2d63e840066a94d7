"""Comparing tensors: largest errors, the first element that differs, and tolerances by dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime.tensors.host import HostTensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tolerance:
    """``|a - e| <= atol + rtol * |e|``, and why. ``relative_to_peak`` scales atol by the largest |e|."""

    rtol: float
    atol: float
    reason: str
    relative_to_peak: bool = False

    def __str__(self) -> str:
        scale = " of the largest value" if self.relative_to_peak else ""
        return f"rtol {self.rtol:g}, atol {self.atol:g}{scale}: {self.reason}"


_HALF = "half precision keeps {} bits, and sums are taken in another order"
TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-9, "float64 keeps 53 bits, and sums are taken in another order"),
    "float32": Tolerance(1e-4, 1e-4, "float32 keeps 24 bits, and sums are taken in another order"),
    "float16": Tolerance(2e-2, 2e-2, _HALF.format(11), relative_to_peak=True),
    "bfloat16": Tolerance(2e-2, 2e-2, _HALF.format(8), relative_to_peak=True),
}
EXACT = Tolerance(0.0, 0.0, "integers and booleans are exact")
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}


def tolerance_for(dtypes: list[str], output: str) -> Tolerance:
    """The tolerance of the coarsest of the floating dtypes that a program computes in; exact for integers."""
    if output not in _BITS:
        return EXACT
    coarsest = min((dtype for dtype in (*dtypes, output) if dtype in _BITS), key=lambda d: _BITS[d])
    return TOLERANCES.get(coarsest, TOLERANCES["bfloat16"])


@dataclass(frozen=True)
class Comparison:
    """How a tensor compares with the expected one. ``first`` is the index of the first bad element."""

    name: str
    equal: bool
    max_abs_error: float
    max_rel_error: float
    first: tuple[int, ...] | None
    actual: Any
    expected: Any
    bad: int
    numel: int
    nonfinite: int
    problem: str = ""
    """A difference of shape or kind, in words; then the numbers say nothing."""

    def words(self) -> str:
        """One line for a person."""
        if self.problem:
            return f"`{self.name}`: {self.problem}"
        errors = f"largest error {self.max_abs_error:.3g}, relative {self.max_rel_error:.3g}"
        odd = f", {self.nonfinite} not finite" if self.nonfinite else ""
        if self.equal:
            return f"`{self.name}`: {errors}{odd}"
        at = f"{self.bad} of {self.numel} differ, first at {list(self.first or ())}"
        return f"`{self.name}`: {at}: {self.actual} instead of {self.expected}; {errors}{odd}"

    def document(self) -> dict[str, Any]:
        """The same for JSON."""
        keys = ("name", "equal", "max_abs_error", "max_rel_error", "bad", "numel", "nonfinite", "problem")
        document = {key: getattr(self, key) for key in keys}
        if self.first is not None:
            document |= {"first": list(self.first), "actual": self.actual, "expected": self.expected}
        return document


def compare(name: str, actual: Any, expected: Any, tolerance: Tolerance) -> Comparison:
    """Compare element by element; NaN equals NaN, an infinity equals itself."""
    a, e = as_array(actual), as_array(expected)
    if "U" in a.dtype.kind + e.dtype.kind:
        is_same = str(a) == str(e)
        problem = "" if is_same else f"{str(a)!r} instead of {str(e)!r}"
        return Comparison(
            name=name,
            equal=is_same,
            max_abs_error=0.0,
            max_rel_error=0.0,
            first=None,
            actual=None,
            expected=None,
            bad=int(not is_same),
            numel=1,
            nonfinite=0,
            problem=problem,
        )
    if a.shape != e.shape:
        problem = f"shape {list(a.shape)} instead of {list(e.shape)}"
        return Comparison(
            name=name,
            equal=False,
            max_abs_error=float("nan"),
            max_rel_error=float("nan"),
            first=None,
            actual=None,
            expected=None,
            bad=0,
            numel=int(a.size),
            nonfinite=0,
            problem=problem,
        )
    if a.dtype.kind in "bui" and e.dtype.kind in "bui":
        wide_a, wide_e = a.astype(np.int64), e.astype(np.int64)
        wrong = wide_a != wide_e
        error = np.abs(wide_a - wide_e).astype(np.float64)
        odd = 0
    else:
        a, e = a.astype(np.float64), e.astype(np.float64)
        error, wrong = _float_errors(a, e, tolerance)
        odd = int(np.count_nonzero(~np.isfinite(a)))
    magnitude = np.abs(e.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(error == 0, 0.0, error / magnitude)
    first = _first(wrong)
    return Comparison(
        name=name,
        equal=first is None,
        max_abs_error=float(error.max(initial=0.0)),
        max_rel_error=float(relative.max(initial=0.0)),
        first=first,
        actual=None if first is None else a[first].item(),
        expected=None if first is None else e[first].item(),
        bad=int(np.count_nonzero(wrong)),
        numel=int(a.size),
        nonfinite=odd,
    )


def on_host(value: Any) -> Any:
    """A result in host memory: an array, or a `HostTensor` where NumPy lacks the type."""
    return value.numpy() if hasattr(value, "numpy") and not isinstance(value, HostTensor) else value


def dtype_name(value: Any) -> str:
    """``float16``, of anything that `on_host` gives."""
    return str(value.dtype) if hasattr(value, "dtype") else str(np.asarray(value).dtype)


def as_array(value: Any) -> Array:
    """A tensor of any kind that the command meets as an array; bfloat16 as float32."""
    host = on_host(value)
    array: Array = host.float32() if isinstance(host, HostTensor) else np.asarray(host)
    return array


def _float_errors(a: Array, e: Array, tolerance: Tolerance) -> tuple[Array, Array]:
    """(absolute error, which elements are outside the tolerance); equal NaN and infinities have no error."""
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(a - e))
    error = np.where(np.isnan(error), np.inf, error)
    finite = np.abs(e[np.isfinite(e)])
    scale = float(finite.max(initial=0.0)) if tolerance.relative_to_peak else 1.0
    allowed = tolerance.atol * scale + tolerance.rtol * np.where(np.isfinite(e), np.abs(e), 0.0)
    return error, error > allowed


def _first(wrong: Array) -> tuple[int, ...] | None:
    if not wrong.any():
        return None
    index = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return tuple(int(i) for i in index)

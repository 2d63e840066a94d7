"""External operators of a tape as library calls on planned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.expr import Size
from ...runtime.program import Argument, Attributes, SourceLocation
from ..tape import ExternCall, Window


class Call:
    """A library call before its windows have become values."""

    def __init__(self, function: str, reads: Sequence[Window], out: Window, attributes: Attributes) -> None:
        self.function, self.reads, self.out, self.attributes = function, tuple(reads), out, attributes


def to_library_calls(extern: ExternCall, *, allow_tf32: bool) -> list[Call]:
    """The library calls that do an external operator's work, in order.

    Raises UnsupportedOperatorError, naming the operator and the user's line, when there are none.
    """
    translate = _TRANSLATIONS.get(extern.operator)
    if translate is None or len(extern.outs) != 1:
        raise unsupported(extern.operator, extern.origin)
    return translate(extern, allow_tf32)


def has_library_call(operator: str) -> bool:
    """Whether an operator such as ``aten.mm.default`` goes to a library."""
    parts = operator.split(".")
    return operator in _TRANSLATIONS or (len(parts) > 1 and parts[1] in _TRANSLATIONS)


def unsupported(operator: str, origin: SourceLocation) -> UnsupportedOperatorError:
    """The error for an operator without a CUDA kernel."""
    return UnsupportedOperatorError(
        f"operator `{operator}` has no CUDA kernel here",
        why=f"it is needed by {origin}" if str(origin) else "",
        hint="`--allow-host-ops` runs it on the host, with copies",
    )


def _matmul(
    reads: Sequence[Window],
    out: Window,
    allow_tf32: bool,
    *,
    has_bias: bool = False,
    has_c: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    epilogue: str = "none",
) -> Call:
    attributes: dict[str, Argument] = {
        "epilogue": epilogue,
        "has_bias": has_bias,
        "has_c": has_c,
        "alpha": float(alpha),
        "beta": float(beta),
        "allow_tf32": allow_tf32,
    }
    return Call("matmul", reads, out, tuple(attributes.items()))


def _mm(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    a, b = extern.operands[:2]
    return [_matmul((a, b), extern.outs[0], allow_tf32)]


def _addmm(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    added, a, b = extern.operands[:3]
    alpha = float(extern.keywords.get("alpha", 1))
    beta = float(extern.keywords.get("beta", 1))
    out = extern.outs[0]
    bias = _as_bias(added, out.sizes[-1])
    if beta == 0:
        return [_matmul((a, b), extern.outs[0], allow_tf32, alpha=alpha)]
    if bias is not None and beta == 1 and len(a.sizes) == 2:
        return [_matmul((a, b, bias), extern.outs[0], allow_tf32, has_bias=True, alpha=alpha)]
    whole = _expanded(added, out.sizes)
    return [_matmul((a, b, whole), extern.outs[0], allow_tf32, has_c=True, alpha=alpha, beta=beta)]


def _linear(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    x, weight, bias, activation = extern.operands
    reads = (x, weight) if bias is None else (x, weight, bias)
    call = _matmul(reads, extern.outs[0], allow_tf32, has_bias=bias is not None, epilogue=str(activation))
    return [call]


def _expanded(window: Window, sizes: Sequence[Size]) -> Window:
    """What is added, with strides of 0 where it is repeated."""
    missing = len(sizes) - len(window.sizes)
    given = zip(window.sizes, window.strides, sizes[missing:], strict=True)
    strides = [0 if extent == 1 != wanted else stride for extent, stride, wanted in given]
    return replace(window, sizes=tuple(sizes), strides=(*[0] * missing, *strides))


def _as_bias(window: Window, columns: Size) -> Window | None:
    """The row vector that is added to every row, if that is what is added."""
    if not window.sizes or window.sizes[-1] != columns:
        return None
    if len(window.sizes) == 1:
        return window
    if len(window.sizes) == 2 and (window.strides[0] == 0 or window.sizes[0] == 1):
        return Window(window.buffer, window.dtype, window.sizes[1:], window.strides[1:], window.offset)
    return None


def _mm_plus_mm(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    a, b, c, d = extern.operands[:4]
    out = extern.outs[0]
    return [_matmul((a, b), out, allow_tf32), _matmul((c, d, out), out, allow_tf32, has_c=True, beta=1.0)]


def _convolution(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = _convolution_operands(
        extern
    )
    attributes: dict[str, Argument] = {
        "stride": _numbers(stride),
        "padding": _numbers(padding),
        "dilation": _numbers(dilation),
        "transposed": bool(transposed),
        "output_padding": _numbers(output_padding),
        "groups": int(groups),
        "has_bias": bias is not None,
        "has_added": False,
        "activation": "none",
        "allow_tf32": allow_tf32,
    }
    reads = (x, weight) if bias is None else (x, weight, bias)
    return [Call("convolution", reads, extern.outs[0], tuple(attributes.items()))]


def _fused_convolution(extern: ExternCall, allow_tf32: bool) -> list[Call]:
    x, weight, bias, added, stride, padding, dilation, groups, activation = extern.operands
    attributes: dict[str, Argument] = {
        "stride": _numbers(stride),
        "padding": _numbers(padding),
        "dilation": _numbers(dilation),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": int(groups),
        "has_bias": bias is not None,
        "has_added": added is not None,
        "activation": str(activation),
        "allow_tf32": allow_tf32,
    }
    reads = [window for window in (x, weight, bias, added) if window is not None]
    return [Call("convolution", reads, extern.outs[0], tuple(attributes.items()))]


def _convolution_operands(extern: ExternCall) -> list[Any]:
    """The nine operands of ``aten.convolution``, given by position or by keyword."""
    names = (
        "input",
        "weight",
        "bias",
        "stride",
        "padding",
        "dilation",
        "transposed",
        "output_padding",
        "groups",
    )
    tensors = [o for o in extern.operands if isinstance(o, Window)]
    literals = [o for o in extern.operands if not isinstance(o, Window)]
    found: dict[str, Any] = dict(zip(names, tensors, strict=False))
    found.setdefault("bias", None)
    if literals and literals[0] is None:
        literals = literals[1:]
    found.update(zip(names[3:], literals, strict=False))
    found.update({k: v for k, v in extern.keywords.items() if k in names})
    return [found[name] for name in names]


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


_TRANSLATIONS: dict[str, Callable[[ExternCall, bool], list[Call]]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "bias_addmm": _addmm,
    "baddbmm": _addmm,
    "_mm_plus_mm": _mm_plus_mm,
    "convolution": _convolution,
    "aten.convolution.default": _convolution,
    "devplan.convolution.default": _fused_convolution,
    "devplan.linear.default": _linear,
}

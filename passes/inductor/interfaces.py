"""Small private or experimental interfaces of PyTorch under names of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import sympy
import torch
import torch.distributions
import torch.nn.modules.transformer
import torch.utils._pytree as pytree
from torch._decomp import core_aten_decompositions
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv, FloorToInt, ToFloat, TruncToInt
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "core_decompositions",
    "depends_on_data",
    "fake_mode",
    "higher_order",
    "in_integers",
    "is_composite",
    "is_higher_order",
    "is_view",
    "known_value",
    "make_fx",
    "python_text",
    "pytree",
    "rename_node",
    "storage_key",
    "tensor_tables",
    "transient_buffers",
    "unasked_values",
    "unknowns",
]


def python_text(expression: Any) -> str:
    """A sympy expression in Python's syntax."""
    return str(PythonPrinter().doprint(sympy.sympify(expression)))


def in_integers(expression: Any) -> Any:
    """A size without the binary fractions that it is rounded from: ``trunc(1.5 * n)`` is ``3 * n // 2``.

    Other factors are left: their products are rounded, so that no integer arithmetic gives the same.
    """

    def rounded(whole: Any) -> Any:
        exact = whole.args[0].replace(lambda e: isinstance(e, ToFloat), lambda e: e.args[0])
        exact = exact.replace(lambda e: e.is_Float, lambda e: sympy.Rational(float(e)))
        numerator, denominator = sympy.fraction(sympy.together(exact))
        is_short = denominator.is_Integer and int(denominator) <= _LONGEST_FRACTION
        return FloorDiv(numerator, denominator) if is_short else whole

    return sympy.sympify(expression).replace(lambda e: isinstance(e, TruncToInt | FloorToInt), rounded)


_LONGEST_FRACTION = 1 << 16


def unknowns(number: object) -> set[str]:
    """The names of what a size or number is made of that only the running program knows."""
    is_symbolic = isinstance(number, torch.SymInt | torch.SymFloat)
    return {str(symbol) for symbol in free_unbacked_symbols(number)} if is_symbolic else set()


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor that tracing meets, where it is a constant that no input has to do with."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


@contextlib.contextmanager
def unasked_values() -> Generator[None]:
    """While active, modules of torch ask no questions about values that only tracing would have to answer.

    Distributions check no parameters, and transformers do not look whether a mask is the causal one: that is
    a hint, the mask is applied either way.
    """

    def hinted(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    with (
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", hinted),
    ):
        yield


def depends_on_data(extent: torch.SymInt) -> bool:
    """Whether a size is only known once the program has run."""
    return bool(free_unbacked_symbols(extent))


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> how core ATen spells it."""
    return dict(core_aten_decompositions())


def fake_mode() -> FakeTensorMode:
    """Where tensors have shapes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors over one storage have in common, fake ones included."""
    return int(tensor.untyped_storage()._cdata)


def tensor_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers by name, to be read and written."""
    return module._parameters, module._buffers


def transient_buffers(module: torch.nn.Module) -> set[str]:
    """The names of a module's own buffers that a saved model does not have."""
    return module._non_persistent_buffers_set


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Give a node of a graph this name, or one that begins so where the graph has it already."""
    node._rename(name)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a window onto another one."""
    return tensor._is_view()


def is_composite(overload: Any) -> bool:
    """Whether the dispatcher itself takes an operator apart into others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key))


def is_higher_order(target: Any) -> bool:
    """Whether a graph node's target is an operator over graphs, such as ``cond``."""
    return isinstance(target, HigherOrderOperator)


def higher_order(name: str) -> Any:
    """The operator over graphs of that name."""
    return getattr(torch.ops.higher_order, name)

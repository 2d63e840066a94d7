"""Complex tensors of an exported graph as pairs of real ones: kernels and libraries here know no others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime.errors import UnsupportedOperatorError
from . import fourier
from .fourier import Pair
from .inline import inline
from .origins import origin_of

if TYPE_CHECKING:
    from .exported import ExportedMethod

aten = torch.ops.aten


def split_complex(method: ExportedMethod) -> bool:
    """Rewrite a method's graph in place; says whether there was anything complex.

    Constants that are complex become real ones with a last dimension of two. Raises
    UnsupportedOperatorError for an operator without a rule, and for complex inputs, outputs and state.
    """
    graph = method.graph.graph
    if not any(_is_complex(n.meta.get("val")) for n in graph.nodes):
        return False
    splitting = _Splitting(method)
    for node in list(graph.nodes):
        if node.op == "output":
            splitting.check_output(node)
        elif _is_complex(node.meta.get("val")) or any(n in splitting.pairs for n in node.all_input_nodes):
            splitting.rewrite(node)
    for node in reversed(list(splitting.replaced)):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    method.graph.recompile()
    return True


_MADE_OF_OTHERS = frozenset(
    getattr(getattr(torch.ops.aten, packet), overload)
    for packet in ("stft", "quantile", "nanquantile")
    for overload in getattr(torch.ops.aten, packet).overloads()
)


def decompose_complex(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take composite operators on complex tensors apart (``stft``, ``fft.rfft``) into what has rules below.

    Likewise those made of complex ones, or of views in place. Other programs are returned as they are.
    """
    touched = {
        node.target
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and (
            node.target in _MADE_OF_OTHERS
            or _is_complex(node.meta.get("val"))
            or any(_is_complex(n.meta.get("val")) for n in node.all_input_nodes)
        )
        and node.target._can_decompose()
    }
    known = torch.export.default_decompositions() if touched else {}
    rules = {target: known[target] for target in touched if target in known}
    return decompose_complex(program.run_decompositions(rules)) if rules else program


def _is_complex(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(v, Tensor) and v.is_complex() for v in values)


class _Splitting:
    def __init__(self, method: ExportedMethod) -> None:
        self._method, self._graph = method, method.graph.graph
        self.pairs: dict[torch.fx.Node, tuple[torch.fx.Node, torch.fx.Node]] = {}
        self.replaced: dict[torch.fx.Node, None] = {}

    def check_output(self, node: torch.fx.Node) -> None:
        """What leaves the method is real."""
        for value in node.all_input_nodes:
            if value in self.pairs:
                raise _refusal(f"output or state `{value.name}` is complex", value)

    def rewrite(self, node: torch.fx.Node) -> None:
        """Replace a node by what computes its pair, or its real result."""
        if node.op == "placeholder":
            self._constant(node)
            return
        if node.target is aten._assert_tensor_metadata.default:
            self.replaced[node] = None
            return
        rule = _rule(node)
        nodes = list(node.all_input_nodes)
        flat = [m for n in nodes for m in self.pairs.get(n, (n,))]
        single = _single_values(node)

        def run(*tensors: Any) -> Any:
            values = iter(tensors)
            known = {n: (next(values), next(values)) if n in self.pairs else next(values) for n in nodes}
            map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
            args, kwargs = _released(map_arg((node.args, node.kwargs), lambda n: _Held(known[n])))
            return rule(*args, **kwargs)

        made = inline(run, flat, node)
        self.replaced[node] = None
        if _is_complex(node.meta["val"]) and single:
            self.pairs[node] = (made[0], made[1])
        else:
            node.replace_all_uses_with(made[0])
            self._rename(node, made[0])

    def _rename(self, node: torch.fx.Node, made: torch.fx.Node) -> None:
        method = self._method
        method.updates = tuple((t, made.name if s == node.name else s) for t, s in method.updates)
        method.outputs = tuple(
            type(o)(o.name, made.name, o.literal) if o.node == node.name else o for o in method.outputs
        )

    def _constant(self, node: torch.fx.Node) -> None:
        content = self._method.contents.get(node.name)
        if content is None or content in self._method.state:
            raise _refusal(f"input or state `{node.name}` is complex", node)
        held = self._method.tensors[content]
        real = torch.view_as_real(held.resolve_conj()).contiguous() if held.is_complex() else held
        self._method.tensors[content] = real
        node.meta["val"] = _real_like(node.meta["val"])
        after = next(n for n in self._graph.nodes if n.op != "placeholder")
        with self._graph.inserting_before(after):
            parts = [self._graph.call_function(aten.select.int, (node, -1, index)) for index in (0, 1)]
        for index, part in enumerate(parts):
            part.meta = {**node.meta, "val": node.meta["val"].select(-1, index)}
        self.pairs[node] = (parts[0], parts[1])


class _Held:
    """Keeps pairs from being taken apart by pytree functions on the way to a rule."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _released(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.value
    if isinstance(value, dict):
        return {k: _released(v) for k, v in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return type(value)(_released(v) for v in value)  # pyright: ignore
    return value


def _single_values(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def _real_like(value: Tensor) -> Tensor:
    return torch.view_as_real(value)


def _refusal(what: str, node: torch.fx.Node) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        what, why=str(origin_of([node])), hint="use `torch.view_as_real` at the edges of the model"
    )


# --- rules: arguments are pairs where the operator's are complex -------------------------------------


def _rule(node: torch.fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is operator.getitem:
        raise _refusal(f"operator `{target}` takes complex numbers", node)
    packet = target._schema.name.removeprefix("aten::")
    if packet in _RULES:
        return _RULES[packet]
    if packet in _BY_PART:
        return lambda *args, **kwargs: _by_part(target, args, kwargs)
    raise _refusal(f"operator `{target}` takes complex numbers", node)


def _by_part(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if not (k == "dtype" and v is not None and v.is_complex)}

    def part(value: Any, index: int) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value):
            return value[index]
        if isinstance(value, list | tuple):
            return [part(v, index) for v in value]
        return value

    return tuple(target(*[part(a, index) for a in args], **kwargs) for index in (0, 1))


def _pair(value: Any) -> Pair:
    """Any operand as a pair; zeros stand for the imaginary part of real ones."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, complex):
        return torch.tensor(value.real), torch.tensor(value.imag)
    return value, torch.zeros_like(value)


def _multiply(x: Any, y: Any) -> Pair:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return fourier.multiply(x, y)
    if isinstance(y, complex):
        return x[0] * y.real - x[1] * y.imag, x[0] * y.imag + x[1] * y.real
    pair, real = (x, y) if isinstance(x, tuple) else (y, x)
    return pair[0] * real, pair[1] * real


def _add(x: Any, y: Any, *, alpha: float = 1) -> Pair:
    (a, b), (c, d) = _pair(x), _pair(y)
    return a + alpha * c, b + alpha * d


def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Pair:
    return _add(x, y, alpha=-alpha)


def _divide(x: Any, y: Any) -> Pair:
    if not isinstance(y, tuple):
        return x[0] / y, x[1] / y
    size = y[0] * y[0] + y[1] * y[1]
    re, im = fourier.multiply(_pair(x), (y[0], -y[1]))
    return re / size, im / size


def _magnitude(x: Pair) -> Tensor:
    return torch.sqrt(x[0] * x[0] + x[1] * x[1])


def _power(x: Pair, exponent: float) -> Pair:
    if exponent == 2:
        return fourier.multiply(x, x)
    size, angle = _magnitude(x) ** exponent, torch.atan2(x[1], x[0]) * exponent
    return size * torch.cos(angle), size * torch.sin(angle)


def _product(x: Any, y: Any) -> Pair:
    (a, b), (c, d) = _pair(x), _pair(y)
    return torch.matmul(a, c) - torch.matmul(b, d), torch.matmul(a, d) + torch.matmul(b, c)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    if isinstance(x, tuple):
        return x if not wanted or wanted[0].is_complex else x[0].to(wanted[0])
    return x, torch.zeros_like(x)


def _exponential(x: Pair) -> Pair:
    size = torch.exp(x[0])
    return size * torch.cos(x[1]), size * torch.sin(x[1])


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
    "exp": _exponential,
    "pow": _power,
    "mul": _multiply,
    "add": _add,
    "sub": _subtract,
    "div": _divide,
    "mm": _product,
    "bmm": _product,
    "matmul": _product,
    "_to_copy": _to,
    "to": _to,
    "_fft_c2c": fourier.complex_to_complex,
    "_fft_r2c": fourier.real_to_complex,
    "_fft_c2r": fourier.complex_to_real,
    "where": _where,
}

_BY_PART = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice",
    "select", "alias", "detach", "clone", "contiguous", "flip", "roll", "cat", "stack", "index",
    "index_select", "gather", "repeat", "neg", "sum", "mean", "constant_pad_nd", "zeros_like",
    "slice_scatter", "select_scatter", "as_strided", "lift_fresh_copy", "cumsum", "unfold",
    "diagonal", "narrow", "movedim", "tile",
}  # fmt: skip
"""Operators that do to a complex tensor what they do to its parts."""

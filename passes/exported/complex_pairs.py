"""Complex tensors of an exported graph as pairs of real ones: kernels and libraries here know no others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.overloads import is_overload
from .complex_rules import rule_of
from .inline import inline
from .origins import origin_of

if TYPE_CHECKING:
    from .method import ExportedMethod

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


_TO_REAL = ("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn")
"""Of real tensors nothing complex is to be seen before these are taken apart."""

_MADE_OF_OTHERS = frozenset(
    getattr(getattr(torch.ops.aten, packet), overload)
    for packet in ("stft", "quantile", "nanquantile", *_TO_REAL)
    for overload in getattr(torch.ops.aten, packet).overloads()
)


def has_complex(node: torch.fx.Node) -> bool:
    """Whether a node's operator should be taken apart for the rules below.

    That are composite operators on complex tensors (``stft``, ``fft.rfft``), and those made of complex ones,
    or of views in place.
    """
    return node.target in _MADE_OF_OTHERS or any(
        _is_complex(n.meta.get("val")) for n in (node, *node.all_input_nodes)
    )


def _is_complex(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(v, Tensor) and v.is_complex() for v in values)


class _Splitting:
    def __init__(self, method: ExportedMethod) -> None:
        self._method, self._graph = method, method.graph.graph
        self.pairs: dict[torch.fx.Node, tuple[torch.fx.Node, torch.fx.Node]] = {}
        self.lists: dict[Any, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
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
        if node.target is operator.getitem and node.args[0] in self.lists:
            self.replaced[node] = None
            self.pairs[node] = self.lists[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        rule = _rule(node)
        nodes = list(node.all_input_nodes)
        flat = [m for n in nodes for m in self.pairs.get(n, (n,))]

        def run(*tensors: Any) -> Any:
            values = iter(tensors)
            known = {n: (next(values), next(values)) if n in self.pairs else next(values) for n in nodes}
            map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
            args, kwargs = _released(map_arg((node.args, node.kwargs), lambda n: _Held(known[n])))
            return rule(*args, **kwargs)

        made = inline(run, flat, node)
        self.replaced[node] = None
        if not isinstance(node.meta["val"], Tensor):
            half = len(made) // 2
            self.lists[node] = list(zip(made[:half], made[half:], strict=True))
        elif _is_complex(node.meta["val"]):
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
        node.meta["val"] = torch.view_as_real(node.meta["val"])
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


def _refusal(what: str, node: torch.fx.Node) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        what, why=str(origin_of([node])), hint="use `torch.view_as_real` at the edges of the model"
    )


def _rule(node: torch.fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    rule = rule_of(target) if is_overload(target) else None
    if rule is None:
        raise _refusal(f"operator `{target}` takes complex numbers", node)
    return rule

"""A region on the host: core ATen operators as out variants on planned memory."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.traceback import preserve_node_meta

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.expr import Size
from ...runtime.program import CPU, Argument, HostCall, Ref, Value
from ..exported.origins import origin_of
from ..exported.sizes import to_dtype, to_size
from ..inductor.interfaces import core_decompositions, make_fx, storage_key
from ..inductor.overloads import arguments, full_name, is_mutable, is_overload, overload_name, packet_name
from ..size_arithmetic import is_dense, plus, product, scaled
from .builder import MethodBuilder
from .region_graph import NamingInterpreter, RegionGraph

_KEEP = {
    "aten::native_layer_norm", "aten::native_group_norm", "aten::_softmax", "aten::_log_softmax",
    "aten::gelu", "aten::addmm", "aten::_native_batch_norm_legit_no_training", "aten::silu",
    "aten::hardswish",
}  # fmt: skip
"""Operators with a kernel of their own that core ATen would take apart."""


class HostLowering:
    """Appends a host region to a method; afterwards the outputs have values of the given names."""

    def __init__(
        self, builder: MethodBuilder, graph: RegionGraph, inputs: Sequence[Value], region: int
    ) -> None:
        self._builder, self._graph, self._region = builder, graph, region
        self._inputs = inputs
        self._values: dict[torch.fx.Node, str | list[str]] = {}
        self._homes: dict[int, tuple[str, Size]] = {}

    def run(self, names: Sequence[str]) -> list[str]:
        """Trace, decompose, and emit one `HostCall` an operator."""
        traced = self._traced()
        (output,) = [n for n in traced.graph.nodes if n.op == "output"]
        results: list[torch.fx.Node] = list(output.args[0])
        placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        for node, value in zip(placeholders, self._inputs, strict=False):
            self._values[node] = value.name
            self._homes[storage_key(node.meta["val"])] = (value.storage, value.offset)
        for node in traced.graph.nodes:
            if node.op == "call_function":
                self._emit(node)
        return [self._rename(node, name) for node, name in zip(results, names, strict=True)]

    def _traced(self) -> torch.fx.GraphModule:
        module, examples = self._graph.module, self._graph.examples
        table = {k: v for k, v in core_decompositions().items() if full_name(k) not in _KEEP}
        tensors = [e for e in examples if isinstance(e, torch.Tensor)]
        mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
        with mode or contextlib.nullcontext(), torch.no_grad(), preserve_node_meta():  # pyright: ignore
            fresh = [_fresh(e) for e in examples]
            return make_fx(
                lambda *args: NamingInterpreter(module).run(*args),
                decomposition_table=table,
                tracing_mode="real",
            )(*fresh)

    def _emit(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node) and isinstance(index, int)
            self._values[node] = self._values[source][index]
            return
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor | list | tuple):
            return  # symbolic integers are read from shapes where they are needed
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        if all(storage_key(t) in self._homes for t in tensors):
            made = [self._window(node.name, t) for t in tensors]
            if node.target is torch.ops.aten.copy_.default:
                self._copy_into(node)
            elif _writes(node.target):
                self._call(node, made, _functional(node))
        else:
            made = [self._allocate(node, t) for t in tensors]
            self._call(node, made)
        self._values[node] = made[0] if isinstance(value, torch.Tensor) else made

    def _copy_into(self, node: torch.fx.Node) -> None:
        target, source = node.args[0], node.args[1]
        assert isinstance(target, torch.fx.Node) and isinstance(source, torch.fx.Node)
        written, read = self._values[target], self._values[source]
        assert isinstance(written, str) and isinstance(read, str)
        call = HostCall(
            "aten::clone.out", (Ref(read), None), (read,), (written,), self._region, origin_of([node])
        )
        self._builder.instructions.append(call)

    def _window(self, name: str, tensor: torch.Tensor) -> str:
        storage, begin = self._homes[storage_key(tensor)]
        offset = plus(begin, scaled(to_size(tensor.storage_offset()), tensor.dtype.itemsize))
        return self._builder.add_value(
            f"r{self._region}_{name}",
            storage,
            to_dtype(tensor.dtype),
            tuple(to_size(s) for s in tensor.shape),
            tuple(to_size(s) for s in tensor.stride()),
            offset,
        ).name

    def _allocate(self, node: torch.fx.Node, tensor: torch.Tensor) -> str:
        shape = tuple(to_size(s) for s in tensor.shape)
        nbytes = scaled(product(shape), tensor.dtype.itemsize)
        if tensor.storage_offset() or not is_dense(shape, tuple(to_size(s) for s in tensor.stride())):
            nbytes = to_size(tensor.untyped_storage().nbytes())
        name = f"r{self._region}_{node.name}"
        storage = self._builder.add_storage(name, CPU, nbytes, origin=origin_of([node]))
        self._homes[storage_key(tensor)] = (storage.name, 0)
        return self._window(node.name, tensor)

    def _call(self, node: torch.fx.Node, made: list[str], overload: Any = None) -> None:
        overload = overload or node.target
        if not is_overload(overload):
            raise UnsupportedOperatorError(
                f"`{overload}` has no kernel on the host", why=str(origin_of([node]))
            )
        target = _own_target(overload) or _out_variant(overload)
        if target is None:
            raise UnsupportedOperatorError(
                f"operator `{overload}` cannot write into planned memory",
                why=f"it has no out variant; needed by {origin_of([node])}",
            )
        arguments = tuple(self._argument(v) for v in _bound(overload, node.args, node.kwargs))
        reads = tuple(dict.fromkeys(_refs(arguments)))
        call = HostCall(target, arguments, reads, tuple(made), self._region, origin_of([node]))
        self._builder.instructions.append(call)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, torch.fx.Node):
            held = value.meta["val"]
            if not isinstance(held, torch.Tensor):
                return to_size(held)
            name = self._values[value]
            assert isinstance(name, str)
            return Ref(name)
        if isinstance(value, list | tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.dtype):
            return to_dtype(value)
        if isinstance(value, torch.device):
            return CPU
        if isinstance(value, torch.memory_format | torch.layout):
            return str(value)
        if isinstance(value, torch.SymInt):
            return to_size(value)
        if value is None or isinstance(value, int | float | bool | str):
            return value
        raise UnsupportedOperatorError(
            f"an argument of type {type(value).__name__} has no place in an artifact"
        )

    def _rename(self, node: torch.fx.Node, name: str) -> str:
        value = self._builder.values[str(self._values[node])]
        return self._builder.add_value(
            name, value.storage, value.dtype, value.shape, value.strides, value.offset
        ).name


def _fresh(example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return example
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="cpu")


def _bound(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the out variant's schema order (without ``out``), defaults filled in."""
    packet = overload.overloadpacket
    given = dict(zip([a.name for a in arguments(overload)], args, strict=False)) | kwargs
    out = overload
    if not _own_target(overload):
        out = getattr(packet, str(_out_variant(overload)).rsplit(".", 1)[-1])
    values: list[Any] = []
    for argument in arguments(out):
        if argument.is_out:
            continue
        values.append(given.get(argument.name, argument.default_value))
    return values


def _own_target(overload: Any) -> str:
    """``devplan::kept_boxes`` for an operator of ours; empty for others."""
    return full_name(overload) if overload.namespace == "devplan" else ""


def _writes(overload: Any) -> bool:
    """Whether an operator changes its operands, as the insides of composite operators may."""
    if not is_overload(overload) or torch.Tag.inplace_view in overload.tags:
        return False
    return is_mutable(overload)


def _functional(node: torch.fx.Node) -> Any:
    """What computes the bytes that an in-place operator writes: ``aten.lerp`` for ``aten.lerp_``."""
    overload: Any = node.target
    name = packet_name(overload).removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload_name(overload), None)
    if found is None or found is overload:
        raise UnsupportedOperatorError(
            f"operator `{overload}` writes in place and has no other form", why=str(origin_of([node]))
        )
    return found


def _out_variant(overload: Any) -> str | None:
    """``aten::add.out`` for ``aten.add.Tensor``: the overload that takes the same and writes into ``out``."""
    factory = {"dtype", "layout", "device", "pin_memory"}  # an out variant takes these from its output
    packet = overload.overloadpacket
    wanted = [(a.name, str(a.type)) for a in arguments(overload) if a.name not in factory]
    for name in packet.overloads():
        other = getattr(packet, name)
        if not any(a.is_out for a in arguments(other)):
            continue
        plain = [(a.name, str(a.type)) for a in arguments(other) if not a.is_out and a.name not in factory]
        if plain == wanted:
            return f"{full_name(other)}.{name}"
    return None


def _refs(arguments: Sequence[Argument]) -> list[str]:
    found: list[str] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            found += _refs(argument)
    return found

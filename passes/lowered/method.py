"""A placed method as a `Method`: regions lowered one by one, copies and ports between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, zip_longest
from typing import Any

import torch

from ...runtime.errors import PassError
from ...runtime.program import CPU, Copy, CopyKind, Count, Device, Method, Port, Region, Role, Value
from ..exported.contents import Contents, channels_last, dense_strides
from ..exported.control_flow import all_nodes
from ..exported.method import CountSpec, ExportedMethod
from ..exported.narrowed import Narrowing
from ..exported.sizes import to_dtype, to_size
from ..kernels.cached_attention import fuse_cached_attention
from ..placed.graph import Node, NodeKind, PlacedGraph
from ..placed.ledger import copy_kind
from ..size_arithmetic import contiguous_strides, is_dense, product, scaled
from ..tape import KernelSpec
from .builder import MethodBuilder
from .control_flow import ControlFlowLowering
from .decompositions import host_replacements, replacements
from .fuse_convolutions import fuse_convolutions
from .fuse_linears import fuse_linears
from .fuse_row_products import fuse_row_products
from .host import HostLowering
from .region import Lowering, TapeLowering, local_copy
from .region_graph import RegionGraph, extract


@dataclass(frozen=True)
class LoweredMethod:
    """A method and the kernels that it launches, not yet compiled."""

    method: Method
    kernels: tuple[KernelSpec, ...]


def lower_method(
    exported: ExportedMethod,
    placed: PlacedGraph,
    contents: Contents,
    how: Lowering,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoweredMethod:
    """Lower every region of a placed graph and put the method together.

    Raises UnsupportedOperatorError for what has no kernel on its device.
    """
    return _MethodLowering(exported, placed, contents, how).run(report)


class _MethodLowering:
    def __init__(
        self,
        exported: ExportedMethod,
        placed: PlacedGraph,
        contents: Contents,
        how: Lowering,
    ) -> None:
        self._exported, self._placed, self._how = exported, placed, how
        self._contents = contents
        self._builder = MethodBuilder(placed.name, placed.symbols, notes=list(exported.notes))
        self._nodes = {node.name: node for node in _flat(placed)}
        self._fx = {n.name: n for n in all_nodes(exported.graph)}
        self._kernels: dict[str, KernelSpec] = {}
        self._value_of: dict[str, str] = {}
        self._readers = _readers(placed)
        self._written_in_regions = _written_in_regions(placed)
        self._updated: set[str] = set()

    def run(self, report: Callable[[int, int], None]) -> LoweredMethod:
        count = len({node.region for node in self._nodes.values() if node.region >= 0})
        self._declare_inputs()
        self._emit(self._placed.nodes, lambda: report(len(self._builder.regions), count))
        self._remaining_updates()
        self._declare_outputs()
        method = self._builder.finish(self._exported.input_tree, self._exported.output_tree)
        return LoweredMethod(method, tuple(self._kernels.values()))

    def _emit(self, nodes: Sequence[Node], report: Callable[[], None]) -> None:
        """Lower nodes in order: those of one region, which stand together, at once."""
        for region, group in groupby(nodes, key=lambda node: node.region):
            members = list(group)
            if region >= 0:
                self._region(members)
                report()
                continue
            for node in members:
                if node.kind is NodeKind.COPY:
                    self._copy(node)
                elif node.kind in (NodeKind.CONSTANT, NodeKind.STATE):
                    self._content(node)
                elif node.branches:
                    self._control_flow(node, report)

    def _control_flow(self, node: Node, report: Callable[[], None]) -> None:
        elements: dict[int, list[Node]] = {}
        for each in self._nodes.values():
            if each.kind is NodeKind.ELEMENT and each.operands[0] == node.name:
                elements.setdefault(each.index, []).append(each)

        def like(template: Node) -> Value:
            return self._like(template, template.name, Role.TEMPORARY, _device(template))

        emit = partial(self._emit, report=report)
        ControlFlowLowering(self._builder, self._value_of, emit, like).lower(node, elements)

    # --- ports and contents ---------------------------------------------------------------------------

    def _declare_inputs(self) -> None:
        by_content = {n.content: n for n in self._placed.nodes if n.kind is NodeKind.INPUT}
        for spec in self._exported.inputs:
            if not spec.is_tensor:
                self._builder.inputs.append(Port(spec.name, "", literal=spec.literal))
                continue
            node = by_content[spec.name]
            device = _device(node)
            value = self._like(node, spec.name, Role.INPUT, device, external=device != CPU)
            self._builder.inputs.append(Port(spec.name, value.name))

    def _like(
        self, node: Node, name: str, role: Role, device: Device, *, external: bool = False, content: str = ""
    ) -> Value:
        """A storage and a value with the layout of the node's own tensor, or of its content."""
        example = self._example(node)
        shape = tuple(to_size(s) for s in example.shape)
        strides = tuple(to_size(s) for s in example.stride())
        if content:
            strides = dense_strides(self._contents.tensors[content])
        elif not is_dense(shape, strides):
            strides = contiguous_strides(shape)
        nbytes = scaled(product(shape), example.dtype.itemsize)
        storage = self._builder.add_storage(name, device, nbytes, role, external=external, content=content)
        value = self._builder.add_value(name, storage.name, to_dtype(example.dtype), shape, strides)
        self._value_of[node.name] = value.name
        return value

    def _example(self, node: Node) -> torch.Tensor:
        """The fake tensor of a node; a copy's is that of what it copies."""
        while node.kind is NodeKind.COPY:
            node = self._nodes[node.operands[0]]
        fx = self._fx[node.twin_of or node.name]
        example: torch.Tensor = fx.meta["val"]
        return example

    def _content(self, node: Node) -> None:
        role = Role.STATE if node.kind is NodeKind.STATE else Role.CONSTANT
        self._like(node, node.name, role, _device(node), content=node.content)

    def _copy(self, node: Node) -> None:
        source = self._builder.values[self._value_of[node.operands[0]]]
        held, device = self._builder.storages[source.storage].device, _device(node)
        if not is_dense(source.shape, source.strides):
            source = local_copy(
                self._builder, source.name, f"{source.name}_packed", held, -1, "a copy moves one dense run"
            )
        nbytes = scaled(product(source.shape), source.dtype.itemsize)
        storage = self._builder.add_storage(node.name, device, nbytes, origin=node.origin)
        made = self._builder.add_value(node.name, storage.name, source.dtype, source.shape, source.strides)
        kind = CopyKind(copy_kind(held, device))
        self._builder.instructions.append(Copy(kind, source.name, made.name, node.reason, origin=node.origin))
        self._value_of[node.name] = made.name

    # --- regions --------------------------------------------------------------------------------------

    def _region(self, nodes: Sequence[Node]) -> None:
        device = _device(nodes[0])
        inside = {node.name for node in nodes}
        wanted = [n.name for n in nodes if n.type is not None and self._readers.get(n.name, set()) - inside]
        updates = self._updates_within(nodes[0].region)
        if not wanted and not updates:
            return
        operators = sum(node.kind is NodeKind.CALL for node in nodes)
        index = len(self._builder.regions)
        backend = "aten" if device == CPU else "triton"
        self._builder.regions.append(Region(device, backend, operators))
        if device == CPU:
            made = self._host_region(nodes, wanted, updates, index)
        else:
            made = self._device_region(nodes, wanted, updates, device, index)
        self._value_of.update(zip(wanted, made, strict=True))
        self._updated |= {target for target, _ in updates}

    def _updates_within(self, region: int) -> list[tuple[str, str]]:
        """Updates that a region writes itself."""
        updates = (u for u in self._placed.updates if u in self._written_in_regions)
        return [(target, source) for target, source in updates if self._nodes[source].region == region]

    def _extract(
        self,
        nodes: Sequence[Node],
        wanted: Sequence[str],
        updates: Sequence[tuple[str, str]],
        device: torch.device,
    ) -> tuple[RegionGraph, list[Value]]:
        inside = {node.name for node in nodes}
        outer = {o for n in nodes for o in n.operands if o not in inside} | {t for t, _ in updates}
        examples: dict[str, Any] = {name: self._example(self._nodes[name]) for name in outer}
        graph = extract(
            self._exported,
            nodes,
            wanted,
            updates,
            device,
            examples,
            replacements() if device.type == "cuda" else host_replacements(),
        )
        held = CPU if device.type == "cpu" else _device(nodes[0])
        return graph, [self._builder.values[self._value_on(name, held)] for name in graph.inputs]

    def _value_on(self, node: str, device: Device) -> str:
        """The node's value. One without elements is not copied: each device has its own."""
        value = self._builder.values[self._value_of[node]]
        held = self._builder.storages[value.storage]
        if held.device == device or 0 not in value.shape:
            return value.name
        storage = self._builder.add_storage(f"{value.name}_on_{device.kind}", device, 0)
        return self._builder.add_value(
            storage.name, storage.name, value.dtype, value.shape, value.strides
        ).name

    def _host_region(
        self, nodes: Sequence[Node], wanted: Sequence[str], updates: Sequence[tuple[str, str]], index: int
    ) -> list[str]:
        graph, inputs = self._extract(nodes, wanted, updates, torch.device("cpu"))
        return HostLowering(self._builder, graph, inputs, index).run(wanted)

    def _device_region(
        self,
        nodes: Sequence[Node],
        wanted: Sequence[str],
        updates: Sequence[tuple[str, str]],
        device: Device,
        index: int,
    ) -> list[str]:
        from ..inductor import lowering as inductor
        from ..inductor.described_gpu import described_target

        self._align_inputs(nodes)
        graph, inputs = self._extract(nodes, wanted, updates, torch.device("cuda", 0))
        shape_env = next(filter(None, map(_shape_env, graph.examples)), None)
        narrowing = Narrowing(shape_env, self._placed.symbols)
        with described_target(self._how.target):
            fuse_cached_attention(graph.module)
            fuse_row_products(graph.module)
            fuse_linears(graph.module)
            fuse_convolutions(graph.module, partial(self._store_channels_last, graph))
            traced, mode = inductor.trace_on_target(graph.module, graph.examples, shape_env, narrowing.check)
            self._lay_out_weights(inductor.channels_last_weights(traced), traced, graph)
            inputs = [self._builder.values[value.name] for value in inputs]
            fakes = [self._fake(mode, e, v) for e, v in zip_longest(graph.examples, inputs)]
            tape = inductor.lower_graph(traced, fakes, mode)
            narrowing.check(f"region {index}")
        lowering = TapeLowering(self._builder, tape, inputs, device, index, self._how)
        made = lowering.run(wanted)
        self._kernels.update({spec.name: spec for spec in lowering.kernels.values()})
        return made

    def _fake(self, mode: Any, example: Any, value: Value | None) -> Any:
        """An input of the region as it really is: with the layout of its value, where that is known."""
        from ..inductor import lowering as inductor

        if value is None or not all(isinstance(s, int) for s in value.strides):
            return inductor.on_target(mode, example)
        return inductor.on_target(mode, example, [int(str(s)) for s in value.strides])

    def _lay_out_weights(
        self, names: Sequence[str], traced: torch.fx.GraphModule, graph: RegionGraph
    ) -> None:
        """Store weights channels-last that would otherwise be transposed in every call."""
        placeholders = [n.name for n in traced.graph.nodes if n.op == "placeholder"]
        nodes = dict(zip(placeholders, graph.inputs, strict=False))
        for name in names:
            if name in nodes:
                self._store_channels_last(graph, nodes[name])

    def _store_channels_last(self, graph: RegionGraph, name: str, dimension: int = 1) -> bool:
        """Let a region's input that is a constant be channels-last; whether it is so now."""
        node = self._nodes.get(name)
        if node is None or node.kind is not NodeKind.CONSTANT:
            return False
        if not self._contents.lay_out_channels_last(node.content, dimension):
            return False
        value = self._builder.values[self._value_of[node.name]]
        strides = dense_strides(self._contents.tensors[node.content])
        self._builder.values[value.name] = replace(value, strides=strides)
        at = graph.inputs.index(name)
        example = graph.examples[at]
        with example.fake_mode:
            graph.examples[at] = channels_last(example, dimension)
        return True

    def _align_inputs(self, nodes: Sequence[Node]) -> None:
        """Kernels assume pointers aligned to 16 bytes: a window that begins elsewhere is copied first."""
        inside = {node.name for node in nodes}
        for name in dict.fromkeys(o for n in nodes for o in n.operands if o not in inside):
            value = self._builder.values[self._value_of[name]]
            if not isinstance(value.offset, int) or value.offset % 16:
                device = self._builder.storages[value.storage].device
                made = local_copy(
                    self._builder,
                    value.name,
                    f"{value.name}_aligned",
                    device,
                    -1,
                    "kernels read from aligned addresses",
                )
                self._value_of[name] = made.name

    # --- the end of the method --------------------------------------------------------------------------

    def _remaining_updates(self) -> None:
        for target, source in self._placed.updates:
            if target not in self._updated:
                read, written = self._value_of[source], self._value_of[target]
                reason = f"the new content of `{self._nodes[target].content}`"
                self._builder.instructions.append(Copy(CopyKind.LOCAL, read, written, reason))

    def _declare_outputs(self) -> None:
        seen: dict[str, str] = {}
        results = [output for output in self._placed.outputs if not output.is_count]
        for output, spec in zip(results, self._exported.outputs, strict=True):
            if not output.node:
                self._builder.outputs.append(Port(spec.name, "", literal=spec.literal))
                continue
            value = self._value_on(output.node, output.device or CPU)
            storage = self._builder.storage_of(value)
            aliases = self._aliases(value, seen)
            if aliases is None and (storage.role is not Role.TEMPORARY or not self._covers(value)):
                value = self._own_output(value, spec.name)
                storage = self._builder.storage_of(value)
            if aliases is None:
                self._builder.update_storage(storage.name, role=Role.OUTPUT, external=storage.device != CPU)
                seen[storage.name] = spec.name
            self._builder.outputs.append(Port(spec.name, value, aliases, None, spec.count, spec.axis))
        counts = [output for output in self._placed.outputs if output.is_count]
        for output, count in zip(counts, self._exported.counts, strict=True):
            self._declare_count(output.node, count)

    def _declare_count(self, node: str, spec: CountSpec) -> None:
        """A size that depends on data is left where it is on the host; state may change, and is copied."""
        value = self._value_of[node]
        if self._builder.storage_of(value).role is Role.STATE:
            value = self._own_output(value, spec.node)
        storage = self._builder.storage_of(value)
        if storage.role is Role.TEMPORARY:
            self._builder.update_storage(storage.name, role=Role.OUTPUT)
        count = Count(spec.name, value, spec.lower, spec.upper, spec.origin, spec.is_difference)
        self._builder.counts.append(count)

    def _aliases(self, value: str, seen: dict[str, str]) -> tuple[str, str] | None:
        storage = self._builder.storage_of(value)
        if storage.name in seen:
            return ("output", seen[storage.name])
        if storage.role is Role.INPUT:
            return ("input", storage.name)
        return None

    def _covers(self, value: str) -> bool:
        """Whether a value is its whole storage, so that the caller may own that."""
        made = self._builder.values[value]
        nbytes = scaled(product(made.shape), made.dtype.itemsize)
        return made.offset == 0 and str(nbytes) == str(self._builder.storage_of(value).nbytes)

    def _own_output(self, value: str, name: str) -> str:
        device = self._builder.storage_of(value).device
        return local_copy(self._builder, value, name, device, -1, "the caller gets memory of their own").name


def _shape_env(example: Any) -> Any:
    """Where the symbols of an example, a fake tensor or a symbolic integer, are known."""
    return getattr(getattr(example, "fake_mode", None) or getattr(example, "node", None), "shape_env", None)


def _device(node: Node) -> Device:
    if node.device is None:
        raise PassError(f"`{node.name}` has no device", hint="the pipeline needs `place-operators`")
    return node.device


def _flat(graph: PlacedGraph) -> Iterator[Node]:
    """The nodes of a graph and of the bodies of its control flow."""
    for node in graph.nodes:
        yield node
        for body in node.branches:
            yield from _flat(body)


def _readers(graph: PlacedGraph) -> dict[str, set[str]]:
    """Node -> who reads it; an empty name stands for the end of the method or body (outputs and updates)."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.operands:
            found.setdefault(name, set()).add(node.name)
        for body in node.branches:
            found.update(_readers(body))
    for output in graph.outputs:
        found.setdefault(output.node, set()).add("")
    written = _written_in_regions(graph)
    for target, source in graph.updates:
        if (target, source) not in written:
            found.setdefault(source, set()).add("")
    return found


def _written_in_regions(graph: PlacedGraph) -> frozenset[tuple[str, str]]:
    """Updates that the region of their source can write: nothing reads the old content afterwards."""
    nodes = {node.name: node for node in graph.nodes}
    last = {node.region: index for index, node in enumerate(graph.nodes)}
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.operands:
            readers.setdefault(name, []).append((index, node.region))

    def is_written(target: str, source: str) -> bool:
        region = nodes[source].region
        if region < 0 or nodes[target].device != nodes[source].device:
            return False
        return not any(at > last[region] and reader != region for at, reader in readers.get(target, ()))

    return frozenset(update for update in graph.updates if is_written(*update))

"""A method through `torch.export`, taken apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.program import Argument, SourceLocation, Symbol
from ..inductor.interfaces import pytree, storage_key
from ..source.hollow import untouched_zeros, weight_names
from ..source.model import MethodSource
from .call_names import output_names
from .control_flow import name_apart
from .dimensions import declared, parameter_names
from .module_casts import computed_attributes
from .scans import scans_to_loops
from .sizes import bound_of

if TYPE_CHECKING:
    from .contents import Contents


@dataclass
class ExportedMethod:
    """One method after export. ``graph`` is functional; its placeholders are ``contents`` and inputs."""

    name: str
    graph: torch.fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    contents: dict[str, str]
    """Placeholder node -> name of the constant or state it stands for."""
    tensors: dict[str, torch.Tensor]
    """Constant or state name -> its tensor, for the bytes."""
    state: frozenset[str]
    """Names in ``tensors`` that the method (or another one of the model) changes."""
    updates: tuple[tuple[str, str], ...]
    """(placeholder of a state or input, node with its new content)."""
    symbols: tuple[Symbol, ...]
    input_tree: str = ""
    output_tree: str = ""
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Parameters and persistent buffers in ``tensors``: the names that a saved model has them under."""
    notes: tuple[str, ...] = ()
    """What a person should know of what passes did."""
    counts: tuple[CountSpec, ...] = ()
    """Sizes that depend on data; their nodes are results of the graph, behind those of the user."""

    def add_constant(self, contents: Contents, name: str, value: torch.Tensor) -> torch.fx.Node:
        """A placeholder for a constant that was computed at export."""
        graph = self.graph.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(f"c_{name.replace('.', '_')}")
        known: Any = next(n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
        with known.fake_mode:
            made.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        content = contents.name(self.name, name, value)
        self.contents[made.name] = content
        self.tensors[content] = contents.tensors[content]
        contents.readers[content] = contents.readers.get(content, 0) + 1
        return made

    def drop_unused(self) -> None:
        """Forget contents that nothing reads any more: they need not be in the artifact."""
        kept = {t for t, _ in self.updates} | {o.node for o in self.outputs} | {c.node for c in self.counts}
        for node in list(self.graph.graph.nodes):
            if node.name in self.contents and not node.users and node.name not in kept:
                del self.contents[node.name]
                self.graph.graph.erase_node(node)

    def rename_ends(self, old: str, new: str) -> None:
        """Let outputs and updates that came from one node come from another."""
        self.updates = tuple((t, new if s == old else s) for t, s in self.updates)
        self.outputs = tuple(replace(o, node=new) if o.node == old else o for o in self.outputs)
        self.counts = tuple(replace(c, node=new) if c.node == old else c for c in self.counts)


@dataclass(frozen=True)
class InputSpec:
    """A user input: its public name, its placeholder, or the literal it was exported with."""

    name: str
    node: str
    literal: Argument = None
    is_tensor: bool = True


@dataclass(frozen=True)
class OutputSpec:
    """A user output: its public name, and the node it comes from or the literal it is."""

    name: str
    node: str
    literal: Argument = None
    count: str = ""
    """The `CountSpec` that says how much of dimension ``axis`` is real, where that depends on data."""
    axis: int = 0


@dataclass(frozen=True)
class CountSpec:
    """A size that depends on data, the node that computes it, and its declared bounds.

    Or, with ``is_difference``, how far two such sizes differ that must be equal.
    """

    name: str
    node: str
    lower: int
    upper: int
    origin: SourceLocation
    is_difference: bool = False


def cast_methods(methods: Sequence[MethodSource], dtype: str | None) -> list[MethodSource]:
    """Parameters and floating-point example inputs in ``dtype``; the user's own modules stay as they are.

    All modules are copied as one, so that what methods share (a whole module, or a layer or buffer inside
    two) is copied once and stays shared.
    """
    if dtype is None:
        return list(methods)
    wanted, copied = getattr(torch, dtype), dict[int, Any]()

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(wanted)
        return value

    def cast_method(method: MethodSource) -> MethodSource:
        if method.exported is not None:
            return method
        for tensor in (*method.module.parameters(), *method.module.buffers()):
            if tensor.is_floating_point() and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                copied.setdefault(id(tensor), _cast(tensor, wanted))  # wherever it is held: by a cache, too
        copied.update(computed_attributes(method.module))
        module: Any = copy.deepcopy(method.module, copied)
        module._apply(cast)  # not `to`, which would make complex tensors real
        args, kwargs = pytree.tree_map(cast, (method.args, method.kwargs))
        return replace(method, module=module, args=args, kwargs=kwargs)

    return [cast_method(method) for method in methods]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy; one of zeros, such as a cache that nothing is in, is never touched and takes no memory."""
    is_zero = not tensor.is_meta and tensor.is_contiguous() and not bool(tensor.any())
    made = untouched_zeros(tensor.shape, dtype) if is_zero else tensor.detach().to(dtype, copy=True)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def analyse(method: MethodSource, exported: torch.export.ExportedProgram) -> ExportedMethod:
    """Take an exported program apart: inputs, contents, state, symbols."""
    signature = exported.graph_signature
    graph = exported.graph_module
    scans_to_loops(graph)
    name_apart(graph)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    names = _input_names(method, exported)
    contents: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    inputs: list[InputSpec] = []
    saved, weights = weight_names(method, exported.state_dict), dict[str, tuple[str, ...]]()
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(_input_spec(node, spec, names[len(inputs)]))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            contents[node.name] = spec.target
            tensors[spec.target] = held = _content(exported, spec.target)
            if spec.kind == InputKind.PARAMETER or (spec.kind == InputKind.BUFFER and spec.persistent):
                others = saved.get(storage_key(held), ()) if held.numel() else ()
                weights[spec.target] = tuple(dict.fromkeys((spec.target, *others)))
        else:
            raise UnsupportedOperatorError(
                f"input `{node.name}` of method `{method.name}` is a {spec.kind.name.lower()}",
                why="tokens and script objects have no place in an artifact",
            )
    outputs, updates, state = _outputs(graph, exported, contents)
    return ExportedMethod(
        name=method.name,
        graph=graph,
        inputs=tuple(inputs),
        outputs=outputs,
        contents=contents,
        tensors=tensors,
        state=state,
        updates=updates,
        symbols=_symbols(method, exported, inputs, placeholders),
        input_tree=_tree(exported.call_spec.in_spec),
        output_tree=_tree(exported.call_spec.out_spec),
        weights=weights,
    )


def _tree(spec: Any) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError):
        return ""  # a type of the user's own: callers get the flat list


def _content(exported: torch.export.ExportedProgram, target: str) -> torch.Tensor:
    for table in (exported.state_dict, exported.constants):
        if target in table and isinstance(table[target], torch.Tensor):
            tensor: torch.Tensor = table[target]
            return tensor.detach()
    raise UnsupportedOperatorError(f"constant `{target}` is no tensor")


def _input_spec(node: torch.fx.Node, spec: Any, name: str) -> InputSpec:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return InputSpec(name, node.name)
    literal = getattr(spec.arg, "value", None)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise UnsupportedOperatorError(
            f"input `{name}` is a dynamic Python number", hint="pass it as a tensor of one element"
        )
    return InputSpec(name, node.name, literal=literal, is_tensor=False)


def _input_names(method: MethodSource, exported: torch.export.ExportedProgram) -> list[str]:
    """Public names of the flat inputs: parameter names of ``forward``, joined with paths inside them."""
    args_spec, kwargs_spec = _children(exported.call_spec.in_spec)
    positional = _children(args_spec)
    names: list[str] = []
    if method.exported is None:
        for name, child in zip(parameter_names(method, len(positional)), positional, strict=True):
            names += _leaf_names(child, name)
    for key, child in zip(kwargs_spec.context or (), _children(kwargs_spec), strict=True):
        names += _leaf_names(child, str(key))
    if method.exported is not None:
        names = [
            spec.arg.name
            for spec in exported.graph_signature.input_specs
            if spec.kind == InputKind.USER_INPUT
        ]
    return names


def _children(spec: Any) -> list[Any]:
    """A pytree spec's children: a method in newer versions of torch, an attribute in older ones."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def _leaf_names(spec: Any, base: str) -> list[str]:
    if spec.is_leaf():
        return [base]
    children = _children(spec)
    keys: Sequence[Any] = spec.context if spec.type is dict else range(len(children))
    names: list[str] = []
    for key, child in zip(keys, children, strict=True):
        names += _leaf_names(child, f"{base}.{key}")
    return names


def _outputs(
    graph: torch.fx.GraphModule, exported: torch.export.ExportedProgram, contents: Mapping[str, str]
) -> tuple[tuple[OutputSpec, ...], tuple[tuple[str, str], ...], frozenset[str]]:
    (output,) = [n for n in graph.graph.nodes if n.op == "output"]
    by_content = {content: node for node, content in contents.items()}
    outputs: list[OutputSpec] = []
    updates: list[tuple[str, str]] = []
    state: set[str] = set()
    specs = exported.graph_signature.output_specs
    users = sum(spec.kind == OutputKind.USER_OUTPUT for spec in specs)
    names = output_names(exported.call_spec.out_spec, users)
    for value, spec in zip(output.args[0], specs, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            state.add(spec.target)
            updates.append((by_content[spec.target], value.name))
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            raise UnsupportedOperatorError(
                f"the model writes into its input `{spec.target}`",
                hint="return the new value, or make it a registered buffer",
            )
        elif spec.kind == OutputKind.USER_OUTPUT:
            name = names[len(outputs)]
            if isinstance(value, torch.fx.Node):
                outputs.append(OutputSpec(name, value.name))
            else:
                outputs.append(OutputSpec(name, "", literal=value))
        else:
            raise UnsupportedOperatorError(
                f"output of kind {spec.kind.name.lower()} has no place in an artifact"
            )
    return tuple(outputs), tuple(updates), frozenset(state)


def _symbols(
    method: MethodSource,
    exported: torch.export.ExportedProgram,
    inputs: Sequence[InputSpec],
    placeholders: Sequence[torch.fx.Node],
) -> tuple[Symbol, ...]:
    """Every dynamic dimension with its declared bounds; a missing maximum is refused by name."""
    nodes = {n.name: n for n in placeholders}
    said = declared(method)
    dims = said.dims
    found: dict[str, Symbol] = {}
    derived: list[tuple[InputSpec, int, Any]] = []
    for spec in inputs:
        value = nodes[spec.node].meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        for dimension, extent in enumerate(value.shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol:
                name = str(extent.node.expr)
                dim = dims.get((spec.name, dimension))
                if name not in found:
                    found[name] = _symbol(exported, spec, dimension, extent)
                if dim is not None and not found[name].label:
                    found[name] = replace(found[name], label=dim.__name__)
            elif isinstance(extent, torch.SymInt):
                derived.append((spec, dimension, extent))
    for (
        spec,
        dimension,
        extent,
    ) in derived:  # no dimension is the symbol: the runtime solves for it
        (root,) = extent.node.expr.free_symbols
        if str(root) not in found:
            made, dim = (
                _symbol(exported, spec, dimension, extent, root),
                said.roots.get((spec.name, dimension)),
            )
            if dim is not None:
                made = replace(made, lower=max(int(dim.min), 1), label=dim.__name__)
            found[str(root)] = made
    return tuple(found.values())


def _symbol(
    exported: torch.export.ExportedProgram,
    spec: InputSpec,
    dimension: int,
    extent: torch.SymInt,
    root: Any = None,
) -> Symbol:
    """The symbol that a dimension is, or of which it is a multiple and the like."""
    lower, upper = bound_of(exported, extent, root)
    if upper is None:
        raise UnsupportedOperatorError(
            f"dimension {dimension} of input `{spec.name}` has no declared maximum",
            hint="give one: `torch.export.Dim('n', max=...)`",
        )
    return Symbol(str(extent.node.expr if root is None else root), lower, upper, spec.name, dimension)

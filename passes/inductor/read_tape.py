"""The lines of Inductor's wrapper, taken as objects, become a `Tape`; its text generator never runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._inductor.virtualized import V

from ...runtime.errors import UnsupportedOperatorError
from ...runtime.expr import Size
from ...runtime.program import SourceLocation
from ..exported.origins import origin_of
from ..exported.sizes import to_dtype, to_size
from ..lowered.library_calls import unsupported
from ..tape import Alias, Allocate, ExternCall, KernelCall, KernelSpec, Step, Tape, Window


class RecordingLines(list[Any]):
    """The wrapper's line list, which notes the graph nodes that each line came from."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: list[SourceLocation] = []

    def append(self, line: Any) -> None:
        super().append(line)
        self.origins.append(_current_origin())


def _current_origin() -> SourceLocation:
    scheduler = getattr(V.graph, "scheduler", None)
    current = getattr(scheduler, "current_node", None)
    nodes: list[Any] = []
    for snode in current.get_nodes() if current is not None else ():
        if snode.node is not None:
            nodes.extend(snode.node.get_origins())
    return origin_of(sorted(nodes, key=graph_position))


def graph_position(node: torch.fx.Node) -> int:
    """The place of a node among those of its graph."""
    graph: Any = node.graph
    if not hasattr(graph, "_devplan_positions"):
        graph._devplan_positions = {n.name: i for i, n in enumerate(graph.nodes)}
    return int(graph._devplan_positions.get(node.name, 0))


def read_tape(lowering: GraphLowering, recorded: RecordingLines) -> Tape:
    """What a lowering's wrapper would run, in order; UnsupportedOperatorError for what has no instruction."""
    return _Reader(lowering, recorded).tape()


class _Reader:
    """Turns the wrapper's line objects into a tape."""

    def __init__(self, lowering: GraphLowering, recorded: RecordingLines) -> None:
        self._lowering = lowering
        self._recorded = recorded
        self._kernels: dict[str, KernelSpec] = {}
        self._steps: list[Step] = []
        self._computed: dict[str, Any] = {}
        self._tuples: dict[str, list[tuple[tuple[int, ...], str]]] = {}

    def tape(self) -> Tape:
        """Read all lines."""
        origins = self._recorded.origins
        for line, origin in zip(list(self._recorded), origins, strict=True):
            self._read(line, origin)
        outputs = tuple(self._window(node) for node in self._lowering.graph_outputs)
        names = tuple(self._lowering.graph_input_names)
        return Tape(self._kernels, tuple(self._steps), names, outputs)

    def _read(self, line: Any, origin: SourceLocation) -> None:
        kind = type(line).__name__
        if kind in _IGNORED or (isinstance(line, str) and not line.strip()):
            return
        handler = getattr(self, f"_read_{kind}", None)
        if handler is None:
            text = line if isinstance(line, str) else kind
            raise UnsupportedOperatorError(
                f"`{origin.operator or text}` lowers to a construct that has no instruction",
                why=f"Inductor emitted `{text[:80]}` {origin}",
            )
        handler(line, origin)

    def _window(self, node: Any) -> Window:
        node = getattr(node, "data", node) if isinstance(node, ir.TensorBox) else node
        if isinstance(node, ir.StorageBox):
            node = node.data
        layout = node.get_layout()
        offset = layout.offset
        if isinstance(layout, ir.NonOwningLayout):  # a part of another buffer, which a ReinterpretLine names
            layout = layout.view.get_layout()
        return Window(
            node.get_name(),
            to_dtype(layout.dtype),
            tuple(_size(s) for s in layout.size),
            tuple(_size(s) for s in layout.stride),
            _size(offset),
        )

    def _read_AllocateLine(self, line: lines.AllocateLine, origin: SourceLocation) -> None:
        node = line.node
        if isinstance(node, WorkspaceArg):
            zero = node.zero_mode != WorkspaceZeroMode.UNINITIALIZED
            dtype = to_dtype(node.dtype)
            window = Window(node.get_name(), dtype, (_size(node.count),), (1,))
            nbytes = _size(node.count * dtype.itemsize)
            self._steps.append(Allocate(window, nbytes, fill_zero=zero, is_workspace=True))
            return
        if node.get_name() in self._lowering.removed_buffers:
            return
        window = self._window(node)
        elements = self._lowering.get_allocation_storage_size(node)
        self._steps.append(Allocate(window, _size(elements * window.dtype.itemsize)))

    def _read_ReuseLine(self, line: lines.ReuseLine, origin: SourceLocation) -> None:
        if line.node.get_name() in self._lowering.removed_buffers:
            return  # fused away, and so is what would reuse it
        self._steps.append(Alias(self._window(line.reused_as), line.node.get_name()))

    def _read_ReinterpretLine(self, line: lines.ReinterpretLine, origin: SourceLocation) -> None:
        owner: Any = line.layout
        layout = owner.view.get_layout()
        window = Window(
            line.reused_as.get_name(),
            to_dtype(layout.dtype),
            tuple(_size(s) for s in layout.size),
            tuple(_size(s) for s in layout.stride),
            _size(layout.offset),
        )
        self._steps.append(Alias(window, line.node.get_name()))

    def _read_SymbolicCallArgLine(self, line: lines.SymbolicCallArgLine, origin: SourceLocation) -> None:
        self._computed[str(line.arg.inner)] = line.arg.inner_expr

    def _read_KernelDefinitionLine(self, line: lines.KernelDefinitionLine, origin: SourceLocation) -> None:
        self._kernels[line.kernel_name] = kernel_spec(line.kernel_name, line.kernel_body)

    def _read_KernelCallLine(self, line: lines.KernelCallLine, origin: SourceLocation) -> None:
        arguments = tuple(self._argument(given) for given in line.call_args)
        self._steps.append(KernelCall(line.kernel_name, arguments, origin))

    def _argument(self, given: Any) -> str | Size | float:
        if isinstance(given, str):
            return given
        if isinstance(given, float | sympy.Float):
            return float(given)
        if isinstance(given, lines.SymbolicCallArg):
            given = given.inner_expr
        if isinstance(given, sympy.Expr):
            given = given.xreplace({sympy.Symbol(k): v for k, v in self._computed.items()})
            given = given.xreplace(
                {s: self._computed[str(s)] for s in given.free_symbols if str(s) in self._computed}
            )
        return _size(given)

    def _read_ExternKernelOutLine(self, line: lines.ExternKernelOutLine, origin: SourceLocation) -> None:
        node = line.node
        out = self._window(node.output_view if node.output_view else node)
        self._extern(node, (out,), origin)

    def _read_ExternKernelAllocLine(self, line: lines.ExternKernelAllocLine, origin: SourceLocation) -> None:
        node: Any = line.node
        made = [node] if isinstance(node.layout, ir.Layout) else list(node.outputs)
        if not made or not all(isinstance(one.layout, ir.Layout) for one in made):
            raise unsupported(_operator_name(node), origin)
        outs: list[Window] = []
        for one in made:
            out = self._window(one)
            elements = self._lowering.get_allocation_storage_size(one)
            self._steps.append(Allocate(out, _size(elements * out.dtype.itemsize)))
            outs.append(out)
        self._extern(node, tuple(outs), origin)

    def _read_MultiOutputLine(self, line: lines.MultiOutputLine, origin: SourceLocation) -> None:
        known = {step.window.buffer for step in self._steps if isinstance(step, Allocate)}
        assert line.result_name in known, line.result_name

    def _read_UnbackedSymbolDefsLine(
        self, line: lines.UnbackedSymbolDefsLine, origin: SourceLocation
    ) -> None:
        if line.unbacked_bindings:
            raise UnsupportedOperatorError(
                f"the size of a result of `{origin.operator}` depends on data", why=f"at {origin}"
            )

    def _extern(self, node: Any, outs: tuple[Window, ...], origin: SourceLocation) -> None:
        tensors = tuple(self._window(i) for i in node.inputs)
        if hasattr(node, "unflatten_args"):
            operands, keywords = node.unflatten_args(tensors, node.constant_args)
            keywords = {**(keywords or {}), **node.kwargs}
        else:
            operands, keywords = (*tensors, *node.constant_args), dict(node.kwargs)
        keywords = {k: self._window(v) if isinstance(v, ir.IRNode) else v for k, v in keywords.items()}
        self._steps.append(ExternCall(_operator_name(node), tuple(operands), keywords, outs, origin))

    def _read_str(self, line: str, origin: SourceLocation) -> None:
        if re.match(r"\s*(#|assert_|del |workspace_\d+\.zero_\(\))", line):
            return  # a workspace that must be zero is allocated as such
        raise UnsupportedOperatorError(
            f"`{origin.operator}` lowers to host code", why=f"Inductor emitted `{line[:80]}` {origin}"
        )


_IGNORED = {
    "CommentLine",
    "NullLine",
    "FreeLine",
    "FreeIfNotReusedLine",
    "EnterDeviceContextManagerLine",
    "ExitDeviceContextManagerLine",
    "EnterDeviceContextManagerWithStreamInfoLine",
    "ExitDeviceContextManagerWithStreamInfoLine",
    "AssertSizeStrideLine",
    "LineContext",
}


def _operator_name(node: Any) -> str:
    """``addmm``, ``convolution``, ``aten.topk.default``."""
    name = node.python_kernel_name or str(node.op_overload)
    return str(name).removeprefix("extern_kernels.").removeprefix("torch.ops.")


def kernel_spec(name: str, body: str) -> KernelSpec:
    """A generated kernel's definition as data. The configuration taken is Inductor's first."""
    source = body.split("'''", 1)[1].rsplit("'''", 1)[0]
    tuner = getattr(PyCodeCache.load(source), name)
    config, meta, inductor_meta = tuner.configs[0], tuner.triton_meta, tuner.inductor_meta
    constants: dict[str, Any] = {**meta.get("constants", {}), **config.kwargs}
    names: list[str] = list(tuner.fn.arg_names)
    signature: dict[str, str] = meta["signature"]
    runtime = [n for n in names if n not in constants and signature[n] != "constexpr"]
    grid = GridExpr.from_meta(inductor_meta, config)
    prefix = _grid_prefix(grid.prefix)
    divisible = [
        names[key[0]] for key, attrs in meta["configs"][0].items() if ["tt.divisibility", 16] in attrs
    ]
    mutated = [n for n in inductor_meta.get("mutated_arg_names", ()) if n in runtime]
    return KernelSpec(
        name=name,
        source=_function_source(source, name),
        parameters=tuple((n, signature[n]) for n in runtime),
        constants=tuple((n, constants[n]) for n in names if n in constants),
        divisible_by_16=tuple(n for n in divisible if n in runtime),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(
            _inline(str(grid.x_grid), prefix),
            _inline(str(grid.y_grid), prefix),
            _inline(str(grid.z_grid), prefix),
        ),
        call_names=(
            *(n for n in names if n not in config.kwargs),
            *inductor_meta.get("extra_launcher_args", ()),
        ),
        mutated=tuple(mutated),
    )


def _grid_prefix(statements: Sequence[str]) -> dict[str, str]:
    """The helper assignments that a grid expression builds on, by name."""
    return {k.strip(): v.strip() for k, v in (s.split("=", 1) for s in statements)}


def _inline(expression: str, definitions: dict[str, str]) -> str:
    """Replace helper names by their definitions until none is left."""
    for _ in range(len(definitions) + 1):
        for key, value in definitions.items():
            expression = re.sub(rf"\b{re.escape(key)}\b", f"({value})", expression)
    return expression


def _function_source(source: str, name: str) -> str:
    """The kernel's function with its ``@triton.jit`` and nothing else of the generated module."""
    tree = ast.parse(source)
    parts: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if "jit" in ast.unparse(d)]
            parts.append(ast.unparse(node))
    assert any(f"def {name}(" in part for part in parts), name
    return "\n\n\n".join(parts) + "\n"


def _size(value: Any) -> Size:
    """A size in the symbols that the method has: equal dimensions are one of them."""
    return to_size(V.graph.sizevars.shape_env.replace(value) if isinstance(value, sympy.Expr) else value)

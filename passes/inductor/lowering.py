"""The one module that touches PyTorch's private interfaces: a graph goes in, a `Tape` comes out.

Inductor lowers for a CUDA device that is only described (`Target`): every question that it, or Triton's
code generation, would put to a driver is answered from data while `described_target` is active. Tried with
torch 2.11, 2.13 and 2.14. The wrapper's lines are taken as objects; its text generator never runs.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import sympy
import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.misc_patterns as misc_patterns
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch.utils._triton
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import compile_fx, ir
from torch._inductor import lowering as inductor_lowering
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode, init_backend_registration
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ...runtime.errors import DevplanError, UnsupportedOperatorError
from ...runtime.expr import Size
from ...runtime.program import SourceLocation
from ..exported.origins import origin_of
from ..exported.sizes import to_dtype, to_size
from ..lowered.decompositions import on_cuda
from ..lowered.library_calls import has_library_call, unsupported
from ..lowered.region_graph import NamingInterpreter, cannot_lower
from ..tape import Alias, Allocate, ExternCall, KernelCall, KernelSpec, Step, Tape, Window
from ..targets import Target
from . import combine_kernels, masked_loads
from .device_guard import cuda_guard
from .overloads import is_overload

_DEVICE = torch.device("cuda", 0)

_OPTIONS: dict[str, Any] = {
    "fx_wrapper": True,
    "compile_threads": 1,
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "allow_buffer_reuse": False,
    "triton.autotune_at_compile_time": False,
    "triton.cooperative_reductions": False,
    "triton.mix_order_reduction": False,
    "triton.unique_kernel_names": True,
    "assert_indirect_indexing": False,
    "freezing": False,
    "comment_origin": False,
    "combo_kernels": combine_kernels.IS_POSSIBLE,
    "combo_kernels_pointwise_only": True,
    "combo_kernels_autotune": 0,
    "fallback_random": False,
}


# --- answers about a device that is not there -------------------------------------------------------


def _properties(target: Target) -> Any:
    """The device properties that Inductor and Triton ask for."""

    class Properties:
        name, gcnArchName = target.part, ""
        major, minor = divmod(target.capability, 10)
        multi_processor_count = target.multiprocessors
        total_memory = target.memory_nbytes
        regs_per_multiprocessor = 65536
        max_threads_per_multi_processor = target.threads_per_multiprocessor
        max_threads_per_block = 1024
        warp_size = 32
        shared_memory_per_block = 49152
        shared_memory_per_block_optin = target.shared_per_block
        shared_memory_per_multiprocessor = target.shared_per_multiprocessor
        L2_cache_size = target.l2_nbytes

    return Properties


def _interface(target: Target) -> type:
    """Dynamo's device interface for the described device."""
    properties = _properties(target)

    class Interface(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            current_device = staticmethod(lambda: 0)
            set_device = staticmethod(lambda device: None)
            get_device_properties = staticmethod(lambda device=None: properties)

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: target.capability)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_raw_stream = staticmethod(lambda device=None: 0)
        synchronize = staticmethod(lambda device=None: None)
        is_bf16_supported = staticmethod(lambda including_emulation=False: target.capability >= 80)

    return Interface


class _TargetDriver:
    """The part of a Triton driver that code generation touches."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("cuda", target.capability, 32)
        self._capability = divmod(target.capability, 10)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, *args: Any) -> tuple[int, int]:
        return self._capability


def _convolution_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The layout that cuDNN gives a convolution's result; a CPU build of torch would answer for the CPU."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(weight.dim())
    if wanted is None:
        return torch.contiguous_format
    channels_last = any(not t.is_contiguous() and t.is_contiguous(memory_format=wanted) for t in (x, weight))
    return wanted if channels_last else torch.contiguous_format


@contextlib.contextmanager
def described_target(target: Target) -> Iterator[None]:
    """While active, PyTorch believes in one CUDA device with the target's properties.

    `torch.cuda.device_count` is left alone: Inductor's pattern set-up would then allocate on a GPU. A
    few call sites bypass the device interface, hence the patches of `torch.cuda` itself.
    """
    properties = _properties(target)
    device_interface.get_registered_device_interfaces()  # registers the real ones, which would win later
    table = device_interface.device_interfaces
    saved, was_active = dict(table), getattr(driver, "_active", None)
    interface = _interface(target)
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, interface)
    capability = divmod(target.capability, 10)
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_conv_determine_backend_memory_format", _convolution_format),
        (misc_patterns, "_misc_patterns_init", lambda device=None: None),  # traces real device tensors
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        # the hardware adds 64-bit integers, too
        (
            inductor_lowering,
            "needs_fallback_due_to_atomic_add_limitations",
            lambda dtype: dtype == torch.bool,
        ),
        (combine_kernels.OWNER, combine_kernels.ATTRIBUTE, combine_kernels.small_and_independent),
        (masked_loads.OWNER, masked_loads.ATTRIBUTE, masked_loads.MASKED),
        (masked_loads.KERNEL, masked_loads.LOAD, masked_loads.load_inside),
    ]
    known = {key: value for key, value in _OPTIONS.items() if _has_option(key)}
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in patches:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(inductor_config.patch(known))
            stack.enter_context(cuda_guard())
            driver.set_active(_TargetDriver(target))  # pyright: ignore
            init_backend_registration()
            _forget_triton()  # tracing a condition or loop before has asked without a GPU
            yield
    finally:
        _forget_triton()
        table.clear()
        table.update(saved)
        driver._active = was_active


def _forget_triton() -> None:
    """Clear what torch remembers of whether Triton works here."""
    for value in vars(torch.utils._triton).values():
        if callable(value) and hasattr(value, "cache_clear"):
            value.cache_clear()


def _has_option(key: str) -> bool:
    owner: Any = inductor_config
    for part in key.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


# --- tracing -----------------------------------------------------------------------------------------


def trace_on_target(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    shape_env: Any,
    check: Callable[[str], None] = lambda where: None,
) -> tuple[torch.fx.GraphModule, FakeTensorMode]:
    """Trace a graph again on fake CUDA tensors, decomposed the way Inductor likes it.

    ``check`` is called after each operator, with what it is and where.

    ``inputs`` are fake or real example values of the placeholders (symbolic integers stay themselves).
    Factories in the graph must already name the CUDA device.
    """
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    fakes = [on_target(mode, value) for value in inputs]
    # Composite operators take symbolic sizes only where Python takes them apart.
    dispatch = enable_python_dispatcher() if any(map(_is_dynamic, fakes)) else contextlib.nullcontext()
    with mode, torch.no_grad(), preserve_node_meta(), dispatch:
        traced = make_fx(
            lambda *args: NamingInterpreter(graph, check).run(*args),
            decomposition_table=decomposition_table(),
            tracing_mode="real",
        )(*fakes)
    # Traced layer by layer, a model computes its masks and positions once for each layer.
    return torch.fx.GraphModule(traced, fx_graph_cse(traced.graph)), mode


def _is_dynamic(value: Any) -> bool:
    extents = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(extent, torch.SymInt) for extent in extents)


def on_target(mode: FakeTensorMode, value: Any, strides: Sequence[int] | None = None) -> Any:
    """A fake CUDA tensor like the given one, with other strides if they are given."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride() if strides is None else strides, dtype=value.dtype, device=_DEVICE
        )


def channels_last_weights(traced: torch.fx.GraphModule) -> list[str]:
    """Placeholders that hold convolution weights which Inductor will want channels-last."""
    if not GraphLowering.decide_layout_opt(traced, is_inference=True):
        return []
    convolutions = [n for n in traced.graph.nodes if n.target is torch.ops.aten.convolution.default]
    weights = [
        n.args[1] for n in convolutions if n.args[1].op == "placeholder" and n.args[1].meta["val"].dim() == 4
    ]
    return [w.name for w in weights if all(user in convolutions for user in w.users)]


def _size(value: Any) -> Size:
    """A size in the symbols that the method has: equal dimensions are one of them."""
    return to_size(V.graph.sizevars.shape_env.replace(value) if isinstance(value, sympy.Expr) else value)


class _RecordingLines(list[Any]):
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
    return origin_of(sorted(nodes, key=_graph_position))


def _graph_position(node: torch.fx.Node) -> int:
    graph: Any = node.graph
    if not hasattr(graph, "_devplan_positions"):
        graph._devplan_positions = {n.name: i for i, n in enumerate(graph.nodes)}
    return int(graph._devplan_positions.get(node.name, 0))


class _Lowering(GraphLowering):
    """Inductor's lowering; what several operators of ours read, such as a mask, is computed once."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Lower one node of the graph."""
        made = super().run_node(n)
        own = [user for user in n.users if str(user.target).startswith("devplan.")]
        if isinstance(made, ir.TensorBox) and (len(own) > 1 or _is_for_all_layers(n, made)):
            made.realize()
        return made


_MANY_USERS = 8
"""More than one layer has of a table of angles."""
_SMALL_NUMEL = 1 << 20


def _is_for_all_layers(node: torch.fx.Node, made: ir.TensorBox) -> bool:
    """Whether a small table, looked up or computed with effort, is read all over the graph.

    So are a rotary embedding's angles. Fused into every layer, each would wait for the position before it can
    read the table, or compute sines and cosines anew.
    """
    if len(node.users) <= _MANY_USERS:
        return False
    data: Any = made
    while isinstance(data, ir.MutableBox | ir.BaseView):
        data = data.data
    if not isinstance(data, ir.Pointwise):
        return False
    numel = sympy.sympify(sympy.prod(data.ranges))
    if not numel.is_Integer or int(numel) > _SMALL_NUMEL:
        return False
    return bool({"indirect_indexing", "sin", "cos"} & set(data.inner_fn_opcount().used_ops))


def lower_graph(traced: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> Tape:
    """Lower a traced graph through Inductor; must run inside `described_target`.

    Raises UnsupportedOperatorError for what Inductor itself cannot lower.
    """
    with mode, torch.no_grad(), V.set_fake_mode(mode), DebugContext():
        compile_fx._recursive_post_grad_passes(traced, is_inference=True)
        lowering = _Lowering(
            traced,
            shape_env=mode.shape_env,
            aot_mode=True,
            fx_wrapper=True,
            cpp_wrapper=False,
            is_inference=True,
        )
        with V.set_graph_handler(lowering), _refusing(lowering):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            recorded = _RecordingLines()
            lowering.wrapper_code.lines = recorded
            lowering._update_scheduler()
            wrapper: Any = lowering.wrapper_code
            wrapper.push_codegened_graph(lowering)
            lowering.scheduler.codegen()
            return _Reader(lowering, recorded).tape()


@contextlib.contextmanager
def _refusing(lowering: GraphLowering) -> Iterator[None]:
    """Whatever Inductor raises becomes a refusal that names the node it was at."""
    try:
        yield
    except DevplanError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        node = getattr(lowering, "current_node", None)
        scheduled = getattr(getattr(lowering, "scheduler", None), "current_node", None)
        if scheduled is not None:
            origins = [n for s in scheduled.get_nodes() if s.node is not None for n in s.node.get_origins()]
            node = max(origins, key=_graph_position, default=node)
        raise cannot_lower(node, cause) from error


# --- reading the wrapper's lines ---------------------------------------------------------------------


class _Reader:
    """Turns the wrapper's line objects into a tape."""

    def __init__(self, lowering: GraphLowering, recorded: _RecordingLines) -> None:
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


def has_cuda_lowering(operator: Any) -> bool:
    """Whether Inductor generates code for an operator (itself or through a decomposition)."""
    return _is_generated(operator) or operator in decomposition_table()


def _is_generated(operator: Any) -> bool:
    lowering = inductor_lowering.lowerings.get(operator)
    return lowering is not None and not getattr(lowering, "_is_fallback_handler", False)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[Any, Any]:
    """Inductor's decompositions, and PyTorch's own for what Inductor would hand to a CUDA library."""
    rest = {
        operator: rule
        for operator, rule in torch._decomp.decomposition_table.items()
        if is_overload(operator) and not _is_generated(operator) and not has_library_call(str(operator))
    }
    return {**rest, **select_decomp_table(), **on_cuda()}

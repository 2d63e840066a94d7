"""A graph goes in, a `Tape` comes out: Inductor's lowering, for a GPU that is only described.

All of this runs while `described_gpu.described_target` is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import compile_fx, ir
from torch._inductor import lowering as inductor_lowering
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from ...runtime.errors import DevplanError
from ..lowered.decompositions import on_cuda
from ..lowered.library_calls import has_library_call
from ..lowered.region_graph import NamingInterpreter, cannot_lower
from ..tape import Tape
from .described_gpu import DEVICE
from .overloads import is_overload
from .read_tape import RecordingLines, graph_position, read_tape


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
            value.shape, value.stride() if strides is None else strides, dtype=value.dtype, device=DEVICE
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
        view_to_reshape(traced)  # type: ignore[no-untyped-call]  # a pass may leave another layout than the view was traced with
        with _refusing(None):
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
            recorded = RecordingLines()
            lowering.wrapper_code.lines = recorded
            lowering._update_scheduler()
            wrapper: Any = lowering.wrapper_code
            wrapper.push_codegened_graph(lowering)
            lowering.scheduler.codegen()
            return read_tape(lowering, recorded)


@contextlib.contextmanager
def _refusing(lowering: GraphLowering | None) -> Iterator[None]:
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
            node = max(origins, key=graph_position, default=node)
        raise cannot_lower(node, cause) from error


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

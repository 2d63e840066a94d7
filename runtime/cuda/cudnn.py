"""Convolutions and attention through cuDNN's graphs, as `nvidia-cudnn-frontend` gives them to Python.

One graph per bound call (`cudnn_graphs.py` describes it), built for the engine that cuDNN thinks fastest.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..errors import DeviceError, ExecutionError
from ..program import LibraryCall
from . import warm
from .cudnn_graphs import Described, attention, convolution
from .nvidia_library import WorkspaceUse

if TYPE_CHECKING:
    from .backend import CudaBackend

_HINT = 'install it: `pip install "devplan[cuda]"`, or export with `--no-library-calls`'


class _NoTorch:
    """A finder of modules that refuses torch to some threads: what others import is their own business."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Nothing; ModuleNotFoundError for torch in such a thread."""
        if name == "torch" and threading.get_ident() in self.threads:
            raise ModuleNotFoundError("torch is not imported for cuDNN's sake", name=name)


_no_torch = _NoTorch()


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """Keep cuDNN's Python package from importing torch, which it does wherever torch is installed."""
    thread = threading.get_ident()
    if "torch" in sys.modules or thread in _no_torch.threads:
        yield
        return
    if _no_torch not in sys.meta_path:
        sys.meta_path.insert(0, _no_torch)
    _no_torch.threads.add(thread)
    try:
        yield
    finally:
        _no_torch.threads.discard(thread)


_MOST_ALGORITHMS = 10
"""Engines that tuning tries per call: some are compiled when they are built, which takes half a second."""


@contextlib.contextmanager
def _told() -> Generator[None]:
    """DeviceError where cuDNN cannot be used."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()
        raise DeviceError(
            "cuDNN is not usable", why=why[0] if why else type(error).__name__, hint=_HINT
        ) from error


def load_cudnn() -> tuple[Any, int]:
    """cuDNN's Python package and the library's version; DeviceError where it is not installed."""
    warm.wait_for_library("cudnn")
    with _told(), _without_torch():
        cudnn: Any = importlib.import_module("cudnn")
        return cudnn, int(cudnn.backend_version())


class Cudnn:
    """cuDNN on one GPU. Binds `convolution` and `attention` library calls."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._cudnn, self.version = load_cudnn()
        with _told(), _without_torch():
            self._handle: Any = self._cudnn.create_handle()
        self._stream = -1

    def close(self) -> None:
        """Release the handle. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._cudnn.destroy_handle(handle)

    def bind(self, call: LibraryCall, operands: Mapping[str, Operand], algorithm: int | None = None) -> Step:
        """A step that computes a `convolution` or `attention` call.

        ``algorithm`` is one of `algorithms` by index; None takes the tuned one, or the heuristics' first
        where there is none or it cannot be built.

        Raises:
            DeviceError: cuDNN has no engine for it, within the workspace that was planned.
        """
        if operands[call.writes[0]].numel == 0:
            return _nothing
        if algorithm is None and self._backend.tuning:
            tuned = self._backend.tuning.get(self.key(call, operands))
            if tuned is not None:
                with contextlib.suppress(DeviceError, ExecutionError):  # a hint must not break what works
                    return self._made(call, operands, tuned)
        return self._made(call, operands, algorithm)

    def _made(self, call: LibraryCall, operands: Mapping[str, Operand], algorithm: int | None) -> Step:
        """The step of one algorithm, or of the heuristics' choice."""
        workspace = operands.get(call.workspace)
        with _without_torch():
            described = self._describe(call, operands)
            offered = workspace.span_nbytes if workspace else 0
            needed = self._build(described, offered, algorithm)
        self._backend.workspaces[self.key(call, operands)] = WorkspaceUse(call.function, offered, needed)
        return self._step(described, workspace.address if workspace else 0, algorithm)

    def key(self, call: LibraryCall, operands: Mapping[str, Operand]) -> str:
        """What `CudaBackend.tuning` knows a call by; empty for one without elements."""
        if any(operands[name].numel == 0 for name in (*call.reads, call.writes[0])):
            return ""
        parts = [call.function]
        for name in (*call.reads, *call.writes):
            operand = operands[name]
            if name == call.workspace:
                parts.append(f"workspace {operand.span_nbytes}")
            else:
                parts.append(f"{operand.dtype}{list(operand.shape)} by {list(operand.strides)}")
        return " ".join([*parts, *(f"{name}={value}" for name, value in sorted(call.attributes))])

    def algorithms(self, call: LibraryCall, operands: Mapping[str, Operand]) -> int:
        """How many engines to try, best first by cuDNN's heuristics: the indices that `bind` takes."""
        with _without_torch():
            described = self._describe(call, operands)
            self._plan(described, 1 << 62)
        return min(int(described.graph.get_execution_plan_count()), _MOST_ALGORITHMS)

    def _describe(self, call: LibraryCall, operands: Mapping[str, Operand]) -> Described:
        describe = attention if call.function == "attention" else convolution
        return describe(self._cudnn, self._handle, call, operands)

    def _step(self, described: Described, workspace: int, algorithm: int | None) -> Step:
        backend, graph, pointers = self._backend, described.graph, described.pointers

        def step() -> None:
            backend.enter()
            self._use_stream(backend.stream)
            # Kernels that cuDNN compiles are launched to begin while the one before ends, and some then read
            # a residual that it has not written yet (on an H200, in graphs: wrong results, without an error).
            backend.separate()
            try:
                if algorithm is None:
                    graph.execute(pointers, workspace, handle=self._handle)
                else:
                    graph.execute_plan_at_index(pointers, workspace, algorithm, self._handle)
            except RuntimeError as error:
                raise ExecutionError(f"a {described.title} failed", why=str(error)) from error

        return step

    def _use_stream(self, stream: int) -> None:
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream

    def _plan(self, described: Described, workspace: int) -> None:
        """List cuDNN's engines for a graph, but for those that need more than ``workspace`` bytes."""
        cudnn, graph = self._cudnn, described.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        if described.exact_float32:
            notes = cudnn.numerical_note
            graph.deselect_numeric_notes([notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS])
        graph.deselect_workspace_greater_than(workspace)

    def _build(self, described: Described, workspace: int, algorithm: int | None) -> int:
        """Make the engine ready that cuDNN thinks best, or the one asked for; gives the bytes it needs."""
        cudnn, graph = self._cudnn, described.graph
        try:
            self._plan(described, workspace)
            graph.check_support()
            if algorithm is None:
                graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
                needed = int(graph.get_workspace_size())
            else:
                graph.build_plan_at_index(algorithm)
                needed = int(graph.get_workspace_size_plan_at_index(algorithm))
        except (RuntimeError, ValueError, IndexError, cudnn.cudnnGraphNotSupportedError) as error:
            lines = str(error).strip().splitlines()
            raise DeviceError(
                f"cuDNN {self.version} has no engine for a {described.title}",
                why=f"within {workspace} bytes of workspace: {lines[0] if lines else type(error).__name__}",
                hint="export again with `--no-library-calls`",
            ) from error
        if needed > workspace:
            raise ExecutionError(
                f"the planned workspace is too small for a {described.title}",
                why=f"cuDNN needs {needed} bytes, {workspace} are planned",
            )
        return needed


def _nothing() -> None:
    """A call without elements."""

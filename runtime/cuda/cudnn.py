"""Convolutions through cuDNN's graph interface, as `nvidia-cudnn-frontend` gives it to Python.

One graph per bound call: convolution, then bias and ReLU fused where cuDNN has an engine for it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import DeviceError, ExecutionError
from ..program import LibraryCall

if TYPE_CHECKING:
    from .backend import CudaBackend

_HINT = 'install it: `pip install "devplan[cuda]"`, or export with `--no-library-calls`'
_TYPES = {DType.FLOAT16: "HALF", DType.BFLOAT16: "BFLOAT16", DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """Keep cuDNN's Python package from importing torch, which it does wherever torch is installed."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


class Cudnn:
    """cuDNN on one GPU. Binds `convolution` library calls."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        try:
            with _without_torch():
                self._cudnn: Any = importlib.import_module("cudnn")
                self.version = int(self._cudnn.backend_version())
                self._handle: Any = self._cudnn.create_handle()
        except (ImportError, OSError, RuntimeError) as error:
            why = str(error).strip().splitlines()
            raise DeviceError(
                "cuDNN is not usable", why=why[0] if why else type(error).__name__, hint=_HINT
            ) from error
        self._stream = -1

    def close(self) -> None:
        """Release the handle. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._cudnn.destroy_handle(handle)

    def bind(self, call: LibraryCall, operands: Mapping[str, Operand]) -> Step:
        """A step that computes a `convolution` call.

        Raises:
            DeviceError: cuDNN has no engine for it.
            ExecutionError: the planned workspace is too small; the message names the bytes.
        """
        names = list(call.reads)
        x, weight = operands[names[0]], operands[names[1]]
        bias = operands[names[2]] if call.attribute("has_bias", False) else None
        out = operands[call.writes[0]]
        self._verify(call, x, weight, out)
        if out.numel == 0:
            return _nothing
        workspace = operands.get(call.workspace)
        has = workspace.span_nbytes if workspace else 0
        with _without_torch():
            graph, pointers = self._graph(call, x, weight, bias, out)
            self._build(graph, call, x, weight, has)
            needed = int(graph.get_workspace_size())
        if needed > has:
            raise ExecutionError(
                "the planned workspace is too small for a convolution",
                why=f"cuDNN needs {needed} bytes, {has} are planned",
            )
        return self._step(graph, pointers, workspace.address if workspace else 0)

    def _step(self, graph: Any, pointers: Mapping[Any, int], workspace: int) -> Step:
        backend = self._backend

        def step() -> None:
            backend.enter()
            self._use_stream(backend.stream)
            try:
                graph.execute(pointers, workspace, handle=self._handle)
            except RuntimeError as error:
                raise ExecutionError("a convolution failed", why=str(error)) from error

        return step

    def _use_stream(self, stream: int) -> None:
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream

    @staticmethod
    def _verify(call: LibraryCall, x: Operand, weight: Operand, out: Operand) -> None:
        if x.dtype not in _TYPES or len({x.dtype, weight.dtype, out.dtype}) != 1:
            raise DeviceError(
                "cuDNN convolves one floating type", why=f"got {x.dtype}, {weight.dtype}, {out.dtype}"
            )
        if call.attribute("activation", "none") not in ("none", "relu"):
            raise DeviceError(f"a convolution has no activation `{call.attribute('activation')}`")

    def _graph(
        self, call: LibraryCall, x: Operand, weight: Operand, bias: Operand | None, out: Operand
    ) -> tuple[Any, dict[Any, int]]:
        cudnn = self._cudnn
        # A spatial dimension is added to one-dimensional convolutions: cuDNN starts at two.
        pad = len(x.shape) == 3
        io_type = getattr(cudnn.data_type, _TYPES[x.dtype])
        compute = cudnn.data_type.DOUBLE if x.dtype is DType.FLOAT64 else cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=io_type,
            intermediate_data_type=compute,
            compute_data_type=compute,
            handle=self._handle,
        )
        pointers: dict[Any, int] = {}

        def tensor(operand: Operand, name: str) -> Any:
            shape, strides = _widened(operand, pad)
            made = graph.tensor(name=name, dim=shape, stride=strides, data_type=io_type)
            pointers[made] = operand.address
            return made

        image, kernel = tensor(x, "x"), tensor(weight, "weight")
        result = self._convolve(graph, call, image, kernel, pad, _widened(out, pad)[0])
        if bias is not None:
            ones = (1,) * (len(x.shape) - 2)
            row = Operand(
                bias.address, bias.dtype, (1, bias.numel, *ones), (bias.numel, 1, *ones), bias.device
            )
            result = graph.bias(input=result, bias=tensor(row, "bias"))
        if call.attribute("activation", "none") == "relu":
            result = graph.relu(input=result)
        shape, strides = _widened(out, pad)
        result.set_output(True).set_data_type(io_type).set_dim(shape).set_stride(strides)
        pointers[result] = out.address
        return graph, pointers

    def _convolve(
        self, graph: Any, call: LibraryCall, image: Any, kernel: Any, pad: bool, out_shape: list[int]
    ) -> Any:
        sizes = {
            "padding": _numbers(call, "padding", pad, 0),
            "stride": _numbers(call, "stride", pad, 1),
            "dilation": _numbers(call, "dilation", pad, 1),
        }
        if not call.attribute("transposed", False):
            return graph.conv_fprop(image=image, weight=kernel, **sizes)
        # A transposed convolution is a plain one's gradient by its input; the shape settles output_padding.
        result = graph.conv_dgrad(loss=image, filter=kernel, **sizes)
        result.set_dim(out_shape)
        return result

    def _build(self, graph: Any, call: LibraryCall, x: Operand, weight: Operand, workspace: int) -> None:
        cudnn = self._cudnn
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            if x.dtype is DType.FLOAT32 and not call.attribute("allow_tf32", False):
                graph.deselect_numeric_notes(
                    [cudnn.numerical_note.TENSOR_CORE, cudnn.numerical_note.DOWN_CONVERT_INPUTS]
                )
            graph.deselect_workspace_greater_than(workspace)
            graph.check_support()
            graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        except (RuntimeError, ValueError, cudnn.cudnnGraphNotSupportedError) as error:
            lines = str(error).strip().splitlines()
            shapes = f"x {list(x.shape)} by {list(x.strides)}, weight {list(weight.shape)}"
            raise DeviceError(
                f"cuDNN {self.version} has no engine for a {x.dtype} convolution",
                why=f"{shapes}: {lines[0] if lines else type(error).__name__}",
                hint="export again with `--no-library-calls`",
            ) from error


def _widened(operand: Operand, pad: bool) -> tuple[list[int], list[int]]:
    """Shape and strides, with a spatial dimension of 1 put in where ``pad`` asks for it."""
    shape, strides = list(operand.shape), list(operand.strides)
    if pad:
        shape.insert(2, 1)
        strides.insert(2, shape[3] * strides[2])
    return shape, strides


def _numbers(call: LibraryCall, name: str, pad: bool, neutral: int) -> list[int]:
    value = call.attribute(name)
    if not isinstance(value, tuple) or not all(isinstance(number, int) for number in value):
        raise ExecutionError(f"a convolution's `{name}` must be a tuple of integers, not {value!r}")
    numbers = [number for number in value if isinstance(number, int)]
    return [neutral, *numbers] if pad else numbers


def _nothing() -> None:
    """A convolution without elements."""

"""Matrix products through cuBLASLt, by ctypes: NVIDIA ships no Python binding of it with cuda-python."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import DeviceError, ExecutionError
from ..program import LibraryCall
from . import cublaslt_api as api
from . import nvidia_library
from .copies import bind_fill
from .matrix import Matrix, Product, product, verify_shapes

if TYPE_CHECKING:
    from .backend import CudaBackend

_MAX_ALGORITHMS = 64


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way of computing one product; ``workspace_nbytes`` is what it needs."""

    data: Any
    workspace_nbytes: int


def load_cublaslt() -> tuple[ctypes.CDLL, str, int]:
    """The library, its path and its version; DeviceError where it is not installed."""
    library, path = nvidia_library.load("cublasLt", "cuBLASLt")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library, path, int(library.cublasLtGetVersion())


class CublasLt:
    """cuBLASLt on one GPU. Binds `matmul` library calls."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._library, self.path, self.version = load_cublaslt()
        self._handle = ctypes.c_void_p()
        self._descriptors: list[tuple[str, ctypes.c_void_p]] = []
        self._found: dict[str, list[Algorithm]] = {}
        self._call("Create", ctypes.byref(self._handle))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            raise api.failure(function, status)

    def close(self) -> None:
        """Release descriptors and the handle. Idempotent."""
        for kind, descriptor in self._descriptors:
            getattr(self._library, f"cublasLt{kind}Destroy")(descriptor)
        self._descriptors.clear()
        if self._handle:
            self._library.cublasLtDestroy(self._handle)
            self._handle = ctypes.c_void_p()

    def bind(self, call: LibraryCall, operands: Mapping[str, Operand], algorithm: int | None = None) -> Step:
        """A step that computes a `matmul` call.

        ``algorithm`` is one of `algorithms` by index; None takes the tuned one, or the heuristics' first.

        Raises:
            DeviceError: an element type or epilogue that cuBLASLt does not have.
            ExecutionError: operands do not fit, or no algorithm serves them.
        """
        a, b, bias, c, out = _roles(call, operands)
        verify_shapes(a, b, out, bias, c)
        if out.numel == 0:
            return _nothing
        if a.numel == 0 and bias is None and c is None:
            return bind_fill(self._backend, out, 0)
        return self._bind(call, product(a, b, out, bias, c), operands.get(call.workspace), algorithm)

    def key(self, call: LibraryCall, operands: Mapping[str, Operand]) -> str:
        """What `CudaBackend.tuning` knows a call by; empty for one without elements."""
        a, b, bias, c, out = _roles(call, operands)
        if 0 in (a.numel, b.numel, out.numel):
            return ""
        workspace = operands.get(call.workspace)
        return matmul_key(call, product(a, b, out, bias, c), workspace.span_nbytes if workspace else 0)

    def _bind(
        self, call: LibraryCall, described: Product, workspace: Operand | None, algorithm: int | None
    ) -> Step:
        operation = self._operation(call, described)
        d = self._layout(described.d, described.batch)
        c = self._layout(described.c, described.batch) if described.c else d
        layouts = (
            self._layout(described.first, described.batch),
            self._layout(described.second, described.batch),
            c,
            d,
        )
        limit = workspace.span_nbytes if workspace else 0
        key = matmul_key(call, described, limit)
        chosen = self._choose(key, operation, layouts, described, limit, algorithm)
        use = nvidia_library.WorkspaceUse(call.function, limit, chosen.workspace_nbytes)
        self._backend.workspaces[key] = use
        scalar = ctypes.c_double if described.d.operand.dtype is DType.FLOAT64 else ctypes.c_float
        alpha = scalar(_number(call, "alpha", 1.0))
        beta = scalar(_number(call, "beta", 1.0) if described.c else 0.0)
        first, second = (ctypes.c_void_p(m.operand.address) for m in (described.first, described.second))
        d_at = ctypes.c_void_p(described.d.operand.address)
        c_at = ctypes.c_void_p(described.c.operand.address) if described.c else d_at
        matmul, backend = self._library.cublasLtMatmul, self._backend
        fixed = (
            self._handle, operation, ctypes.byref(alpha), first, layouts[0], second, layouts[1],
            ctypes.byref(beta), c_at, c, d_at, d, ctypes.byref(chosen.data),
            ctypes.c_void_p(workspace.address if workspace else None), ctypes.c_size_t(limit),
        )  # fmt: skip

        def step() -> None:
            backend.enter()
            status = matmul(*fixed, ctypes.c_void_p(backend.stream))
            if status:
                raise api.failure("Matmul", status, key)

        return step

    def algorithms(self, call: LibraryCall, operands: Mapping[str, Operand]) -> int:
        """How many algorithms the library offers for a call: the indices that `bind` takes."""
        self.bind(call, operands, 0)
        return len(self._found[f"{self.key(call, operands)} all"])

    # --- descriptors ----------------------------------------------------------------------------------

    def _make(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(f"{kind}Create", ctypes.byref(made), *arguments)
        self._descriptors.append((kind, made))
        return made

    def _set(self, kind: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(f"{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _operation(self, call: LibraryCall, described: Product) -> ctypes.c_void_p:
        dtype = described.d.operand.dtype
        if dtype not in api.DATA_TYPES:
            raise DeviceError(
                f"cuBLASLt multiplies no {dtype}", hint="export again with `--no-library-calls`"
            )
        compute = api.COMPUTE_FLOAT32
        if dtype is DType.FLOAT64:
            compute = api.COMPUTE_FLOAT64
        elif dtype is DType.FLOAT32 and call.attribute("allow_tf32", False):
            compute = api.COMPUTE_TF32
        scale = api.DATA_TYPES[DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32]
        operation = self._make("MatmulDesc", compute, scale)
        self._set("MatmulDesc", operation, api.TRANSPOSE_A, ctypes.c_int32(described.first.transposed))
        self._set("MatmulDesc", operation, api.TRANSPOSE_B, ctypes.c_int32(described.second.transposed))
        epilogue = (str(call.attribute("epilogue", "none")), described.bias is not None)
        if epilogue not in api.EPILOGUES:
            raise DeviceError(
                f"cuBLASLt has no epilogue `{epilogue[0]}`",
                why="its GELU is the tanh form" if epilogue[0] == "gelu_erf" else "",
                hint="lower the activation as a kernel of its own",
            )
        self._set("MatmulDesc", operation, api.EPILOGUE, ctypes.c_int32(api.EPILOGUES[epilogue]))
        if described.bias is not None:
            self._set("MatmulDesc", operation, api.BIAS_POINTER, ctypes.c_uint64(described.bias.address))
        return operation

    def _layout(self, matrix: Matrix, batch: int) -> ctypes.c_void_p:
        made = self._make(
            "MatrixLayout",
            api.DATA_TYPES[matrix.operand.dtype],
            ctypes.c_uint64(matrix.rows),
            ctypes.c_uint64(matrix.columns),
            ctypes.c_int64(matrix.leading),
        )
        if batch > 1:
            self._set("MatrixLayout", made, api.BATCH_COUNT, ctypes.c_int32(batch))
            self._set("MatrixLayout", made, api.BATCH_STRIDE, ctypes.c_int64(matrix.batch_stride))
        return made

    # --- algorithms -----------------------------------------------------------------------------------

    def _choose(
        self,
        key: str,
        operation: ctypes.c_void_p,
        layouts: tuple[ctypes.c_void_p, ...],
        described: Product,
        limit: int,
        index: int | None,
    ) -> Algorithm:
        if index is None:
            index = self._backend.tuning.get(key)
        count = 1 if index is None else _MAX_ALGORITHMS
        memo = f"{key} {'first' if index is None else 'all'}"
        if memo not in self._found:
            self._found[memo] = self._ask(operation, layouts, described, limit, count)
        found, index = self._found[memo], index or 0
        if not found:
            raise ExecutionError(
                "cuBLASLt has no algorithm for a product", why=f"{key}, workspace {limit} bytes"
            )
        # A tuning file made with another version of the library may know algorithms that are not here.
        return found[index] if index < len(found) else found[0]

    def _ask(
        self,
        operation: ctypes.c_void_p,
        layouts: tuple[ctypes.c_void_p, ...],
        described: Product,
        limit: int,
        count: int,
    ) -> list[Algorithm]:
        preference = ctypes.c_void_p()
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        try:
            self._set("MatmulPreference", preference, api.MAX_WORKSPACE, ctypes.c_size_t(limit))
            if described.d.operand.dtype in (DType.FLOAT16, DType.BFLOAT16):
                schemes = ctypes.c_uint32(api.REDUCE_IN_COMPUTE_TYPE)
                self._set("MatmulPreference", preference, api.REDUCTION_SCHEMES, schemes)
            for attribute, alignment in zip(api.MIN_ALIGNMENTS, _alignments(described), strict=True):
                self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(alignment))
            results, number = (api.Heuristic * count)(), ctypes.c_int()
            status = self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, operation, *layouts, preference, count, results, ctypes.byref(number)
            )
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        if status and api.STATUS_NAMES.get(status) != "NOT_SUPPORTED":
            raise api.failure("MatmulAlgoGetHeuristic", status)
        usable: list[Any] = [result for result in results[: number.value] if result.state == 0]
        return [Algorithm(_copied(result.algorithm), int(result.workspace_nbytes)) for result in usable]


def _copied(algorithm: Any) -> Any:
    """The same opaque bytes in memory of their own."""
    return (ctypes.c_uint64 * 8)(*algorithm)


def _roles(
    call: LibraryCall, operands: Mapping[str, Operand]
) -> tuple[Operand, Operand, Operand | None, Operand | None, Operand]:
    """A `matmul` call's a, b, bias, c and out."""
    names = list(call.reads)
    a, b = operands[names.pop(0)], operands[names.pop(0)]
    bias = operands[names.pop(0)] if call.attribute("has_bias", False) else None
    c = operands[names.pop(0)] if call.attribute("has_c", False) else None
    return a, b, bias, c, operands[call.writes[0]]


def matmul_key(call: LibraryCall, described: Product, workspace_nbytes: int) -> str:
    """What a product is, as text: equal keys may share a tuned algorithm."""
    parts = [f"{described.batch}x{described.m}x{described.n}x{described.k}", str(described.d.operand.dtype)]
    for matrix in (described.first, described.second, described.d, *((described.c,) if described.c else ())):
        parts.append(f"{'t' if matrix.transposed else 'n'}{matrix.leading}+{matrix.batch_stride}")
    parts.append(f"{call.attribute('epilogue', 'none')}{'+bias' if described.bias else ''}")
    if call.attribute("allow_tf32", False):
        parts.append("tf32")
    parts.append(f"aligned {','.join(map(str, _alignments(described)))} workspace {workspace_nbytes}")
    return " ".join(["matmul", *parts])


def _alignments(described: Product) -> tuple[int, int, int, int]:
    """Of a, b, c and d in bytes, at most 256, which the library believes unless told otherwise."""
    c = described.c or described.d
    operands = (described.first.operand, described.second.operand, c.operand, described.d.operand)
    one, two, three, four = (min(operand.address & -operand.address, 256) or 256 for operand in operands)
    return one, two, three, four


def _number(call: LibraryCall, name: str, default: float) -> float:
    value = call.attribute(name, default)
    if not isinstance(value, int | float):
        raise ExecutionError(f"matmul's `{name}` must be a number, not {value!r}")
    return float(value)


def _nothing() -> None:
    """A product without elements."""

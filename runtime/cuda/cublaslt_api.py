"""The binary interface of cuBLASLt, as far as products need it.

Numbers are those of `cublasLt.h` and `library_types.h`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ..dtypes import DType
from ..errors import ExecutionError

DATA_TYPES = {DType.FLOAT32: 0, DType.FLOAT64: 1, DType.FLOAT16: 2, DType.BFLOAT16: 14}
COMPUTE_FLOAT32, COMPUTE_TF32, COMPUTE_FLOAT64 = 68, 77, 70
EPILOGUES = {
    ("none", False): 1,
    ("none", True): 4,
    ("relu", False): 2,
    ("relu", True): 6,
    ("gelu_tanh", False): 32,
    ("gelu_tanh", True): 36,
}
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
BATCH_COUNT, BATCH_STRIDE = 5, 6
MAX_WORKSPACE, REDUCTION_SCHEMES, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
REDUCE_IN_COMPUTE_TYPE = 2
"""Partial sums of a split product stay float32; the other schemes round them to the output's type."""
STATUS_NAMES = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}


class Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_nbytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def failure(function: str, status: int, detail: str = "") -> ExecutionError:
    name = STATUS_NAMES.get(status, str(status))
    why = f"CUBLAS_STATUS_{name}" + (f" for {detail}" if detail else "")
    hint = "free memory on the GPU" if name == "ALLOC_FAILED" else ""
    return ExecutionError(f"cublasLt{function} failed", why=why, hint=hint)


def first_heuristic(path: Path, dtype: DType) -> None:
    """Let the library choose an algorithm for a small product, in the current context, and forget it.

    The first choice makes the library build its tables; statuses are left to the calls that matter.
    """
    library, handle, preference = ctypes.CDLL(str(path)), ctypes.c_void_p(), ctypes.c_void_p()
    operation, layout = ctypes.c_void_p(), ctypes.c_void_p()
    result, found = Heuristic(), ctypes.c_int()
    if dtype not in DATA_TYPES or library.cublasLtCreate(ctypes.byref(handle)):
        return
    double = dtype is DType.FLOAT64
    compute, scale = (COMPUTE_FLOAT64, DType.FLOAT64) if double else (COMPUTE_FLOAT32, DType.FLOAT32)
    extents = (ctypes.c_uint64(64), ctypes.c_uint64(64), ctypes.c_int64(64))
    library.cublasLtMatmulDescCreate(ctypes.byref(operation), compute, DATA_TYPES[scale])
    library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), DATA_TYPES[dtype], *extents)
    library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
    layouts = (layout, layout, layout, layout)
    answer = (1, ctypes.byref(result), ctypes.byref(found))
    library.cublasLtMatmulAlgoGetHeuristic(handle, operation, *layouts, preference, *answer)
    library.cublasLtMatmulPreferenceDestroy(preference)
    library.cublasLtMatrixLayoutDestroy(layout)
    library.cublasLtMatmulDescDestroy(operation)
    library.cublasLtDestroy(handle)

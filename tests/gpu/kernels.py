"""Triton kernels for the GPU tests, compiled for one architecture without a GPU.

`python kernels.py sm_90 FILE` writes them as a pickle of `devplan.runtime.program.Kernel` values, in a process
of its own: Triton imports torch where it is installed, and the tests watch that the runtime does not.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from devplan.runtime.program import Kernel, KernelCode, KernelParameter

SOURCE = '''
import triton
import triton.language as tl


@triton.jit
def add_scaled(x, y, out, n, scale, BLOCK: tl.constexpr):
    """out = x + scale * y"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    left, right = tl.load(x + at, inside), tl.load(y + at, inside)
    tl.store(out + at, left + scale * right, inside)


@triton.jit
def add_early(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y, launched while the launch before ends"""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def shared_product(x, out, N: tl.constexpr):
    """out = x @ x of an N by N matrix: takes more than 48 KiB of shared memory"""
    at = tl.arange(0, N)
    tile = tl.load(x + at[:, None] * N + at[None, :])
    product = tl.dot(tile, tile, out_dtype=tl.float32)
    tl.store(out + at[:, None] * N + at[None, :], product.to(tl.float16))
'''

_SIGNATURES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "add_scaled": (
        {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i64", "scale": "fp32", "BLOCK": "constexpr"},
        {"BLOCK": 256},
    ),
    "add_early": (
        {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        {"BLOCK": 256},
    ),
    "shared_product": ({"x": "*fp16", "out": "*fp16", "N": "constexpr"}, {"N": 256}),
}


def build(architecture: str) -> dict[str, Kernel]:
    """Compile every kernel for an architecture such as ``sm_90``."""
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu_test_kernels.py"
        path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location("gpu_test_kernels", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return {
            name: _compile(triton, GPUTarget, ASTSource, getattr(module, name), name, architecture)
            for name in _SIGNATURES
            if name != "add_early" or int(architecture.removeprefix("sm_")) >= 90
        }


def _compile(triton: Any, target: Any, source: Any, function: Any, name: str, architecture: str) -> Kernel:
    signature, constants = _SIGNATURES[name]
    made = triton.compile(
        source(
            function, signature, {(function.arg_names.index(key),): value for key, value in constants.items()}
        ),
        target=target("cuda", int(architecture.removeprefix("sm_")), 32),
        options={"num_warps": 8},
    )
    parameters = tuple(KernelParameter(key, kind) for key, kind in signature.items() if kind != "constexpr")
    codes = tuple(
        KernelCode(
            architecture,
            form,
            made.metadata.name,
            data if isinstance(data, bytes) else data.encode(),
            8,
            made.metadata.shared,
            name == "add_early",
        )
        for form, data in (("cubin", made.asm["cubin"]), ("ptx", made.asm["ptx"]))
    )
    return Kernel(name, parameters, codes, constants=tuple(constants.items()))


def build_apart(architecture: str) -> dict[str, Kernel]:
    """Like `build`, in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.pickle"
        subprocess.run([sys.executable, __file__, architecture, str(path)], check=True)
        kernels: dict[str, Kernel] = pickle.loads(path.read_bytes())
        return kernels


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(build(sys.argv[1])))

"""Our attention kernel in several block shapes, beside PyTorch's and cuDNN's, at the sizes of the benchmark's models.

    python tests/bench/bench_attention.py

Each time is the median of replays of a CUDA graph with ten calls, a call's share. The first line of a size is the
shape that an export chooses.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from devplan.passes.kernels.attention import OPERATOR, to_launch
from devplan.passes.tape import ExternCall, Window
from devplan.runtime.dtypes import DType

SIZES = {
    "whisper, 1": (1, 12, 1500, 64),
    "whisper, 32": (32, 12, 1500, 64),
    "dinov2, 1": (1, 6, 257, 64),
    "dinov2, 32": (32, 6, 257, 64),
    "minilm, 1": (1, 12, 128, 32),
    "minilm, 32": (32, 12, 128, 32),
    "prefill 2048": (1, 32, 2048, 64),
}
CALLS = 10


def microseconds(call: Callable[[], Any]) -> float:
    """A call's share of a graph of `CALLS` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def jitted(source: str, folder: Path, name: str) -> Any:
    """The kernel as Triton's own launcher has it."""
    path = folder / f"{name}.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n{source}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES).replace(", ", " "))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--top", type=int, default=5)
    asked = parser.parse_args()
    for name, size in SIZES.items():
        if name.replace(", ", " ") in asked.sizes.split(","):
            measure(name, size, asked.causal, asked.top)


def measure(name: str, size: tuple[int, int, int, int], is_causal: bool, top: int) -> None:
    """Print one size's table."""
    batch, heads, rows, head = size
    torch.manual_seed(0)
    packed = torch.randn(batch, rows, 3, heads, head, device="cuda", dtype=torch.float16)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    output = torch.empty(batch, rows, heads, head, device="cuda", dtype=torch.float16).transpose(1, 2)
    windows = [
        Window(n, DType.FLOAT16, size, t.stride()) for n, t in zip("qkv", (query, key, value), strict=True)
    ]
    call = ExternCall(
        OPERATOR,
        (*windows, None, head**-0.5, is_causal),
        {},
        (Window("o", DType.FLOAT16, size, output.stride()),),
    )
    spec = to_launch(call).kernel
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    constants = dict(spec.constants)
    chosen = (constants["BLOCK_M"], constants["BLOCK_N"], spec.num_warps, spec.num_stages)
    shapes = product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    rest = [s for s in shapes if s != chosen and s[0] <= 2 * rows and s[0] >= 8 * s[2] // 4]
    flops = 4.0 * batch * heads * rows * rows * head / (2 if is_causal else 1)
    found: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        kernel = jitted(spec.source, Path(folder), "attention_kernel")
        for shape in [chosen, *rest]:
            block_m, block_n, warps, stages = shape
            if batch * heads * rows // block_m < 24 or (block_m == 16 and batch > 1):
                continue
            given = {**constants, "BLOCK_M": block_m, "BLOCK_N": block_n}
            grid = (-(rows // -block_m), batch * heads, 1)

            def launch(
                grid: Any = grid, given: Any = given, warps: int = warps, stages: int = stages
            ) -> None:
                kernel[grid](
                    query, key, value, query, output, rows, rows, **given, num_warps=warps, num_stages=stages
                )

            try:
                output.zero_()
                launch()
                error = float((output - wanted).abs().max())
                time = microseconds(launch)
            except Exception as failure:
                print(f"  {shape}: {type(failure).__name__}: {str(failure)[:80]}", flush=True)
                continue
            label = f"{block_m:4} x {block_n:3}, {warps} warps, {stages} stages, differs {error:.1e}"
            found.append((time, label + ("  <- chosen" if shape == chosen else "")))
    print(f"{name}: {size}{' causal' if is_causal else ''}", flush=True)
    for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                time = microseconds(
                    lambda: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
                )
            print(f"  {time:9.2f} us {flops / time * 1e-6:7.1f} TFLOP/s  torch {label}", flush=True)
        except Exception as failure:
            print(f"  torch {label}: {str(failure)[:80]}")
    best = sorted(found)[:top]
    for time, label in best + [f for f in found if "chosen" in f[1] and f not in best]:
        print(f"  {time:9.2f} us {flops / time * 1e-6:7.1f} TFLOP/s  {label}", flush=True)


if __name__ == "__main__":
    main()

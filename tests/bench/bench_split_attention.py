"""Attention of one query to a cache of 2,048 keys in several shapes, beside PyTorch's, at batch 1, 4 and 32.

    python tests/bench/bench_split_attention.py

Both kernels, launched early, one pair after another in a CUDA graph, each on another cache, more of them than the L2
cache holds. Bytes are those of keys and values.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from bench_row_product import CACHE_NBYTES, LAUNCHES, Kernel, microseconds
from torch.nn import functional as F

from devplan.passes.kernels.split_attention import Shape, to_steps
from devplan.passes.lowered.compile_kernels import canonical, compile_kernel
from devplan.passes.tape import ExternCall, KernelSpec, OwnLaunch, Window
from devplan.runtime.dtypes import DType
from devplan.runtime.program import KernelCode

HEADS, KEY_HEADS, KEYS, HEAD = 32, 4, 2048, 64
BATCHES = (1, 4, 32)
SHAPES = [
    Shape(),
    *(
        Shape(keys, programs, programs, warps, stages)
        for keys, programs, (warps, stages) in product(
            (32, 64, 128), (128, 256, 512, 1024), ((4, 2), (4, 3), (4, 4), (2, 3), (8, 3))
        )
    ),
]


def call_for(batch: int) -> ExternCall:
    """The operator's call that lowering would make."""

    def window(name: str, *sizes: int, dtype: DType = DType.FLOAT16) -> Window:
        return Window(name, dtype, sizes, tuple(torch.empty(sizes, device="meta").stride()))

    query, key = window("q", batch, HEADS, 1, HEAD), window("k", batch, KEY_HEADS, KEYS, HEAD)
    mask = window("mask", 1, KEYS, dtype=DType.BOOL)
    return ExternCall("devplan.attention.default", (query, key, key, mask, HEAD**-0.5, False), {}, (query,))


def compiled(spec: KernelSpec) -> KernelCode | str:
    """Machine code for Hopper, or why there is none."""
    try:
        return compile_kernel(spec, "sm_90", "cubin")
    except Exception as error:
        return str(error)


class Data:
    """Operands on the GPU."""

    def __init__(self, batch: int) -> None:
        made = {"device": "cuda", "dtype": torch.float16}
        sizes = (batch, KEY_HEADS, KEYS, HEAD)
        self.nbytes = 4 * batch * KEY_HEADS * KEYS * HEAD
        copies = min(LAUNCHES, max(2, -(-CACHE_NBYTES // self.nbytes)))
        self.caches = [(torch.randn(sizes, **made), torch.randn(sizes, **made)) for _ in range(copies)]
        self.query, self.output = (torch.randn(batch, HEADS, 1, HEAD, **made) for _ in range(2))
        self.mask = torch.arange(KEYS, device="cuda")[None] <= KEYS - 100
        self.sums = torch.empty(batch * HEADS * 64 * HEAD, device="cuda")
        self.marks = torch.empty(batch * HEADS * 64 * 2, device="cuda")

    def wanted(self, index: int) -> torch.Tensor:
        """PyTorch's result."""
        key, value = self.caches[index % len(self.caches)]
        return F.scaled_dot_product_attention(self.query, key, value, attn_mask=self.mask, enable_gqa=True)


def pair(data: Data, steps: tuple[OwnLaunch, OwnLaunch], codes: list[KernelCode], cu: Any) -> Any:
    """Enqueues both kernels on one of the caches."""
    parts, join = (Kernel(cu, code, code.waits) for code in codes)
    splits = dict(steps[0].kernel.constants)["SPLITS"]
    rows = data.query.shape[0] * HEADS

    def enqueue(index: int) -> None:
        key, value = data.caches[index % len(data.caches)]
        tensors = (data.query, key, value, data.mask, data.sums, data.marks)
        parts((splits, data.query.shape[0] * KEY_HEADS, 1), [*(t.data_ptr() for t in tensors), KEYS])
        join((rows, 1, 1), [*(t.data_ptr() for t in (data.sums, data.marks, data.output)), rows])

    return enqueue


def main() -> None:
    work = [(batch, shape) for batch in BATCHES for shape in dict.fromkeys(SHAPES)]
    steps = [[s for s in to_steps(call_for(b), shape) if isinstance(s, OwnLaunch)] for b, shape in work]
    specs = list({canonical(s.kernel).name: canonical(s.kernel) for pair_ in steps for s in pair_}.values())
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = dict(zip([s.name for s in specs], pool.map(compiled, specs), strict=True))
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    from devplan.runtime.cuda.driver import bindings

    print(f"{torch.cuda.get_device_name()}, {len(codes)} kernels")
    for batch in BATCHES:
        data, found = Data(batch), list[tuple[float, str]]()
        took = microseconds(data.wanted)
        print(f"batch {batch}: {data.nbytes / 1e6:.1f} MB, torch {took:.2f} us")
        for (of, shape), both in zip(work, steps, strict=True):
            made = [codes[canonical(step.kernel).name] for step in both]
            if of != batch or len(both) != 2 or any(isinstance(code, str) for code in made):
                continue
            enqueue = pair(data, (both[0], both[1]), made, bindings())  # type: ignore[arg-type]
            enqueue(0)
            error = float((data.output.float() - data.wanted(0).float()).abs().max())
            wrong = "" if error < 1e-2 else f"  WRONG by {error:.1e}"
            splits = dict(both[0].kernel.constants)["SPLITS"]
            label = f"{shape.keys:4} keys, {splits:3} spans, {shape.warps} warps, {shape.stages} stages"
            chosen = "  <- chosen" if shape == SHAPES[0] else ""
            found.append((microseconds(enqueue), f"{label}{chosen}{wrong}"))
        best = sorted(found)[:6]
        for took, label in best + [each for each in found if "<-" in each[1] and each not in best]:
            print(f"  {took:8.2f} us {data.nbytes / took / 1e3:6.0f} GB/s  {label}", flush=True)


if __name__ == "__main__":
    main()

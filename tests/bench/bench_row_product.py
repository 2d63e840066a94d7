"""Products of one row at the sizes of a 1.1 B-parameter decoder: our kernel in many shapes beside torch's F.linear.

    python tests/bench/bench_row_product.py

Each launch reads another copy of the weight, more of them than the L2 cache holds, all in one CUDA graph, as in a
decoder's step. `early` launches each kernel while the one before ends (programmatic dependent launch); it loads its
first weights meanwhile. Times are medians of graph replays, a launch's share, with the gap to the next launch.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from devplan.passes.kernels.row_product import OPERATOR, Blocks, blocks_for, to_steps_with
from devplan.passes.lowered import compile_kernels
from devplan.passes.lowered.compile_kernels import canonical
from devplan.passes.tape import READY, ExternCall, KernelSpec, Window
from devplan.runtime.dtypes import DType
from devplan.runtime.program import KernelCode

DTYPES = {"float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16, "float32": DType.FLOAT32}
CACHE_NBYTES = 160 << 20
"""More than three times the L2 cache of an H200."""
LAUNCHES = 48
WAYS = ("", "early", "early, lets the next begin")


@dataclass(frozen=True)
class Shape:
    """One product of a decoder's layer and what is fused with it."""

    name: str
    outputs: int
    columns: int
    has_norm: bool = False
    has_added: bool = False
    is_gated: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight: twice the results where they gate each other."""
        return self.outputs * (2 if self.is_gated else 1)


SHAPES = (
    Shape("query key value", 2560, 2048, has_norm=True),
    Shape("output", 2048, 2048, has_added=True),
    Shape("gate up", 5632, 2048, has_norm=True, is_gated=True),
    Shape("down", 2048, 5632, has_added=True),
    Shape("head", 32000, 2048, has_norm=True),
    Shape("almost nothing", 264, 64),
)


def call_for(shape: Shape, rows: int, dtype: DType) -> ExternCall:
    """The operator's call that lowering would make."""

    def window(name: str, *sizes: int) -> Window:
        return Window(name, dtype, sizes, (sizes[1], 1) if len(sizes) == 2 else (1,))

    norm = window("norm", shape.columns) if shape.has_norm else None
    added = window("added", rows, shape.outputs) if shape.has_added else None
    operands = (window("x", rows, shape.columns), window("weight", shape.weight_rows, shape.columns), None)
    ends = (norm, 1e-5, added, "silu" if shape.is_gated else "none", shape.is_gated)
    return ExternCall(OPERATOR, (*operands, *ends), {}, (window("output", rows, shape.outputs),))


def candidates(shape: Shape, rows: int, dtype: DType) -> list[Blocks]:
    """Block shapes worth a measurement, the chosen one first."""
    vector = 16 // dtype.itemsize
    chosen = blocks_for(rows, shape.outputs, shape.columns, dtype.itemsize, shape.is_gated, shape.has_norm)
    found = [chosen]
    for height, (warps, factor) in product((1, 2, 4, 8), ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1))):
        columns = warps * 32 * vector * factor
        held = height * rows * factor * (2 if shape.is_gated else 1)
        if held <= 8 and columns <= 2 * shape.columns:
            found.append(Blocks(height, columns, warps))
    return list(dict.fromkeys(found))


def spec_for(call: ExternCall, blocks: Blocks, way: str) -> KernelSpec:
    """The kernel's text for one way to launch it."""
    spec = canonical(to_steps_with(call, blocks)[0].kernel)
    waits = "    tl.extra.cuda.gdc_wait()"
    if way == WAYS[2]:
        waits = f"    tl.extra.cuda.gdc_launch_dependents()\n{waits}"
    return canonical(replace(spec, source=spec.source.replace(READY, waits))) if way else spec


def compiled(spec: KernelSpec) -> KernelCode:
    """Machine code for Hopper, with waits where the text has them and nowhere else."""
    with mock.patch.object(compile_kernels, "that_waits", lambda same: same):
        return compile_kernels.compile_kernel(spec, "sm_90", "cubin")


class Kernel:
    """A kernel on the GPU, launched on torch's current stream."""

    def __init__(self, cu: Any, code: KernelCode, is_early: bool) -> None:
        from devplan.runtime.cuda.code import load_function

        self.cu, self.code, self.is_early = cu, code, is_early
        self.module, self.function = load_function(cu, code, code.symbol)
        self.alive: list[Any] = []
        self._configs: dict[Any, Any] = {}

    def __call__(self, grid: int | tuple[int, int, int], addresses: list[int]) -> None:
        """Enqueue one launch; ``addresses`` are pointers and small integers."""
        values = (ctypes.c_uint64 * (len(addresses) + 2))(*addresses, 0, 0)
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(values) + 8 * i for i in range(len(values)))
        )
        stream = torch.cuda.current_stream().cuda_stream
        key = (grid, stream, self.is_early)
        if key not in self._configs:
            self._configs[key] = self._config((grid, 1, 1) if isinstance(grid, int) else grid, stream)
        self.alive.append((values, pointers))
        (status,) = self.cu.cuLaunchKernelEx(self._configs[key], self.function, ctypes.addressof(pointers), 0)
        assert not int(status), status

    def _config(self, grid: tuple[int, int, int], stream: int) -> Any:
        cu = self.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.code.num_warps * 32, 1, 1
        config.sharedMemBytes = self.code.shared_nbytes
        config.hStream = cu.CUstream(stream)
        if self.is_early:
            attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        return config


def microseconds(enqueue: Any, launches: int = LAUNCHES) -> float:
    """The median of a graph of so many launches, for one of them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for index in range(launches):
            enqueue(index)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


class Data:
    """Operands on the GPU, with enough copies of the weight that none is still in a cache."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, copies: int = 0) -> None:
        nbytes = shape.weight_rows * shape.columns * dtype.itemsize
        copies = copies or min(LAUNCHES, max(2, -(-CACHE_NBYTES // nbytes)))
        made = {"device": "cuda", "dtype": dtype}
        self.shape, self.nbytes = shape, nbytes
        self.x = torch.randn(rows, shape.columns, **made)
        self.norm = torch.rand(shape.columns, **made) + 0.5
        self.added = torch.randn(rows, shape.outputs, **made)
        self.output = torch.zeros(rows, shape.outputs, **made)
        self.weights = [torch.randn(shape.weight_rows, shape.columns, **made) / 50 for _ in range(copies)]

    def addresses(self, index: int) -> list[int]:
        """Pointers in the order of the kernel's parameters."""
        weight = self.weights[index % len(self.weights)]
        tensors = [self.x, weight]
        tensors += [self.norm] if self.shape.has_norm else []
        tensors += [self.added] if self.shape.has_added else []
        return [tensor.data_ptr() for tensor in (*tensors, self.output)]

    def expected(self) -> torch.Tensor:
        """What the first weight gives, in float32."""
        x, weight, shape = self.x.float(), self.weights[0].float(), self.shape
        if shape.has_norm:
            x = F.rms_norm(x, (shape.columns,), self.norm.float(), 1e-5)
        y = x @ weight.T
        if shape.is_gated:
            y = F.silu(y[:, : shape.outputs]) * y[:, shape.outputs :]
        return y + self.added.float() if shape.has_added else y

    def error(self, kernel: Kernel, grid: int) -> float:
        """The largest difference, relative to the largest value."""
        self.output.fill_(float("nan"))
        kernel(grid, self.addresses(0))
        wanted = self.expected()
        return float((self.output.float() - wanted).abs().max() / wanted.abs().max())


def report(shape: Shape, rows: int, data: Data, tried: list[tuple[Blocks, str, float]]) -> None:
    """The best of each way, the chosen shape, and torch's time for the product alone."""

    def line(what: str, took: float) -> None:
        print(f"  {what:56}{took:8.2f} us{data.nbytes / took / 1e3:8.0f} GB/s")

    print(
        f"{shape.name}: {rows} x {shape.columns} by {shape.weight_rows} x {shape.columns}, {data.nbytes / 1e6:.1f} MB"
    )
    line(
        "torch, F.linear alone", microseconds(lambda i: F.linear(data.x, data.weights[i % len(data.weights)]))
    )
    for way in WAYS:
        of_way = [(took, blocks) for blocks, each, took in tried if each == way]
        chosen = of_way[0]
        for took, blocks in [chosen, *sorted(of_way, key=lambda pair: pair[0])[:3]]:
            name = f"{blocks.rows} x {blocks.columns}, {blocks.warps} warps"
            line(f"{'chosen' if (took, blocks) == chosen else '':7} {name:24} {way}", took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16")
    asked = parser.parse_args()
    dtype = DTYPES[asked.dtype]
    calls = {shape: call_for(shape, asked.rows, dtype) for shape in SHAPES}
    work = [
        (shape, blocks, way)
        for shape in SHAPES
        for blocks in candidates(shape, asked.rows, dtype)
        for way in WAYS
    ]
    specs = [spec_for(calls[shape], blocks, way) for shape, blocks, way in work]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = list(pool.map(compiled, specs))
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    from devplan.runtime.cuda.driver import bindings

    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.dtype}, {len(work)} kernels")
    for shape in SHAPES:
        data = Data(shape, asked.rows, getattr(torch, asked.dtype))
        tried: list[tuple[Blocks, str, float]] = []
        for (of, blocks, way), code in zip(work, codes, strict=True):
            if of is not shape:
                continue
            kernel, grid = Kernel(bindings(), code, bool(way)), -(-shape.outputs // blocks.rows)
            error = data.error(kernel, grid)
            if not error < 1e-2:
                print(f"  WRONG {blocks} {way}: {error:.1e}")
            took = microseconds(lambda i, k=kernel, g=grid, d=data: k(g, d.addresses(i)))
            tried.append((blocks, way, took))
        report(shape, asked.rows, data, tried)


if __name__ == "__main__":
    main()

"""Products with packed weights in many shapes, beside torch's F.linear in float16 (cuBLASLt).

    python tests/bench/bench_quantized.py

Each launch reads another copy of the weight, more of them than the L2 cache holds, all in one CUDA graph. Times are
medians of graph replays, a launch's share (with the kernel that joins parts, where there is one). "written out" is a
kernel that writes the weight in float16, and torch's product with that, both in the graph. GB/s counts the bytes of
the weight as it is stored; what `to_steps` would choose is marked.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from bench_row_product import CACHE_NBYTES, LAUNCHES, microseconds
from torch.nn import functional as F

from devplan.passes.lowered.compile_kernels import canonical, compile_kernel
from devplan.passes.quantized.linear import OPERATOR, Blocks, blocks_of, tile_steps
from devplan.passes.quantized.matrix import to_steps as matrix_steps
from devplan.passes.quantized.row import RowBlocks, row_blocks_of, row_steps
from devplan.passes.quantized.weight import CHUNK, quantized, words_per_chunk
from devplan.passes.size_arithmetic import substitute
from devplan.passes.tape import Allocate, ExternCall, KernelSpec, OwnLaunch, Window
from devplan.runtime.dtypes import DType
from devplan.runtime.program import KernelCode

SHAPES = ((4096, 4096), (5632, 2048), (2048, 5632))
"""N, K."""
SCHEMES = ((8, 0), (4, 128))


@dataclass(frozen=True)
class WrittenOut:
    """The weight as a plain matrix first."""


Cut = Blocks | RowBlocks | WrittenOut


@dataclass(frozen=True)
class Job:
    """One product, cut in one way."""

    rows: int
    shape: tuple[int, int]
    scheme: tuple[int, int]
    cut: Cut


def call_for(rows: int, shape: tuple[int, int], scheme: tuple[int, int]) -> ExternCall:
    """The operator's call that lowering would make, in float16."""
    (outputs, columns), (bits, group) = shape, scheme

    def window(name: str, dtype: DType, *sizes: int) -> Window:
        return Window(name, dtype, sizes, (sizes[1], 1))

    chunks = -(columns // -CHUNK)
    words = window("words", DType.INT32, outputs, chunks * words_per_chunk(bits))
    groups = -(columns // -group) if group else 1
    scales = window("scales", DType.FLOAT16 if group else DType.FLOAT32, outputs, groups)
    zeros = window("zeros", DType.FLOAT16, outputs, groups) if group else None
    x, output = window("x", DType.FLOAT16, rows, columns), window("output", DType.FLOAT16, rows, outputs)
    return ExternCall(OPERATOR, (x, words, scales, zeros, None, bits, group), {}, (output,))


def chosen(rows: int, shape: tuple[int, int], bits: int) -> Cut:
    """The blocks that lowering takes."""
    row_words = -(shape[1] // -CHUNK) * words_per_chunk(bits)
    if rows == 1:
        return row_blocks_of(shape[0], row_words, bits)
    return blocks_of(rows, shape[0], row_words, DType.FLOAT16, bits)


def candidates(rows: int, shape: tuple[int, int], bits: int) -> Iterator[Cut]:
    """Blocks worth a measurement, the chosen ones first."""
    yield chosen(rows, shape, bits)
    if rows == 1:
        for columns, (words, warps) in product((2, 4, 8, 16), ((256, 2), (512, 4), (1024, 4))):
            yield RowBlocks(columns, words // words_per_chunk(bits), warps)
    elif rows <= 32:
        height = 16 if rows <= 16 else 32
        for columns, splits, stages in product((64, 128), (2, 4, 8), (3, 4)):
            yield Blocks(height, columns, splits, 4, stages)
        yield WrittenOut()
    else:
        shapes = ((64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 128, 8), (256, 128, 8))
        parts = (1,) if rows > 256 else (1, 2, 4)
        for (height, columns, warps), stages, splits in product(shapes, (3, 4), parts):
            if height <= 2 * rows:
                yield Blocks(height, columns, splits, warps, stages)
        for columns, height in product((64, 128), (64, 128)):
            yield Blocks(height, columns, 1, columns // 16, 3, in_halves=False)
        yield WrittenOut()


def steps_of(job: Job) -> list[Allocate | OwnLaunch]:
    """What runs."""
    call = call_for(job.rows, job.shape, job.scheme)
    if isinstance(job.cut, RowBlocks):
        return list(row_steps(call, job.cut))
    if isinstance(job.cut, WrittenOut):
        x, words, scales, zeros, _, bits, group = call.operands
        written = Window("written", x.dtype, job.shape, (job.shape[1], 1))
        return list(
            matrix_steps(replace(call, operands=(x, words, scales, zeros, bits, group), outs=(written,)))
        )
    return list(tile_steps(call, job.cut))


def compiled(spec: KernelSpec) -> KernelCode:
    """Machine code for Hopper."""
    return compile_kernel(spec, "sm_90", "cubin")


class Data:
    """Operands on the GPU, with enough copies of the weight that none is still in a cache."""

    def __init__(self, rows: int, shape: tuple[int, int], scheme: tuple[int, int]) -> None:
        outputs, columns = shape
        self.x = torch.randn(rows, columns, device="cuda", dtype=torch.float16)
        self.plain = torch.randn(outputs, columns, device="cuda", dtype=torch.float16) / columns**0.5
        self.weight = quantized(self.plain, *scheme)
        self.nbytes = self.weight.words.nbytes
        copies = min(LAUNCHES, -(-CACHE_NBYTES // self.nbytes))
        self.words = [self.weight.words.clone() for _ in range(copies)]
        plain_copies = min(LAUNCHES, -(-CACHE_NBYTES // self.plain.nbytes))
        self.plains = [self.plain.clone() for _ in range(plain_copies)]
        self.output = torch.empty(rows, outputs, device="cuda", dtype=torch.float16)
        self.parts = torch.empty(8 * min(rows, 256) * outputs, device="cuda")
        self.written = torch.empty_like(self.plain)

    def address(self, window: Window, index: int) -> int:
        """Where a window of the call is for a launch."""
        if window.buffer == "words":
            return self.words[index % len(self.words)].data_ptr()
        zeros = self.weight.zeros
        held = {"x": self.x, "scales": self.weight.scales, "zeros": zeros, "output": self.output}
        held["written"] = self.written
        tensor = held.get(window.buffer, self.parts)
        assert tensor is not None
        return tensor.data_ptr()

    def error(self) -> float:
        """The largest difference of what is in the output, relative to the largest value."""
        wanted = self.x.float() @ self.weight.dequantized(self.x.shape[1]).T
        return float((self.output.float() - wanted).abs().max() / wanted.abs().max())


class Launches:
    """A job's kernels on the GPU, on torch's current stream."""

    def __init__(self, cu: Any, steps: list[OwnLaunch], codes: list[KernelCode]) -> None:
        from devplan.runtime.cuda.code import load_function

        self.cu, self.steps, self.codes = cu, steps, codes
        self.loaded = [load_function(cu, code, code.symbol) for code in codes]
        self.alive: list[Any] = []

    def __call__(self, data: Data, index: int) -> None:
        """Enqueue all of them."""
        stream = self.cu.CUstream(torch.cuda.current_stream().cuda_stream)
        for step, code, (_, function) in zip(self.steps, self.codes, self.loaded, strict=True):
            given = [data.address(a, index) if isinstance(a, Window) else int(str(a)) for a in step.arguments]
            named = dict(zip(step.kernel.call_names, step.arguments, strict=True))
            sizes: dict[str, Any] = {
                n: v for n, v in (*step.kernel.constants, *named.items()) if isinstance(v, int)
            }
            grid = [int(str(substitute(text, sizes))) for text in step.kernel.grid]
            values = (ctypes.c_uint64 * (len(given) + 2))(*given, 0, 0)
            pointers = (ctypes.c_void_p * len(values))(
                *(ctypes.addressof(values) + 8 * i for i in range(len(values)))
            )
            self.alive.append((values, pointers))
            block = (code.num_warps * 32, 1, 1)
            (status,) = self.cu.cuLaunchKernel(
                function, *grid, *block, code.shared_nbytes, stream, ctypes.addressof(pointers), 0
            )
            assert not int(status), status
        if any(isinstance(a, Window) and a.buffer == "written" for a in self.steps[0].arguments):
            torch.mm(data.x, data.written.t(), out=data.output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256, 512, 2048])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--best", type=int, default=3, help="how many of the fastest to print")
    asked = parser.parse_args()
    work = [
        Job(rows, shape, scheme, cut)
        for rows, shape, scheme in product(asked.rows, SHAPES[: asked.shapes], SCHEMES)
        for cut in dict.fromkeys(candidates(rows, shape, scheme[0]))
    ]
    steps = {job: [s for s in steps_of(job) if isinstance(s, OwnLaunch)] for job in work}
    specs = {job: [canonical(s.kernel) for s in found] for job, found in steps.items()}
    unique = {spec.name: spec for found in specs.values() for spec in found}
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = dict(zip(unique, pool.map(compiled, unique.values(), chunksize=4), strict=True))
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    from devplan.runtime.cuda.driver import bindings

    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16, {len(unique)} kernels")
    for rows, shape, scheme in product(asked.rows, SHAPES[: asked.shapes], SCHEMES):
        data = Data(rows, shape, scheme)
        if scheme == SCHEMES[0]:
            took = microseconds(lambda i, d=data: F.linear(d.x, d.plains[i % len(d.plains)]))
            line(f"{rows} rows, {shape[0]} x {shape[1]}: torch, float16", took, data.plain.nbytes)
        tried: list[tuple[float, Cut]] = []
        for job in (j for j in work if (j.rows, j.shape, j.scheme) == (rows, shape, scheme)):
            code = [codes[spec.name] for spec in specs[job]]
            if any(one.shared_nbytes > 227 << 10 for one in code):
                continue
            launches = Launches(bindings(), steps[job], code)
            data.output.fill_(float("nan"))
            launches(data, 0)
            if not (error := data.error()) < 2e-3:
                print(f"  WRONG {job.cut}: {error:.1e}")
            tried.append((microseconds(lambda i, k=launches, d=data: k(d, i)), job.cut))
        best = sorted(tried, key=lambda pair: pair[0])[: asked.best]
        known = [pair for pair in tried if isinstance(pair[1], WrittenOut)]
        for took, cut in dict.fromkeys([tried[0], *best, *known]):
            mark = "chosen" if cut == tried[0][1] else ""
            line(f"  int{scheme[0]} {words(cut):44}{mark}", took, data.nbytes)


def words(cut: Cut) -> str:
    """The blocks in a line."""
    if isinstance(cut, RowBlocks):
        return f"{cut.columns} rows x {cut.chunks} chunks, {cut.num_warps} warps"
    if isinstance(cut, WrittenOut):
        return "written out"
    kind = "" if cut.in_halves else ", float32"
    return f"{cut.rows} x {cut.columns}, {cut.splits} splits, {cut.num_warps} warps, {cut.num_stages} stages{kind}"


def line(what: str, took: float, nbytes: int) -> None:
    print(f"{what:62}{took:8.2f} us{nbytes / took / 1e3:7.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()

"""Rows times packed experts in many shapes, beside torch's grouped_mm in bfloat16.

    python tests/bench/bench_experts.py

128 experts of 1536 x 2048, as in a 30 B-parameter mixture of which 8 experts serve a token. Every launch has its own
routing, all in one CUDA graph; times are medians of graph replays, a launch's share. What `to_steps` chooses is marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch
from bench_quantized import SCHEMES, Launches, compiled
from bench_row_product import LAUNCHES, microseconds

from devplan.passes.lowered.compile_kernels import canonical
from devplan.passes.quantized.experts import OPERATOR, by_rows, by_tiles, to_steps
from devplan.passes.quantized.linear import Blocks
from devplan.passes.quantized.weight import QuantizedWeight, quantized, words_per_chunk
from devplan.passes.tape import ExternCall, OwnLaunch, Window
from devplan.runtime.dtypes import DType

EXPERTS, OUTPUTS, COLUMNS = 128, 1536, 2048


def call_for(rows: int, scheme: tuple[int, int]) -> ExternCall:
    """The operator's call that lowering would make, in bfloat16."""
    bits, group = scheme

    def window(name: str, dtype: DType, *sizes: int) -> Window:
        return Window(name, dtype, sizes, (sizes[1], 1) if len(sizes) == 2 else (1,))

    outputs, groups = EXPERTS * OUTPUTS, COLUMNS // group if group else 1
    words = window("words", DType.INT32, outputs, COLUMNS // 128 * words_per_chunk(bits))
    scales = window("scales", DType.BFLOAT16 if group else DType.FLOAT32, outputs, groups)
    zeros = window("zeros", DType.BFLOAT16, outputs, groups) if group else None
    x, output = window("x", DType.BFLOAT16, rows, COLUMNS), window("output", DType.BFLOAT16, rows, OUTPUTS)
    ends = window("ends", DType.INT32, EXPERTS)
    return ExternCall(OPERATOR, (x, words, scales, zeros, ends, bits, group, EXPERTS, True), {}, (output,))


def candidates(rows: int, scheme: tuple[int, int]) -> Iterator[tuple[str, OwnLaunch]]:
    """Launches worth a measurement, the chosen one first."""
    call = call_for(rows, scheme)
    yield "chosen", to_steps(call)[0]
    if rows <= 64:
        yield "row by row", by_rows(call)
    for height, (columns, warps), stages in product((16, 32, 64, 128), ((64, 4), (128, 8)), (3, 4)):
        if height <= max(16, rows // 16):
            name = f"{height} x {columns}, {warps} warps, {stages} stages"
            yield name, by_tiles(call, Blocks(height, columns, 1, warps, stages))


class Data:
    """Operands on the GPU, with a routing for each launch."""

    def __init__(self, weight: QuantizedWeight, plain: torch.Tensor, rows: int) -> None:
        self.weight, self.plain = weight, plain
        self.x = torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
        self.output = torch.empty(rows, OUTPUTS, device="cuda", dtype=torch.bfloat16)
        chosen = (torch.rand(-(-rows // 8), EXPERTS).topk(8).indices for _ in range(LAUNCHES))
        counts = (c.reshape(-1)[:rows].bincount(minlength=EXPERTS) for c in chosen)
        self.ends = [c.cumsum(0).to("cuda", torch.int32) for c in counts]

    def address(self, window: Window, index: int) -> int:
        """Where a window of the call is for a launch."""
        weight = self.weight
        held = {"x": self.x, "words": weight.words, "scales": weight.scales, "zeros": weight.zeros}
        held |= {"output": self.output, "ends": self.ends[index % LAUNCHES]}
        found = held[window.buffer]
        assert found is not None
        return found.data_ptr()

    def error(self) -> float:
        """The largest difference from the first routing's result, relative to the largest value."""
        wanted = torch.zeros(self.output.shape, device="cuda")
        begin = 0
        for expert, end in enumerate(self.ends[0].tolist()):
            rows = slice(expert * OUTPUTS, (expert + 1) * OUTPUTS)
            w = self.weight
            zeros = None if w.zeros is None else w.zeros[rows]
            part = QuantizedWeight(w.words[rows], w.scales[rows], zeros, w.bits, w.group)
            if end > begin:
                wanted[begin:end] = self.x[begin:end].float() @ part.dequantized(COLUMNS).T
            begin = end
        return float((self.output.float() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--best", type=int, default=3, help="how many of the fastest to print")
    asked = parser.parse_args()
    work = [(r, s, *found) for r, s in product(asked.rows, SCHEMES) for found in candidates(r, s)]
    unique = {(spec := canonical(step.kernel)).name: spec for *_, step in work}
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = dict(zip(unique, pool.map(compiled, unique.values(), chunksize=2), strict=True))
    torch.manual_seed(0)
    plain = torch.randn(EXPERTS, OUTPUTS, COLUMNS, device="cuda", dtype=torch.bfloat16) / COLUMNS**0.5
    from devplan.runtime.cuda.driver import bindings

    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, {len(unique)} kernels")
    weights = {scheme: quantized(plain, *scheme) for scheme in SCHEMES}
    for rows, scheme in product(asked.rows, SCHEMES):
        data = Data(weights[scheme], plain, rows)
        if scheme == SCHEMES[0]:
            took = microseconds(
                lambda i, d=data: torch.nn.functional.grouped_mm(d.x, d.plain.mT, offs=d.ends[i % LAUNCHES])
            )
            print(
                f"{rows} rows, {EXPERTS} x {OUTPUTS} x {COLUMNS}: {'torch, bfloat16':34}{took:8.2f} us",
                flush=True,
            )
        tried: list[tuple[float, str]] = []
        for name, step in ((n, step) for r, s, n, step in work if (r, s) == (rows, scheme)):
            launches = Launches(bindings(), [step], [codes[canonical(step.kernel).name]])
            data.output.fill_(float("nan"))
            launches(data, 0)
            if not (error := data.error()) < 2e-2:
                print(f"  WRONG {name}: {error:.1e}")
            tried.append((microseconds(lambda i, k=launches, d=data: k(d, i)), name))
        for took, name in [tried[0], *sorted(tried[1:])[: asked.best]]:
            print(f"  int{scheme[0]} {name:50}{took:8.2f} us", flush=True)


if __name__ == "__main__":
    main()

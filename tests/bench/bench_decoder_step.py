"""All products of a 1.1 B-parameter decoder's step in one CUDA graph, launched in several ways.

    python tests/bench/bench_decoder_step.py

Three kernels that do almost nothing stand for the attention of each layer. A way adds to each kernel, before it
waits for the launch before: the permission that the next kernel begins, and hints to fetch weights of the product
after it into the L2 cache.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from bench_row_product import DTYPES, SHAPES, Data, Kernel, Shape, call_for, compiled, microseconds

from devplan.passes import row_product
from devplan.passes.compile_kernels import canonical
from devplan.passes.row_product import Blocks, blocks_for, to_steps_with
from devplan.passes.tape import READY, KernelSpec
from devplan.runtime.dtypes import DType

LAYERS = 22
BANDWIDTH = 4.3e12
NAMES = {shape.name: shape for shape in SHAPES}
QKV, OUT, GATE, DOWN, HEAD, NOTHING = (
    NAMES[name] for name in ("query key value", "output", "gate up", "down", "head", "almost nothing")
)
ORDER = [QKV, NOTHING, NOTHING, NOTHING, OUT, GATE, DOWN] * LAYERS + [HEAD]


@dataclass(frozen=True)
class Way:
    """How kernels are launched. ``ahead``: which kernels fetch how many MB of the next weight into the L2 cache."""

    name: str
    is_early: bool = True
    next_begins: str = "before"
    """``before`` or ``after`` the wait, or never."""
    ahead: tuple[Shape, ...] = ()
    megabytes: int = 0
    keeps: bool = False
    """Weights are not the first to give way in the L2 cache."""


WAYS = (
    Way("one after the other", is_early=False),
    Way("early", next_begins=""),
    Way("next begins after the wait", next_begins="after"),
    Way("next begins at once"),
    Way("at once, weights stay in L2", keeps=True),
    *(Way(f"output fetches {n} MB", ahead=(OUT,), megabytes=n) for n in (8, 16, 24, 32, 46)),
    Way("output fetches 16 MB, weights stay", ahead=(OUT,), megabytes=16, keeps=True),
    Way("output, gate up fetch 16 MB", ahead=(OUT, GATE), megabytes=16),
    Way("output, gate up, down fetch 10 MB", ahead=(OUT, GATE, DOWN), megabytes=10),
)
NEXT = {OUT: GATE, GATE: DOWN, DOWN: QKV}

PLANS: dict[str, dict[Shape, Blocks]] = {
    "chosen": {},
    "8 warps": {
        QKV: Blocks(2, 2048, 8),
        OUT: Blocks(2, 2048, 8),
        GATE: Blocks(2, 2048, 8),
        DOWN: Blocks(2, 2048, 8),
        HEAD: Blocks(4, 2048, 8),
    },
    "16 bytes": {
        QKV: Blocks(2, 1024, 4),
        OUT: Blocks(2, 1024, 4),
        GATE: Blocks(1, 1024, 4),
        DOWN: Blocks(2, 1024, 4),
        HEAD: Blocks(2, 1024, 4),
    },
}


def spec_for(shape: Shape, blocks: Blocks, way: Way, rows: int, dtype: DType) -> KernelSpec:
    """The kernel's text."""
    call = call_for(shape, rows, dtype)
    if shape in way.ahead:
        following = call_for(NEXT[shape], rows, dtype).operands[1]
        call = replace(call, keywords={"ahead": following})
        row_product._AHEAD_NBYTES = way.megabytes << 20
    spec = canonical(to_steps_with(call, blocks)[0].kernel)
    source = spec.source
    if way.keeps:
        source = source.replace(', eviction_policy="evict_first"', "")
    if not way.is_early:
        return canonical(replace(spec, source=source))
    begins = "    tl.extra.cuda.gdc_launch_dependents()\n"
    text = begins if way.next_begins == "before" else ""
    text += spec.hints + "    tl.extra.cuda.gdc_wait()\n"
    text += begins if way.next_begins == "after" else ""
    return canonical(replace(spec, source=source.replace(f"{READY}\n", text), hints=""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16")
    asked = parser.parse_args()
    dtype, shapes = DTYPES[asked.dtype], list(dict.fromkeys(ORDER))

    def blocks_of(plan: str, shape: Shape) -> Blocks:
        chosen = blocks_for(asked.rows, shape.outputs, shape.columns, dtype.itemsize, shape.is_gated)
        return PLANS[plan].get(shape, chosen)

    work = [(plan, way, shape) for plan in PLANS for way in WAYS for shape in shapes]
    specs = [spec_for(s, blocks_of(plan, s), way, asked.rows, dtype) for plan, way, s in work]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = dict(zip(work, pool.map(compiled, specs), strict=True))
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    from devplan.runtime.cuda.driver import bindings

    data = [Data(shape, asked.rows, getattr(torch, asked.dtype), 1) for shape in ORDER]
    nbytes = sum(each.nbytes for each in data)
    limit = nbytes / BANDWIDTH * 1e6
    print(f"{torch.cuda.get_device_name()}, {asked.dtype}, {len(ORDER)} launches, {nbytes / 1e6:.0f} MB")
    print(f"{'us (share of 4.3 TB/s)':32}{''.join(f'{plan:>18}' for plan in PLANS)}")
    for way in WAYS:
        cells: list[str] = []
        for plan in PLANS:
            kernels = {s: Kernel(bindings(), codes[plan, way, s], way.is_early) for s in shapes}
            grids = {s: -(-s.outputs // blocks_of(plan, s).rows) for s in shapes}
            wrong = [
                s.name for s in shapes if s not in way.ahead and not _is_right(s, data, kernels[s], grids[s])
            ]

            def enqueue(_: int, kernels: Any = kernels, grids: Any = grids, way: Way = way) -> None:
                for index, each in enumerate(data):
                    following = data[(index + 1) % len(data)].weights[0]
                    ahead = [following.data_ptr()] if each.shape in way.ahead else []
                    kernels[each.shape](grids[each.shape], [*each.addresses(0), *ahead])

            took = microseconds(enqueue, 1)
            cells.append(f"{took:9.1f} ({limit / took:4.0%}) {'WRONG' if wrong else ''}")
        print(f"{way.name:32}{''.join(f'{cell:>18}' for cell in cells)}", flush=True)


def _is_right(shape: Shape, data: list[Data], kernel: Kernel, grid: int) -> bool:
    one = next(each for each in data if each.shape is shape)
    return one.error(kernel, grid) < 1e-2


if __name__ == "__main__":
    main()

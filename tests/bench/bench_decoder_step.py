"""All products of a 1.1 B-parameter decoder's step in one CUDA graph, launched in several ways.

    python tests/bench/bench_decoder_step.py

Three kernels that do almost nothing stand for the attention of each layer. A way adds to each kernel, before it
waits for the launch before: the permission that the next kernel begins, and hints to fetch weights into the L2
cache: `ahead N` those of the program N places later, `rest` what this program itself reads later.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from bench_row_product import DTYPES, SHAPES, Data, Kernel, Shape, call_for, compiled, microseconds

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
    """How kernels are launched."""

    name: str
    is_early: bool = True
    next_begins: str = "before"
    """``before`` or ``after`` the wait, or never."""
    ahead: int = 0
    fetches_rest: bool = False
    streams: bool = False


WAYS = (
    Way("one after the other", is_early=False),
    Way("early", next_begins=""),
    Way("next begins after the wait", next_begins="after"),
    Way("next begins at once"),
    Way("at once, streams", streams=True),
    Way("at once, rest", fetches_rest=True),
    Way("at once, ahead 396", ahead=396),
    Way("at once, ahead 792", ahead=792),
    Way("at once, ahead 1584", ahead=1584),
    Way("after, ahead 792", next_begins="after", ahead=792),
    Way("at once, ahead 792, streams", ahead=792, streams=True),
)

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

_FETCH = """\
    {name} = ({pointer} + {rows}[:, None] * weight_n + {columns}).to(tl.int64)
    {name} = tl.where(({rows} < OUTPUTS)[:, None] & ({columns} < COLUMNS), {name}, weight.to(tl.int64))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [{name}], dtype=tl.int32, is_pure=False, pack=1
    )
"""


def hints(shape: Shape, way: Way, itemsize: int) -> str:
    """The text that fetches weights into the L2 cache."""
    line = 128 // itemsize
    width = 1 << (shape.columns // line - 1).bit_length()
    pointers = ["weight", "weight + OUTPUTS * weight_n"] if shape.is_gated else ["weight"]
    made = f"    lines = tl.arange(0, {max(width, 1)})[None, :] * {line}\n"
    if way.ahead:
        made += (
            f"    later = (tl.program_id(0) + {way.ahead}).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)\n"
        )
    for index, pointer in enumerate(pointers):
        if way.ahead:
            made += _FETCH.format(name=f"h{index}", pointer=pointer, rows="later", columns="lines")
        if way.fetches_rest:
            rows, columns = "n.to(tl.int64)", "(lines + BLOCK_K)"
            made += _FETCH.format(name=f"r{index}", pointer=pointer, rows=rows, columns=columns)
    return made if way.ahead or way.fetches_rest else ""


def spec_for(shape: Shape, blocks: Blocks, way: Way, rows: int, dtype: DType) -> KernelSpec:
    """The kernel's text."""
    spec = canonical(to_steps_with(call_for(shape, rows, dtype), blocks)[0].kernel)
    source = spec.source
    if way.streams:
        source = "\n".join(
            text.replace("other=0.0)", 'other=0.0, eviction_policy="evict_first")')
            if "tl.load(weight" in text
            else text
            for text in source.splitlines()
        )
    if not way.is_early:
        return canonical(replace(spec, source=source))
    begins = "    tl.extra.cuda.gdc_launch_dependents()\n"
    text = begins if way.next_begins == "before" else ""
    text += hints(shape, way, dtype.itemsize) + "    tl.extra.cuda.gdc_wait()\n"
    text += begins if way.next_begins == "after" else ""
    return canonical(replace(spec, source=source.replace(f"{READY}\n", text)))


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
            wrong = [s.name for s in shapes if not _is_right(s, data, kernels[s], grids[s])]

            def enqueue(_: int, kernels: Any = kernels, grids: Any = grids) -> None:
                for each in data:
                    kernels[each.shape](grids[each.shape], each.addresses(0))

            took = microseconds(enqueue, 1)
            cells.append(f"{took:9.1f} ({limit / took:4.0%}) {'WRONG' if wrong else ''}")
        print(f"{way.name:32}{''.join(f'{cell:>18}' for cell in cells)}", flush=True)


def _is_right(shape: Shape, data: list[Data], kernel: Kernel, grid: int) -> bool:
    one = next(each for each in data if each.shape is shape)
    return one.error(kernel, grid) < 1e-2


if __name__ == "__main__":
    main()

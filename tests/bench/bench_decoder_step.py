"""The step of a 1.1 B-parameter decoder in one CUDA graph: what its launches' shapes and hints are worth.

    python tests/bench/bench_decoder_step.py [--seconds 60]

22 layers with real sizes, attention over a cache of 2,048 keys included, each layer's results handed to the next and
the logits compared with PyTorch's. A search changes one choice after the other and keeps what is faster; afterwards
each choice of the best step is taken back alone. The limit is the copy bandwidth measured here: bytes read and written
by a copy of 1 GiB on the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context

import torch
from bench_row_product import Kernel, Shape, compiled
from decoder_step import ATTENTIONS, NAMES, PRODUCTS, TRIED, Attention, Choice, Step, all_specs

from devplan.passes.kernels.row_product import Blocks

EDGES = (
    *(
        ("out", "self"),
        ("out", "gate"),
        ("qkv", "out"),
        ("qkv", "cache"),
        ("down", "cache"),
        ("gate", "down"),
    ),
    *(("down", "qkv"), ("down", "own"), ("qkv", "gate")),
)
"""Who fetches what: ``own`` is its own weight some megabytes later, ``self`` what the program itself will read."""
MEGABYTES = (0.0, 2.0, 4.0, 8.0, 16.0)
DISTANCES = (0.0, 4.0, 8.0, 10.0, 12.0, 16.0, 24.0)
PROGRAMS = (132, 528, 9999)
OFFSETS = (0.0, 4.0, 8.0)


def timed(step: Step, choice: Choice, replays: int = 9) -> float:
    """Microseconds of a step, by graph replays; the median."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for kernel in step.kernels.values():
        kernel.alive.clear()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        step.enqueue(choice)
    times: list[float] = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def with_blocks(choice: Choice, shape: Shape, blocks: Blocks) -> Choice:
    """The choice with other blocks for a product."""
    return replace(choice, blocks=tuple({**dict(choice.blocks), shape: blocks}.items()))


def with_ahead(
    choice: Choice, edge: tuple[str, str], megabytes: float, programs: int = 9999, offset: float = 0.0
) -> Choice:
    """The choice with another hint, and a kernel that takes it."""
    found = {**dict(choice.ahead), edge: (megabytes, programs, offset)}
    places = dict(choice.places)
    places[edge[0]] = "before" if places[edge[0]] == "none" else places[edge[0]]
    ahead = tuple((e, a) for e, a in found.items() if a[0])
    places = {
        name: place if any(e[0] == name for e, _ in ahead) else "none" for name, place in places.items()
    }
    return replace(choice, ahead=ahead, places=tuple(places.items()))


def neighbours() -> Iterator[tuple[str, Callable[[Choice], Choice]]]:
    """One change each, with a name."""
    for edge in EDGES:
        if edge[1] in ("own", "self"):
            for far in DISTANCES if edge[1] == "own" else (0.0, 1.0):
                yield (
                    f"{edge[0]} fetches {edge[1]}, {far} MB away",
                    lambda c, e=edge, m=far: with_ahead(c, e, m),
                )
            continue
        for megabytes, programs, offset in product(MEGABYTES, PROGRAMS, OFFSETS):
            yield (
                f"{edge[0]} fetches {megabytes} MB of {edge[1]} after {offset}, {programs} programs",
                (lambda c, e=edge, m=megabytes, p=programs, o=offset: with_ahead(c, e, m, p, o)),
            )
    for each in ATTENTIONS[:-1]:
        yield f"{each}", lambda c, a=each: replace(c, attention=a)
    for shape, tried in TRIED.items():
        for b in tried:
            yield f"{shape.name} {b}", lambda c, s=shape, b=b: with_blocks(c, s, Blocks(*b))
    for name in NAMES:
        yield f"{name} fetches at the end, or before", lambda c, n=name: elsewhere(c, n)


def elsewhere(choice: Choice, name: str) -> Choice:
    """The choice with a product's hints on the other side of its work."""
    other = {"none": "none", "before": "end", "end": "before"}
    return replace(choice, places=tuple((n, other[p] if n == name else p) for n, p in choice.places))


def bandwidth() -> float:
    """Bytes a second that a copy of 1 GiB on the device reads and writes together."""
    a, b = (torch.zeros(2**30, device="cuda", dtype=torch.uint8) for _ in range(2))
    times: list[float] = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / 4)
    return 2 * 2**30 / statistics.median(times[2:])


def search(step: Step, choice: Choice, seconds: float, show: Callable[[str, float], None]) -> Choice:
    """Takes whatever change is faster, round after round, until the time is over or nothing is."""
    until, best, is_better = time.monotonic() + seconds, timed(step, choice), True
    while is_better and time.monotonic() < until:
        is_better = False
        for name, change in neighbours():
            tried = change(choice)
            if tried == choice or time.monotonic() > until:
                continue
            took = timed(step, tried)
            if took < best * 0.998 and (took := min(timed(step, tried, 15), 1e9)) < best * 0.998:
                choice, best, is_better = tried, took, True
                show(f"  {name}", took)
    return choice


def first_table(step: Step, show: Callable[[str, float], None]) -> Choice:
    """What each choice is worth by itself; where to begin."""
    wanted = step.expected()
    base = Choice(tuple((shape, Blocks(*TRIED[shape][0])) for shape in PRODUCTS))
    times: dict[Attention, float] = {}
    for each in ATTENTIONS:
        error = 0.0 if each.kind == "none" else step.error(replace(base, attention=each), wanted)
        times[each] = timed(step, replace(base, attention=each), 21)
        show(f"{each}{'' if error < 2e-2 else f' WRONG by {error:.1e}'}", times[each])
    for each in ATTENTIONS:
        show(f"again {each}", timed(step, replace(base, attention=each), 21))
    show("three, one launch after the other", timed(step, replace(base, is_early=False)))
    none = replace(base, attention=ATTENTIONS[-1])
    show("the same without attention", timed(step, replace(none, is_early=False)))
    base = replace(base, attention=min(ATTENTIONS[:-1], key=times.__getitem__))
    began = time.monotonic()
    for _ in range(10):
        timed(step, base)
    print(f"one try takes {(time.monotonic() - began) * 100:.0f} ms")
    return base


def last_table(step: Step, best: Choice, show: Callable[[str, float], None]) -> None:
    """The best step, and what each choice is worth in it."""
    show(f"best, wrong by {step.error(best, step.expected()):.1e}", timed(step, best, 41))
    for name in NAMES:
        print(f"  {name}: {dict(best.blocks)[NAMES[name]]}, {dict(best.places)[name]}")
    print(f"  {best.attention}")
    for edge, (megabytes, programs, offset) in best.ahead:
        show(
            f"  without: {edge[0]} fetches {megabytes} MB of {edge[1]} after {offset}, last {programs}",
            timed(step, with_ahead(best, edge, 0), 21),
        )
    nothing = tuple((name, "none") for name in NAMES)
    show("  without any fetch", timed(step, replace(best, ahead=(), places=nothing), 21))
    for each in ATTENTIONS:
        show(f"  with {each}", timed(step, replace(best, attention=each), 21))
    for shape in PRODUCTS:
        for b in TRIED[shape]:
            show(f"  with {shape.name} {b}", timed(step, with_blocks(best, shape, Blocks(*b)), 21))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=55.0, help="of the search; 0: the first table alone")
    asked = parser.parse_args()
    began = time.monotonic()
    specs = all_specs()
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = dict(zip(specs, pool.map(compiled, specs.values()), strict=True))
    print(f"{len(codes)} kernels compiled in {time.monotonic() - began:.0f} s")
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    from devplan.runtime.cuda.driver import bindings

    step = Step({name: Kernel(bindings(), code, True) for name, code in codes.items()})
    speed, nbytes = bandwidth(), step.nbytes()
    limit = nbytes / speed * 1e6
    print(
        f"{torch.cuda.get_device_name()}: copies at {speed / 1e12:.3f} TB/s; {nbytes / 1e6:.0f} MB take {limit:.0f} us"
    )

    def show(name: str, took: float) -> None:
        print(f"{name:78}{took:8.1f} us {limit / took:6.1%}", flush=True)

    base = first_table(step, show)
    if not asked.seconds:
        return
    print("search")
    best = search(step, base, asked.seconds, show)
    last_table(step, best, show)


if __name__ == "__main__":
    main()

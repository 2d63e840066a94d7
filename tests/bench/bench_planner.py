"""Measure the planner: arena over lower bound, time, and what reordering saves. Prints tables.

Run from the repository: ``python -m tests.bench.bench_planner [--effort default] [--only A,K,wired500]``.
Instances are read from ``$DEVPLAN_SHARED`` or ``../shared/data`` beside the repository, generated programs
are always there. Times are processor seconds of this process.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from devplan.planner import PlanOptions, check, plan
from devplan.planner.offsets import place
from devplan.planner.options import Effort
from devplan.planner.order import peaks
from devplan.planner.problem import Buffer, Placement, Problem
from devplan.runtime.program import Program

ROOT = Path(__file__).parents[2]
BEST_KNOWN = {"C": 1_039_360, "D": 1_031_168, "J": 1_039_360}
"""Best heights published with the instances, in bytes, where they are not 1,048,576 (A to K)."""


def graphs() -> ModuleType:
    """The generators beside this file, however it was started."""
    spec = importlib.util.spec_from_file_location(
        "devplan_bench_graphs", Path(__file__).with_name("graphs.py")
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shared() -> Path | None:
    """The folder of the public instances, or None where there is none."""
    places = [Path(os.environ["DEVPLAN_SHARED"])] if "DEVPLAN_SHARED" in os.environ else []
    places += [ROOT.parent / "shared" / "data"]
    for place_ in places:
        for folder in (place_ / "dsa-instances", place_ / "data" / "dsa-instances", place_):
            if (folder / "minimalloc-challenging").is_dir():
                return folder
    return None


def read(file: Path) -> Problem:
    """One instance: rows of lower, upper (half-open) and size."""
    with file.open(newline="") as rows:
        return Problem(
            tuple(Buffer(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(rows))
        )


def instances(folder: Path, only: set[str]) -> Iterator[tuple[str, str, Problem]]:
    """(group, name, problem) of every instance wanted."""
    for group in ("small-models", "synthetic", "armnn", "minimalloc-challenging", "idealloc"):
        for file in sorted((folder / group).glob("*.csv")):
            name = file.stem.removesuffix(".1048576")
            if not only or name in only or group in only:
                yield group, name, read(file)


def shared_objects(problem: Problem) -> int:
    """The height by a greedy like ExecuTorch's default, written from its description.

    By size, largest first, into shared objects that are never resized: at the bottom of one or above those
    in it that are alive at the same time; a new object where nothing fits.
    """
    objects: list[tuple[int, list[tuple[int, Buffer]]]] = []
    for buffer in sorted(problem.buffers, key=lambda b: -b.size):
        best: tuple[int, int] | None = None
        for number, (size, inside) in enumerate(objects):
            meeting = [at + b.size for at, b in inside if b.lower < buffer.upper and buffer.lower < b.upper]
            at = max(meeting, default=0)
            if at + buffer.size <= size and (best is None or at < best[1]):
                best = (number, at)
        if best is None:
            objects.append((buffer.size, [(0, buffer)]))
        else:
            objects[best[0]][1].append((best[1], buffer))
    return sum(size for size, _ in objects)


def verify(problem: Problem, found: Placement) -> None:
    """No two buffers that live together overlap: a sweep over time with the live ones sorted by address."""
    from bisect import bisect_left

    events = [(b.lower, 1, i) for i, b in enumerate(problem.buffers)]
    events += [(b.upper, 0, i) for i, b in enumerate(problem.buffers)]
    live: list[tuple[int, int, int]] = []
    for _, opens, index in sorted(events):
        at, size = found.offsets[index], problem.buffers[index].size
        item = (at, at + size, index)
        where = bisect_left(live, item)
        if opens:
            assert where == 0 or live[where - 1][1] <= at, "overlap"
            assert where == len(live) or at + size <= live[where][0], "overlap"
            live.insert(where, item)
        else:
            live.pop(where)
    assert problem.height(found.offsets) == found.height


def offsets_table(effort: Effort, only: set[str]) -> None:
    """Arena over lower bound for every public instance."""
    folder = shared()
    if folder is None:
        print("the public instances are absent; set DEVPLAN_SHARED to their folder")
        return
    print(
        f"{'instance':<32}{'buffers':>8}{'lower bound':>16}{'greedy':>8}{'ours':>8}{'seconds':>9}  best known, algorithm"
    )
    tight = total = 0
    for group, name, problem in instances(folder, only):
        started = time.process_time()
        found = place(problem, effort)
        seconds = time.process_time() - started
        verify(problem, found)
        other = f"{shared_objects(problem) / problem.lower_bound:.3f}" if len(problem.buffers) < 5000 else "-"
        ratio = found.height / problem.lower_bound
        note = ""
        if group == "minimalloc-challenging" and name != "input.12":
            note = f"{found.height / BEST_KNOWN.get(name, 1 << 20):.4f} "
        elif group != "idealloc":
            tight, total = tight + (found.height == problem.lower_bound), total + 1
        head = f"{group + '/' + name:<32}{len(problem.buffers):>8}{problem.lower_bound:>16}{other:>8}"
        print(f"{head}{ratio:>8.4f}{seconds:>9.2f}  {note}{found.algorithm}", flush=True)
    if total:
        print(f"networks at the lower bound: {tight} of {total}")


def programs() -> Iterator[tuple[str, Program]]:
    """Generated programs, for reordering."""
    make = graphs()
    for count, seed in ((100, 1), (200, 2), (200, 3), (500, 4), (500, 5)):
        yield f"random wired {count} (seed {seed})", make.random_wired(count, seed)
    for layers, experts in ((8, 8), (24, 16), (16, 32)):
        yield f"experts {layers}x{experts}, one by one", make.mixture_of_experts(layers, experts, 1)
        yield (
            f"experts {layers}x{experts}, stage by stage",
            make.mixture_of_experts(layers, experts, 1, by_stage=True),
        )
    yield "residual chain 50", make.residual(50)


def order_table(effort: Effort) -> None:
    """Peak and arena as given and reordered, of the generated programs."""
    print(
        f"{'program':<34}{'steps':>6}{'given peak':>13}{'peak':>13}{'saved':>8}{'arena/peak':>12}{'seconds':>9}"
    )
    for name, program in programs():
        started = time.process_time()
        planned = plan(program, PlanOptions(effort))
        seconds = time.process_time() - started
        check(planned)
        given = sum(peaks(program.methods[0]).values())
        arena = planned.plan.methods[0].arenas[0]
        saved = 1 - arena.lower_bound / given
        steps = len(program.methods[0].instructions)
        head = f"{name:<34}{steps:>6}{given:>13}{arena.lower_bound:>13}{saved:>8.1%}"
        print(f"{head}{arena.nbytes / arena.lower_bound:>12.4f}{seconds:>9.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", choices=["fast", "default", "max"], default="default")
    parser.add_argument("--only", default="", help="names or groups of instances, comma separated")
    arguments = parser.parse_args()
    only = {name for name in arguments.only.split(",") if name}
    offsets_table(arguments.effort, only)
    if not only:
        print()
        order_table(arguments.effort)


if __name__ == "__main__":
    main()

"""What the products and convolutions of artifacts need as workspace, and what less or more would cost in time.

    python tests/bench/bench_workspaces.py encoder.pte mobilenet_v2.pte --limits 0,planned,limit,32

Each distinct call is bound to memory of its own at each limit: with no workspace, with what the plan offers, with
the fixed limit of `passes.lowered.workspaces` (4 MiB for products, 8 MiB for convolutions), and with 32 MiB. Printed are
the bytes that the library's first choice then needs, and its median time on the device. Lines whose planned time is
more than 3 % above the best of the larger limits are marked, since there the plan's bound costs speed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from devplan.passes.lowered.workspaces import CONVOLUTION_LIMIT, MATMUL_LIMIT
from devplan.runtime.artifact import read
from devplan.runtime.backend import Operand
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import DevplanError
from devplan.runtime.expr import evaluate
from devplan.runtime.program import Device, LibraryCall, Method

MIB, PAGE = 1 << 20, 256
GPU = Device("cuda", 0)
FIXED = {"matmul": MATMUL_LIMIT, "convolution": CONVOLUTION_LIMIT}


def calls_of(method: Method) -> list[tuple[LibraryCall, dict[str, Operand], int]]:
    """Products and convolutions, their operands without addresses, and the bytes planned for each."""
    bound = {symbol.name: symbol.upper for symbol in method.symbols}
    found: list[tuple[LibraryCall, dict[str, Operand], int]] = []
    for call in method.instructions:
        if not isinstance(call, LibraryCall) or call.function not in FIXED:
            continue
        operands: dict[str, Operand] = {}
        for name in dict.fromkeys((*call.reads, *call.writes)):
            value = method.value(name)
            shape = tuple(evaluate(size, bound) for size in value.shape)
            strides = tuple(evaluate(stride, bound) for stride in value.strides)
            operands[name] = Operand(0, value.dtype, shape, strides, GPU)
        storage = method.storage(method.value(call.workspace).storage) if call.workspace else None
        found.append((call, operands, 0 if storage is None else storage.reserved_nbytes))
    return found


def title_of(call: LibraryCall, operands: Mapping[str, Operand]) -> str:
    """Shapes and type, by which calls are told apart."""
    shapes = " ".join("x".join(map(str, operands[name].shape)) for name in call.reads[:2])
    out = operands[call.writes[0]]
    extras = [
        str(value) for key, value in call.attributes if key in ("stride", "groups", "epilogue", "activation")
    ]
    return f"{call.function} {shapes} {out.dtype} {','.join(extras)} {out.strides[-1]}"


class Bench:
    """One GPU and memory for the operands of one call at a time."""

    def __init__(self, nbytes: int) -> None:
        self.gpu = CudaBackend(GPU)
        self._base = self.gpu.allocate(nbytes)
        self.gpu.fill(self._base, nbytes, 0)

    def measure(
        self, call: LibraryCall, operands: Mapping[str, Operand], limit: int, repeat: int
    ) -> tuple[int, float]:
        """Bytes that the library's choice needs and its median microseconds; NaN where it has none."""
        at, placed = self._base, dict[str, Operand]()
        for name, operand in operands.items():
            placed[name] = replace(operand, address=at)
            at += -(-operand.span_nbytes // PAGE) * PAGE
        if limit:
            placed["workspace"] = Operand(at, DType.UINT8, (limit,), (1,), GPU)
        self.gpu.workspaces.clear()
        try:
            step = self.gpu.bind(replace(call, workspace="workspace" if limit else ""), placed, {})
            runs = self.gpu.timeline([[step] * 20], repeat)
        except DevplanError as error:
            print(f"    {error}"[:160])
            return 0, math.nan
        uses = [use.needed for use in self.gpu.workspaces.values()]
        return max(uses, default=0), statistics.median(run[0] for run in runs) * 1e6 / 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--limits", default="0,planned,limit,32", help="MiB, `planned` or `limit`")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--most", type=int, default=24, help="distinct calls of an artifact that are measured"
    )
    asked = parser.parse_args()
    words = asked.limits.split(",")
    for artifact in asked.artifacts:
        seen: dict[str, tuple[LibraryCall, dict[str, Operand], int]] = {}
        for method in read(artifact).planned.program.methods:
            for call, operands, planned in calls_of(method):
                seen.setdefault(title_of(call, operands), (call, operands, planned))
        chosen = sorted(seen.items(), key=lambda item: item[1][2])[:: max(len(seen) // asked.most, 1)]
        sizes = [sum(o.span_nbytes + PAGE for o in operands.values()) for _, (_, operands, _) in chosen]
        bench = Bench(max(sizes, default=0) + 64 * MIB)
        print(f"{artifact.name}: {len(chosen)} of {len(seen)} distinct calls; KiB needed, us on the device")
        print(f"{'':60}{'planned':>9} " + "".join(f"{word:>16}" for word in words))
        slower = 0
        for title, (call, operands, planned) in chosen:
            limits = [
                planned if w == "planned" else FIXED[call.function] if w == "limit" else int(w) * MIB
                for w in words
            ]
            got = [bench.measure(call, operands, limit, asked.repeat) for limit in limits]
            times: dict[str, Any] = {word: time for word, (_, time) in zip(words, got, strict=True)}
            larger = [t for w, t in times.items() if w not in ("0", "planned") and not math.isnan(t)]
            is_slow = bool(larger) and times.get("planned", 0.0) > 1.03 * min(larger)
            slower += is_slow
            cells = "".join(f"{needed / 1024:8.0f}{time:8.2f}" for needed, time in got)
            print(f"{title[:60]:60}{planned / 1024:9.0f} {cells}{'  slower' if is_slow else ''}", flush=True)
        print(f"{slower} of {len(chosen)} slower by more than 3 % within what is planned")
        bench.gpu.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

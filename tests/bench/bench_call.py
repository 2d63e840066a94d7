"""What one call costs, host to host: the sum of two vectors of 16 floats, and the least that the driver allows.

    python tests/bench/bench_call.py

Medians over 10,000 calls: ours; ours with the copies that a kernel's use of host memory saves; and bare driver calls
on the same memory, which no runtime can beat: replaying the graph, and launching its kernel, each with a wait.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CALLS = 10_000


def microseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """The median and the 99th percentile of one call."""
    clock = time.perf_counter
    for _ in range(500):
        call()
    times = []
    for _ in range(CALLS):
        begin = clock()
        call()
        times.append(clock() - begin)
    times.sort()
    return statistics.median(times) * 1e6, times[int(len(times) * 0.99)] * 1e6


def show(what: str, call: Callable[[], Any]) -> None:
    """One line of the table."""
    median, high = microseconds(call)
    print(f"{what:52}{median:8.2f} us   p99 {high:8.2f} us")


def exported_product(folder: Path) -> Path:
    """The artifact of a product of one row with 32,000 results, 64 KB."""
    import torch

    import devplan

    path = folder / "product.pte"
    model = torch.nn.Linear(2048, 32000, bias=False).half()
    devplan.export(model, (torch.ones(1, 2048).half(),)).write(path)
    return path


def exported(folder: Path) -> Path:
    """The artifact of x + y."""
    import torch

    import devplan

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    path = folder / "sum.pte"
    devplan.export(Sum(), (torch.ones(16), torch.ones(16))).write(path)
    return path


def bare(program: Any) -> None:
    """The driver's calls alone, on what the program has captured."""
    method = program.method()
    (backend,) = (b for slot, b in program.backends.items() if slot.kind == "cuda")
    cu, stream = backend.driver, backend.stream_object
    (segment,) = method.bound.execution.segments
    executable = segment.step._executable

    def replay() -> None:
        cu.cuGraphLaunch(executable, stream)
        cu.cuStreamSynchronize(stream)

    def launch() -> None:
        segment.steps[0]()
        cu.cuStreamSynchronize(stream)

    def polled() -> None:
        cu.cuGraphLaunch(executable, stream)
        while cu.cuStreamQuery(stream)[0]:
            pass

    show("bare: the graph, and a wait", replay)
    show("bare: the graph, and asking until it is done", polled)
    if len(segment.steps) == 1:
        show("bare: its kernel, and a wait", launch)
    show("bare: a wait for nothing", lambda: cu.cuStreamSynchronize(stream))
    show("bare: naming the context", lambda: cu.cuCtxSetCurrent(backend.context))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = exported(Path(folder))
        from devplan.runtime import load
        from devplan.runtime.cuda.backend import CudaBackend

        x, y = np.arange(16, dtype=np.float32), np.ones(16, np.float32)
        with load(path, device="cuda") as program:
            method = program.method()
            np.testing.assert_array_equal(method(x, y)[next(iter(method(x, y)))], x + y)
            show("ours", lambda: method(x, y))
            show("ours, borrowing the output", lambda: method(x, y, borrow=True))
            bare(program)
        CudaBackend.direct_read_nbytes = CudaBackend.direct_write_nbytes = 0
        with load(path, device="cuda") as program:
            method = program.method()
            show("ours, with copies", lambda: method(x, y))
        product, row = exported_product(Path(folder)), np.ones((1, 2048), np.float16)
        for most in (0, 65536):
            CudaBackend.direct_write_nbytes = most
            with load(product, device="cuda") as program:
                method = program.method()
                show(f"32,000 results, over the bus up to {most}", lambda call=method: call(row, borrow=True))
    print(f"python {sys.version.split()[0]}, {CALLS} calls each")


if __name__ == "__main__":
    main()

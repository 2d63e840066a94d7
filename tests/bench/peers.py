"""One way of running a model with torch, measured in a process of its own: `python peers.py PEER MODEL.py ...`.

Prints a JSON document: medians in microseconds (`device`: by CUDA events, `end_to_end`: host to host), seconds from
the process's start to the first output, and device memory. Peers: ``eager``, ``graph`` (a hand-made CUDA graph of
eager), ``compile``, ``reduce-overhead``, ``max-autotune``, ``aoti``. Inputs and outputs of graphs are pinned.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.time()
PEERS = ("eager", "graph", "compile", "reduce-overhead", "max-autotune", "aoti")


def load_model(path: Path, dtype: str, batch: int) -> tuple[Any, list[Any]]:
    """The module on the GPU and its example inputs on the host, pinned."""
    import torch

    spec = importlib.util.spec_from_file_location("peer_model", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = file
    spec.loader.exec_module(file)
    model = file.model
    if not isinstance(model, torch.nn.Module):
        model = model()
    inputs = file.example_inputs
    inputs = inputs() if callable(inputs) else inputs
    given = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if dtype:
        model = model.to(getattr(torch, dtype))
        given = [x.to(getattr(torch, dtype)) if x.is_floating_point() else x for x in given]
    if batch > 1:
        given = [x.repeat(batch, *[1] * (x.dim() - 1)) for x in given]
    return model.eval().cuda(), [x.contiguous().pin_memory() for x in given]


def first_tensor(result: Any) -> Any:
    """The tensor of a result that may be a tuple or a dict."""
    while not hasattr(result, "data_ptr"):
        result = next(iter(result.values() if isinstance(result, dict) else result))
    return result


def prepare(peer: str, model: Any, device_inputs: list[Any], torch: Any) -> Callable[[], Any]:
    """A function that runs the model on its static device inputs and gives its device output."""
    if peer in ("compile", "reduce-overhead", "max-autotune"):
        compiled = torch.compile(model, mode=None if peer == "compile" else peer)
        for _ in range(3):
            compiled(*device_inputs)
        return lambda: first_tensor(compiled(*device_inputs))
    if peer == "aoti":
        exported = torch.export.export(model, tuple(device_inputs))
        package = torch._inductor.aoti_compile_and_package(exported)
        loaded = torch._inductor.aoti_load_package(package)
        return lambda: first_tensor(loaded(*device_inputs))
    if peer == "eager":
        return lambda: first_tensor(model(*device_inputs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(*device_inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = first_tensor(model(*device_inputs))

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def wait_at(gate: str) -> None:
    """Say that all is prepared (``GATE.ready``) and wait for the turn to be measured (``GATE.go``)."""
    if gate:
        Path(f"{gate}.ready").touch()
        while not Path(f"{gate}.go").exists():
            time.sleep(0.02)


def measure(peer: str, model: Any, inputs: list[Any], repeat: int, gate: str = "") -> dict[str, Any]:
    """Device and host-to-host medians, first output and memory."""
    import torch

    device_inputs = [x.cuda() for x in inputs]
    begin = time.time()
    run = prepare(peer, model, device_inputs, torch)
    out = run()
    host_out = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)

    def call() -> None:
        for static, given in zip(device_inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        host_out.copy_(run(), non_blocking=True)
        torch.cuda.synchronize()

    call()
    first = time.time()
    wait_at(gate)
    for _ in range(20):
        call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    device = []
    for _ in range(repeat):
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize()
        device.append(events[0].elapsed_time(events[1]) * 1e3)
    return {
        "peer": peer,
        "end_to_end": statistics.median(times) * 1e6,
        "device": statistics.median(device),
        "prepare_s": first - begin,
        "first_result_s": first - STARTED,
        "memory": torch.cuda.max_memory_allocated(),
        "output": [float(x) for x in host_out.float().flatten()[:64]],
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument(
        "--started", type=float, default=0.0, help="wall clock when this process was asked for"
    )
    parser.add_argument("--gate", default="", help="be measured only when the file GATE.go is there")
    asked = parser.parse_args()
    global STARTED
    STARTED = asked.started or STARTED
    import torch

    with torch.no_grad():
        model, inputs = load_model(asked.model, asked.dtype, asked.batch)
        print(json.dumps(measure(asked.peer, model, inputs, asked.repeat, asked.gate)))


if __name__ == "__main__":
    sys.exit(main())

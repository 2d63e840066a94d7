"""Where a cold start's time goes: what began when, on which thread, and how long it took.

    python tests/bench/bench_start.py encoder.pte --repeat 10

Each repeat is a fresh process that imports devplan, loads the artifact and runs it once with zeros. Spans are
taken by wrapping functions as their modules are imported, so that nothing is imported earlier than it would be.
Prints medians in milliseconds since the process was started, beside those of bare interpreters.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WRAPPED = {
    "cuda.warm": ("_initialise", "_make_context", "_prepare_cublaslt", "_map_cudnn", "_wait", "map_library"),
    "cuda.cublaslt_api": ("first_heuristic",),
    "artifact.reader": ("read", "verify", "verify_agreement", "_codes"),
    "loading": ("load_planned",),
    "cuda.driver": ("initialise", "device_info"),
    "cuda.context": ("GpuContext.__init__",),
    "cuda.backend": ("load_function", "CudaBackend.capture", "CudaBackend.load"),
    "cuda.nvidia_library": ("load",),
    "cuda.cublaslt": ("CublasLt.__init__", "CublasLt._ask"),
    "cuda.cudnn": ("Cudnn.__init__", "Cudnn._build"),
    "cuda.staging": ("Staging._prepare",),
    "memory.shared": ("constant_addresses",),
    "engine": ("allocate_arenas",),
    "devplan_cli.run_job": ("load_program", "gather_inputs", "_call", "_document", "_show"),
    "calls.caller": ("Caller._bind", "Caller.prepare"),
}
"""Functions under ``devplan.runtime``, or of the command, where they are looked up."""
IMPORTS = (
    "typer",
    "pydantic",
    "rich",
    "devplan.devplan_cli.main",
    "devplan.devplan_cli.run_job",
    "numpy",
    "cuda.bindings.driver",
    "cuda.pathfinder",
    "concurrent.futures",
    "devplan.runtime.engine",
)
BARE = {
    "python -S -c pass": ["-S", "-c", "pass"],
    "python -c pass": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import cuda.bindings.driver": ["-c", "import cuda.bindings.driver"],
    "import devplan.runtime.program": ["-c", "import devplan.runtime.program"],
}


class Spans:
    """Seconds since the start, by name: when it first began, how long it took in all, how often, where."""

    def __init__(self, started: float) -> None:
        self._offset = time.time() - time.perf_counter() - started
        self.found: dict[str, dict[str, Any]] = {}

    def now(self) -> float:
        return time.perf_counter() + self._offset

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*given: Any, **named: Any) -> Any:
            begin = self.now()
            try:
                return call(*given, **named)
            finally:
                self.note(name, begin)

        return inner

    def note(self, name: str, begin: float) -> None:
        thread = threading.current_thread().name
        span = self.found.setdefault(name, {"begin": begin, "took": 0.0, "count": 0, "thread": thread})
        span["took"] += self.now() - begin
        span["count"] += 1


class Watcher:
    """Times imports, and wraps what a module defines once it is imported."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        short = name.removeprefix("devplan.").removeprefix("runtime.")
        if name not in IMPORTS and short not in WRAPPED:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute, spans = spec.loader.exec_module, self._spans

        def exec_module(module: Any) -> None:
            begin = spans.now()
            execute(module)
            if name in IMPORTS:
                spans.note(f"import {name}", begin)
            for title in WRAPPED.get(short, ()):
                home = module
                *owners, last = title.split(".")
                for owner in owners:
                    home = getattr(home, owner)
                setattr(home, last, spans.timed(f"{short}.{title}", getattr(home, last)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def child(artifact: str, device: str, started: float) -> None:
    """One cold start; prints its spans as JSON."""
    spans = Spans(started)
    spans.note("(python has started)", spans.now())
    sys.meta_path.insert(0, Watcher(spans))
    import devplan

    spans.note("(devplan is imported)", spans.now())
    with devplan.load(artifact, device or None) as program:
        spans.note("(loaded)", spans.now())
        import numpy as np

        from devplan.runtime.tensors.host import host_value, numpy_dtype

        method = program.method(program.methods[0])
        inputs: dict[str, Any] = {}
        for port in method.description.inputs:
            if port.value:
                value = method.description.value(port.value)
                bound = {symbol.name: symbol.upper for symbol in method.description.symbols}
                shape = [s if isinstance(s, int) else s.evaluate(bound) for s in value.shape]
                inputs[port.name] = host_value(np.zeros(shape, numpy_dtype(value.dtype)), value.dtype)
        method.run(inputs)
        spans.note("(first output)", spans.now())
        tell(spans)


def command(artifact: str, device: str, started: float) -> None:
    """One ``devplan run`` from its start to its end; prints its spans as JSON."""
    spans = Spans(started)
    spans.note("(python has started)", spans.now())
    sys.meta_path.insert(0, Watcher(spans))
    sys.argv = ["devplan", "run", artifact, "--device", device, "--quiet"]
    from devplan.devplan_cli.__main__ import main as devplan

    try:
        devplan()
    except SystemExit as end:
        if end.code:
            raise
    spans.note("(first output)", spans.now())
    tell(spans)


def tell(spans: Spans) -> None:
    """Print the spans as JSON."""
    import json

    print(json.dumps(spans.found), flush=True)


def bare(arguments: list[str], repeat: int) -> float:
    """Median seconds of an interpreter."""
    import statistics
    import subprocess

    times: list[float] = []
    for _ in range(repeat):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> int:
    """The command. What only this needs is imported here: a process that is timed must not pay for it."""
    import argparse
    import json
    import os
    import statistics
    import subprocess

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--no-bare", action="store_true", help="leave out the bare interpreters")
    parser.add_argument("--command", action="store_true", help="`devplan run`, in place of `load` and a call")
    asked = parser.parse_args()
    runs: list[dict[str, Any]] = []
    ended: list[float] = []
    for _ in range(asked.repeat):
        words = [sys.executable, str(Path(__file__)), "--command" if asked.command else "--child"]
        words += [str(asked.artifact), asked.device]
        begin = time.time()
        done = subprocess.run([*words, repr(begin)], capture_output=True, text=True, check=False)
        ended.append(time.time() - begin)
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1] if done.stderr else f"exit {done.returncode}")
            return 1
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    if not asked.no_bare:
        for title, arguments in BARE.items():
            print(f"{title:36}{bare(arguments, asked.repeat) * 1e3:8.0f} ms")
    print(
        f"{asked.artifact.name}, {asked.device}, medians of {asked.repeat}, {os.cpu_count()} processors, ms"
    )
    print(f"{'':42}{'begin':>8}{'took':>8}{'ends':>8}  times  thread")
    names = [name for name in runs[0] if all(name in run for run in runs)]
    middle = {
        name: [statistics.median(run[name][key] for run in runs) * 1e3 for key in ("begin", "took")]
        for name in names
    }
    for name in sorted(names, key=lambda name: middle[name][0]):
        begin, took = middle[name]
        once = f"{begin + took:8.0f}" if runs[0][name]["count"] == 1 else f"{'':8}"
        count, thread = runs[0][name]["count"], runs[0][name]["thread"].replace("MainThread", "")
        print(f"{name:42}{begin:8.0f}{took:8.1f}{once}{count:7}  {thread}")
    first = [run["(first output)"]["begin"] * 1e3 for run in runs]
    print(
        f"first output: least {min(first):.0f}, median {statistics.median(first):.0f}, most {max(first):.0f};"
        f" the process ends at {statistics.median(ended) * 1e3:.0f}"
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in ("--child", "--command"):
        timed = child if sys.argv[1] == "--child" else command
        timed(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        sys.exit(main())

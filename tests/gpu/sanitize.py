"""Artifacts under compute-sanitizer, and with their arenas full of NaN before each call; a line for each.

    python tests/gpu/sanitize.py MODEL.pte ... [--inputs FOLDER] [--jobs N] [--limit SECONDS]

``memcheck`` finds accesses outside of memory, ``initcheck`` reads of device memory that nothing has written, ``scrub``
compares the bytes of the outputs with those of a program whose arenas were filled with 0xFF, three calls each. Inputs
are FOLDER/MODEL.npz, which the benchmark leaves beside its artifacts.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CALLS = """
import sys
from pathlib import Path
import numpy as np
from devplan.runtime import load
from devplan.runtime.measure.bench_inputs import read_inputs
path, inputs, scrubs = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "both"

def outputs(scrub):
    with load(path, device="cuda", scrub=scrub) as program:
        method = program.method(program.methods[0])
        return [
            np.asarray(getattr(x, "raw", x)).tobytes()
            for _ in range(3) for x in method.run(read_inputs(inputs)).values()
        ]

first = outputs(scrubs)
if scrubs and first != outputs(False):
    sys.exit("the outputs differ")
print(f"{len(first)} outputs")
"""


def checked(path: Path, tool: str, inputs: Path, limit: float) -> tuple[str, bool]:
    """A line about one artifact under one tool, and whether it was clean."""
    begin = time.monotonic()
    command = [sys.executable, "-X", "faulthandler", "-c", CALLS, str(path), str(inputs / f"{path.stem}.npz")]
    command.append("both" if tool == "scrub" else "once")
    if tool != "scrub":
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--report-api-errors",  # asking whether memory is pinned is refused where it is not
            "no",
            "--error-exitcode",
            "9",
            "--show-backtrace",
            "no",
            "--print-limit",
            "100000",
            *command,
        ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"late    {tool:10} {path.name}: more than {limit:g} s", False
    good = done.returncode == 0
    words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    telling = [line for line in words if "ERROR SUMMARY" in line] or words[-1:]
    lines = [
        f"{'clean' if good else 'FAILED':7} {tool:10} {path.name}: {time.monotonic() - begin:.0f} s {telling[0]}"
    ]
    if not good:
        lines += [f"    {line[:160]}" for line in (*culprits(words), *words[:6], *words[-12:])]
    return "\n".join(lines), good


def culprits(words: list[str]) -> list[str]:
    """How many errors each kernel made, by what the sanitizer printed."""
    names = Counter(found[1] for line in words if (found := re.search(r" at (\w[^+ ]*)\+0x", line)))
    return [f"{count} x {name}" for name, count in names.most_common(12)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--inputs", type=Path, default=Path("/tmp/devplan-bench"))
    parser.add_argument("--tools", default="memcheck,initcheck,scrub")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=120.0)
    asked = parser.parse_args()
    tools = [t for t in asked.tools.split(",") if t == "scrub" or shutil.which("compute-sanitizer")]
    if len(tools) < len(asked.tools.split(",")):
        print("compute-sanitizer is not installed: only `scrub` is done")
    work = [(path, tool) for path in asked.artifacts for tool in tools]
    failed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for line, good in pool.map(lambda w: checked(*w, asked.inputs, asked.limit), work):
            failed += not good
            print(line, flush=True)
    print(f"{len(work) - failed} of {len(work)} clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

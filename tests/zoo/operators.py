"""PyTorch's own database of operators against the emulator: a few of its samples per operator and element type.

    python -m tests.zoo.operators --results operators.jsonl [--letters a-m] [--only linalg.*,add] [--dtypes float32]
    python -m tests.zoo.operators --results operators.jsonl --failed     # again what did not come out right
    python -m tests.zoo.operators --results operators.jsonl --table      # only print

Needs `expecttest` (`pip install expecttest`), which the database imports. An operator runs in a process of its own.
The samples of an element type are one module; where that is not right, each sample is one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import re
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.zoo.operator_samples import DTYPES, Sample, measure, measure_operator

OUTCOMES = {
    "right": "",
    "random": "type and shape alone",
    "unbuilt": "eager refuses the sample",
    "refused": "exit code 3",
    "untraceable": "exit code 3, and `torch.export` refuses, too",
    "failed": "another exit code",
    "traceback": "",
    "wrong": "",
    "timeout": "",
}
"""What a sample can come to, the harmless first."""


def main() -> None:
    """The command."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # what is measured is an export without a GPU
    warnings.simplefilter("ignore")
    options = _parser().parse_args()
    path = Path(options.results)
    if not options.table:
        try:
            from torch.testing._internal.common_methods_invocations import op_db
        except ModuleNotFoundError as error:
            raise SystemExit(f"the database of operators needs `{error.name}`") from None
        measure(
            [Sample("", (torch.ones(2),), torch.neg)], "neg", options.limit
        )  # imports, once for all processes
        for info in op_db:
            wanted = [dtype for dtype in options.dtypes.split(",") if _is_wanted(info, dtype, options, path)]
            if wanted:
                _in_process(info, wanted, options)
    print(_table(_rows(path)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.operators", description=__doc__)
    parser.add_argument("--results", default="operators.jsonl", help="results, one row a line")
    parser.add_argument(
        "--letters", default="", help="first letters of the operators' last names, such as a-m"
    )
    parser.add_argument("--only", default="", help="these operators alone (globs), measured again")
    parser.add_argument("--failed", action="store_true", help="measure again what was not right")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="element types")
    parser.add_argument("--samples", type=int, default=6, help="samples per operator and element type")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per sample")
    parser.add_argument("--table", action="store_true", help="only print the table")
    return parser


def _name(info: Any) -> str:
    return f"{info.name}/{info.variant_test_name}" if info.variant_test_name else str(info.name)


def _is_wanted(info: Any, dtype: str, options: argparse.Namespace, path: Path) -> bool:
    name = _name(info)
    if getattr(torch, dtype) not in info.dtypes:
        return False
    if options.only:
        return any(fnmatch.fnmatch(name, glob) for glob in options.only.split(","))
    first = str(info.name).rsplit(".", 1)[-1][0].lower()
    if options.letters and not re.match(f"[{options.letters}]", first):
        return False
    row = _rows(path).get((name, dtype))
    return row is None or (options.failed and set(row["found"]) - {"right", "random"} != set())


def _rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each operator and element type."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["name"], row["dtype"]): row for row in map(json.loads, lines)}


def _in_process(info: Any, dtypes: list[str], options: argparse.Namespace) -> None:
    """Each element type is a row; one that ends its process, or hangs in it, is told as such."""
    for dtype in dtypes:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, info, dtype, options))
        process.start()
        theirs.close()
        begin, limit = time.monotonic(), options.limit * (options.samples + 2)
        row: dict[str, Any]
        try:
            row = ours.recv() if ours.poll(limit) else {"found": {"timeout": 1}, "errors": []}
        except EOFError:
            process.join()
            errors = [{"status": "traceback", "error": f"the process ended with {process.exitcode}"}]
            row = {"found": {"traceback": 1}, "errors": errors}
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        seconds = round(time.monotonic() - begin, 1)
        row = {"name": _name(info), "dtype": dtype, **row, "seconds": seconds}
        with Path(options.results).open("a") as file:
            file.write(json.dumps(row) + "\n")
        worst = next((e["error"][:100] for e in row["errors"]), "")
        print(f"{row['name']:44} {dtype:9} {row['seconds']:5.1f}s {row['found']} {worst}", flush=True)


def _work(pipe: Any, info: Any, dtype: str, options: argparse.Namespace) -> None:
    found, errors = measure_operator(info, getattr(torch, dtype), options.samples, options.limit)
    pipe.send({"found": found, "errors": errors})
    pipe.close()


def _table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Samples by outcome and element type, then operators by their worst sample."""
    samples, operators = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (_, dtype), row in rows.items():
        samples.update({(outcome, dtype): count for outcome, count in row["found"].items()})
        worst = max(row["found"], key=list(OUTCOMES).index, default=None)
        operators.update([(worst, dtype)] if worst else [])
    dtypes = [dtype for dtype in DTYPES if any(key[1] == dtype for key in rows)]
    lines = [" ".join([f"{'samples (operators)':22}", *(f"{dtype:>14}" for dtype in dtypes)])]
    for outcome, what in OUTCOMES.items():
        cells = [f"{samples[outcome, d]:6} ({operators[outcome, d]:5})" for d in dtypes]
        lines.append(" ".join([f"{outcome:22}", *(f"{cell:>14}" for cell in cells), f" {what}"]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    main()

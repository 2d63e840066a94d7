"""Measure the zoo: each model in a process of its own with a time limit, results kept as JSON lines.

    python -m tests.zoo --results zoo.jsonl [--group models,torchvision,timm,transformers] [--only NAME,...]
    python -m tests.zoo --results zoo.jsonl --failed          # again what did not come out right
    python -m tests.zoo --results zoo.jsonl --table           # only print

A model that has its row in the results file is not measured again unless ``--only`` or ``--failed`` asks for it.
The device ``executorch`` is ExecuTorch 1.5 on this machine, from the folder in ``DEVPLAN_EXECUTORCH``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from devplan.passes.source.model import ModelSource
from tests.zoo import catalog, executorch_peer
from tests.zoo.measure import Row, measure
from tests.zoo.table import table


def main() -> None:
    """The command."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # what is measured is an export without a GPU
    options = _parser().parse_args()
    results = _Results(Path(options.results))
    if not options.table:
        for name, group, device in _wanted(options, results):
            row = _in_process(name, group, device, options)
            results.add(row)
            print(
                f"{name:32} {device:5} {row['status']:9} {row['seconds']:7.1f}s  {row['error'][:110]}",
                flush=True,
            )
    print(table(results.rows()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    folder = Path(tempfile.gettempdir())
    parser.add_argument(
        "--results", default=str(folder / "devplan-zoo.jsonl"), help="results, one row a line"
    )
    parser.add_argument("--group", default="models,torchvision,timm,transformers", help="which groups")
    parser.add_argument("--only", default="", help="these models alone, measured again")
    parser.add_argument("--failed", action="store_true", help="measure again what was not right")
    parser.add_argument("--devices", default="cuda,cpu,executorch", help="what to export for")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a model and device")
    parser.add_argument("--no-code", action="store_true", help="leave kernels as sources, for the emulator")
    parser.add_argument("--no-run", action="store_true", help="export only")
    parser.add_argument("--table", action="store_true", help="only print the table")
    return parser


def _wanted(options: argparse.Namespace, results: _Results) -> list[tuple[str, str, str]]:
    only = set(filter(None, options.only.split(",")))
    good = ("right", "exported", "unbuilt")
    rows = [row for row in results.rows() if not options.failed or row["status"] in good]
    done = {(row["group"], row["name"], row["device"]) for row in rows}
    found: list[tuple[str, str, str]] = []
    for group in options.group.split(","):
        for name in catalog.names(group):
            for device in options.devices.split(","):
                if name in only or (not only and (group, name, device) not in done):
                    found.append((name, group, device))
    return found


class _Results:
    """A file of rows, of which the last one of a model and device counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            row = json.loads(line)
            key = (row["group"], row["name"], row["device"])
            found.pop(key, None)
            found[key] = row
        return list(found.values())

    def add(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _in_process(name: str, group: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, name, group, device, options))
    process.start()
    theirs.close()
    row = Row(name, group, device).document()
    deadline = time.monotonic() + options.limit
    try:
        while not row.get("is_final"):  # a row comes after the export, and one at the end
            if not ours.poll(max(deadline - time.monotonic(), 0.0)):
                so_far = "; it was exported" if row["kernels"] else ""
                row |= {"status": "timeout", "error": f"more than {options.limit:g} s{so_far}"}
                break
            row = ours.recv()
    except EOFError:
        process.join()
        row |= {"status": "traceback", "error": f"the process ended with {process.exitcode}"}
    row.pop("is_final", None)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return row


def _work(pipe: Connection, name: str, group: str, device: str, options: argparse.Namespace) -> None:
    os.setsid()  # a time limit ends the compilers that this process starts, too

    def build() -> ModelSource:
        return catalog.build(group, name)

    if device == executorch_peer.DEVICE:
        row = executorch_peer.measure(name, group, build)
    else:
        row = measure(
            name,
            group,
            build,
            device,
            run=not options.no_run,
            code=not options.no_code,
            exported=lambda row: pipe.send(row.document()),
        )
    pipe.send(row.document() | {"is_final": True})
    pipe.close()


if __name__ == "__main__":
    main()

"""Export the named models at full size without their weights, one at a time, and print a table.

    python -m tests.zoo.full_size --results full.jsonl [--only NAME,...] [--dtype bfloat16] [--table]

Each model goes through the command line in a process of its own: `devplan export MODEL --weights none`. A model that
has its row in the results file is not exported again unless ``--only`` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .catalog import MODELS

FURTHER = {"whisper": ("turbo",)}
"""Sizes besides ``full``; ``NAME:SIZE`` here and in `tests/gpu/full_size.py`."""
_HEAD = "| model | export s | peak memory | weights | device arena | over its bound | launches | copies |"


def names() -> list[str]:
    """The model files that have a full size."""
    found: list[str] = []
    for path in sorted(MODELS.glob("*.py")):
        if "DEVPLAN_MODEL_SIZE" in path.read_text():
            found += [path.stem, *(f"{path.stem}:{size}" for size in FURTHER.get(path.stem, ()))]
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", default=str(Path(tempfile.gettempdir()) / "devplan-full-size.jsonl"))
    parser.add_argument("--only", default="", help="these alone, again")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds a model")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    results, only = Path(options.results), list(filter(None, options.only.split(",")))
    for name in [] if options.table else only or [n for n in names() if n not in _rows(results)]:
        row = export(name, options.dtype, options.limit)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(_line(row), flush=True)
    print("\n".join(["", _HEAD, "|" + "---|" * 8, *map(_line, _rows(results).values())]))


def export(name: str, dtype: str, limit: float) -> dict[str, Any]:
    """One model through the command; a row with ``error`` when it fails."""
    stem, _, size = name.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "devplan.devplan_cli",
            "export",
            str(MODELS / f"{stem}.py"),
        ]
        command += [
            "-o",
            f"{folder}/model.pte",
            "--weights",
            "none",
            "--dtype",
            dtype,
            "--arch",
            "sm_90",
            "--json",
        ]
        environment = {**os.environ, "DEVPLAN_MODEL_SIZE": size or "full"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "error": f"more than {limit:g} s"}
    if done.returncode:
        return {"name": name, "error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return {"name": name, **_summary(json.loads(done.stdout))}


def _summary(described: dict[str, Any]) -> dict[str, Any]:
    methods = described["methods"]
    arenas = [a for m in methods for a in m["arenas"] if a["device"] != "cpu" and a["algorithm"] != "stacked"]
    return {
        "seconds": described["export_seconds"],
        "stage_seconds": described["stage_seconds"],
        "peak_rss": described["peak_rss_bytes"],
        "weights": described["constants"]["unique_bytes"],
        "arena": max((a["planned_bytes"] for a in arenas), default=0),
        "ratio": max((a["planned_bytes"] / max(a["lower_bound_bytes"], 1) for a in arenas), default=1.0),
        "launches": sum(region["launches"] for m in methods for region in m["regions"]),
        "copies": sum(len(m["copies"]) for m in methods),
    }


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | {row['error'].replace('|', '/')} |" + " |" * 6
    cells = [
        row["name"],
        f"{row['seconds']:.0f}",
        f"{row['peak_rss'] / 2**20:.0f} MiB",
        f"{row['weights'] / 2**30:.2f} GiB",
        f"{row['arena'] / 2**20:.1f} MiB",
        f"{row['ratio']:.3f}",
        str(row["launches"]),
        str(row["copies"]),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()

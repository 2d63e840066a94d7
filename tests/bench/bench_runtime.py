"""An artifact against PyTorch's own ways of running the same model, side by side on this machine's GPU.

    python tests/bench/bench_runtime.py encoder.pte encoder_model.py --dtype float16

Each runs in a process of its own: devplan must not import torch, and no peer may profit from another's warm-up.
Prints medians, each as a ratio to the best peer, with the commit; `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_PEERS = "eager,graph,compile,reduce-overhead"

DEVPLAN = """
import json, sys, time
from pathlib import Path
import numpy as np
artifact, inputs, repeat = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
from devplan.runtime.measure.bench import measure
from devplan.runtime.measure.bench_inputs import read_inputs
from devplan.runtime.artifact import read
method = read(artifact).planned.program.methods[0]
given = read_inputs(inputs)
document = measure(artifact, method.name, given, device="cuda", repeat=repeat, warmup=50)
from devplan.runtime import load
with load(artifact, device="cuda") as program:
    out = next(iter(program.method(method.name).run(given).values()))
out = out.float32() if hasattr(out, "raw") else out
document["output"] = [float(x) for x in np.asarray(out, np.float32).reshape(-1)[:64]]
document["torch_free"] = "torch" not in sys.modules and "triton" not in sys.modules
print(json.dumps(document))
"""

INPUTS = """
import sys
from pathlib import Path
import numpy as np, torch
sys.path.insert(0, sys.argv[4])
import peers
from devplan.runtime.artifact import read
ports = [port.name for port in read(Path(sys.argv[1])).planned.program.methods[0].inputs if port.value]
torch.nn.Module.cuda = lambda self, *a, **k: self
torch.Tensor.pin_memory = lambda self, *a, **k: self
_, given = peers.load_model(Path(sys.argv[2]), sys.argv[5], int(sys.argv[6]))
arrays = {}
for name, x in zip(ports, given, strict=True):
    if x.dtype is torch.bfloat16:
        arrays[name + ":bfloat16"] = x.view(torch.int16).numpy().view(np.uint16)
    else:
        arrays[name] = x.numpy()
np.savez(sys.argv[3], **arrays)
"""


def run(command: list[str], what: str, limit: float = 600.0) -> dict[str, Any]:
    """The last line that a process prints within ``limit`` seconds, as JSON, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"peer": what, "error": f"more than {limit:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines()
        return {"peer": what, "error": errors[-1] if errors else f"exit {done.returncode}"}
    document: dict[str, Any] = json.loads(lines[-1])
    return document


def row_of(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    if "error" in document:
        return {"name": name, "error": document["error"]}
    if "latency_us" in document:  # `devplan bench` measured it
        latency, memory = document["latency_us"], document["memory"]
        return {
            "name": name,
            "end_to_end": latency["end_to_end"]["p50"],
            "device": latency["device"]["p50"],
            "first": document["cold_start_s"]["first_result"],
            "memory": memory["measured_total"]
            or sum(memory[k] or 0 for k in ("arena", "constants", "state")),
            "output": document["output"],
        }
    return {
        "name": name,
        **{key: document[key] for key in ("end_to_end", "device", "memory", "output")},
        "first": document["first_result_s"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Aligned columns; ratios are devplan's number over the row's."""
    ours = rows[0]
    lines = [
        f"{'':18}{'host to host':>14}{'device':>12}{'first output':>14}{'memory':>12}{'devplan is':>12}{'differs':>10}"
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:18}{row['error'][:100]}")
            continue
        ratio = "" if "error" in ours or row is ours else f"{ours['end_to_end'] / row['end_to_end']:.2f} x"
        pairs = zip(row["output"], ours.get("output", []), strict=False)
        differs = "" if row is ours else f"{max((abs(a - b) for a, b in pairs), default=math.nan):.1e}"
        lines.append(
            f"{row['name']:18}{row['end_to_end']:11.1f} us{row['device']:9.1f} us{row['first']:12.2f} s"
            f"{row['memory'] / 2**20:8.1f} MiB{ratio:>12}{differs:>10}"
        )
    return lines


def commit() -> str:
    """The commit, or `unknown` outside a checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("model", type=Path, help="a model file: `model`, `example_inputs`")
    parser.add_argument(
        "--dtype", default="", help="cast parameters and floating inputs, as `export --dtype` did"
    )
    parser.add_argument(
        "--batch", type=int, default=1, help="repeat the example inputs, as the artifact expects"
    )
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument(
        "--peers", default=DEFAULT_PEERS, help=f"default {DEFAULT_PEERS}; also max-autotune, aoti"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    inputs = Path(f"/tmp/bench_inputs_{asked.artifact.stem}.npz")
    python, flags = sys.executable, ["--dtype", asked.dtype, "--batch", str(asked.batch)]
    subprocess.run(
        [
            python,
            "-c",
            INPUTS,
            str(asked.artifact),
            str(asked.model),
            str(inputs),
            str(HERE),
            asked.dtype,
            str(asked.batch),
        ],
        check=True,
    )
    documents = {
        "devplan": run(
            [python, "-c", DEVPLAN, str(asked.artifact), str(inputs), str(asked.repeat)], "devplan"
        )
    }
    for peer in filter(None, asked.peers.split(",")):
        command = [
            python,
            str(HERE / "peers.py"),
            peer,
            str(asked.model),
            *flags,
            "--repeat",
            str(asked.repeat),
        ]
        documents[peer] = run([*command, "--started", repr(time.time())], peer)
    rows = [row_of(name, document) for name, document in documents.items()]
    print(f"{asked.artifact.name}, batch {asked.batch}, medians of {asked.repeat}, commit {commit()}")
    print("\n".join(table(rows)))
    best = min((row["end_to_end"] for row in rows[1:] if "error" not in row), default=0.0)
    if best and "error" not in rows[0]:
        print(f"best peer {best:.1f} us host to host: devplan takes {rows[0]['end_to_end'] / best:.2f} of it")
        print(
            f"torch-free: {documents['devplan']['torch_free']}, cold start {documents['devplan']['cold_start_s']}"
        )
        print(f"parts {documents['devplan']['latency_us']}\nmemory {documents['devplan']['memory']}")
    if asked.json:
        asked.json.write_text(json.dumps({"commit": commit(), "documents": documents}, indent=1))
    return 0 if "error" not in rows[0] else 1


if __name__ == "__main__":
    sys.exit(main())

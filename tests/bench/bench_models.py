"""The runtime benchmark: models exported on this machine and run beside PyTorch's own ways, one table.

    python tests/bench/bench_models.py --batch 1 --peers graph,reduce-overhead

Every model is exported for this GPU first (in parallel), then measured alone, each peer in a process of its own.
The last lines give the geometric mean of devplan's time over the best peer's, and of its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from bench_runtime import row_of  # noqa: E402

ROOT = HERE.parents[1]
MODELS = {
    "encoder": HERE / "models/encoder.py",
    "minilm": HERE / "models/minilm_shape.py",
    "resnet18": ROOT / "configs/models/resnet18.py",
    "mobilenet_v2": ROOT / "configs/models/mobilenet_v2.py",
    "dinov2_small": ROOT / "configs/models/dinov2_small.py",
    "whisper_encoder": HERE / "models/whisper_encoder.py",
    "llama_decode": HERE / "models/llama_decode.py",
}


def settings(model: str, batch: int) -> dict[str, str]:
    """The environment in which a model is exported and run, full size and batched."""
    return {
        **os.environ,
        "DEVPLAN_MODEL_SIZE": "full",
        "DEVPLAN_BENCH_MODEL": str(MODELS[model]),
        "DEVPLAN_BENCH_BATCH": str(batch),
    }


def exported(model: str, batch: int, dtype: str, folder: Path) -> tuple[Path, str]:
    """The artifact, and what went wrong in making it (empty if nothing)."""
    path = folder / f"{model}-{batch}.pte"
    command = [sys.executable, "-m", "devplan.devplan_cli", "export", str(HERE / "models/batched.py")]
    command += ["--dtype", dtype, "--arch", "native", "-o", str(path), "-q"]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=settings(model, batch), check=False)
    failure = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    print(f"exported {model} batch {batch} in {time.time() - begin:.1f} s {' '.join(failure)}", flush=True)
    return path, " ".join(failure)


def measured(model: str, batch: int, dtype: str, path: Path, peers: str) -> list[dict[str, Any]]:
    """The rows of one model's table."""
    out = path.with_suffix(".json")
    command = [sys.executable, str(HERE / "bench_runtime.py"), str(path), str(HERE / "models/batched.py")]
    command += ["--dtype", dtype, "--peers", peers, "--json", str(out), "--repeat", "200"]
    done = subprocess.run(command, capture_output=True, text=True, env=settings(model, batch), check=False)
    if not out.exists():
        return [{"name": "devplan", "error": (done.stderr.strip().splitlines() or ["failed"])[-1]}]
    documents: dict[str, Any] = json.loads(out.read_text())["documents"]
    return [row_of(name, document) for name, document in documents.items()]


def summary(model: str, batch: int, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Print one line; the ratios of time and of memory to the best peer's (NaN where there is none)."""
    ours, peers = rows[0], [r for r in rows[1:] if "error" not in r]
    failed = [f"{r['name']}: {r['error'][:60]}" for r in rows if "error" in r]
    if "error" in ours or not peers:
        print(f"{model:16}{batch:4}  {'; '.join(failed)}", flush=True)
        return math.nan, math.nan
    best = min(peers, key=lambda r: float(r["end_to_end"]))
    least = min(float(r["memory"]) for r in peers)
    ratio, memory = ours["end_to_end"] / best["end_to_end"], ours["memory"] / least
    print(
        f"{model:16}{batch:4}{ours['end_to_end']:11.1f} us{ours['device']:10.1f} us{best['end_to_end']:11.1f} us "
        f"{best['name']:16}{ratio:6.2f} x{ours['memory'] / 2**20:9.1f} MiB{memory:6.2f} x  {'; '.join(failed)}",
        flush=True,
    )
    return ratio, memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", default="1", help="one or more, such as 1,32")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--peers", default="eager,graph,reduce-overhead")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/devplan-bench"))
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    work = [(m, int(b)) for b in asked.batch.split(",") for m in asked.models.split(",")]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda w: exported(*w, asked.dtype, asked.folder), work))
    print(f"{'model':16}batch  host to host       device    best peer{'':20}ratio      memory  ratio")
    ratios: dict[int, list[tuple[float, float]]] = {}
    for (model, batch), (path, failure) in zip(work, made, strict=True):
        if not failure:
            rows = measured(model, batch, asked.dtype, path, asked.peers)
            ratios.setdefault(batch, []).append(summary(model, batch, rows))
    for batch, pairs in ratios.items():
        known = [p for p in pairs if not math.isnan(p[0])]
        means = [math.exp(sum(math.log(p[i]) for p in known) / max(len(known), 1)) for i in range(2)]
        print(
            f"batch {batch}: geometric mean over {len(known)} models: time {means[0]:.2f} x, memory {means[1]:.2f} x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The runtime benchmark: models exported on this machine and run beside PyTorch's own ways, one table.

    python tests/bench/bench_models.py --batch 1,32 --peers graph,reduce-overhead

Everything is prepared at once: each model is exported for this GPU, and each peer loads, compiles and warms up in a
process of its own. Then all wait, and one at a time is measured, so that nothing else runs meanwhile. Whoever is not
ready within ``--prepare`` seconds is left out, and said to be. The last lines give the geometric means of devplan's
time over the best peer's, and of its memory over the least of theirs. ``--own-kernels`` also exports each model
without library calls and adds the times of that to its line.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from bench_runtime import DEVPLAN, INPUTS, commit, row_of, run  # noqa: E402

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
TINY = {"add16": HERE / "models/add16.py"}
"""Measured when named; no part of the means."""
BATCHED = HERE / "models/batched.py"
_FEW_WORKERS = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
"""Peers prepare side by side: each with as many workers as the machine has cores would be too many."""


@dataclass
class Case:
    """One model at one batch size: its artifact, its peers that wait to be measured, and what came out."""

    model: str
    batch: int
    folder: Path
    failure: str = ""
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """What came out of the export without library calls."""
    peers: dict[str, subprocess.Popen[str]] = field(default_factory=dict[str, "subprocess.Popen[str]"])
    documents: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def artifact(self) -> Path:
        """Where the export goes."""
        return self.folder / f"{self.model}-{self.batch}.pte"

    @property
    def own_artifact(self) -> Path:
        """Where the export without library calls goes, if it is asked for."""
        return self.folder / f"{self.model}-{self.batch}-own.pte"

    @property
    def inputs(self) -> Path:
        """Where the inputs go, as NumPy has them."""
        return self.folder / f"{self.model}-{self.batch}.npz"

    def gate(self, peer: str) -> Path:
        """A peer makes this file with the suffix ``.ready`` and waits for the one with ``.go``."""
        return self.folder / f"{self.model}-{self.batch}-{peer}"

    @property
    def environment(self) -> dict[str, str]:
        """In which the model is exported and run, full size and batched."""
        return {
            **os.environ,
            "DEVPLAN_MODEL_SIZE": "full",
            "DEVPLAN_BENCH_MODEL": str((MODELS | TINY)[self.model]),
            "DEVPLAN_BENCH_BATCH": str(self.batch),
        }


def repeats(case: Case, wanted: int) -> int:
    """Timed calls of one case: a batch takes long enough for fewer."""
    return wanted if case.batch == 1 else max(wanted // 4, 1)


def export(case: Case, dtype: str, options: list[str]) -> None:
    """Make the artifact and its inputs."""
    begin = time.time()
    case.failure = _exported(case, case.artifact, dtype, options)
    if not case.failure:
        given = [str(case.artifact), str(BATCHED), str(case.inputs), str(HERE), dtype, "1"]
        subprocess.run([sys.executable, "-c", INPUTS, *given], env=case.environment, check=True)
    print(
        f"exported {case.model} batch {case.batch} in {time.time() - begin:.1f} s {case.failure}", flush=True
    )


def export_own(case: Case, dtype: str, options: list[str]) -> None:
    """Make the artifact without library calls."""
    failure = _exported(case, case.own_artifact, dtype, [*options, "--no-library-calls"])
    case.own = {"error": failure} if failure else {}


def _exported(case: Case, artifact: Path, dtype: str, options: list[str]) -> str:
    """Export for this GPU; gives why not, or nothing."""
    command = [sys.executable, "-m", "devplan.devplan_cli", "export", str(BATCHED), *options]
    command += ["--dtype", dtype, "--arch", "native", "-o", str(artifact), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, env=case.environment, check=False)
    return (done.stderr.strip().splitlines() or ["failed"])[-1] if done.returncode else ""


def start_peer(case: Case, peer: str, dtype: str, repeat: int) -> None:
    """Let a peer prepare and wait."""
    command = [sys.executable, str(HERE / "peers.py"), peer, str(BATCHED), "--dtype", dtype]
    command += ["--repeat", str(repeat), "--gate", str(case.gate(peer)), "--started", repr(time.time())]
    with case.gate(peer).with_suffix(".log").open("w") as log:
        case.peers[peer] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=case.environment | _FEW_WORKERS
        )


def _unprepared(cases: list[Case]) -> list[tuple[Case, str]]:
    return [
        (case, peer)
        for case in cases
        for peer, process in case.peers.items()
        if process.poll() is None and not case.gate(peer).with_suffix(".ready").exists()
    ]


def wait_for_peers(cases: list[Case], end: float) -> None:
    """Until each is ready or has failed, or the time is over; the rest is killed."""
    while (late := _unprepared(cases)) and time.time() < end:
        time.sleep(0.2)
    for case, peer in late:
        case.peers[peer].kill()
        case.peers[peer].wait()
        case.documents[peer] = {"peer": peer, "error": "was not ready in time"}


def measure(case: Case, repeat: int, limit: float) -> None:
    """Run devplan, for so many seconds at most, then each peer."""
    if case.failure:
        case.documents["devplan"] = {"error": case.failure}
    else:
        command = [sys.executable, "-c", DEVPLAN, str(case.artifact), str(case.inputs), str(repeat)]
        ours = run(command, "devplan", limit)
        case.documents = {"devplan": ours, **case.documents}
    if case.own_artifact.exists() and not case.own:
        command = [sys.executable, "-c", DEVPLAN, str(case.own_artifact), str(case.inputs), str(repeat)]
        case.own = run(command, "own kernels", limit)
    for peer, process in case.peers.items():
        if peer in case.documents:
            continue
        case.gate(peer).with_suffix(".go").touch()
        out, _ = process.communicate()
        lines = out.strip().splitlines()
        if process.returncode or not lines:
            log = case.gate(peer).with_suffix(".log").read_text().strip().splitlines()
            telling = [line for line in log if "Error" in line or "error" in line] or log
            why = f"exit {process.returncode}" + (f", {telling[-1].strip()}" if telling else "")
            case.documents[peer] = {"peer": peer, "error": why}
        else:
            case.documents[peer] = json.loads(lines[-1])


def summary(case: Case) -> tuple[float, float]:
    """Print one line; the ratios of time and of memory to the best peer's (NaN where there is none)."""
    rows = [row_of(name, document) for name, document in case.documents.items()]
    ours, peers = rows[0], [r for r in rows[1:] if "error" not in r]
    failed = [f"{r['name']}: {r['error'][:60]}" for r in rows if "error" in r]
    if case.own:
        own = row_of("own kernels", case.own)
        times = own.get("error") or f"{own['end_to_end']:.1f} us, device {own['device']:.1f} us"
        failed.append(f"own kernels: {times[:60]}")
    if "error" in ours or not peers:
        alone = "" if "error" in ours else f"{ours['end_to_end']:11.1f} us{ours['device']:10.1f} us  no peer"
        print(f"{case.model:16}{case.batch:4}{alone}  {'; '.join(failed)}", flush=True)
        return math.nan, math.nan
    best = min(peers, key=lambda r: float(r["end_to_end"]))
    least = min(float(r["memory"]) for r in peers)
    ratio, memory = ours["end_to_end"] / best["end_to_end"], ours["memory"] / least
    differs = max(
        max((abs(a - b) for a, b in zip(r["output"], ours["output"], strict=False)), default=math.nan)
        for r in peers
    )
    parts = case.documents["devplan"]["memory"]
    known = sum(
        v or 0 for k, v in parts.items() if k not in ("staging", "load", "calls", "unnamed", "measured_total")
    )
    print(
        f"{case.model:16}{case.batch:4}{ours['end_to_end']:11.1f} us{ours['device']:10.1f} us"
        f"{best['end_to_end']:11.1f} us {best['name']:16}{ratio:6.2f} x{ours['memory'] / 2**20:9.1f} MiB"
        f"{memory:6.2f} x{100 * known / (parts['measured_total'] or math.nan):7.1f} %{differs:10.1e}"
        f"  {'; '.join(failed)}",
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
    parser.add_argument("--extra", default="", help="further peers of models at batch 1: MODEL:PEER,...")
    parser.add_argument("--export", default="", help="further options of the export, separated by blanks")
    parser.add_argument("--repeat", type=int, default=200, help="timed calls; a quarter of it for batches")
    parser.add_argument(
        "--prepare", type=float, default=600.0, help="seconds until who is not ready is left out"
    )
    parser.add_argument(
        "--hold", type=Path, help="measure only once this file is there: others may use the GPU"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one measurement may take")
    parser.add_argument("--own-kernels", action="store_true", help="also without library calls")
    parser.add_argument("--jobs", type=int, default=6, help="exports at a time")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/devplan-bench"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for old in (*asked.folder.glob("*.ready"), *asked.folder.glob("*.go"), *asked.folder.glob("*-own.pte")):
        old.unlink()
    end = time.time() + asked.prepare
    cases = [Case(m, int(b), asked.folder) for b in asked.batch.split(",") for m in asked.models.split(",")]
    extra = [part.split(":") for part in asked.extra.split(",") if part]
    for case in cases:
        further = [peer for model, peer in extra if model == case.model and case.batch == 1]
        for peer in (*filter(None, asked.peers.split(",")), *further):
            start_peer(case, peer, asked.dtype, repeats(case, asked.repeat))
    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(lambda case: export(case, asked.dtype, asked.export.split()), cases))
        if asked.own_kernels:
            list(pool.map(lambda case: export_own(case, asked.dtype, asked.export.split()), cases))
    wait_for_peers(cases, end)
    while asked.hold and not asked.hold.exists():
        time.sleep(0.1)
    print(
        f"commit {commit()}, {asked.dtype}, medians of {asked.repeat}\n"
        f"{'model':16}batch  host to host       device    best peer{'':20}ratio      memory  ratio  known   differs",
        flush=True,
    )
    ratios: dict[int, list[tuple[float, float]]] = {}
    for case in cases:
        measure(case, repeats(case, asked.repeat), asked.limit)
        pair = summary(case)
        if case.model in MODELS:
            ratios.setdefault(case.batch, []).append(pair)
    for batch, pairs in ratios.items():
        known = [p for p in pairs if not math.isnan(p[0])]
        means = [math.exp(sum(math.log(p[i]) for p in known) / max(len(known), 1)) for i in range(2)]
        print(
            f"batch {batch}: geometric mean over {len(known)} models: time {means[0]:.2f} x, memory {means[1]:.2f} x"
        )
    if asked.json:
        documents = {f"{case.model}-{case.batch}": case.documents for case in cases}
        asked.json.write_text(json.dumps({"commit": commit(), "cases": documents}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

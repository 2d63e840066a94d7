"""How long an export takes, beside AOTInductor's and ExecuTorch's CUDA backend's, one table.

    python tests/bench/bench_export.py [--models resnet18,mobilenet_v2,whisper_encoder] [--dtype float16]
    python tests/bench/bench_export.py --ways devplan,aoti --peer-device cpu    # where there is no GPU

Every way starts a process of its own with empty caches. ``export`` is from a module in memory to files on disk,
``process`` the whole of it, imports and the building of the model included; medians of ``--repeat``. ``devplan``
compiles for this GPU's architecture alone, as the peers do, ``devplan default`` for all that an export names unless
told otherwise. ExecuTorch is taken from DEVPLAN_EXECUTORCH (``pip install --target``); what a way cannot do is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = {
    "resnet18": ROOT / "configs/models/resnet18.py",
    "mobilenet_v2": ROOT / "configs/models/mobilenet_v2.py",
    "dinov2_small": ROOT / "configs/models/dinov2_small.py",
    "encoder": HERE / "models/encoder.py",
    "whisper_encoder": HERE / "models/whisper_encoder.py",
}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DEVPLAN_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where the ways keep what they compiled."""
Files = list[Path]
Way = Callable[[Any, list[Any], Path, argparse.Namespace], Files]


# --- one way, in its own process ---------------------------------------------------------------------------


def model_and_inputs(path: Path, dtype: str) -> tuple[Any, list[Any]]:
    """The module and its example inputs on the host, in the element type."""
    import torch

    spec = importlib.util.spec_from_file_location("benched_model", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    model = file.model if isinstance(file.model, torch.nn.Module) else file.model()
    inputs = file.example_inputs() if callable(file.example_inputs) else file.example_inputs
    given = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    wanted = getattr(torch, dtype)
    given = [x.to(wanted) if x.is_floating_point() else x for x in given]
    return model.eval().to(wanted), given


def by_devplan(model: Any, inputs: list[Any], folder: Path, asked: argparse.Namespace) -> Files:
    """This tool, for the architecture of the GPU that is here (sm_90 where there is none)."""
    import devplan

    path = folder / "model.pte"
    named = {} if asked.way == "devplan default" else {"arch": asked.arch}
    devplan.export(model, tuple(inputs), device=asked.devplan_device, **named).write(path)
    return [path]


def by_aoti(model: Any, inputs: list[Any], folder: Path, asked: argparse.Namespace) -> Files:
    """AOTInductor with its defaults."""
    import torch

    with torch.no_grad():
        model, inputs = model.to(asked.peer_device), [x.to(asked.peer_device) for x in inputs]
        exported = torch.export.export(model, tuple(inputs))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "model.pt2"))
    return [Path(path)]


def by_executorch(model: Any, inputs: list[Any], folder: Path, asked: argparse.Namespace) -> Files:
    """ExecuTorch's CUDA backend as its examples use it; ``--quick-peer`` leaves out its autotuning."""
    import torch

    sys.path.append(os.environ["DEVPLAN_EXECUTORCH"])
    exir: Any = __import__("executorch.exir", fromlist=["x"])
    backend: Any = __import__("executorch.backends.cuda.cuda_backend", fromlist=["x"]).CudaBackend
    partitioner: Any = __import__("executorch.backends.cuda.cuda_partitioner", fromlist=["x"]).CudaPartitioner
    specs = [backend.generate_method_name_compile_spec("forward")]
    if asked.way == "executorch untuned":
        compile_spec: Any = __import__("executorch.exir.backend.compile_spec_schema", fromlist=["x"])
        specs.append(compile_spec.CompileSpec("max_autotune", b"OFF"))
    with torch.no_grad():
        exported = torch.export.export(model, tuple(inputs))
        edge = exir.to_edge_transform_and_lower(
            exported,
            partitioner=[partitioner(specs)],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        program = edge.to_executorch()
    with (folder / "model.pte").open("wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(folder))
    return [path for path in folder.iterdir() if path.suffix in (".pte", ".ptd")]


WAYS: dict[str, Way] = {
    "devplan": by_devplan,
    "devplan default": by_devplan,
    "aoti": by_aoti,
    "executorch": by_executorch,
    "executorch untuned": by_executorch,
}


def work(asked: argparse.Namespace) -> None:
    """Build, export, print a JSON line."""
    model, inputs = model_and_inputs(MODELS[asked.models], asked.dtype)
    if asked.peer_device == "cuda" and not asked.way.startswith("devplan"):
        import torch

        torch.zeros(1, device="cuda")  # the driver's start is nobody's export
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        files = WAYS[asked.way](model, inputs, Path(folder), asked)
        seconds = time.perf_counter() - begin
        sizes = [path.stat().st_size for path in files]
    print(json.dumps({"export": seconds, "bytes": sum(sizes)}), flush=True)


# --- all of them -------------------------------------------------------------------------------------------


def measured(model: str, way: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One run with empty caches; ``error`` where it failed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--way", way, "--models", model]
    command += ["--dtype", asked.dtype, "--arch", asked.arch]
    command += ["--peer-device", asked.peer_device, "--devplan-device", asked.devplan_device]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        environment = {**os.environ, **caches, "DEVPLAN_MODEL_SIZE": "full"}
        paths = [str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=asked.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"more than {asked.limit:g} s"}
        seconds = time.perf_counter() - begin
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return {"error": lines[-1][:200]}
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**document, "process": seconds}


def row(model: str, way: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Medians of all runs of one way, printed as they come."""
    runs = [measured(model, way, asked) for _ in range(asked.repeat)]
    failed = [run["error"] for run in runs if "error" in run]
    if failed:
        print(f"{model:18}{way:20}  failed: {failed[0]}", flush=True)
        return {"model": model, "way": way, "error": failed[0]}
    found = {key: statistics.median(run[key] for run in runs) for key in ("export", "process", "bytes")}
    print(
        f"{model:18}{way:20}{found['export']:9.1f} s{found['process']:9.1f} s{found['bytes'] / 2**20:9.1f} MiB",
        flush=True,
    )
    return {"model": model, "way": way, **found}


def ratios(rows: list[dict[str, Any]]) -> None:
    """Devplan's seconds over each peer's, model by model, and their geometric means."""
    known = {(r["model"], r["way"]): r for r in rows if "error" not in r}
    peers = [w for w in WAYS if not w.startswith("devplan") and any(way == w for _, way in known)]
    for ours in ("devplan", "devplan default"):
        for peer in peers:
            pairs = [
                (m, r["export"] / known[m, peer]["export"], r["process"] / known[m, peer]["process"])
                for (m, way), r in known.items()
                if way == ours and (m, peer) in known
            ]
            if pairs:
                export, process = (math.exp(statistics.fmean(math.log(p[i]) for p in pairs)) for i in (1, 2))
                each = ", ".join(f"{m} {e:.2f}" for m, e, _ in pairs)
                print(
                    f"{ours} over {peer}: export {export:.2f} ({each}), process {process:.2f} "
                    f"(geometric means of {len(pairs)})"
                )


def parser() -> argparse.ArgumentParser:
    """The command's flags; ``--way`` makes it the process of one way."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default="resnet18,mobilenet_v2,whisper_encoder")
    made.add_argument("--ways", default=",".join(WAYS))
    made.add_argument("--dtype", default="float16")
    made.add_argument("--arch", default="sm_90", help="what devplan compiles for; `native` asks the GPU")
    made.add_argument("--devplan-device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--peer-device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--repeat", type=int, default=1)
    made.add_argument("--limit", type=float, default=400.0, help="seconds a run")
    made.add_argument("--json", type=Path, help="also write the rows there")
    made.add_argument("--way", default="", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """The command."""
    asked = parser().parse_args()
    if asked.way:
        work(asked)
        return 0
    ways = [way for way in asked.ways.split(",") if way in WAYS]
    if not os.environ.get("DEVPLAN_EXECUTORCH"):
        ways = [way for way in ways if not way.startswith("executorch")]
        print("ExecuTorch is not measured: DEVPLAN_EXECUTORCH is not set")
    print(f"{'model':18}{'way':20}{'export':>11}{'process':>11}{'files':>13}")
    rows = [row(model, way, asked) for model in asked.models.split(",") for way in ways]
    ratios(rows)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

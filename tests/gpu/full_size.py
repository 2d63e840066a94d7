"""Named models at full size on a GPU: exported without weights, run, and compared with eager in two precisions.

    python tests/gpu/full_size.py [--only NAME,...] [--dtype bfloat16] [--limit SECONDS] [--jobs N]
    python tests/gpu/full_size.py --size small --device emulator     # the same without a GPU
    python tests/gpu/full_size.py --save FOLDER                      # export alone, which needs no GPU
    python tests/gpu/full_size.py --artifacts FOLDER                 # and run what was exported so

Weights are random, made on the device in the given type. Errors are norms of differences over the norm of eager's
result in float32 with the same weights: ours, and that of eager in the same type, which is the yardstick; a model
whose results other inputs hardly move is called deaf, since its agreement would say nothing. One line a model,
printed as soon as it is known; models run N at a time, but one at a time on the device (``--at-once``).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT.parent)] if ROOT.name == "devplan" else []
MODELS = ROOT / "configs" / "models"
NAMED = (
    "whisper", "qwen3", "gemma3", "dinov2_small", "resnet18", "whisper:turbo", "voxtral_mini_3b", "mobilenet_v2",
    "llama_decode", "parakeet_tdt", "moshi", "mimi", "voxtral_mini_4b_realtime", "wav2letter", "mobilenet_v3",
    "sortformer", "emformer", "llama_lora", "llama_stories260k", "sdpa", "conv1d", "linear", "add_mul", "qwen3_5_moe",
)  # fmt: skip
"""Those that tell most come first, and the longest exports early; what the time does not reach is said."""
CALLS, TIMED, THREADS = 2, 20, 4
EXPORTED = "exported"
"""The line with which a model's process gives its turn to the next export."""


def main() -> None:
    """The command."""
    options = _parser().parse_args()
    if options.one:
        print(json.dumps(_measure(options)))
        return
    names = options.only.split(",") if options.only else NAMED
    names = [name for name in names if (MODELS / f"{name.partition(':')[0]}.py").exists()]
    end, turns = time.monotonic() + options.limit, threading.Semaphore(options.jobs)
    failed = 0
    with tempfile.TemporaryDirectory() as places, ThreadPoolExecutor(len(names)) as pool:
        for number in range(options.at_once):
            (Path(places) / str(number)).touch()
        jobs = [pool.submit(_in_process, name, options, places, end, turns) for name in names]
        for job in as_completed(jobs):
            line, good = job.result()
            failed += not good
            print(line, flush=True)
    print(f"{len(names) - failed} of {len(names)} good", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="these models alone; NAME or NAME:SIZE")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", default="full")
    parser.add_argument("--device", default="cuda", help="cuda, or emulator")
    parser.add_argument(
        "--limit", type=float, default=540.0, help="seconds, after which nothing more is begun"
    )
    parser.add_argument("--each", type=float, default=300.0, help="seconds for a model from its turn on")
    parser.add_argument("--on-device", type=int, default=100, help="of them, seconds on the device")
    parser.add_argument("--jobs", type=int, default=4, help="exports at a time")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="models at a time on the device: with more than one, times are not fair",
    )
    parser.add_argument("--logs", default="", help="a folder for what failed models wrote")
    parser.add_argument("--save", default="", help="only export, into this folder, what is not there yet")
    parser.add_argument("--artifacts", default="", help="take the exports from this folder")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--places", default="", help=argparse.SUPPRESS)
    return parser


def _in_process(
    name: str, options: argparse.Namespace, places: str, end: float, turns: threading.Semaphore
) -> tuple[str, bool]:
    """One model's line, and whether it is good. ``turns`` is held until the model is exported."""
    with contextlib.ExitStack() as turn, tempfile.TemporaryFile("w+") as errors:
        turn.enter_context(turns)
        left = min(end - time.monotonic(), options.each)
        if left < 5:
            return f"{name:26} not begun: the time is over", False
        begin, lines = time.monotonic(), list[str]()
        process = _started(name, options, places, errors)
        timer = threading.Timer(left, _end, [process])
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip() == EXPORTED:
                turn.close()
        code = process.wait()
        timer.cancel()
        if code == 0:
            found = json.loads(lines[-1])
            return _line(name, found), found["good"]
        errors.seek(0)
        return _failure(name, code, errors.read(), lines, time.monotonic() - begin, options), False


def _started(name: str, options: argparse.Namespace, places: str, errors: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--places", places]
    for key in ("dtype", "size", "device", "save", "artifacts"):
        command += [f"--{key}", getattr(options, key)] if getattr(options, key) else []
    command += ["--on-device", str(options.on_device)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        env=os.environ | threads,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and those that compile for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _failure(
    name: str, code: int, text: str, lines: list[str], seconds: float, options: argparse.Namespace
) -> str:
    if options.logs:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
        (Path(options.logs) / f"{name.replace(':', '-')}.txt").write_text(text)
    where = "on the device" if f"{EXPORTED}\n" in lines else "before it was exported"
    if code == -signal.SIGALRM:
        return f"{name:26} stopped: {options.on_device} s on the device"
    if code == -signal.SIGKILL:
        return f"{name:26} stopped after {seconds:.0f} s, {where}"
    last = [line for line in text.splitlines() if line.strip()]
    return f"{name:26} failed {where}: {(last or [f'exit code {code}'])[-1][:300]}"


def _line(name: str, found: dict[str, Any]) -> str:
    if "saved" in found:
        return f"{name:26} {found['saved']}"
    parts = [
        f"{name:26} export {found['export_s']:.0f} s, {found['rss'] / 2**30:.2f} GiB",
        f"weights {found['constants'] / 2**30:.2f} GiB",
        f"arena {found['arena'] / 2**20:.1f} MiB ({found['ratio']:.3f} of its bound)",
        f"{found['launches']} launches",
        f"load {found['load_s']:.1f} s",
    ]
    for method in found["methods"]:
        errors = f"{method['ours']:.2e} / {method['eager']:.2e}"
        ids = f", ids {method['same']:.0%} as eager's" if method["same"] is not None else ""
        speed = f", {method['ms']:.2f} ms" if "ms" in method else ""
        speed += f", DEAF: other inputs move it by {method['heard']:.1e}" if method["deaf"] else ""
        parts.append(f"{method['name']} {errors}{ids}{speed}")
    return " | ".join([*parts, "ok" if found["good"] else "WRONG"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    name, _, size = options.one.partition(":")
    os.environ["DEVPLAN_MODEL_SIZE"] = size if size and options.size == "full" else options.size
    import torch

    from devplan.passes.api import Exported
    from devplan.passes.export import export
    from devplan.passes.options import ExportOptions
    from devplan.passes.source.load import resolve
    from devplan.passes.source.state_dict import constants_with
    from devplan.runtime.loading import load_planned

    torch.set_num_threads(THREADS)
    dtype, path = getattr(torch, options.dtype), str(MODELS / f"{name}.py")
    place = torch.device("cuda" if options.device == "cuda" else "cpu")

    def build(kind: Any, device: Any, **how: Any) -> Any:
        torch.set_default_dtype(kind)
        try:
            with device, torch.no_grad():
                torch.manual_seed(0)
                return resolve(path, **how)
        finally:
            torch.set_default_dtype(torch.float32)

    file = Path(options.save or options.artifacts or ".") / f"{options.one.replace(':', '-')}.pte"
    if options.save and file.exists():
        return {"saved": "was exported before", "good": True}
    source = build(dtype, torch.device("cpu"), weightless=True)
    architectures = (_architecture(),) if place.type == "cuda" and not options.save else ("sm_90",)
    begin = time.monotonic()
    if options.artifacts:
        result = _exported(file)
    else:
        result = export(source, ExportOptions(architectures=architectures, weights="none", jobs=THREADS))
    found: dict[str, Any] = {"export_s": time.monotonic() - begin}
    if options.save:
        Exported(result, "none").write(file)
        return {
            "saved": f"export {found['export_s']:.0f} s, {file.stat().st_size / 2**20:.1f} MiB",
            "good": True,
        }
    found["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found |= _plan(result)
    print(EXPORTED, flush=True)
    torch.backends.cudnn.allow_tf32 = False
    with _place_on_the_device(options.places, options.on_device), torch.no_grad():
        half, exact = build(dtype, place), build(torch.float32, place)
        weights: dict[str, Any] = {}
        for twin, method in zip(exact.methods, half.methods, strict=True):
            weights |= method.module.state_dict()
            twin.module.to(torch.float32)  # a model may name its own type
            twin.module.load_state_dict(method.module.state_dict())
        begin = time.monotonic()
        with load_planned(result.planned, constants_with(result, weights), options.device) as program:
            found["load_s"] = time.monotonic() - begin
            found["methods"] = [
                _compare(program, *methods, place)
                for methods in zip(source.methods, half.methods, exact.methods, strict=True)
            ]
    bounds = [
        max(2 * method["eager"], 1e-3 if dtype != torch.float32 else 1e-5) for method in found["methods"]
    ]
    for method, bound in zip(found["methods"], bounds, strict=True):
        method["deaf"] = method["heard"] is not None and method["heard"] < 4 * bound
    found["good"] = all(
        m["ours"] <= bound and not m["deaf"] for m, bound in zip(found["methods"], bounds, strict=True)
    )
    return found


def _exported(file: Path) -> Any:
    """What `export` gives, from an artifact without weights."""
    from devplan.passes.export import ExportResult
    from devplan.runtime.artifact import read

    artifact = read(file)
    recipes = {blob.digest: blob.recipe for blob in artifact.blobs if blob.recipe is not None}
    held = {
        digest: (lambda d=digest: artifact.constants[d])
        for digest in artifact.constants
        if digest not in recipes
    }
    return ExportResult(artifact.planned, held, (), {}, recipes)


def _architecture() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@contextlib.contextmanager
def _place_on_the_device(places: str, seconds: int) -> Iterator[None]:
    """As many processes at a time as there are files; the system ends one when its seconds are over, wherever it is."""
    with contextlib.ExitStack() as held:
        files = [held.enter_context(place.open()) for place in Path(places).iterdir()] if places else []
        while files and not any(_taken(file) for file in files):
            time.sleep(0.05)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        yield
        signal.alarm(0)


def _taken(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _plan(result: Any) -> dict[str, Any]:
    from devplan.runtime.memory.allocator import constants_nbytes
    from devplan.runtime.program import Launch, LibraryCall

    arenas = [a for m in result.planned.plan.methods for a in m.arenas if a.kind == "arena"]
    device = [a for a in arenas if str(a.device) != "cpu"]
    largest = max(device, key=lambda a: a.nbytes)
    steps = [i for m in result.planned.program.methods for i in m.instructions]
    return {
        "constants": constants_nbytes(result.planned),
        "arena": largest.nbytes,
        "ratio": max(a.nbytes / max(a.lower_bound, 1) for a in device),
        "launches": sum(isinstance(i, Launch | LibraryCall) for i in steps),
    }


def _compare(program: Any, source: Any, half: Any, exact: Any, place: Any) -> dict[str, Any]:
    """One method, `CALLS` times in a row: relative errors of the worst output, and the speed on a GPU."""
    import torch
    from torch.utils import _pytree as pytree

    method, floats = program.method(source.name), torch.float32

    def given(dtype: Any = None) -> tuple[Any, Any]:
        def cast(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return x.to(place, dtype if dtype is not None and x.is_floating_point() else None)

        made: tuple[Any, Any] = pytree.tree_map(cast, (source.args, dict(source.kwargs)))
        return made

    inputs = _flat(source)
    worst: dict[str, Any] = {"name": source.name, "ours": 0.0, "eager": 0.0, "same": None}
    for _ in range(CALLS):
        ours = [_tensor(value, place) for value in method(*inputs).values()]
        with place:  # models make masks and positions as they go
            args, kwargs = given()
            eager = _tensors(half.module(*args, **kwargs))
            args, kwargs = given(floats)
            wanted = _tensors(exact.module(*args, **kwargs))
        for mine, theirs, right in zip(ours, eager, wanted, strict=True):
            if right.is_floating_point():
                worst["ours"] = max(worst["ours"], _error(mine, right))
                worst["eager"] = max(worst["eager"], _error(theirs, right))
            else:
                same = (mine == theirs).double().mean().item()
                worst["same"] = min(same, 1.0 if worst["same"] is None else worst["same"])
    if place.type == "cuda":
        worst["ms"] = _milliseconds(lambda: method(*inputs))
    worst["heard"] = _heard(exact.module, given(floats), wanted, place)
    return worst


def _heard(module: Any, inputs: tuple[Any, Any], wanted: list[Any], place: Any) -> float | None:
    """How far other floating-point inputs move the results, like an error; None where there are no such inputs.

    Where that is hardly more than an error may be, agreement says nothing.
    """
    import torch
    from torch.utils import _pytree as pytree

    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in pytree.tree_leaves(inputs)):
        return None

    def other(x: Any) -> Any:
        return torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    args, kwargs = pytree.tree_map(other, inputs)
    with place:
        moved = _tensors(module(*args, **kwargs))
    pairs = [(a, b) for a, b in zip(moved, wanted, strict=True) if b.is_floating_point()]
    return max((_error(a, b) for a, b in pairs), default=None)


def _flat(source: Any) -> list[Any]:
    """Positional inputs, then keywords in the order of the signature."""
    import inspect

    from torch.utils import _pytree as pytree

    order = list(inspect.signature(source.module.forward).parameters)
    names = sorted(source.kwargs, key=lambda name: order.index(name) if name in order else len(order))
    leaves: list[Any] = pytree.tree_leaves((source.args, {name: source.kwargs[name] for name in names}))
    return leaves


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [leaf.clone() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _tensor(value: Any, place: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(value)).to(place)


def _error(found: Any, wanted: Any) -> float:
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp_min(1e-30))


def _milliseconds(call: Any) -> float:
    """The median of `TIMED` calls, from host to host."""
    times: list[float] = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()

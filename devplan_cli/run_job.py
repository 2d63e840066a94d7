"""What `run` does: inputs, calls, outputs, and the comparison with what was expected."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..runtime.errors import ExecutionError, UsageError
from ..runtime.program import CopyKind
from .artifacts import check_targets, choose_method
from .compare import Comparison, Tolerance, as_array, compare, dtype_name, on_host, tolerance_for
from .console import Output
from .failures import Differs
from .loading import check_device_name, device_label, load_program, to_places
from .run_inputs import gather_inputs
from .tensor_files import check_output_name, read_many, write_many
from .words import count, microseconds, shape, sizes_words, table
from .words import size as size_words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runtime.engine import LoadedMethod, LoadedProgram


@dataclass(frozen=True)
class Order:
    """The options of one `run`."""

    artifact: Path
    method: str | None
    single: tuple[str, ...]
    inputs: Path | None
    shapes: tuple[str, ...]
    seed: int
    outputs: Path | None
    expect: Path | None
    rtol: float | None
    atol: float | None
    device: str | None
    repeat: int
    warmup: int
    profile: Path | None
    require_cuda_graph: bool
    allow_torch_ops: bool
    tuning: Path | None = None
    device_map: Mapping[str, str] | None = None
    weights: tuple[Path, ...] = ()


def run_order(order: Order, output: Output) -> int:
    """Run and print; 0, or a `MismatchError` when the results are not the expected ones."""
    check_device_name(order.device)
    check_targets(order.outputs, order.profile, sources=(order.artifact, *order.weights))
    if order.outputs is not None:
        check_output_name(order.outputs)
    if order.expect is None and (order.rtol is not None or order.atol is not None):
        raise UsageError(
            "wrong usage", why="`--rtol` and `--atol` belong to `--expect`", hint="add `--expect FILE.npz`"
        )
    expected = read_many(order.expect) if order.expect is not None else None
    with load_program(
        order.artifact,
        order.device,
        output,
        allow_torch_ops=order.allow_torch_ops,
        tuning=order.tuning,
        device_map=order.device_map,
        weights=order.weights,
        verify=True,
    ) as program:
        method = program.method(choose_method(order.method, list(program.methods)))
        inputs, random = gather_inputs(
            method.description, order.single, order.inputs, order.shapes, order.seed
        )
        if random:
            output.say(f"random {', '.join(f'`{name}`' for name in random)} (seed {order.seed})")
        inputs = to_places(program, method.description, inputs)
        results, seconds = _call(method, inputs, order)
        results = {name: on_host(value) for name, value in results.items()}
        _check_graph(method, order)
        comparisons = _compare(program, results, expected, order) if expected is not None else []
        if expected and (left := [name for name in results if name not in expected]):
            output.say(f"not compared, as `{order.expect}` lacks them: {', '.join(f'`{n}`' for n in left)}")
        if order.outputs is not None:
            write_many(order.outputs, results)
        if order.profile is not None:
            from ..runtime.measure.profile import write_trace

            write_trace(program, method, inputs, order.profile)
        document = dict[str, Any]()
        if output.tells_results or comparisons:
            document = _document(program, method, results, seconds, [c for c, _ in comparisons])
    if document:
        _show(document, comparisons, order, output)
    bad = [comparison for comparison, _ in comparisons if not comparison.equal]
    if bad:
        _raise_mismatch(bad, order, document)
    output.document(document)
    return 0


def _call(method: LoadedMethod, inputs: dict[str, Any], order: Order) -> tuple[dict[str, Any], list[float]]:
    if order.require_cuda_graph:
        method.prepare()
        if method.bound is not None:  # else it depends on the sizes, and the first call shows it
            _check_graph(method, order)
    for _ in range(order.warmup):
        method.run(inputs)
    seconds: list[float] = []
    results: dict[str, Any] = {}
    for _ in range(order.repeat):
        begin = time.perf_counter()
        results = method.run(inputs)
        seconds.append(time.perf_counter() - begin)
    return results, seconds


def _check_graph(method: LoadedMethod, order: Order) -> None:
    reason = method.no_graph_reason
    if order.require_cuda_graph and reason:
        hint = "run on a CUDA device with static shapes or a bucket's, or drop `--require-cuda-graph`"
        raise ExecutionError("no CUDA graph is used", why=reason, hint=hint)


def _dtypes(program: LoadedProgram) -> list[str]:
    """Floating element types that the program computes in, as far as its constants tell."""
    return [str(constant.dtype) for constant in program.planned.program.constants]


def _compare(
    program: LoadedProgram, results: dict[str, Any], expected: dict[str, Any], order: Order
) -> list[tuple[Comparison, Tolerance]]:
    if not expected:
        why, hint = "it holds no tensor", "write one with `devplan run --outputs`"
        raise UsageError(f"nothing to compare in `{order.expect}`", why=why, hint=hint)
    for name in expected:
        if name not in results:
            listed = ", ".join(f"`{n}`" for n in results)
            why = "the method has no such output"
            raise UsageError(
                f"unknown output `{name}` in `{order.expect}`", why=why, hint=f"its outputs are {listed}"
            )
    pairs: list[tuple[Comparison, Tolerance]] = []
    for name, value in expected.items():
        tolerance = tolerance_for(_dtypes(program), dtype_name(results[name]))
        if order.rtol is not None or order.atol is not None:
            rtol, atol = order.rtol or 0.0, order.atol or 0.0
            tolerance = Tolerance(rtol, atol, "as given")
        pairs.append((compare(name, results[name], value, tolerance), tolerance))
    return pairs


def _document(
    program: LoadedProgram,
    method: LoadedMethod,
    results: dict[str, Any],
    seconds: list[float],
    comparisons: list[Comparison],
) -> dict[str, Any]:
    reason, memory = method.no_graph_reason, program.memory
    document: dict[str, Any] = {
        "method": method.name,
        "device": device_label(program),
        "outputs": [_describe(name, value) for name, value in results.items()],
        "cuda_graph": {"reason": reason} if reason else True,
        "latency_us": percentiles([second * 1e6 for second in seconds]),
        "memory": {
            "arena": memory.arena,
            "constants": memory.constants,
            "state": memory.state,
            "staging": memory.staging,
        },
        "copies": copies_of(method),
        "ptx_kernels": sum(map(len, program.compiled_from_ptx.values())),
    }
    if method.buckets:
        document["buckets"] = [bucket.document() for bucket in method.buckets]
        document["other_calls"] = method.other_calls
    return document | ({"comparisons": [c.document() for c in comparisons]} if comparisons else {})


def copies_of(method: LoadedMethod) -> dict[str, Any]:
    """Copies that all calls so far have made, by kind, as the runtime counted them."""
    tally = method.copies
    kinds = [kind for kind in CopyKind if kind is not CopyKind.LOCAL]
    return {kind.value: {"count": tally.counts[kind], "bytes": tally.nbytes[kind]} for kind in kinds}


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99, min, mean and the number of samples."""
    array = np.asarray(values)
    points = {f"p{p}": float(np.percentile(array, p)) for p in (50, 90, 99)}
    return points | {"min": float(array.min()), "mean": float(array.mean()), "samples": len(values)}


def _describe(name: str, value: Any) -> dict[str, Any]:
    host = as_array(value)
    described: dict[str, Any] = {"name": name, "dtype": dtype_name(value), "shape": list(host.shape)}
    if host.size and host.dtype.kind in "fiu":
        finite = host[np.isfinite(host)] if host.dtype.kind == "f" else host
        described["nonfinite"] = int(host.size - finite.size)
        if finite.size:
            described |= {
                "min": float(finite.min()),
                "max": float(finite.max()),
                "mean": float(finite.mean(dtype=float)),
            }
    return described


def _show(
    document: dict[str, Any], comparisons: list[tuple[Comparison, Tolerance]], order: Order, output: Output
) -> None:
    latency = document["latency_us"]
    head = f"{document['method']} on {document['device']}: {microseconds(latency['p50'])}"
    if latency["samples"] > 1:
        head += f" median of {count(latency['samples'], 'call')} (p90 {microseconds(latency['p90'])})"
    made = table("", "output", "type", "min>", "mean>", "max>")
    for entry in document["outputs"]:
        numbers = [f"{entry[key]:.6g}" if key in entry else "-" for key in ("min", "mean", "max")]
        made.add_row(entry["name"], f"{entry['dtype']}[{shape(entry['shape'])}]", *numbers)
    output.show(head, made)
    if "buckets" in document:
        output.show("", *buckets_view(document))
    for comparison, tolerance in comparisons:
        output.show(f"{comparison.words()} ({tolerance})")
    if order.outputs is not None:
        output.say(f"wrote {order.outputs}")
    if order.profile is not None:
        output.say(f"wrote {order.profile}")


def buckets_view(document: dict[str, Any]) -> list[RenderableType]:
    """A table of the declared sizes: calls so far, their graphs, and what these took."""
    timed = any("latency_us" in bucket for bucket in document["buckets"])
    columns = ("p50>", "p99>") if timed else ()
    made = table(f"Buckets of {document['method']}", "sizes", "calls>", *columns, "graph bytes>", "graph+")
    for bucket in document["buckets"]:
        taken, graph = bucket["graph_bytes"], bucket["cuda_graph"]
        made.add_row(
            sizes_words(bucket["sizes"]),
            str(bucket["calls"]),
            *(microseconds(bucket["latency_us"][point.rstrip(">")]) for point in columns),
            "-" if taken is None else size_words(taken),
            "yes" if graph is True else f"no: {graph['reason']}",
        )
    made.add_row("other sizes", str(document["other_calls"]))
    return [made]


def _raise_mismatch(bad: list[Comparison], order: Order, document: dict[str, Any]) -> NoReturn:
    what = f"`{order.artifact}` gives other results than `{order.expect}`"
    hint = "raise `--rtol` and `--atol` if that is near enough; bisect with `export --no-device-planning`"
    raise Differs(what, document, why=bad[0].words(), hint=hint)

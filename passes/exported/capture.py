"""A method through `torch.export`; what stands in its way is refused by operator and line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...runtime.errors import DevplanError, UnsupportedOperatorError
from ..inductor.interfaces import pytree, unasked_values
from ..inductor.overloads import can_decompose, is_overload
from ..size_arithmetic import is_dense
from ..source.data_classes import known_results
from ..source.frames import is_users
from ..source.model import MethodSource
from .boxes import traced_detection
from .complex_pairs import has_complex
from .data_loops import unrolled_loops
from .data_turns import close_turns
from .deferred_checks import traced_for_range
from .directed_accesses import directed_accesses
from .kept_numbers import kept_numbers
from .lifted_tensors import merge_lifted_tensors
from .module_casts import traced_casts
from .raised_checks import passed_checks
from .random_numbers import is_random


def export_method(method: MethodSource) -> torch.export.ExportedProgram:
    """`torch.export` with errors that name the user's line; exit 3 when the model cannot be exported."""
    if method.exported is not None:
        return _saved(method.name, method.exported)
    args, kwargs = pytree.tree_map(_dense, (method.args, method.kwargs))
    try:
        with torch.no_grad(), kept_numbers(), _as_tracing_needs(method.module):
            exported = traced_for_range(partial(_traced, method, args, kwargs))
            close_turns(exported)
            merge_lifted_tensors(exported)
            functional: torch.export.ExportedProgram = exported.run_decompositions({})
            return _taken_apart(functional)
    except DevplanError:
        raise
    except (Exception, SystemExit) as error:
        raise _refusal(method.name, error) from error


def _saved(name: str, exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A program that was exported and saved before; buffers that it reached in two ways are one here, too."""
    try:
        with torch.no_grad():
            merge_lifted_tensors(exported)
            functional: torch.export.ExportedProgram = exported.run_decompositions({})
    except Exception as error:
        raise _refusal(name, error) from error
    return functional


def _traced(method: MethodSource, args: Any, kwargs: Any, puts_off: bool) -> torch.export.ExportedProgram:
    """The method through torch; ``puts_off`` makes checks of conditions that it cannot prove."""
    exported: torch.export.ExportedProgram = torch.export.export(
        method.module,
        args,
        kwargs,
        dynamic_shapes=method.dynamic_shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=puts_off,
    )
    return exported


def _dense(value: Any) -> Any:
    """An example input as callers will hand it over: its elements in one run, without gaps or repetitions."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    return value if is_dense(tuple(value.shape), value.stride()) else value.contiguous()


@contextlib.contextmanager
def _as_tracing_needs(module: torch.nn.Module) -> Iterator[None]:
    """While active, what eager code decides by looking at data is spelled so that it can be traced."""
    with (
        grouped_experts(module),
        unrolled_loops(),
        traced_casts(module),
        directed_accesses(),
        known_results(module),
        passed_checks(),
        unasked_values(),
        traced_detection(),
    ):
        yield


def _taken_apart(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take apart composite operators where later passes have rules for their parts only."""
    touched = {
        node.target
        for node in program.graph.nodes
        if is_overload(node.target) and (has_complex(node) or is_random(node)) and can_decompose(node.target)
    }
    known = torch.export.default_decompositions() if touched else {}
    rules = {target: known[target] for target in touched if target in known}
    return _taken_apart(program.run_decompositions(rules)) if rules else program


@contextlib.contextmanager
def grouped_experts(module: torch.nn.Module) -> Iterator[None]:
    """While active, mixtures of experts of `transformers` compute by groups of rows.

    Some of its models loop over the experts that were chosen, which depends on data. The library has the same
    sum as grouped matrix products, for every class of experts that reads its configuration for which to use.
    """
    changed: list[Any] = []
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(type(part), "_apply_gate") and getattr(config, "_experts_implementation", "") == "eager":
            changed.append(config)
            config._experts_implementation = "grouped_mm"
    try:
        yield
    finally:
        for config in changed:
            setattr(config, "_experts_implementation", "eager")  # noqa: B010


def _refusal(method: str, error: BaseException) -> UnsupportedOperatorError:
    """The refusal for whatever `torch.export` raised."""
    text = _CAUSES.sub("", str(error)).strip() or type(error).__name__
    lines = [line for line in text.splitlines() if line.strip()]
    operator = _operator(error)
    at = f", at operator `{operator}`" if operator else ""
    if unknown := re.search(r"Found <class '([^']+)'> in output", text):
        return UnsupportedOperatorError(
            f"method `{method}` returns a `{unknown[1].rpartition('.')[2]}`",
            why=f"`{unknown[1]}` is not made of tensors in a way that torch knows",
            hint="return its tensors, one by one or in a tuple, a dict or a data class",
        )
    return UnsupportedOperatorError(
        f"method `{method}` cannot be exported{at}",
        why=f"{type(error).__name__}: {' '.join(lines[:3])[:400]}{_user_line(error)}",
        hint=_hint(error, text),
    )


_CAUSES = re.compile(r" *Caused by: \([^)]*\)\.?")
"""Where torch says what asked for a number: shortened paths, of our files and torch's, too."""


def _hint(error: BaseException, text: str) -> str:
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return (
            "what runs, and how much of it, must not depend on data: use `torch.cond`, `torch.where`, a mask "
            "or `torch.nonzero_static`"
        )
    if "Constraints violated" in text:
        found = re.search(r"Suggested fixes:\n\s*(.+)", text)
        smaller = f"`{found[1].strip()}`, say" if found else "or a size for each artifact"
        return f"the model asks about this size and goes on otherwise: declare a smaller range, {smaller}"
    if "ScriptModule" in text:
        return "export the module that was scripted or traced"
    if "cuda" in text.lower() and any(words in text for words in _NO_GPU):
        return "an export needs no GPU and runs on the host: write `x.device` where the model names a device"
    return "`--verbose` shows torch's whole report"


_NO_GPU = (
    "not linked with",
    "not compiled with",
    "same device",
    "two different devices",
    "No CUDA GPUs",
    "no NVIDIA driver",
)


def _frames(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _operator(error: BaseException) -> str:
    """The operator that the user's code was calling; empty when it was none of torch's."""
    for trace in _frames(error):
        called: Any = trace.tb_frame.f_locals.get("func")
        if is_overload(called):
            return str(called)
        if trace.tb_frame.f_code.co_name == "__torch_function__" and callable(called):
            return str(getattr(called, "__name__", called))
    return ""


def _user_line(error: BaseException) -> str:
    """`` (at model.py:12)`` for the innermost of the user's frames."""
    found = ""
    for trace in _frames(error):
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f" (at {Path(file).name}:{trace.tb_lineno})"
    return found

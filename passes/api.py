"""`devplan.export`: the command's `export` for Python, in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from ..runtime.errors import UsageError
from ..runtime.program import PlannedProgram
from ..runtime.weights.safetensors import weight_files
from .config.read import load_config
from .config.rules import bucket_rules, parse_io
from .config.setting import BY_NAME, nearest
from .export import ExportResult
from .export import export as run_pipeline
from .narrow import is_tuple
from .options import BucketRule, IoRule, Progress, silent
from .source.load import resolve_namespace
from .targets import TARGETS

if TYPE_CHECKING:
    from ..runtime.engine import LoadedProgram

Weights = Literal["embed", "external", "reference", "none"]
_KEYWORDS = {setting.name.partition(".")[2].replace("-", "_"): setting.name for setting in BY_NAME.values()}
_COMMAND_ONLY = ("output", "report", "check", "artifact_size", "copies", "fail_on_copy")
_SPELLED = {"memory": "memory_budget", "effort": "planning_effort"}


@dataclass(frozen=True)
class Exported:
    """A model that has been exported: run it with `load`, or `write` it as an artifact."""

    result: ExportResult
    weights: Weights = "embed"
    weights_files: tuple[Path, ...] = ()

    @property
    def planned(self) -> PlannedProgram:
        """The program with its plan; arena sizes in bytes are in ``planned.plan``."""
        return self.result.planned

    def write(self, path: str | PathLike[str]) -> Path:
        """Write the artifact in one step and return its path. OSError when the folder cannot be written."""
        from .. import __version__
        from ..runtime.artifact import write

        target = Path(path)
        write(
            target,
            self.planned,
            self.result.constants,
            producer=__version__,
            weights=self.weights,
            files=weight_files(self.weights_files),
            recipes=self.result.recipes,
        )
        return target

    def load(self, device: str | None = None, weights: Mapping[str, Any] | None = None) -> LoadedProgram:
        """The program, ready to be called, on ``cuda:N``, ``emulator`` or ``cpu``; see `devplan.load`.

        ``weights`` are the tensors of a model that was exported without them: its ``state_dict()``.
        """
        from ..runtime.loading import load_planned
        from .source.state_dict import constants_with

        constants = constants_with(self.result, weights, weight_files(self.weights_files))
        return load_planned(self.planned, constants, device)


def export(
    model: Any = None,
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    config: str | None = None,
    io: str | Sequence[str] = (),
    buckets: Mapping[str, int | Sequence[int]] | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Exported:
    """Export a model to a planned device program. Needs no GPU, driver or C++ compiler.

    Args:
        model: an `nn.Module` (or a function or class that makes one), put in evaluation mode.
        example_inputs: a tuple of tensors, a dict of keyword arguments, or a function that makes one. Their
            shapes and dtypes become the signature.
        dynamic_shapes: as `torch.export.export` takes them; every dimension needs a maximum.
        methods: several methods instead of ``model``: name -> dict with ``module`` or ``function``,
            ``example_inputs`` and optionally ``dynamic_shapes``. Modules in common are shared.
        config: a TOML file, or the name of a ready one; the other options win over it.
        io: ``"device"``, or rules such as ``"prefill.tokens=device"``: what callers keep in device memory.
        buckets: ``{"batch": [1, 8, 32]}``: sizes of dynamic dimensions that get a plan and a CUDA graph of
            their own, by the name of a `Dim`, ``INPUT:NUMBER`` or ``METHOD.DIMENSION``.
        progress: told (stage, fraction from 0 to 1, detail).
        options: the command's options with underscores: ``device``, ``dtype``, ``arch``,
            ``device_planning``, ``planning_effort``, ``reorder``, ``library_calls``, ``library_workspace``,
            ``tuning``, ``allow_host_ops``, ``allow_tf32``, ``memory_budget`` (bytes or ``"2GiB"``),
            ``weights``, ``weights_file``, ``jobs``.

    Raises:
        UsageError: an argument does not follow the convention, or options contradict each other.
        UnsupportedOperatorError: the model has an operator that cannot be exported; its line is named.
        BudgetError: the plan needs more than ``memory_budget``.
    """
    names: dict[str, Any] = {"dynamic_shapes": dynamic_shapes}
    names |= (
        {"methods": methods} if methods is not None else {"model": model, "example_inputs": example_inputs}
    )
    source = resolve_namespace(SimpleNamespace(**names), "devplan.export")
    settings = load_config(
        config, _flags(options), _rules(io), buckets=_buckets(buckets or {}), architectures=tuple(TARGETS)
    )
    result = run_pipeline(source, settings.options, progress)
    return Exported(result, settings.options.weights, settings.weights_files)


def _rules(io: str | Sequence[str]) -> tuple[tuple[str, IoRule], ...]:
    texts = [io] if isinstance(io, str) else list(io)
    try:
        return tuple(("io", parse_io(text)) for text in texts)
    except ValueError as error:
        raise UsageError("cannot use `io`", why=str(error)) from error


def _buckets(table: Mapping[str, int | Sequence[int]]) -> tuple[tuple[str, BucketRule], ...]:
    try:
        return tuple(("buckets", rule) for _, rule in bucket_rules(table))
    except ValueError as error:
        raise UsageError("cannot use `buckets`", why=str(error)) from error


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    valid = {_SPELLED.get(key, key): name for key, name in _KEYWORDS.items() if key not in _COMMAND_ONLY}
    for key in options:
        if key not in valid:
            raise UsageError(f"unknown option `{key}` of `devplan.export`", hint=nearest(key, list(valid)))
    return {valid[key]: _plain(value) for key, value in options.items()}


def _plain(value: Any) -> Any:
    return list(value) if is_tuple(value) else value

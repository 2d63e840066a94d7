"""Read a TOML file and flags into `ExportOptions`, and remember where each value came from.

One TOML file can say everything that flags can; flags win over the file, the file over the defaults.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...runtime.errors import UsageError
from ..narrow import is_list, is_mapping
from ..options import BucketRule, ExportOptions, IoRule, PlacementRule
from ..pipeline import check_names
from ..targets import DEFAULT_ARCHITECTURES
from .rules import bucket_rules, io_rules, placement_rules
from .setting import BY_NAME, SETTINGS, Setting, nearest

_TABLES = ("pipeline", "export", "plan", "io", "buckets", "budget", "placement", "pass")
_READY = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Config:
    """What flags and a file amount to: options for `export`, and what the command itself looks after."""

    options: ExportOptions
    max_artifact_size: int | None
    max_copies: int | None
    check: bool
    output: Path | None
    report: Path | None
    weights_files: tuple[Path, ...]
    values: dict[str, Any]
    origins: dict[str, str]
    """Where each value came from: ``default``, ``FILE:LINE`` or the flag."""

    def toml(self) -> str:
        """The configuration as a TOML file, each value with a comment that says where it came from."""
        from .show import lines

        return "\n".join(lines(self)) + "\n"


@dataclass
class _Layers:
    """Values gathered from the lowest layer to the highest."""

    values: dict[str, Any]
    origins: dict[str, str]
    io: list[tuple[IoRule, str]]
    buckets: list[tuple[BucketRule, str]] = field(default_factory=list[tuple["BucketRule", str]])
    placement: tuple[PlacementRule, ...] = ()
    pipeline: tuple[str, ...] | None = None
    passes: dict[str, dict[str, Any]] | None = None


def load_config(
    file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    io: tuple[tuple[str, IoRule], ...] = (),
    *,
    buckets: tuple[tuple[str, BucketRule], ...] = (),
    architectures: tuple[str, ...] = (),
    native: Callable[[], tuple[str, ...]] = tuple,
) -> Config:
    """Read ``file`` (a path, or the name of one of ``configs/``) and lay flags over it.

    Args:
        flags: values by ``table.key``; None means that the flag was not given.
        io: (flag, rule) pairs, after the file's own rules.
        buckets: the same.
        architectures: the known ones; empty leaves names unchecked.
        native: the architectures of the GPUs that are present.

    Raises:
        UsageError: a key, pass option, type or architecture is not known; the nearest valid name is given.
    """
    layers = _Layers({s.name: s.default for s in SETTINGS}, {s.name: "default" for s in SETTINGS}, [])
    if file is not None:
        _read_file(layers, find_file(file))
    for name, value in (flags or {}).items():
        if value is not None:
            setting = BY_NAME[name]
            layers.values[name] = _read(setting, value, f"`{setting.flag} {value}`")
            layers.origins[name] = setting.flag
    layers.io.extend((rule, flag) for flag, rule in io)
    layers.buckets.extend((rule, flag) for flag, rule in buckets)
    _set_architectures(layers, architectures, native)
    return _config(layers)


def find_file(name: str) -> Path:
    """The file of that path, or the ready configuration of that name; `UsageError` if there is neither."""
    path = Path(name)
    if path.is_file():
        return path
    ready = {entry.stem: entry for entry in sorted(_READY.glob("*.toml"))}
    if name in ready:
        return ready[name]
    hint = nearest(name, list(ready)) if ready else "check the path"
    raise UsageError(f"cannot read configuration `{name}`", why="there is no such file", hint=hint)


def _read_file(layers: _Layers, path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8-sig")  # which editors of Windows write
        document = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read configuration `{path}`", why=str(error.strerror)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read configuration `{path}`", why=f"it is not TOML: {error}") from error
    for key, value in document.items():
        at = f"{path}:{_line(text, '', key)}"
        if key not in _TABLES:
            raise UsageError(f"cannot use configuration `{path}`", why=_unknown(at, key, _TABLES))
        try:
            _read_table(layers, key, value, partial(_place, path, text, key))
        except ValueError as error:
            raise UsageError(f"cannot use configuration `{path}`", why=f"`{key}` ({at}): {error}") from error
    if layers.pipeline is not None:
        layers.pipeline = tuple(_beside(path, entry) for entry in layers.pipeline)


def _beside(path: Path, entry: str) -> str:
    """A pass ``FILE.py:ClassName`` with FILE beside the configuration, where there is such a file."""
    file, colon, name = entry.rpartition(":")
    beside = path.parent / file
    return f"{beside}:{name}" if colon and file.endswith(".py") and beside.is_file() else entry


def _read_table(layers: _Layers, key: str, value: Any, at: Callable[[str], str]) -> None:
    if key == "pipeline":
        layers.pipeline = _texts(value)
    elif key == "placement":
        layers.placement = placement_rules(value)
    elif not is_mapping(value):
        raise ValueError(f"expected a table `[{key}]`")
    elif key == "io":
        rules = io_rules(value)
        layers.io.extend((rule, at(name)) for name, rule in rules)
    elif key == "buckets":
        layers.buckets.extend((rule, at(name)) for name, rule in bucket_rules(value))
    elif key == "pass":
        layers.passes = _pass_options(value)
    else:
        _read_settings(layers, key, value, at)


def _read_settings(layers: _Layers, table: str, values: Mapping[str, Any], at: Callable[[str], str]) -> None:
    valid = tuple(setting.key for setting in SETTINGS if setting.table == table)
    for spelled, value in values.items():
        key = spelled.replace("_", "-")
        if key not in valid:
            raise UsageError("cannot use the configuration", why=_unknown(at(spelled), spelled, valid))
        name = f"{table}.{key}"
        layers.values[name] = _read(
            BY_NAME[name], value, f"`{spelled} = {json.dumps(value, default=str)}` at {at(spelled)}"
        )
        layers.origins[name] = at(spelled)


def _read(setting: Setting, value: Any, shown: str) -> Any:
    try:
        return setting.kind.read(value)
    except ValueError as error:
        words = setting.kind.schema.get("enum", [])
        meant = _ALSO_CALLED.get(str(value), str(value))
        raise UsageError(f"cannot use {shown}", why=str(error), hint=_close(meant, words)) from error


_ALSO_CALLED = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
"""What others call the types, so that the hint names the right one."""


def _unknown(at: str, key: str, valid: tuple[str, ...]) -> str:
    return f"unknown key `{key}` at {at}; {nearest(key.replace('_', '-'), valid)}"


def _texts(value: Any) -> tuple[str, ...]:
    if not (is_list(value) and all(isinstance(item, str) for item in value)):
        raise ValueError("expected a list of pass names")
    return tuple(value)


def _pass_options(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    for name, table in tables.items():
        if not is_mapping(table):
            raise ValueError(f"expected a table `[pass.{name}]` of the pass's options")
    return {name: {k.replace("-", "_"): v for k, v in table.items()} for name, table in tables.items()}


def _place(path: Path, text: str, table: str, key: str) -> str:
    return f"{path}:{_line(text, table, key)}"


def _line(text: str, table: str, key: str) -> int:
    """The line of a key in a table of a TOML text, as well as a search can tell; 1 when it cannot."""
    inside = not table
    last = re.escape(key.rpartition(".")[2])
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.\"-]+)", line):
            inside = not table or header[1].split(".")[0] == table
            if not table and header[1].split(".")[0] == key:
                return number
        elif inside and re.match(rf"\s*([\w.\"-]+\.)?\"?([\w-]+\.)*{last}\"?\s*=", line):
            return number
    return 1


def _set_architectures(
    layers: _Layers, known: tuple[str, ...], native: Callable[[], tuple[str, ...]]
) -> None:
    given, origin = layers.values["export.arch"], layers.origins["export.arch"]
    if given is None:
        present = native()
        layers.values["export.arch"] = present or DEFAULT_ARCHITECTURES
        layers.origins["export.arch"] = "the GPU present" if present else "default"
        return
    found: list[str] = []
    for name in given:
        if name == "native":
            if not (present := native()):
                hint = "name architectures, such as `--arch sm_80,sm_90`"
                raise UsageError("cannot use `--arch native`", why="this machine has no GPU", hint=hint)
            found.extend(present)
        elif known and name not in known:
            why = f"it is not known ({origin}); known are {', '.join(known)}"
            spelled = f"sm_{re.sub('[^0-9]', '', name)}"  # 90, 9.0, sm90 or compute_90
            hint = f"did you mean `{spelled}`" if spelled in known else _close(name, known)
            raise UsageError(f"cannot use architecture `{name}`", why=why, hint=hint)
        else:
            found.append(name)
    layers.values["export.arch"] = tuple(dict.fromkeys(found))


def _close(name: str, known: tuple[str, ...] | list[str]) -> str:
    hint = nearest(name, known)
    return hint if hint.startswith("did") else ""


def _config(layers: _Layers) -> Config:
    v = layers.values
    options = ExportOptions(
        device=v["export.device"],
        dtype=v["export.dtype"],
        architectures=v["export.arch"],
        placement=layers.placement,
        io=tuple(rule for rule, _ in layers.io),
        buckets=tuple(rule for rule, _ in layers.buckets),
        allow_host_ops=v["export.allow-host-ops"],
        allow_tf32=v["export.allow-tf32"],
        library_calls=v["export.library-calls"],
        library_workspace=v["export.library-workspace"],
        tuning=Path(v["export.tuning"]) if v["export.tuning"] else None,
        device_planning=v["plan.device-planning"],
        planning_effort=v["plan.effort"],
        reorder=v["plan.reorder"],
        memory_budget=v["budget.memory"],
        quantize=v["export.quantize"],
        weights=v["export.weights"],
        weights_files=tuple(Path(file) for file in v["export.weights-file"]),
        pipeline=layers.pipeline,
        pass_options=layers.passes or {},
        jobs=v["export.jobs"],
    )
    _refuse_contradictions(options, v["export.weights-file"], v["export.check"])
    check_names(options)
    origins = layers.origins | {f"io.{i}": origin for i, (_, origin) in enumerate(layers.io)}
    origins |= {f"buckets.{i}": origin for i, (_, origin) in enumerate(layers.buckets)}
    return Config(
        options,
        max_artifact_size=v["budget.artifact-size"],
        max_copies=0 if v["budget.fail-on-copy"] else v["budget.copies"],
        check=v["export.check"],
        output=Path(v["export.output"]) if v["export.output"] else None,
        report=Path(v["export.report"]) if v["export.report"] else None,
        weights_files=tuple(Path(file) for file in v["export.weights-file"]),
        values=v,
        origins=origins,
    )


def _refuse_contradictions(options: ExportOptions, weights_files: tuple[str, ...], check: bool) -> None:
    """A caller's device tensor needs a place that is planned; constants left in files need the files."""
    if (options.weights == "reference") != bool(weights_files):
        what = "cannot use `--weights reference` and `--weights-file` without each other"
        raise UsageError(what, hint="write `--weights reference --weights-file model.safetensors`")
    if options.weights == "none" and check:
        why = "without weights there are no results to compare"
        raise UsageError("cannot use `--check` with `--weights none`", why=why, hint="drop one of them")
    if options.quantize and options.device == "cpu":
        why = "the kernels that read packed weights are for GPUs"
        raise UsageError("cannot use `--quantize` with `--device cpu`", why=why, hint="drop one of them")
    on_device = any(rule.location == "device" for rule in options.io)
    if on_device and not options.device_planning:
        why = "inputs and outputs that stay on the device need planned device memory"
        raise UsageError(
            "cannot use `--no-device-planning` with `--io device`", why=why, hint="drop one of them"
        )
    if on_device and options.device == "cpu" and not any(rule.device != "cpu" for rule in options.placement):
        why = "a program for the host has no device tensors"
        raise UsageError("cannot use `--io device` with `--device cpu`", why=why, hint="drop one of them")

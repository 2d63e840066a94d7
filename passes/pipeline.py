"""Pipelines of passes: built from names and options, run with checks after each pass.

A pass is a frozen dataclass whose fields are its options (see `base`). A field that bears the name of an
`ExportOptions` field takes that value; the others are set in TOML::

    pipeline = ["place-operators", "insert-copies", "my_passes.py:MyPass"]
    [pass.MyPass]
    strength = 2
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar, cast, get_args, get_origin

from ..runtime.errors import DevplanError, PassError, UsageError
from .base import AnyPass, Pass, PassResult, Stage
from .narrow import is_list, is_tuple
from .options import ExportOptions

if TYPE_CHECKING:
    from .placed.graph import PlacedGraph

T = TypeVar("T")

BUILT_IN: tuple[tuple[str, str], ...] = (
    ("fold-constants", "rewrites.fold_constants:FoldConstants"),
    ("fold-batch-norms", "rewrites.fold_batch_norms:FoldBatchNorms"),
    ("fuse-attention", "rewrites.fuse_attention:FuseAttention"),
    ("quantize-weights", "quantized.quantize:QuantizeWeights"),
    ("merge-linears", "rewrites.merge_linears:MergeLinears"),
    ("place-operators", "placed.place:PlaceOperators"),
    ("insert-copies", "placed.insert_copies:InsertCopies"),
    ("group-regions", "placed.regions:GroupRegions"),
    ("schedule-copies", "program.schedule_copies:ScheduleCopies"),
    ("merge-uploads", "program.merge_uploads:MergeUploads"),
)
"""The built-in passes in the order in which they run: name, and module and class in this room.

To add one: write the file, add a line here and its name to ``configs/default.toml``. Named, not imported, so
that reading a configuration stays fast.
"""


NEEDED = ("place-operators", "insert-copies", "group-regions")
"""What every pipeline has, in this order: nothing else makes of exported methods what can be lowered."""


@dataclass(frozen=True)
class PassRun:
    """What an observer is told after a pass ran on one method or on the program."""

    ran: AnyPass
    subject: Any
    """What came out."""
    changed: bool
    seconds: float


Observer = Callable[[PassRun], None]


def pass_names() -> tuple[str, ...]:
    """The names of the built-in passes, in the built-in order."""
    return tuple(name for name, _ in BUILT_IN)


def pass_class(spec: str, folder: Path | None = None) -> type[AnyPass]:
    """The class that a pipeline entry means: a built-in name, or ``FILE.py:ClassName``.

    ``folder`` is what a relative FILE is relative to. UsageError names the nearest valid name.
    """
    if ".py:" in spec:
        return _from_file(spec, folder)
    known = dict(BUILT_IN)
    if spec not in known:
        raise UsageError(f"there is no pass `{spec}`", hint=_nearest(spec, known))
    module, _, name = known[spec].partition(":")
    found: type[AnyPass] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(f"`{n}`" for n in names) or "none"
    return (f"did you mean `{near[0]}`? " if near else "") + f"valid: {listed}"


def _from_file(spec: str, folder: Path | None) -> type[AnyPass]:
    file, _, name = spec.rpartition(":")
    path = (folder or Path.cwd()) / file
    if not path.is_file():
        raise UsageError(f"there is no file `{file}` for the pass `{spec}`")
    module_name = f"devplan_user_pass_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their own module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"`{file}` cannot be imported", why=f"{type(error).__name__}: {error}") from error
    found: object = getattr(module, name, None)
    if not _is_pass(found):
        passes = [key for key, value in vars(module).items() if isinstance(value, type) and value is not Pass]
        raise UsageError(f"`{file}` has no pass `{name}`", hint=_nearest(name, passes))
    for needed in ("name", "stage"):
        if not hasattr(found, needed):
            raise UsageError(f"pass `{spec}` has no `{needed}`", hint=f"set `{needed}` in the class")
    return found


def check_names(options: ExportOptions, folder: Path | None = None) -> None:
    """Refuse pass names that mean nothing, without importing any pass: UsageError with the nearest name."""
    entries = options.pipeline if options.pipeline is not None else pass_names()
    for entry in entries:
        file, _, _ = entry.rpartition(":")
        if ".py:" not in entry and entry not in pass_names():
            raise UsageError(f"there is no pass `{entry}`", hint=_nearest(entry, pass_names()))
        if ".py:" in entry and not ((folder or Path.cwd()) / file).is_file():
            raise UsageError(f"there is no file `{file}` for the pass `{entry}`")
    has_own = any(".py:" in entry for entry in entries)
    _check_needed(entries, has_own)
    if not has_own:  # the name of a pass in a file is not known yet
        _check_tables(options, set(entries))


def _check_needed(entries: Sequence[str], has_own: bool) -> None:
    """UsageError for a pipeline without `NEEDED`, unless a pass from a file may stand for what is missing."""
    found = [entry for entry in entries if entry in NEEDED]
    in_order = f"in this order: {', '.join(f'`{name}`' for name in NEEDED)}"
    if (missing := [f"`{name}`" for name in NEEDED if name not in found]) and not has_own:
        hint = f"add what is missing, {in_order}"
        raise UsageError(f"the pipeline lacks {', '.join(missing)}", why="nothing can be lowered", hint=hint)
    for before, after in itertools.pairwise(found):
        if NEEDED.index(before) > NEEDED.index(after):
            raise UsageError(f"pass `{after}` cannot come after `{before}`", hint=f"they belong {in_order}")


def _check_tables(options: ExportOptions, used: set[str]) -> None:
    for key in options.pass_options:
        if key not in used and key not in pass_names():
            raise UsageError(f"there is no pass `{key}` to set options of", hint=_nearest(key, sorted(used)))


def build_pipeline(
    options: ExportOptions,
    services: Mapping[str, Any] | None = None,
    *,
    builtin_order: Sequence[str] | None = None,
    folder: Path | None = None,
) -> tuple[AnyPass, ...]:
    """The passes of an export, with their options.

    ``services`` are values that only the program can give, by field name (``supports``). UsageError for an
    unknown pass or option (with the nearest valid name), a wrong type (with both types and the value), and
    an order in which a pass would need what a later one makes.
    """
    entries = options.pipeline if options.pipeline is not None else tuple(builtin_order or pass_names())
    classes = [pass_class(entry, folder) for entry in entries]
    _check_order(classes)
    tables = dict(options.pass_options)
    built: list[AnyPass] = []
    for entry, cls in zip(entries, classes, strict=True):
        table: dict[str, Any] = {}
        for key in (cls.name, cls.__name__, entry):
            table |= tables.get(key, {})
        built.append(_build(cls, table, options, services or {}))
    _check_tables(options, {*entries, *(cls.name for cls in classes), *(cls.__name__ for cls in classes)})
    return tuple(built)


def _check_order(classes: Sequence[type[AnyPass]]) -> None:
    for before, after in itertools.pairwise(classes):
        if before.stage > after.stage:
            raise UsageError(
                f"pass `{after.name}` cannot come after `{before.name}`",
                why=f"it rewrites the {after.stage.name.lower()} form, which is gone by then",
            )


def _build(
    cls: type[AnyPass], table: Mapping[str, Any], options: ExportOptions, services: Mapping[str, Any]
) -> AnyPass:
    own = {f.name for f in fields(cls)}
    shared = own & {f.name for f in fields(options)}
    settable = own - shared - set(services)
    values: dict[str, Any] = {name: getattr(options, name) for name in shared}
    values |= {name: services[name] for name in own & set(services)}
    hints = typing.get_type_hints(cls)
    for key, value in table.items():
        if key in shared:
            raise UsageError(
                f"`{key}` is no option of pass `{cls.name}` alone",
                hint="set it for the whole export, by its flag",
            )
        if key not in settable:
            raise UsageError(f"pass `{cls.name}` has no option `{key}`", hint=_nearest(key, sorted(settable)))
        values[key] = _checked(cls.name, key, value, hints[key])
    for needed in fields(cls):
        has_default = needed.default is not MISSING or needed.default_factory is not MISSING
        if not has_default and needed.name not in values:
            raise UsageError(
                f"pass `{cls.name}` needs its option `{needed.name}`",
                hint=f"set it in `[pass.{cls.name}]`",
            )
    return cls(**values)


def _checked(name: str, key: str, value: Any, hint: Any) -> Any:
    if is_list(value):
        value = tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and hint is float:
        return float(value)
    if _fits(value, hint):
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise UsageError(
        f"option `{key}` of pass `{name}` has the wrong type",
        why=f"it must be {wanted}, not {type(value).__name__}: {value!r}",
    )


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return is_tuple(value) and all(_fits(item, arguments[0]) for item in value)
    return type(value) is hint or (hint is types.NoneType and value is None)


def run_stage(
    passes: Sequence[AnyPass],
    stage: Stage,
    subjects: Sequence[T],
    *,
    observe: Observer | None = None,
    check: Callable[[T], None] | None = None,
) -> tuple[T, ...]:
    """Run a stage's passes in order, each on all subjects (a program's methods, or the program alone).

    Placed graphs are checked after every pass and, whole, after the last; ``check`` is run after every pass
    of any stage. A failure becomes a `PassError` that names the pass, the method and the passes before it;
    errors that the user must act on (usage, unsupported operators, budgets) go through as they are.
    """
    mine = [p for p in passes if p.stage == stage]
    current = tuple(subjects)
    for position, ran in enumerate(mine):
        done = [p.name for p in mine[:position]]
        with _Chain(ran, done, ""):
            ran = ran.prepared(current)
        current = tuple(_run(ran, subject, done, observe, check) for subject in current)
    if mine and stage is Stage.PLACED:
        from .placed.verify import verify  # not at the top: a configuration that is read names passes only

        for placed in cast("tuple[PlacedGraph, ...]", current):
            verify(placed)
    return current


def _run(
    ran: AnyPass, subject: T, done: Sequence[str], observe: Observer | None, check: Callable[[T], None] | None
) -> T:
    begin = time.perf_counter()
    with _Chain(ran, done, str(getattr(subject, "name", ""))):
        outcome = _outcome(ran.run(subject), subject)
        if ran.stage is not Stage.EXPORTED and outcome.changed != (outcome.subject != subject):
            said, truth = ("changed", "the same") if outcome.changed else ("unchanged", "another")
            raise PassError(f"it says {said}, but its result is {truth}")
        if ran.stage is Stage.PLACED:
            from .placed.verify import verify_structure

            verify_structure(cast("PlacedGraph", outcome.subject))
        if check is not None:
            check(outcome.subject)
    if observe is not None:
        observe(PassRun(ran, outcome.subject, outcome.changed, time.perf_counter() - begin))
    return outcome.subject


def _outcome(result: object, subject: T) -> PassResult[T]:
    if not _is_result(result) or type(result.subject) is not type(subject):
        raise PassError(f"it must return a PassResult with a {type(subject).__name__}")
    return result


def _is_result(value: object) -> TypeGuard[PassResult[Any]]:
    return isinstance(value, PassResult)


def _is_pass(value: object) -> TypeGuard[type[AnyPass]]:
    return isinstance(value, type) and issubclass(value, Pass)


class _Chain:
    """Turns what goes wrong inside into a PassError that tells which pass, on what, and after which."""

    def __init__(self, ran: AnyPass, done: Sequence[str], method: str) -> None:
        self._ran, self._done, self._method = ran, done, method

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, DevplanError) and not isinstance(error, PassError):
            return
        where = f" on method `{self._method}`" if self._method else ""
        before = ", ".join(f"`{name}`" for name in self._done)
        why = str(error) if isinstance(error, PassError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, PassError) else ""
        raise PassError(
            f"pass `{self._ran}` failed{where}",
            why=why + (f" (passes before it: {before})" if before else " (it was the first pass)"),
            hint=hint,
        ) from error

"""Resolve SOURCE, as a user types it, to a `ModelSource`.

SOURCE is ``model.py``, ``model.py:NAME``, ``package.module:NAME`` or ``program.pt2``. Every way in which a
file can miss the convention ends in a `UsageError` whose one line says what was expected, what was found,
and at which line of the user's own file.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from ...runtime.errors import UsageError
from ..config.rules import bucket_rule
from ..exported.call_names import misfit, parameters_of, wrong_name
from ..narrow import is_mapping, is_sequence, is_tuple
from ..options import BucketRule
from .function_module import FunctionModule
from .hollow import without_weights
from .model import MethodSource, ModelSource
from .text import default_name, split_source
from .user_code import UserCode, import_file, import_module

_METHOD_KEYS = ("module", "function", "example_inputs", "dynamic_shapes", "buckets")
_INPUTS = "a tuple, a dict for keyword arguments, or a function that makes one"
_MODEL = "an `nn.Module`, or a function or class that makes one without arguments"


def resolve(text: str, *, weightless: bool = False) -> ModelSource:
    """Load what SOURCE names; `UsageError` says what was expected, what was found, and where.

    ``weightless`` builds modules with their parameters on the meta device: none of them is ever in memory.
    """
    if weightless:
        with without_weights():
            return resolve(text)
    target, name = split_source(text)
    path = Path(target)
    if path.suffix == ".pt2":
        return _saved_program(path, text)
    code = import_file(path, target) if path.suffix == ".py" else import_module(target)
    methods, notes = _Resolver(code).methods(name)
    return ModelSource(default_name(target, name), methods, file=code.file, notes=notes)


def resolve_namespace(space: SimpleNamespace, label: str) -> ModelSource:
    """The same for names that are not in a file: any object whose ``vars`` are those of a model file."""
    code = UserCode(label, None, space)
    methods, notes = _Resolver(code).methods("")
    return ModelSource("model", methods, notes=notes)


def _saved_program(path: Path, label: str) -> ModelSource:
    logging.disable(logging.ERROR)  # torch logs a traceback before it raises
    try:
        program = torch.export.load(str(path))
    except Exception as error:
        why = f"`torch.export.load` raised `{type(error).__name__}`: {_first_line(error)}"
        hint = "write it again with `torch.export.save` of this torch version"
        raise UsageError(f"cannot use `{label}`", why=why, hint=hint) from error
    finally:
        logging.disable(logging.NOTSET)
    return ModelSource(path.stem, (_from_program("forward", program),), file=path.resolve())


def _from_program(name: str, program: torch.export.ExportedProgram) -> MethodSource:
    args, kwargs = program.example_inputs or ((), {})
    return MethodSource(name, program.module(), tuple(args), dict(kwargs), exported=program)


@dataclass
class _Resolver:
    """Reads the convention's names out of one user module."""

    code: UserCode
    notes: list[str] = field(default_factory=list[str])
    made: dict[int, Any] = field(default_factory=dict[int, Any])
    """What each factory made, by its id, so that methods naming one factory share one module."""

    def methods(self, name: str) -> tuple[tuple[MethodSource, ...], tuple[str, ...]]:
        """All methods of the file, or the one of its attribute ``name``; and what a person should know."""
        space = vars(self.code.module)
        found = self._many(space["methods"]) if "methods" in space and not name else (self._one(name),)
        return found, tuple(self.notes)

    def _one(self, name: str) -> MethodSource:
        space = vars(self.code.module)
        attribute = name or ("model" if "model" in space else self._convention_class())
        value = self._attribute(attribute)
        if _is_convention(value):
            return self._from_convention(attribute, value)
        model = self._module(attribute, value)
        if isinstance(model, torch.export.ExportedProgram):
            return _from_program("forward", model)
        if "example_inputs" not in space:
            why = f"it defines `{attribute}` ({self.code.at(attribute)}) but no `example_inputs`"
            raise self.code.error(
                why, self._similar("example_inputs") or "add `example_inputs = (tensor, ...)`"
            )
        args, kwargs = self._inputs("example_inputs", space["example_inputs"])
        shapes = self._shapes("dynamic_shapes", space.get("dynamic_shapes"))
        self._check_call("", "", model, args, kwargs, shapes)
        buckets = self._buckets("buckets", space.get("buckets"))
        return MethodSource("forward", model, args, kwargs, shapes, buckets=buckets)

    def _many(self, methods: Any) -> tuple[MethodSource, ...]:
        at = self.code.at("methods")
        if not (is_mapping(methods) and methods):
            found = "empty" if is_mapping(methods) else _kind(methods)
            why = f"`methods` at {at} is {found}, expected a dict of dicts"
            raise self.code.error(
                why, 'write `methods = {"forward": {"module": model, "example_inputs": (x,)}}`'
            )
        return tuple(self._method(name, entry) for name, entry in methods.items())

    def _method(self, name: Any, entry: Any) -> MethodSource:
        at = self.code.at("methods")
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name)):
            raise self.code.error(
                f"`methods` at {at} has the key {name!r}, expected a name of letters and digits"
            )
        what = f'methods["{name}"]'
        if not is_mapping(entry):
            raise self.code.error(
                f"`{what}` at {at} is {_kind(entry)}, expected a dict", f"keys: {_listed(_METHOD_KEYS)}"
            )
        for key in entry:
            if key not in _METHOD_KEYS:
                raise self.code.error(
                    f"`{what}` at {at} has the unknown key `{key}`", _suggest(str(key), _METHOD_KEYS)
                )
        if ("module" in entry) == ("function" in entry):
            found = "both" if "module" in entry else "neither"
            raise self.code.error(
                f"`{what}` at {at} must have one of `module` and `function`, it has {found}"
            )
        if "module" in entry:
            module = self._module(f"{what}.module", entry["module"], at)
        else:
            module = self._function(f"{what}.function", entry["function"], at)
        if isinstance(module, torch.export.ExportedProgram):
            return _from_program(name, module)
        if "example_inputs" not in entry:
            raise self.code.error(f"`{what}` at {at} has no `example_inputs`", f"expected {_INPUTS}")
        args, kwargs = self._inputs(f"{what}.example_inputs", entry["example_inputs"], at)
        shapes = self._shapes(f"{what}.dynamic_shapes", entry.get("dynamic_shapes"), at)
        self._check_call(f"{what}.", at, module, args, kwargs, shapes)
        buckets = self._buckets(f"{what}.buckets", entry.get("buckets"), at)
        return MethodSource(name, module, args, kwargs, shapes, buckets=buckets)

    def _from_convention(self, name: str, value: Any) -> MethodSource:
        """A class with ``get_eager_model`` and ``get_example_inputs``, as ExecuTorch's examples have it."""
        at = self.code.at(name)
        with self.code.blaming(f"making `{name}`"):
            holder = value() if isinstance(value, type) else value
        module = self._module(f"{name}.get_eager_model()", self._call(holder, "get_eager_model"), at)
        args, kwargs = self._inputs(
            f"{name}.get_example_inputs()", self._call(holder, "get_example_inputs"), at
        )
        if hasattr(holder, "get_example_kwarg_inputs"):
            kwargs = dict(self._call(holder, "get_example_kwarg_inputs") or {})
        shapes = self._call(holder, "get_dynamic_shapes") if hasattr(holder, "get_dynamic_shapes") else None
        return MethodSource(
            "forward", module, args, kwargs, self._shapes(f"{name}.get_dynamic_shapes()", shapes, at)
        )

    def _call(self, holder: Any, method: str) -> Any:
        with self.code.blaming(f"calling `{method}()`"):
            return getattr(holder, method)()

    def _attribute(self, name: str) -> Any:
        value: Any = self.code.module
        for part in name.split("."):
            if not hasattr(value, part):
                why = f"it does not define `{name}`" + ("" if name != "model" else f", expected {_MODEL}")
                raise self.code.error(why, self._similar(name) or f"define `{name}`")
            value = getattr(value, part)
        return value

    def _similar(self, name: str) -> str:
        close = get_close_matches(name, self.code.names(), n=1, cutoff=0.7)
        return f"did you mean `{close[0]}` at {self.code.at(close[0])}" if close else ""

    def _convention_class(self) -> str:
        own = [
            name
            for name, value in vars(self.code.module).items()
            if isinstance(value, type)
            and _is_convention(value)
            and value.__module__ == getattr(self.code.module, "__name__", "")
        ]
        if len(own) > 1:
            where = _listed([f"{name} ({self.code.at(name)})" for name in own])
            raise self.code.error(
                f"several classes define a model: {where}", f"write `{self.code.label}:{own[0]}`"
            )
        return own[0] if own else "model"

    def _module(self, what: str, value: Any, at: str = "") -> Any:
        """The module itself, or what a factory makes of it; in evaluation mode."""
        at = at or self.code.at(what)
        if (isinstance(value, type) or inspect.isroutine(value)) and not isinstance(value, torch.nn.Module):
            if required := _required_parameters(value):
                why = f"`{what}` at {at} takes parameters ({', '.join(required)}), expected {_MODEL}"
                raise self.code.error(
                    why, "export a function of tensors through `methods` with the key `function`"
                )
            if id(value) not in self.made:
                with self.code.blaming(f"calling `{what}()`"):
                    self.made[id(value)] = value()
            made, source = self.made[id(value)], f"`{what}()` at {at} made"
        else:
            made, source = value, f"`{what}` at {at} is"
        if isinstance(made, torch.export.ExportedProgram):
            return made
        if not isinstance(made, torch.nn.Module):
            raise self.code.error(f"{source} {_kind(made)}, expected {_MODEL}")
        if made.training and any(module.training for module in made.modules() if _is_mode_dependent(module)):
            self.notes.append(f"`{what}` was in training mode and was switched to evaluation mode")
        return made.eval()

    def _function(self, what: str, value: Any, at: str) -> torch.nn.Module:
        if not callable(value) or isinstance(value, type):
            raise self.code.error(f"`{what}` at {at} is {_kind(value)}, expected a function of tensors")
        return value if isinstance(value, torch.nn.Module) else FunctionModule(value).eval()

    def _inputs(self, what: str, value: Any, at: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
        at = at or self.code.at(what)
        if inspect.isroutine(value):
            if required := _required_parameters(value):
                raise self.code.error(
                    f"`{what}` at {at} takes parameters ({', '.join(required)}), expected {_INPUTS}"
                )
            with self.code.blaming(f"calling `{what}()`"):
                value = value()
        if is_mapping(value):
            if bad := [key for key in value if not isinstance(key, str)]:
                raise self.code.error(f"`{what}` at {at} has the key {bad[0]!r}, expected argument names")
            kwargs = {str(key): leaf for key, leaf in value.items()}
            self._check_leaves(what, at, tuple(kwargs.values()))
            return (), kwargs
        if not is_tuple(value):
            hint = f"write `{what.rpartition('.')[2]} = (x,)`" if isinstance(value, torch.Tensor) else ""
            raise self.code.error(f"`{what}` at {at} is {_kind(value)}, expected {_INPUTS}", hint)
        self._check_leaves(what, at, value)
        return value, {}

    def _check_call(
        self, prefix: str, at: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any
    ) -> None:
        """The example and the dynamic shapes must be for this module's inputs."""
        for key, names in (("example_inputs", kwargs), ("dynamic_shapes", shapes)):
            wrong = wrong_name(module, names) if is_mapping(names) else None
            if wrong is not None:
                where = at or self.code.at(key)
                raise self.code.error(f"`{prefix}{key}` at {where} names no input `{wrong[0]}`", wrong[1])
        if why := misfit(module, args, kwargs):
            where = at or self.code.at("example_inputs")
            inputs = list(parameters_of(module) or ())
            raise self.code.error(
                f"`{prefix}example_inputs` at {where} does not fit the model: {why}",
                f"its inputs are {_listed(inputs)}",
            )

    def _check_leaves(self, what: str, at: str, value: Any) -> None:
        if is_sequence(value):
            for item in value:
                self._check_leaves(what, at, item)
        elif type(value).__module__ == "numpy":
            why = f"`{what}` at {at} holds {_kind(value)}, expected tensors and Python numbers"
            raise self.code.error(why, "wrap arrays in `torch.from_numpy`")

    def _shapes(self, what: str, value: Any, at: str = "") -> Any:
        if value is None or isinstance(value, dict | tuple | list | torch.export.ShapesCollection):
            return cast(Any, value)
        at = at or self.code.at(what)
        why = f"`{what}` at {at} is {_kind(value)}, expected a dict or tuple as `torch.export` has it"
        raise self.code.error(why, 'for example `{"x": {0: torch.export.Dim("batch", max=32)}}`')

    def _buckets(self, what: str, value: Any, at: str = "") -> tuple[BucketRule, ...]:
        if value is None:
            return ()
        at = at or self.code.at(what)
        example = 'for example `{"batch": [1, 8, 32]}`'
        if not (is_mapping(value) and all(isinstance(name, str) for name in value)):
            why = f"`{what}` at {at} is {_kind(value)}, expected a dict of sizes by dimension"
            raise self.code.error(why, example)
        try:
            return tuple(bucket_rule(name, sizes) for name, sizes in value.items())
        except ValueError as error:
            raise self.code.error(f"`{what}` at {at}: {error}", example) from error


def _is_convention(value: Any) -> bool:
    return hasattr(value, "get_eager_model") and hasattr(value, "get_example_inputs")


def _is_mode_dependent(module: torch.nn.Module) -> bool:
    """Whether training mode changes what a module computes, as far as its class tells."""
    return type(module).__name__.startswith(("Dropout", "BatchNorm", "AlphaDropout", "InstanceNorm", "RReLU"))


def _required_parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _suggest(name: str, valid: tuple[str, ...]) -> str:
    close = get_close_matches(name, valid, n=1)
    return f"did you mean `{close[0]}`" if close else f"keys: {_listed(valid)}"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _kind(value: object) -> str:
    return "None" if value is None else f"a `{type(value).__name__}`"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")

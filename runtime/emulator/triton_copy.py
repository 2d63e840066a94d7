"""A copy of Triton's own modules with its interpreter switched on, apart from the process's Triton.

Triton decides at import, for good, whether ``@triton.jit`` makes functions for the compiler or for the
interpreter, and its interpreter replaces functions of ``triton.language`` in place. A process that exports
has the compiler's Triton already. So the Python modules are imported a second time under the setting, kept
out of ``sys.modules``, and share the extension module with the first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from ..errors import DeviceError
from . import triton_builder, triton_libdevice

_SETTING = "TRITON_INTERPRET"
_HELPERS = ("torch._inductor.runtime.triton_compat", "torch._inductor.runtime.triton_helpers")
LOCK = threading.RLock()
"""Held while interpreting: the interpreter keeps the current program in its modules."""


@dataclass(frozen=True)
class Interpreter:
    """What kernels are interpreted with."""

    tl: Any
    """``triton.language``."""
    triton: Any
    helpers: Any
    """Inductor's ``triton_helpers``, interpreted."""
    module: Any
    """``triton.runtime.interpreter``."""


@lru_cache(maxsize=1)
def interpreter() -> Interpreter:
    """The interpreter, made on the first call (about a second). DeviceError without torch or triton."""
    try:
        importlib.import_module("torch._inductor.runtime")
        importlib.import_module("triton")
    except ImportError as error:
        raise DeviceError(
            "Triton's interpreter is not here",
            why=f"{error}",
            hint="pip install 'devplan[export]', or run it on `emulator`, which needs neither",
        ) from error
    with LOCK, _apart():
        triton = importlib.import_module("triton")
        module = importlib.import_module("triton.runtime.interpreter")
        helpers = [_load(name) for name in _HELPERS][-1]
    triton.knobs.propagate_env = False  # so that setting a knob here changes no environment
    triton.knobs.runtime.interpret = True
    made = Interpreter(triton.language, triton, helpers, module)
    _unwrap_constants(made)
    triton_libdevice.install(made)
    triton_builder.install(made)
    return made


def _unwrap_constants(made: Interpreter) -> None:
    """Compile-time functions unwrap our Triton's constants; they would look for the process's class."""
    unwrap = made.tl.core._unwrap_if_constexpr

    def call(self: Any, *arguments: Any, _semantic: Any = None, **named: Any) -> Any:
        return self.fn(*map(unwrap, arguments), **{name: unwrap(value) for name, value in named.items()})

    made.triton.runtime.jit.ConstexprFunction.__call__ = call


def _is_copied(name: str) -> bool:
    is_triton = name == "triton" or name.startswith("triton.")
    return name in _HELPERS or (is_triton and not name.startswith("triton._C"))


@contextmanager
def _apart() -> Generator[None]:
    """Imports of Triton make new modules, for the interpreter; afterwards the process has its own again."""
    held = {name: module for name, module in sys.modules.items() if _is_copied(name)}
    before = os.environ.get(_SETTING)
    for name in held:
        del sys.modules[name]
    os.environ[_SETTING] = "1"
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_copied(name)]:
            del sys.modules[name]
        sys.modules.update(held)
        os.environ.pop(_SETTING)
        if before is not None:
            os.environ[_SETTING] = before


def _load(name: str) -> ModuleType:
    """Import one module without making it an attribute of its package, which has the process's."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise DeviceError(f"this torch has no `{name}`", hint="run it on `emulator`")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

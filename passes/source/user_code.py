"""Import a user's Python file, and say where in it something went wrong."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType

from ...runtime.errors import DevplanError, UsageError
from .frames import is_users

_LONGEST_TEXT = 600
"""Letters of an exception that are shown; some quote all of a tensor."""


@dataclass(frozen=True)
class UserCode:
    """A user's module, with the words for it in messages.

    Args:
        label: what the user typed, such as ``models/net.py``.
        file: where its source is; None for a module without one.
        module: the module, or any object with the same names.
    """

    label: str
    file: Path | None
    module: ModuleType | SimpleNamespace

    def at(self, name: str) -> str:
        """``net.py:12``, the line that binds a top-level name; the bare file name if no line does."""
        stem = self.file.name if self.file else self.label
        line = self._lines().get(name)
        return f"{stem}:{line}" if line else stem

    def names(self) -> list[str]:
        """The public top-level names that the source binds."""
        return [name for name in self._lines() if not name.startswith("_")]

    def error(self, why: str, hint: str = "") -> UsageError:
        """The error of a file that does not follow the convention."""
        return UsageError(f"cannot use `{self.label}`", why=why, hint=hint)

    @contextmanager
    def blaming(self, doing: str) -> Generator[None]:
        """Turn an exception of the user's code into one line that names the user's own file and line."""
        try:
            yield
        except DevplanError:
            raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a test runner's `skip` is one, `sys.exit` another
            raise blame(error, self.label, self.file, doing) from error

    def _lines(self) -> dict[str, int]:
        if self.file is None:
            return {}
        try:
            tree = ast.parse(self.file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return {}
        return dict(_bindings(tree.body))


def import_file(path: Path, label: str) -> UserCode:
    """Run a file with its own folder importable, as python does; `UsageError` when it raises."""
    file = path.resolve()
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"devplan_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot use `{label}`", why="it is not a Python file", hint="name a `.py` file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    code = UserCode(label, file, module)
    process = os.getpid()
    with code.blaming("importing it"):
        spec.loader.exec_module(module)
    if (
        os.getpid() != process
    ):  # a child that the file forked and did not end: there is one export, the parent's
        os._exit(0)
    return code


def import_module(name: str) -> UserCode:
    """Import ``package.module`` from the current folder or the environment; `UsageError` when it raises."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and name.startswith(error.name or "\0")
        if missing:
            hint = "name a `.py` file, or install the package that holds the module"
            raise UsageError(f"cannot use `{name}`", why=f"there is no module `{name}`", hint=hint) from error
        raise blame(error, name, None, "importing it") from error
    source = getattr(module, "__file__", None)
    return UserCode(name, Path(source) if source else None, module)


def blame(error: BaseException, label: str, file: Path | None, doing: str) -> UsageError:
    """One line for an exception of the user's code: its type, its text, and the last line of theirs."""
    text = " ".join(str(error)[:_LONGEST_TEXT].split())
    why = f"{doing} raised `{type(error).__name__}`" + (f" at {at}" if (at := where(error, file)) else "")
    if isinstance(error, ModuleNotFoundError) and error.name:
        hint = f"install the package that provides `{error.name}`, or mend the import"
    else:
        hint = "mend the model file; `--verbose` shows the traceback"
    return UsageError(f"cannot use `{label}`", why=f"{why}: {text}" if text else why, hint=hint)


def where(error: BaseException, file: Path | None) -> str:
    """``net.py:12``: the innermost frame in the user's file, else in its folder, else of anything."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = list(_frames(error.__traceback__))
    own = [frame for frame in frames if file is not None and Path(frame[0]) == file]
    near = [frame for frame in frames if file is not None and Path(frame[0]).is_relative_to(file.parent)]
    theirs = [frame for frame in frames if is_users(frame[0])]
    best = own or near or theirs
    return f"{Path(best[-1][0]).name}:{best[-1][1]}" if best else ""


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """(name, line) of what top-level statements bind, those inside `if`, `try` and `with` included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
                yield from ((name, node.lineno) for name in names)
        else:
            for inner in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(node, inner, []))

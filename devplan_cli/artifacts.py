"""Opening artifacts: the one place where the command touches `runtime.artifact`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import UsageError
from .words import origin

if TYPE_CHECKING:
    from ..runtime.artifact import Artifact
    from ..runtime.program import PlannedProgram


@dataclass(frozen=True)
class Opened:
    """An artifact that has been read and checked; its constants have not been touched."""

    artifact: Artifact

    @property
    def planned(self) -> PlannedProgram:
        """The program with its plan."""
        return self.artifact.planned

    def origins(self) -> dict[str, dict[str, str]]:
        """By method and storage: the operator, module and source line that made it."""
        methods = self.planned.program.methods
        return {m.name: {storage.name: origin(storage.origin) for storage in m.storages} for m in methods}

    def describe(self, method: str | None = None, *, sha256: bool = True) -> dict[str, Any]:
        """The contract's JSON document, of one method if one is named; the digest reads the whole file."""
        from ..runtime.describe import describe

        described = describe(self.artifact, sha256=sha256)
        if method is not None:
            name = choose_method(method, [m["name"] for m in described["methods"]])
            described["methods"] = [m for m in described["methods"] if m["name"] == name]
        return described


def check_targets(*files: Path | None, sources: Iterable[Path] = ()) -> None:
    """`UsageError` for a file that cannot be written where it is wanted, before any work is done for it.

    Nor is one that would take the place of another, or of one of ``sources``, which are read.
    """
    taken = {path.resolve(): "is read" for path in sources}
    for file in filter(None, files):
        if what := taken.get(file.resolve()):
            why = f"the same file {what} by this command"
            raise UsageError(f"cannot write `{file}`", why=why, hint="name another")
        taken[file.resolve()] = "is written"
        if not file.parent.is_dir():
            why = f"there is no folder `{file.parent}`"
            raise UsageError(f"cannot write `{file}`", why=why, hint=f"mkdir -p {file.parent}")
        if file.is_dir():
            raise UsageError(f"cannot write `{file}`", why="it is a folder", hint="name a file")
        if file.exists() and not file.is_file():
            raise UsageError(f"cannot write `{file}`", why="it is no ordinary file", hint="name another")
        if not os.access(file.parent, os.W_OK):
            why = f"the folder `{file.parent}` is not yours to write to"
            raise UsageError(f"cannot write `{file}`", why=why, hint="name a file in another folder")


def require_file(path: Path) -> None:
    """`UsageError` when there is no such file."""
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_file():
        why, hint = "it is not yours to read", "check its permissions"
    elif path.is_dir():
        why, hint = "it is a folder", "name a file in it"
    elif path.exists():
        why, hint = "it is no ordinary file", "name a file"
    else:
        why, hint = "there is no such file", _nearby(path)
    raise UsageError(f"cannot read `{path}`", why=why, hint=hint)


def open_artifact(path: Path) -> Opened:
    """Read an artifact; `UsageError` without a file, `ArtifactError` when it is none."""
    require_file(path)
    from ..runtime.artifact import read

    return Opened(read(path))


def choose_method(name: str | None, methods: list[str]) -> str:
    """The method of that name, or the only one, or `forward`; `UsageError` says which there are."""
    listed = ", ".join(f"`{method}`" for method in methods)
    if name is None:
        if len(methods) == 1:
            return methods[0]
        if "forward" in methods:
            return "forward"
        raise UsageError(
            "which method?", why=f"the artifact has {listed}", hint=f"write `--method {methods[0]}`"
        )
    if name not in methods:
        close = get_close_matches(name, methods, n=1)
        hint = f"did you mean `{close[0]}`" if close else ""
        raise UsageError(f"there is no method `{name}`", why=f"the artifact has {listed}", hint=hint)
    return name


def _nearby(path: Path) -> str:
    entries = path.parent.glob("*.pte") if path.parent.is_dir() else ()
    names = [entry.name for entry in entries if entry.is_file()]
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean `{path.parent / close[0]}`" if close else "check the path"

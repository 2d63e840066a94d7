"""Split SOURCE into its parts, before anything heavy is imported."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from ...runtime.errors import UsageError


def split_source(text: str) -> tuple[str, str]:
    """(file or module, attribute or ""); checks that the file is there, so that it costs no heavy import."""
    target, _, name = text.rpartition(":") if re.search(r":\w[\w.]*$", text) else (text, "", "")
    suffix = Path(target).suffix
    if suffix in (".py", ".pt2"):
        if not Path(target).is_file():
            raise UsageError(f"cannot read `{target}`", why="there is no such file", hint=_nearby(target))
        if name and suffix == ".pt2":
            raise UsageError(
                f"cannot use `{text}`", why="a `.pt2` program has no attributes", hint=f"write `{target}`"
            )
    elif not (name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", target)):
        hint = f"write `{text}.py`" if Path(f"{text}.py").is_file() else "see `devplan export --help`"
        expected = "a SOURCE is `model.py`, `model.py:NAME`, `package.module:NAME` or `program.pt2`"
        raise UsageError(f"cannot use `{text}`", why=expected, hint=hint)
    return target, name


def default_name(target: str, name: str) -> str:
    """The stem of the artifact's name: the attribute's if one is named, else the file's or module's."""
    if name and name != "model":
        return re.sub(r"\W+", "_", name)
    return Path(target).stem if target.endswith((".py", ".pt2")) else target.rpartition(".")[2]


def _nearby(target: str) -> str:
    path = Path(target)
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = get_close_matches(path.name, [name for name in names if name.endswith((".py", ".pt2"))], n=1)
    return f"did you mean `{folder / close[0]}`" if close else "check the path"

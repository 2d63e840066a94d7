"""Differences as words and as markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .differences import Change

if TYPE_CHECKING:
    from rich.console import RenderableType

_LONGEST = 60


def lines(changes: list[Change]) -> list[RenderableType]:
    """One line for each; what matters is marked."""
    if not changes:
        return ["no differences"]
    return [f"{'!' if change.matters else ' '} {_words(change)}" for change in changes]


def markdown_lines(old: str, new: str, changes: list[Change]) -> list[RenderableType]:
    """A table to paste into a pull request."""
    if not changes:
        return [f"**devplan diff** `{old}` → `{new}`: no differences"]
    head = [f"**devplan diff** `{old}` → `{new}`", "", "| | what | before | after |", "|---|---|---|---|"]
    rows = [
        f"| {'⚠️' if c.matters else ''} | {_cell(c.what)} | {_cell(_short(c.old))} | {_cell(_short(c.new))} |"
        for c in changes
    ]
    return [*head, *rows]


def _words(change: Change) -> str:
    if change.kind in ("signature", "state") and change.old is not None and change.new is not None:
        return f"{change.what}: {change.old} became {change.new}"
    if change.kind == "architectures":
        return f"{change.what}: {', '.join(change.old or ())} became {', '.join(change.new or ())}"
    return change.what


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

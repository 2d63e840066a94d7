"""HTML and SVG elements as text, escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ...passes.narrow import is_tuple


def element(tag: str, *children: str, **attributes: object) -> str:
    """An element of markup children. In attributes a trailing underscore goes, others are dashes."""
    named = "".join(f' {_name(key)}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{tag}{named}>{''.join(children)}</{tag}>" if children else f"<{tag}{named}/>"


def text(value: object) -> str:
    """Text, escaped."""
    return escape(str(value))


def table(head: Iterable[str], rows: Iterable[Iterable[object]], *, numeric: Iterable[int] = ()) -> str:
    """A table; columns in ``numeric`` are set flush right and sort as numbers.

    A cell may be a (sort key, shown text) pair.
    """
    right = set(numeric)
    titles = "".join(f"<th{_class(i in right)}>{text(title)}</th>" for i, title in enumerate(head))
    body = "".join(f"<tr>{''.join(_cell(c, i in right) for i, c in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: object, numeric: bool) -> str:
    if is_tuple(cell):
        key, shown = cell
        return f'<td data-key="{text(key)}"{_class(numeric)}>{text(shown)}</td>'
    return f"<td{_class(numeric)}>{text(cell)}</td>"


def _class(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _name(key: str) -> str:
    return "viewBox" if key == "viewBox" else key.rstrip("_").replace("_", "-")

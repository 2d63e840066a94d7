"""Numbers and tables in a person's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ..runtime.program import SourceLocation


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int) -> str:
    """``1.50 MiB``: three figures and a binary unit; exact below one KiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    power = next(p for p in (1, 2, 3, 4) if abs(nbytes) / 1024**p < 1023.5 or p == 4)
    value, unit = nbytes / 1024**power, _UNITS[power]
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {unit}"


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 copy``, ``2 copies``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """``1.2 s`` or ``2 min 5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def microseconds(value: float) -> str:
    """``206 us`` or ``1.25 ms``."""
    return f"{value:.0f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def shape(extents: Sequence[Any]) -> str:
    """``1x128x384``; a scalar is ``scalar``."""
    return "x".join(str(extent) for extent in extents) or "scalar"


def sizes_words(sizes: Mapping[str, int]) -> str:
    """``batch=8, length=128``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def lifetime(allocation: dict[str, Any]) -> str:
    """``3-7``: the instructions, inclusive, over which a storage keeps its bytes; or ``never``."""
    return "never" if allocation["first"] is None else f"{allocation['first']}-{allocation['last']}"


def origin(location: SourceLocation) -> str:
    """``bmm in encoder.layer.0.attention, model.py:19``: the last operator, its module, the line."""
    named = [part for part in location.operator.split(", ") if part != "..."]
    last = named[-1] if named else ""
    operator = last.split(".")[1] if last.count(".") == 2 else last
    inside = f"{operator} in {location.module}" if location.module else operator
    at = f"{location.file}:{location.line}" if location.file else ""
    return ", ".join(part for part in (inside, at) if part)


def table(title: str, *columns: str) -> Table:
    """A table without rules; a column whose title ends in ``>`` is set flush right, one in ``+`` may wrap."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    made.padding = (0, 2, 0, 0)
    made.min_width = min(len(title), 80)
    for column in columns:
        name = column.rstrip(">+")
        right, wraps = column.endswith(">"), column.endswith("+")
        made.add_column(name, justify="right" if right else "left", no_wrap=not wraps, overflow="ellipsis")
    return made

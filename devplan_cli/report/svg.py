"""An arena as a drawing: bytes upwards, instructions to the right, one block per allocation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.artifact.atomic import write_whole
from ..words import size
from .markup import element, text

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 420, 70, 26, 8
_LETTER = 6.2
"""Width of a letter of the labels, about."""
ROLE_COLOURS = {
    "input": "#4c78a8",
    "output": "#54a24b",
    "temporary": "#bab0ab",
    "workspace": "#f2cf5b",
    "staging": "#b279a2",
    "state": "#e45756",
    "constant": "#9ecae9",
}


def arena_svg(arena: dict[str, Any], origins: Mapping[str, str], *, standalone: bool = False) -> str:
    """The drawing of one arena. ``origins`` says for a storage what made it; shown when pointed at."""
    total = max(1, arena["planned_bytes"])
    live = [a for a in arena["allocations"] if a["first"] is not None]
    columns = 1 + max((a["last"] for a in live), default=0)
    blocks = [_block(a, total, columns, origins) for a in live]
    drawn = element("g", *blocks, class_="blocks")
    parts = (_style() if standalone else "", _frame(), drawn, *_axes(total, columns), _bound(arena, total))
    options: dict[str, object] = {"xmlns": "http://www.w3.org/2000/svg"} if standalone else {}
    return element("svg", *parts, class_="arena", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", **options)


def write_svg(path: Path, described: dict[str, Any]) -> None:
    """Write the largest arena of the first method as a file of its own."""
    arenas = [arena for method in described["methods"] for arena in method["arenas"] if arena["allocations"]]
    largest = max(arenas, key=lambda arena: arena["planned_bytes"], default=None)
    empty: dict[str, Any] = {"planned_bytes": 0, "lower_bound_bytes": 0, "allocations": []}
    write_whole(path, arena_svg(largest or empty, {}, standalone=True) + "\n")


def _block(a: dict[str, Any], total: int, columns: int, origins: Mapping[str, str]) -> str:
    x0, x1 = _x(a["first"], columns), _x(a["last"] + 1, columns)
    y0, y1 = _y(a["offset"] + a["bytes"], total), _y(a["offset"], total)
    where = origins.get(a["name"], "")
    title = (
        f"{a['name']} ({a['role']})\n{a['bytes']} bytes at {a['offset']}\nlive {a['first']} to {a['last']}"
    )
    colour = ROLE_COLOURS.get(a["role"], "#bab0ab")
    hint = element("title", text(f"{title}\n{where}" if where else title))
    box = element(
        "rect",
        hint,
        x=f"{x0:.2f}",
        y=f"{y0:.2f}",
        width=f"{x1 - x0:.2f}",
        height=f"{y1 - y0:.2f}",
        fill=colour,
    )
    if y1 - y0 < 10 or x1 - x0 < _LETTER * 3:
        return box
    label = a["name"][: max(1, int((x1 - x0 - 4) / _LETTER))]
    return box + element(
        "text", text(label), x=f"{x0 + 3:.2f}", y=f"{(y0 + y1) / 2 + 3.5:.2f}", class_="name"
    )


def _frame() -> str:
    return element(
        "rect",
        x=LEFT,
        y=TOP,
        width=WIDTH - LEFT - 4,
        height=HEIGHT - TOP - BOTTOM,
        class_="frame",
        fill="none",
    )


def _axes(total: int, columns: int) -> list[str]:
    marks = [
        element(
            "text",
            text(size(total * step // 4)),
            x=LEFT - 6,
            y=_y(total * step // 4, total) + 4,
            class_="axis end",
        )
        for step in range(5)
    ]
    step = max(1, (columns - 1) // 8)
    marks += [
        element("text", text(i), x=f"{_x(i, columns):.2f}", y=HEIGHT - 10, class_="axis")
        for i in range(0, columns, step)
    ]
    return marks


def _bound(arena: dict[str, Any], total: int) -> str:
    """The lower bound as a dashed line: no plan of this order can end below it."""
    y = _y(arena["lower_bound_bytes"], total)
    hint = element("title", text(f"lower bound {arena['lower_bound_bytes']} bytes"))
    return element("line", hint, x1=LEFT, x2=WIDTH - 4, y1=f"{y:.2f}", y2=f"{y:.2f}", class_="bound")


def _x(instruction: int, columns: int) -> float:
    return LEFT + (WIDTH - LEFT - 4) * instruction / columns


def _y(offset: int, total: int) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * offset / total


def _style() -> str:
    rules = (
        "text{font:11px sans-serif;fill:#222}.axis{fill:#666}.end{text-anchor:end}.name{font-size:10px}"
        ".blocks rect{stroke:#fff;stroke-width:.6}.frame{stroke:#bbb}"
        ".bound{stroke:#d62728;stroke-dasharray:6 4}"
    )
    return element("style", rules)

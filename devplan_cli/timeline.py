"""The memory timeline in the terminal: each arena as rows of bytes over columns of instructions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .words import lifetime, shape, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH, HEIGHT, NAMED = 64, 16, 24
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_SMALL, _FREE = "+", "."


def timelines(described: dict[str, Any], origins: Mapping[str, Mapping[str, str]]) -> list[RenderableType]:
    """One picture per arena, with the largest storages named below it.

    ``origins`` says by method and storage what made it.
    """
    items: list[RenderableType] = []
    for method in described["methods"]:
        for arena in method["arenas"]:
            live = [a for a in arena["allocations"] if a["first"] is not None]
            if live:
                shown = {**arena, "allocations": live}
                items += [
                    *_picture(method["name"], shown),
                    _legend(shown, origins.get(method["name"], {})),
                    "",
                ]
        items += list(_at_their_bounds(method))
    return items or ["nothing is planned: every storage is allocated at run time"]


def _at_their_bounds(method: dict[str, Any]) -> Iterator[str]:
    """A line for each output that is smaller than its place, as the data will have it."""
    for port in method["outputs"]:
        if counted := port.get("data_dependent"):
            bound = shape(port["max_shape"])
            real = f"{counted['lower']} to {counted['upper']} in dimension {counted['dimension']}"
            yield f"`{port['name']}` of {method['name']} is data-dependent: {real}, planned at {bound}"


def _picture(method: str, arena: dict[str, Any]) -> list[str]:
    bound = arena["lower_bound_bytes"]
    ratio = f", {arena['planned_bytes'] / bound:.3f} of the lower bound" if bound else ""
    head = f"{method} on {arena['device']}: {size(arena['planned_bytes'])}{ratio} ({arena['algorithm']})"
    last = max(a["last"] for a in arena["allocations"])
    rows = [f"{_axis(arena, row)} |{line}|" for row, line in enumerate(_grid(arena, last))]
    columns = min(WIDTH, last + 1)
    foot = (
        f"{'':>10}  0{f'instruction {last}':>{columns - 1}}"
        if columns > 20
        else f"{'':>10}  0 to instruction {last}"
    )
    return [head, *rows, foot]


def _axis(arena: dict[str, Any], row: int) -> str:
    """The offset at the top of a row, at every fourth of them; the arena's end is at the top."""
    top = arena["planned_bytes"] * (HEIGHT - row) // HEIGHT
    return f"{size(top) if row % 4 == 0 else '':>10}"


def _grid(arena: dict[str, Any], last: int) -> list[str]:
    """Characters by row and column. A cell shows the storage that covers its middle."""
    columns, total = min(WIDTH, last + 1), max(1, arena["planned_bytes"])
    marks = _marks(arena)
    cells = [[_FREE] * columns for _ in range(HEIGHT)]
    for a in sorted(arena["allocations"], key=lambda a: a["bytes"]):
        for row in range(HEIGHT):
            middle = total * (2 * (HEIGHT - 1 - row) + 1) / (2 * HEIGHT)
            if a["offset"] <= middle < a["offset"] + a["bytes"]:
                begin, end = a["first"] * columns // (last + 1), a["last"] * columns // (last + 1)
                cells[row][begin : end + 1] = marks[a["name"]] * (end + 1 - begin)
    return ["".join(row) for row in cells]


def _marks(arena: dict[str, Any]) -> dict[str, str]:
    largest = sorted(arena["allocations"], key=lambda a: (-a["bytes"], a["first"], a["name"]))
    return {a["name"]: _MARKS[i] if i < len(_MARKS) else _SMALL for i, a in enumerate(largest)}


def _legend(arena: dict[str, Any], origins: Mapping[str, str]) -> RenderableType:
    made = table("", "", "storage", "role", "bytes>", "offset>", "live>", "from+")
    marks = _marks(arena)
    largest = sorted(arena["allocations"], key=lambda a: (-a["bytes"], a["first"], a["name"]))
    for a in largest[:NAMED]:
        numbers = (size(a["bytes"]), str(a["offset"]), lifetime(a))
        made.add_row(marks[a["name"]], a["name"], a["role"], *numbers, origins.get(a["name"], ""))
    if len(largest) > NAMED:
        rest = sum(a["bytes"] for a in largest[NAMED:])
        made.add_row("", f"and {len(largest) - NAMED} more", "", size(rest), "", "", "")
    return made

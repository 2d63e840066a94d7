"""What `inspect` shows a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .summary import arenas_table, bucket_tables, constants_line, kernel_counts, methods_table, tuning_lines
from .words import count, lifetime, shape, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType


def overview(described: dict[str, Any], *, verbose: bool = False) -> list[RenderableType]:
    """All tables of an artifact; with ``verbose`` every allocation too."""
    file = described["file"]
    items: list[RenderableType] = [
        f"Format     {file['format']}, written by devplan {described['devplan']}",
        f"File       {size(file['bytes'])} ({file['bytes']} bytes)" + _digest(file),
        f"Code for   {', '.join(described['architectures']) or 'the host'}",
        f"Constants  {constants_line(described)}",
        f"Kernels    {kernel_counts(described)}",
        *tuning_lines(described),
        "",
        methods_table(described),
    ]
    for method in described["methods"]:
        items += ["", _copies(method), "", _regions(method)]
    items += ["", arenas_table(described), *bucket_tables(described)]
    if described["state"]:
        items += ["", _state(described)]
    if verbose:
        items += [item for method in described["methods"] for item in ("", _allocations(method))]
    return items


def _digest(file: dict[str, Any]) -> str:
    return f", sha256 {file['sha256']}" if file["sha256"] else ""


def _copies(method: dict[str, Any]) -> RenderableType:
    if not method["copies"]:
        return f"{method['name']}: no copies"
    made = table(f"Copies of {method['name']}", "kind", "tensor", "bytes>", "from", "to", "why+")
    for copy in method["copies"]:
        made.add_row(
            copy["kind"], copy["tensor"], size(copy["bytes"]), copy["from"], copy["to"], copy["reason"]
        )
    return made


def _regions(method: dict[str, Any]) -> RenderableType:
    made = table(f"Regions of {method['name']}", "device", "backend", "operators>", "launches>")
    for region in method["regions"]:
        made.add_row(region["device"], region["backend"], str(region["operators"]), str(region["launches"]))
    return made


def _state(described: dict[str, Any]) -> RenderableType:
    made = table("State", "name", "type", "bytes>", "device", "methods+")
    for variable in described["state"]:
        kind = f"{variable['dtype']}[{shape(variable['shape'])}]"
        made.add_row(
            variable["name"],
            kind,
            size(variable["bytes"]),
            variable["device"],
            ", ".join(variable["methods"]),
        )
    return made


def _allocations(method: dict[str, Any]) -> RenderableType:
    total = sum(len(arena["allocations"]) for arena in method["arenas"])
    title = f"Allocations of {method['name']} ({count(total, 'storage')})"
    made = table(title, "device", "storage", "role", "offset>", "bytes>", "live>")
    for arena in method["arenas"]:
        for a in sorted(arena["allocations"], key=lambda a: (a["offset"], a["first"] or 0)):
            live = lifetime(a)
            made.add_row(arena["device"], a["name"], a["role"], str(a["offset"]), str(a["bytes"]), live)
    return made

"""The page: summary, timelines, tensors, copies, kernels, constants, regions; no network, printable."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...runtime.artifact.atomic import write_whole
from ...runtime.program import Launch, PlannedProgram
from ..summary import constants_line, dimension_names, kernel_counts, port_words
from ..words import count, lifetime, origin, size, sizes_words
from .lanes import lanes_svg
from .markup import element, table, text
from .svg import ROLE_COLOURS, arena_svg
from .treemap import treemap_svg

_SHOWN, _LARGEST = 40, 400
"""Rows of the tensor table that are shown, and that can be unfolded; the rest is told as a number."""


def write_page(path: Path, name: str, described: dict[str, Any], planned: PlannedProgram) -> None:
    """Write the report of an artifact of that name."""
    write_whole(path, page(name, described, planned))


def page(name: str, described: dict[str, Any], planned: PlannedProgram) -> str:
    """The whole document."""
    body = [element("h1", text(name)), _cards(described), _legend()]
    body += [part for method in described["methods"] for part in _method(method, planned)]
    body += [*_kernels(planned), *_constants(planned)]
    head = [
        '<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        element("title", text(f"{name}: devplan memory report")),
        f"<style>{_asset('page.css')}</style>",
    ]
    script = f"<script>{_asset('page.js')}</script>"
    whole = element("head", *head) + element("body", *body, script)
    return f'<!doctype html>\n<html lang="en">{whole}</html>\n'


def _asset(name: str) -> str:
    return (files(__package__ or "") / name).read_text(encoding="utf-8")


def _cards(described: dict[str, Any]) -> str:
    device = sum(
        max(
            (a["planned_bytes"] for m in described["methods"] for a in m["arenas"] if a["device"] == place),
            default=0,
        )
        for place in {a["device"] for m in described["methods"] for a in m["arenas"] if a["device"] != "cpu"}
    )
    copies = sum(len(method["copies"]) for method in described["methods"])
    entries = {
        "device arena": size(device),
        "constants": constants_line(described),
        "copies a call": str(copies),
        "kernels": kernel_counts(described),
        "code for": ", ".join(described["architectures"]) or "the host",
        "file": f"{size(described['file']['bytes'])}, {described['file']['format']}",
    }
    cards = [
        element("div", element("b", text(value)), element("span", text(key)))
        for key, value in entries.items()
    ]
    return element("section", *cards, class_="cards")


def _legend() -> str:
    parts = [
        element("i", " ", style=f"background:{c}") + f"<span>{r}</span>" for r, c in ROLE_COLOURS.items()
    ]
    note = "<br/><span>dashed: lower bound · wheel: zoom · drag: move · double click: back</span>"
    return element("p", *parts, note, class_="legend")


def _method(method: dict[str, Any], planned: PlannedProgram) -> Iterator[str]:
    program = next(m for m in planned.program.methods if m.name == method["name"])
    origins = {storage.name: origin(storage.origin) for storage in program.storages}
    yield element("h2", text(f"Method {method['name']}"))
    names = dimension_names(method)
    signature = [f"in: {port_words(port, names)}" for port in method["inputs"]]
    signature += [f"out: {port_words(port, names)}" for port in method["outputs"]]
    yield element("p", "<br/>".join(text(line) for line in signature), class_="signature")
    for arena in method["arenas"]:
        if arena["allocations"]:
            yield element("h3", text(_arena_title(arena)))
            yield element("div", arena_svg(arena, origins), class_="plot")
    for bucket in method["buckets"]:
        for arena in bucket["arenas"]:
            if arena["allocations"]:
                told = element("summary", text(f"{sizes_words(bucket['sizes'])}: {_arena_title(arena)}"))
                yield element("details", told, element("div", arena_svg(arena, origins), class_="plot"))
    yield element("h3", "Regions and copies")
    yield lanes_svg(program)
    yield element("h3", text(f"Copies ({len(method['copies'])})"))
    yield _copies(method)
    yield element("h3", "Tensors by size")
    yield _tensors(method, origins)
    if program.notes:
        yield element("h3", "Notes")
        yield element("ul", *(element("li", text(note)) for note in program.notes))


def _arena_title(arena: dict[str, Any]) -> str:
    bound, planned = arena["lower_bound_bytes"], arena["planned_bytes"]
    ratio = f", {planned / bound:.3f} of the lower bound" if bound else ""
    return f"Arena on {arena['device']}: {size(planned)}{ratio}, by {arena['algorithm']}"


def _copies(method: dict[str, Any]) -> str:
    if not method["copies"]:
        return element("p", "none")
    rows = [
        (c["kind"], c["tensor"], (c["bytes"], size(c["bytes"])), c["from"], c["to"], c["reason"])
        for c in method["copies"]
    ]
    return table(("kind", "tensor", "bytes", "from", "to", "why"), rows, numeric=(2,))


def _tensors(method: dict[str, Any], origins: dict[str, str]) -> str:
    found = [(a, arena["device"]) for arena in method["arenas"] for a in arena["allocations"]]
    found.sort(key=lambda pair: (-pair[0]["bytes"], pair[0]["first"] or 0, pair[0]["name"]))
    rows = [
        (
            a["name"],
            a["role"],
            device,
            (a["bytes"], size(a["bytes"])),
            a["offset"],
            (a["first"] or 0, lifetime(a)),
            origins.get(a["name"], ""),
        )
        for a, device in found[:_LARGEST]
    ]
    head = ("storage", "role", "device", "bytes", "offset", "live", "made by")
    shown = table(head, rows[:_SHOWN], numeric=(3, 4))
    if len(rows) > _SHOWN:
        told = element("summary", text(f"{len(rows) - _SHOWN} smaller ones"))
        shown += element("details", told, table(head, rows[_SHOWN:], numeric=(3, 4)))
    more = len(found) - len(rows)
    return shown + (element("p", text(f"and {more} that are smaller still")) if more > 0 else "")


def _kernels(planned: PlannedProgram) -> Iterator[str]:
    if not planned.program.kernels:
        return
    launches: dict[str, int] = {}
    for method in planned.program.methods:
        for instruction in method.instructions:
            if isinstance(instruction, Launch):
                launches[instruction.kernel] = launches.get(instruction.kernel, 0) + 1
    rows = [
        (
            kernel.name,
            launches.get(kernel.name, 0),
            ", ".join(f"{code.architecture} {code.form}" for code in kernel.codes),
            (
                sum(len(code.data) for code in kernel.codes),
                size(sum(len(code.data) for code in kernel.codes)),
            ),
            kernel.num_warps,
            (max((code.shared_nbytes for code in kernel.codes), default=0),) * 2,
        )
        for kernel in planned.program.kernels
    ]
    yield element("h2", text(f"Kernels ({count(len(rows), 'kernel')})"))
    head = ("kernel", "launches", "code", "bytes", "warps", "shared memory")
    yield table(head, rows, numeric=(1, 3, 4, 5))


def _constants(planned: PlannedProgram) -> Iterator[str]:
    seen: dict[str, tuple[str, int]] = {}
    for constant in planned.program.constants:
        seen.setdefault(constant.digest, (constant.name, constant.nbytes))
    total = sum(nbytes for _, nbytes in seen.values())
    if total:
        yield element("h2", text(f"Constants by module ({size(total)})"))
        yield element("div", treemap_svg(seen.values()), class_="plot")

"""Constants by module as a treemap: nested rectangles whose areas are bytes.

Squarified layout after Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..words import size
from .markup import element, text

WIDTH, HEIGHT = 960.0, 420.0
_PALETTE = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#e45756",
    "#72b7b2",
    "#b279a2",
    "#ff9da6",
    "#9d755d",
    "#79706e",
    "#eeca3b",
)
_LETTER = 6.4
_DOMINANT = 0.6
"""The share of the bytes above which a module is opened instead of drawn as one colour."""


@dataclass
class Branch:
    """A module: its own bytes and those of its children."""

    name: str
    nbytes: int = 0
    children: dict[str, Branch] = field(default_factory=dict[str, "Branch"])


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


def tree(constants: Iterable[tuple[str, int]]) -> Branch:
    """A tree of dotted names with the bytes below each."""
    root = Branch("")
    for name, nbytes in constants:
        node = root
        node.nbytes += nbytes
        for part in name.split("."):
            node = node.children.setdefault(part, Branch(part))
            node.nbytes += nbytes
    return root


def _opened(root: Branch) -> Branch:
    """Put the children of a child that holds nearly everything in its place, so that colours tell apart."""
    largest = max(root.children.values(), key=lambda child: child.nbytes, default=None)
    while largest is not None and largest.children and largest.nbytes > _DOMINANT * root.nbytes:
        rest = {name: child for name, child in root.children.items() if child is not largest}
        for name, child in largest.children.items():
            path = f"{largest.name}.{name}"
            rest[path] = Branch(path, child.nbytes, child.children)
        root = Branch("", root.nbytes, rest)
        largest = max(root.children.values(), key=lambda child: child.nbytes, default=None)
    return root


def treemap_svg(constants: Iterable[tuple[str, int]]) -> str:
    """The drawing; two levels are coloured and named, deeper ones are outlined."""
    root = _opened(tree(constants))
    parts: list[str] = []
    for index, (child, box) in enumerate(_placed(root, Box(0, 0, WIDTH, HEIGHT))):
        parts += _draw(child, child.name, box, _PALETTE[index % len(_PALETTE)], 0)
    return element("svg", *parts, class_="treemap", viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img")


def _draw(branch: Branch, path: str, box: Box, colour: str, depth: int) -> list[str]:
    hint = element("title", text(f"{path}\n{size(branch.nbytes)} ({branch.nbytes} bytes)"))
    place = {
        "x": f"{box.x:.2f}",
        "y": f"{box.y:.2f}",
        "width": f"{box.width:.2f}",
        "height": f"{box.height:.2f}",
    }
    opacity = f"{max(0.3, 0.6 - 0.1 * depth):.2f}"
    parts = [element("rect", hint, **place, fill=colour, fill_opacity=opacity)]
    inner = branch.children if box.width > 12 and box.height > 12 and depth < 5 else {}
    header = 14.0 if inner and box.height > 40 and box.width > 40 else 0.0
    if box.height > 12 and box.width > _LETTER * 3 and (header or not inner):
        letters, whole = int((box.width - 4) / _LETTER), f"{branch.name} {size(branch.nbytes)}"
        label = whole if len(whole) <= letters else branch.name[:letters]
        parts.append(element("text", text(label), x=f"{box.x + 3:.2f}", y=f"{box.y + 11:.2f}", class_="name"))
    if inner:
        rest = Box(box.x + 1, box.y + header, box.width - 2, box.height - header - 1)
        for child, place_of in _placed(branch, rest):
            parts += _draw(child, f"{path}.{child.name}", place_of, colour, depth + 1)
    return parts


def _placed(branch: Branch, box: Box) -> list[tuple[Branch, Box]]:
    children = sorted((c for c in branch.children.values() if c.nbytes), key=lambda c: (-c.nbytes, c.name))
    return list(zip(children, squarify([child.nbytes for child in children], box), strict=True))


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Rectangles that fill ``box`` with areas in proportion to ``sizes`` (descending, above 0)."""
    total = sum(sizes)
    if not total or box.width <= 0 or box.height <= 0:
        return [Box(box.x, box.y, 0, 0) for _ in sizes]
    areas = [value * box.width * box.height / total for value in sizes]
    boxes: list[Box] = []
    begin = 0
    while begin < len(areas):
        side = min(box.width, box.height)
        end = begin + 1
        while end < len(areas) and _worst(areas[begin : end + 1], side) <= _worst(areas[begin:end], side):
            end += 1
        row, box = _lay(areas[begin:end], box)
        boxes += row
        begin = end
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The worst ratio of a row's rectangles along a side."""
    total = sum(row)
    if side <= 0 or total <= 0:
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def _lay(row: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """A row along the shorter side, and what is left of the box."""
    total = sum(row)
    placed: list[Box] = []
    if box.width >= box.height:
        width, y = (total / box.height if box.height else 0.0), box.y
        for area in row:
            height = area / width if width else 0.0
            placed.append(Box(box.x, y, width, height))
            y += height
        return placed, Box(box.x + width, box.y, max(0.0, box.width - width), box.height)
    height, x = (total / box.width if box.width else 0.0), box.x
    for area in row:
        width = area / height if height else 0.0
        placed.append(Box(x, box.y, width, height))
        x += width
    return placed, Box(box.x, box.y + height, box.width, max(0.0, box.height - height))

"""Regions and copies of a method as a drawing: a lane per device, boxes in order, arrows between lanes."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.program import Copy, CopyKind, HostCall, Instruction, Launch, LibraryCall, Method
from ..words import count, size
from .markup import element, text

_BOX, _GAP, _LANE, _LEFT = 150, 34, 78, 90


@dataclass(frozen=True)
class Step:
    """A run of instructions of one region, or one copy. ``lane`` is a device; of a copy, its source."""

    lane: str
    label: str
    detail: str
    target: str = ""
    first: int = 0
    last: int = 0


def steps(method: Method) -> list[Step]:
    """The method's instructions, in order, with those of a region together."""
    found: list[Step] = []
    run: list[tuple[int, Instruction]] = []
    for index, instruction in enumerate(method.instructions):
        if isinstance(instruction, Copy) and instruction.kind is not CopyKind.LOCAL:
            found += _region_step(method, run)
            run = []
            found.append(_copy_step(method, index, instruction))
            continue
        if run and run[-1][1].region != instruction.region:
            found += _region_step(method, run)
            run = []
        run.append((index, instruction))
    return found + _region_step(method, run)


def lanes_svg(method: Method) -> str:
    """The drawing."""
    drawn = steps(method)
    lanes = sorted(
        {step.lane for step in drawn} | {step.target for step in drawn if step.target}, key=_lane_order
    )
    width = _LEFT + max(1, len(drawn)) * (_BOX + _GAP) + _BOX // 2
    height = 20 + len(lanes) * _LANE
    parts = [_ARROW]
    for row, lane in enumerate(lanes):
        y = 10 + row * _LANE
        parts.append(element("rect", x=0, y=y, width=width, height=_LANE - 10, class_="lane"))
        parts.append(element("text", text(lane), x=8, y=y + _LANE / 2, class_="axis"))
    for column, step in enumerate(drawn):
        parts += _draw(step, _LEFT + column * (_BOX + _GAP), lanes)
    svg = element(
        "svg", *parts, class_="lanes", width=width, height=height, viewBox=f"0 0 {width} {height}", role="img"
    )
    return element("div", svg, class_="scroll")


_ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#d62728"/></marker></defs>'
)


def _draw(step: Step, x: int, lanes: list[str]) -> list[str]:
    hint = element("title", text(f"{step.label}\n{step.detail}\ninstructions {step.first} to {step.last}"))
    y = 14 + lanes.index(step.lane) * _LANE
    if step.target:
        below = lanes.index(step.target) > lanes.index(step.lane)
        y0 = y + (_LANE - 18) / 2
        y1 = 14 + lanes.index(step.target) * _LANE + (_LANE - 18) / 2
        middle = x + _BOX / 2
        line = element(
            "line", hint, x1=middle, x2=middle, y1=y0, y2=y1, class_="copy", marker_end="url(#tip)"
        )
        words = element(
            "text", text(step.label), x=middle + 6, y=(y0 + y1) / 2 + (4 if below else -2), class_="name"
        )
        return [line, words]
    box = element("rect", hint, x=x, y=y, width=_BOX, height=_LANE - 18, rx=5, class_="region")
    return [
        box,
        element("text", text(step.label), x=x + 8, y=y + 22, class_="name"),
        element("text", text(step.detail[:24]), x=x + 8, y=y + 40, class_="axis"),
    ]


def _region_step(method: Method, run: list[tuple[int, Instruction]]) -> list[Step]:
    if not run:
        return []
    number = run[0][1].region
    region = method.regions[number] if 0 <= number < len(method.regions) else None
    lane = str(region.device) if region else "cpu"
    instructions = [instruction for _, instruction in run]
    kinds = {"launch": Launch, "library call": LibraryCall, "host call": HostCall}
    counts = [(sum(isinstance(i, kind) for i in instructions), noun) for noun, kind in kinds.items()]
    detail = ", ".join(count(n, noun, "launches" if noun == "launch" else "") for n, noun in counts if n)
    label = f"region {number}" + (f" ({region.backend})" if region else "")
    return [Step(lane, label, detail or "data movement", first=run[0][0], last=run[-1][0])]


def _copy_step(method: Method, index: int, copy: Copy) -> Step:
    source, target = method.value(copy.source), method.value(copy.destination)
    from_device = str(method.storage(source.storage).device)
    storage = method.storage(target.storage)
    label = f"{copy.destination} {size(storage.reserved_nbytes)}"
    return Step(from_device, label, copy.reason, str(storage.device), index, index)


def _lane_order(lane: str) -> tuple[bool, str]:
    return lane != "cpu", lane

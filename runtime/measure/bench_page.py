"""A measurement as one self-contained page: distribution of latencies, parts, memory and cold start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _BARS = 860, 260, 60
_LEFT, _BOTTOM, _TOP = 46, 34, 18

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
body { color: #1c2330; }
table { border-collapse: collapse; margin: .6rem 0 1.6rem; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #c6ccd6; font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #4a5362; }
.bar { fill: #3d7dca; } .mark { stroke: #c2410c; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  body { background: #12161d; color: #e3e8f0; } svg text { fill: #a5afbf; }
  thead th { border-color: #3a4352; }
}
"""


def page(document: Mapping[str, Any], microseconds: Sequence[float]) -> str:
    """HTML for a `bench` document and the host-to-host times behind it, in the order they were taken."""
    title = f"{document['method']} on {document['device']}"
    latency = {part: numbers for part, numbers in document["latency_us"].items() if numbers}
    points = ("p50", "p90", "p99", "min", "mean")
    parts = _table(
        ("part", *points),
        [(part, *(f"{numbers[p]:.1f}" for p in points)) for part, numbers in latency.items()],
    )
    graph = document["cuda_graph"]
    graphed = "replayed as one CUDA graph" if graph is True else f"no CUDA graph: {graph['reason']}"
    sections = [
        f"<h1>{escape(title)}</h1><p>{len(microseconds)} calls, host to host; {escape(graphed)}.</p>",
        histogram(microseconds, {p: latency["end_to_end"][p] for p in ("p50", "p90", "p99")}),
        f"<h2>Latency, microseconds</h2>{parts}",
    ]
    if document.get("cold_start_s"):
        rows = [(name, f"{seconds:.3f}") for name, seconds in document["cold_start_s"].items()]
        sections.append(f"<h2>Cold start, seconds</h2>{_table(('up to', 'seconds'), rows)}")
    rows = [(name, f"{nbytes:,}") for name, nbytes in document["memory"].items() if nbytes is not None]
    sections.append(f"<h2>Memory, bytes</h2>{_table(('part', 'bytes'), rows)}")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def bins(values: Sequence[float], count: int = _BARS) -> tuple[float, float, list[int]]:
    """(start, width of a bin, how many fall into each). The slowest percent shares the last bin."""
    ordered = sorted(values)
    start, end = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    width = (end - start) / count or 1.0
    counts = [0] * count
    for value in values:
        counts[min(int((value - start) / width), count - 1)] += 1
    return start, width, counts


def histogram(values: Sequence[float], marks: Mapping[str, float]) -> str:
    """An SVG histogram with vertical marks; the picture's text says the same for those who cannot see it."""
    start, width, counts = bins(values)
    inner_width, inner_height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM - _TOP
    step, tallest = inner_width / len(counts), max(counts)
    shapes: list[str] = []
    for i, n in enumerate(counts):
        tall = n / tallest * inner_height
        place = f'x="{_LEFT + i * step + 0.5:.1f}" y="{_HEIGHT - _BOTTOM - tall:.1f}"'
        size = f'width="{step - 1:.1f}" height="{tall:.1f}"'
        shapes.append(f'<rect class="bar" {place} {size}><title>{n}</title></rect>' if n else "")
    for name, value in marks.items():
        x = _LEFT + min(max((value - start) / width, 0), len(counts)) * step
        shapes.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        shapes.append(f'<text x="{x + 3:.1f}" y="{_TOP - 5}">{name} {value:.1f}</text>')
    for i in range(0, len(counts) + 1, len(counts) // 6):
        label = f"{start + i * width:.1f}" + ("+" if i == len(counts) else "")
        place = f'x="{_LEFT + i * step:.1f}" y="{_HEIGHT - _BOTTOM + 16}"'
        shapes.append(f'<text text-anchor="middle" {place}>{label}</text>')
    shapes.append(f'<text x="0" y="{_TOP + 10}">{tallest}</text>')
    said = ", ".join(f"{name} {value:.1f}" for name, value in marks.items())
    label = escape(f"Histogram of {len(values)} latencies in microseconds: {said}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

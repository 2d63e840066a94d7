"""The coverage table: a line a model, and sums a group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

_HEAD = "| model | cuda exports | right on the emulator | right on cpu | copies | arena / bound | export s | kernels |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    groups: dict[str, dict[str, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row["group"]][row["name"]][row["device"]] = row
    parts: list[str] = []
    for group, models in groups.items():
        parts += [f"\n## {group}\n", _HEAD, "|" + "---|" * 8]
        parts += [_line(name, devices) for name, devices in models.items()]
        parts += ["", *_sums(group, models)]
    return "\n".join(parts)


def _line(name: str, devices: dict[str, dict[str, Any]]) -> str:
    cuda, cpu = devices.get("cuda", {}), devices.get("cpu", {})
    shown = cuda if _exports(cuda) else cpu
    ratio = f"{shown['arena'] / max(shown['lower_bound'], 1):.3f}" if _exports(shown) else ""
    kernels = " ".join(f"{count} {kind}" for kind, count in shown.get("kernels", {}).items())
    cells = [
        name,
        "yes" if _exports(cuda) else _why(cuda),
        "yes" if cuda.get("status") == "right" else cuda.get("status", ""),
        "yes" if cpu.get("status") == "right" else _why(cpu),
        str(shown.get("copies", "")),
        ratio,
        f"{shown.get('seconds', 0):.1f}",
        kernels,
    ]
    return "| " + " | ".join(cells) + " |"


def _exports(row: dict[str, Any]) -> bool:
    return bool(row.get("kernels")) or row.get("status") in ("right", "wrong", "exported")


def _why(row: dict[str, Any]) -> str:
    return f"{row.get('status', '')}: {row.get('error', '')[:80]}".replace("|", "/") if row else ""


def _sums(group: str, models: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines: list[str] = []
    for device in ("cuda", "cpu"):
        rows = [devices[device] for devices in models.values() if device in devices]
        counted = [row for row in rows if row["status"] != "unbuilt"]
        if not counted:
            continue
        exported = sum(_exports(row) for row in counted)
        right = sum(row["status"] == "right" for row in counted)
        states = ", ".join(f"{n} {s}" for s, n in Counter(row["status"] for row in rows).most_common())
        share = f"{100 * right / len(counted):.0f} %"
        lines.append(
            f"{group} on {device}: {exported} of {len(counted)} export, {right} right ({share}); {states}"
        )
    return lines

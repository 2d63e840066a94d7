"""The coverage table: a line a model, and sums a group."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Rows = dict[str, dict[str, Any]]
"""The rows of one model by device."""

DEAF = 1e-2
"""Results that other inputs move less than this are hardly further apart than the tolerance."""
_HEAD = (
    "model",
    "cuda exports",
    "right on the emulator",
    "right on cpu",
    "copies",
    "arena",
    "arena / bound",
    "reordering saves",
    "export s",
    "kernels",
    "ExecuTorch exports",
    "it plans",
    "its s",
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    groups: dict[str, dict[str, Rows]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row["group"]][row["name"]][row["device"]] = row
    parts: list[str] = []
    for group, models in groups.items():
        parts += [f"\n## {group}\n", "| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
        parts += [_line(name, devices) for name, devices in models.items()]
        parts += ["", *_sums(group, models)]
    return "\n".join(parts)


def _line(name: str, devices: Rows) -> str:
    cuda, cpu, peer = (devices.get(device, {}) for device in ("cuda", "cpu", "executorch"))
    shown = cuda if _exports(cuda) else cpu
    is_shown = _exports(shown)
    kernels = " ".join(f"{count} {kind}" for kind, count in sorted(shown.get("kernels", {}).items()))
    cells = [
        name,
        "yes" if _exports(cuda) else _why(cuda),
        "yes" if cuda.get("status") == "right" else cuda.get("status", ""),
        "yes" if cpu.get("status") == "right" else _why(cpu),
        str(shown.get("copies", "")),
        _size(shown["arena"]) if is_shown else "",
        f"{shown['arena'] / max(shown['lower_bound'], 1):.3f}" if is_shown else "",
        _saved(shown),
        f"{shown.get('seconds', 0):.1f}" if is_shown else "",
        kernels,
        (peer.get("note", "") if "check" in peer.get("note", "") else "yes")
        if _exports(peer)
        else _why(peer) or "not measured",
        _size(peer["arena"]) if _exports(peer) else "",
        f"{peer['seconds']:.1f}" if _exports(peer) else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _exports(row: dict[str, Any]) -> bool:
    return bool(row.get("kernels")) or row.get("status") in ("right", "wrong", "exported")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _saved(row: dict[str, Any]) -> str:
    return f"{1 - row['arena'] / row['arena_given']:.1%}" if row.get("arena_given") else ""


def _why(row: dict[str, Any]) -> str:
    if row.get("status") == "absent":
        return "not measured"
    return f"{row.get('status', '')}: {row.get('error', '')[:80]}".replace("|", "/") if row else ""


def _sums(group: str, models: dict[str, Rows]) -> list[str]:
    lines: list[str] = []
    for device in ("cuda", "cpu", "executorch"):
        rows = [devices[device] for devices in models.values() if device in devices]
        counted = [row for row in rows if row["status"] not in ("unbuilt", "absent")]
        if not counted:
            continue
        exported = sum(_exports(row) for row in counted)
        right = sum(row["status"] == "right" for row in counted)
        states = ", ".join(f"{n} {s}" for s, n in Counter(row["status"] for row in rows).most_common())
        unchecked = sum("check" in row.get("note", "") for row in counted if _exports(row))
        states += f" ({unchecked} without its check of operators)" if unchecked else ""
        deaf = sum((row.get("heard") or 1.0) < DEAF for row in counted)
        states += f" ({deaf} hardly depend on their inputs)" if deaf else ""
        share = "" if device == "executorch" else f", {right} right ({100 * right / len(counted):.0f} %)"
        lines.append(f"{group} on {device}: {exported} of {len(counted)} export{share}; {states}")
    return [*lines, *_reordering(group, models), *_beside(group, models)]


def _reordering(group: str, models: dict[str, Rows]) -> list[str]:
    rows = [row for devices in models.values() for row in devices.values() if row.get("arena_given")]
    better = [1 - row["arena"] / row["arena_given"] for row in rows if row["arena"] < row["arena_given"]]
    worse = sum(row["arena"] > row["arena_given"] for row in rows)
    if not rows:
        return []
    gain = (
        f"by {sum(better) / len(better):.1%} on average, {max(better):.1%} at most"
        if better
        else "by nothing"
    )
    return [
        f"{group}, reordering: smaller for {len(better)} of {len(rows)} exports {gain}; larger for {worse}"
    ]


def _beside(group: str, models: dict[str, Rows]) -> list[str]:
    """Seconds and bytes over ExecuTorch's, for the models that both export."""
    lines: list[str] = []
    for device in ("cuda", "cpu"):
        pairs = [
            (devices[device], devices["executorch"])
            for devices in models.values()
            if _exports(devices.get(device, {})) and _exports(devices.get("executorch", {}))
        ]
        if pairs:
            seconds = _mean([ours["seconds"] / theirs["seconds"] for ours, theirs in pairs])
            space = _mean([ours["arena"] / theirs["arena"] for ours, theirs in pairs if theirs["arena"]])
            lines.append(
                f"{group} on {device} over ExecuTorch's portable path, geometric means of {len(pairs)}: "
                f"export seconds {seconds:.2f}, planned bytes {space:.2f}{_tensors(pairs)}"
            )
    return lines


def _tensors(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The ratio of bytes without the workspaces of libraries, where all rows know it."""
    known = [(a["arena_tensors"], b["arena"]) for a, b in pairs if a.get("arena_tensors") and b["arena"]]
    ratio = _mean([ours / theirs for ours, theirs in known])
    return f", without workspaces {ratio:.2f} (of {len(known)})" if known else ""


def _mean(ratios: Sequence[float]) -> float:
    known = [ratio for ratio in ratios if ratio > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan

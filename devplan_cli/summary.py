"""The summary of an export, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .words import count, duration, shape, size, sizes_words, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .export_job import Written


def summary(target: Path, written: Written) -> list[RenderableType]:
    """Tables of methods, arenas and kernels, then constants, file and time."""
    described = written.description
    items: list[RenderableType] = ["", methods_table(described), "", arenas_table(described)]
    items += bucket_tables(described)
    kernels = kernel_counts(described)
    items += ["", f"Kernels    {kernels}", f"Constants  {constants_line(described)}"]
    if described["state"]:
        total = sum(variable["bytes"] for variable in described["state"])
        items.append(f"State      {count(len(described['state']), 'tensor')}, {size(total)}")
    if described["architectures"]:
        items.append(f"Code for   {', '.join(described['architectures'])}")
    items.append(f"Took       {duration(written.seconds)}, peak memory {size(written.peak_rss_bytes)}")
    items.append(f"Wrote      {target} ({size(described['file']['bytes'])})")
    items += [f"note: {note}" for note in written.notes]
    return items


def methods_table(described: dict[str, Any]) -> RenderableType:
    """Methods with their signatures and copies."""
    made = table("Methods", "name", "inputs+", "outputs+", "copies>", "bytes>")
    for method in described["methods"]:
        names = dimension_names(method)
        copied = sum(copy["bytes"] for copy in method["copies"])
        made.add_row(
            method["name"],
            "\n".join(port_words(port, names) for port in method["inputs"]),
            "\n".join(port_words(port, names) for port in method["outputs"]),
            str(len(method["copies"])),
            size(copied),
        )
    return made


def dimension_names(method: dict[str, Any]) -> dict[str, str]:
    """The user's names for dynamic dimensions, where there are any, by the program's."""
    symbols = method.get("symbols", [])
    return {symbol["name"]: symbol["label"] for symbol in symbols if ":" not in symbol["label"]}


def port_words(port: dict[str, Any], names: Mapping[str, str]) -> str:
    """``x float16[batchx128x384] @cuda:0``; the device only where it is not the host.

    A size that depends on data stands as its bounds: ``hits int64[0..24x2] data-dependent``.
    """
    extents = [names.get(extent, extent) for extent in port["shape"]]
    counted = port.get("data_dependent")
    if counted:
        extents[counted["dimension"]] = f"{counted['lower']}..{counted['upper']}"
    at = "" if port["device"] == "cpu" else f" @{port['device']}"
    return f"{port['name']} {port['dtype']}[{shape(extents)}]{at}" + (" data-dependent" if counted else "")


def arenas_table(described: dict[str, Any]) -> RenderableType:
    """Arenas of each method against their lower bound."""
    made = table("Arenas", "method", *_ARENA_COLUMNS)
    for method in described["methods"]:
        for arena in method["arenas"]:
            made.add_row(method["name"], *_arena_cells(arena))
    return made


_ARENA_COLUMNS = ("device", "planned>", "bound>", "ratio>", "sum>", "by")


def _arena_cells(arena: dict[str, Any]) -> tuple[str, ...]:
    bound = arena["lower_bound_bytes"]
    return (
        arena["device"],
        size(arena["planned_bytes"]),
        size(bound),
        f"{arena['planned_bytes'] / bound:.3f}" if bound else "-",
        size(arena["sum_bytes"]),
        arena["algorithm"],
    )


def bucket_tables(described: dict[str, Any]) -> list[RenderableType]:
    """Of each method with buckets, their plans against their lower bounds, after an empty line."""
    items: list[RenderableType] = []
    for method in described["methods"]:
        columns = ("sizes+", "device", "planned>", "bound>", "ratio>", "by+")
        made = table(f"Buckets of {method['name']}, within its arenas", *columns)
        for bucket in method["buckets"]:
            for arena in bucket["arenas"]:
                device, planned, bound, ratio, _, algorithm = _arena_cells(arena)
                sizes = sizes_words(bucket["sizes"])
                made.add_row(sizes, device, planned, bound, ratio, algorithm)
        items += ["", made] if made.row_count else []
    return items


def kernel_counts(described: dict[str, Any]) -> str:
    """``12 generated, 3 library`` over all methods."""
    kinds = ("generated", "library", "host", "torch")
    totals = {kind: sum(method["kernels"].get(kind, 0) for method in described["methods"]) for kind in kinds}
    return ", ".join(f"{number} {kind}" for kind, number in totals.items() if number) or "none"


def tuning_lines(described: dict[str, Any]) -> list[str]:
    """For which GPUs library algorithms are embedded, with which versions of the libraries."""
    lines: list[str] = []
    for tuning in described.get("library_tunings", []):
        gpu = f"{tuning['gpu']} ({tuning['architecture']})" if tuning["architecture"] else tuning["gpu"]
        versions = " and ".join(f"{name} {version}" for name, version in tuning["versions"].items())
        lines.append(f"Tuned for  {gpu} with {versions}: {count(len(tuning['algorithms']), 'algorithm')}")
    return lines


def constants_line(described: dict[str, Any]) -> str:
    """How many, how large, and where."""
    constants = described["constants"]
    shared = constants["bytes"] - constants["unique_bytes"]
    tail = f" ({size(shared)} shared)" if shared else ""
    return f"{constants['count']}, {size(constants['unique_bytes'])}{tail}, {constants['location']}"

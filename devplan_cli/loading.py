"""Loading a program for `run`, `verify` and `bench`, and saying what it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.errors import UsageError
from .artifacts import require_file

if TYPE_CHECKING:
    from ..runtime.engine import LoadedProgram
    from .console import Output


def check_device_name(device: str | None) -> None:
    """`UsageError` for a device that there is no such thing as."""
    kind, _, index = (device or "cpu").partition(":")
    good = (kind == "cuda" and (not index or index.isdigit())) or (kind in ("cpu", "emulator") and not index)
    if not good:
        raise UsageError(f"unknown device `{device}`", hint="devices are `cuda:N`, `emulator` and `cpu`")


def load_program(
    path: Path, device: str | None, output: Output, *, allow_torch_ops: bool = False
) -> LoadedProgram:
    """Load an artifact on a device, or on the GPU, or where there is none on the emulator, saying so."""
    check_device_name(device)
    require_file(path)
    from ..runtime import load

    return load(path, device, allow_torch_ops=allow_torch_ops, notify=output.say)


def device_label(program: LoadedProgram) -> str:
    """What the program runs on, in a person's words: ``NVIDIA H200``, ``emulator``, ``cpu``."""
    labels = [label for slot, label in program.devices.items() if slot.kind != "cpu"]
    return ", ".join(labels) if labels else "cpu"

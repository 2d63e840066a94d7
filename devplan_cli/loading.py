"""Loading a program for `run`, `verify` and `bench`, and saying what it runs on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import UsageError
from ..runtime.program import CPU, Method
from .artifacts import require_file

if TYPE_CHECKING:
    from ..runtime.engine import LoadedProgram
    from .console import Output


def check_device_name(device: str | None) -> None:
    """`UsageError` for a device that there is no such thing as."""
    from ..runtime.device_names import check_target

    check_target(device)


def load_program(
    path: Path,
    device: str | None,
    output: Output,
    *,
    allow_torch_ops: bool = False,
    tuning: Path | None = None,
    device_map: Mapping[str, str] | None = None,
    weights: Sequence[Path] = (),
    verify: bool = False,
) -> LoadedProgram:
    """Load an artifact on a device, or on the GPU, or where there is none on the emulator, saying so."""
    check_device_name(device)
    require_file(path)
    from ..runtime import load

    program = load(
        path,
        device,
        device_map=device_map,
        allow_torch_ops=allow_torch_ops,
        notify=teller(output),
        tuning=tuning,
        weights=weights,
        verify=verify,
    )
    if program.tuning_note:
        output.detail(program.tuning_note)
    return program


@contextmanager
def as_it_was() -> Generator[None]:
    """Undo what a model file does to the process: its folder, which paths were given from, its streams."""
    here, streams = os.open(".", getattr(os, "O_PATH", os.O_RDONLY)), (sys.stdout, sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        os.chdir(here)
        os.close(here)


def teller(output: Output) -> Callable[[str], None]:
    """What tells a person what `load` has to say."""

    def notify(line: str) -> None:
        is_known = line.startswith("no CUDA device") and not output.verbose
        output.say("no CUDA device; running on the emulator" if is_known else line)

    return notify


def parse_device_map(texts: Sequence[str]) -> dict[str, str] | None:
    """Read ``cuda:0=cuda:1``; the runtime checks the names. None when nothing is given."""
    pairs = [text.partition("=") for text in texts]
    for slot, equals, gpu in pairs:
        if not (slot and equals and gpu):
            raise UsageError(f"cannot use `--device-map {slot}{equals}{gpu}`", why="expected `cuda:0=cuda:1`")
    slots = [slot for slot, _, _ in pairs]
    if twice := [slot for slot in slots if slots.count(slot) > 1]:
        raise UsageError("cannot use `--device-map`", why=f"slot `{twice[0]}` is given twice")
    return {slot: gpu for slot, _, gpu in pairs} or None


def to_places(program: LoadedProgram, method: Method, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs where the method takes them: those of device memory (`export --io device`) are copied there."""
    values = {port.name: port.value for port in method.inputs if port.value}
    placed: dict[str, Any] = {}
    for name, tensor in inputs.items():
        device = method.storage(method.value(values[name]).storage).device if name in values else CPU
        placed[name] = tensor if device == CPU else program.to_device(tensor, device)
    return placed


def device_label(program: LoadedProgram) -> str:
    """What the program runs on, in a person's words: ``NVIDIA H200``, ``emulator``, ``cpu``."""
    labels = [label for slot, label in program.devices.items() if slot.kind != "cpu"]
    return ", ".join(labels) if labels else "cpu"

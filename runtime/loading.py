"""From a file to a callable program: which device serves which slot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from .backend import Backend
from .cpu.backend import CpuBackend
from .device_names import BY_TRITON, as_device, check_target, gpus_of
from .engine import EngineOptions, LoadedProgram
from .errors import DeviceError, UsageError
from .memory.allocator import Constants
from .memory.peers import introduce
from .program import CPU, Device, PlannedProgram

Notify = Callable[[str], None]


def load_planned(
    planned: PlannedProgram,
    constants: Constants,
    device: str | None = None,
    *,
    device_map: Mapping[str, str] | None = None,
    allow_torch_ops: bool = False,
    poison: bool = False,
    scrub: bool = False,
    notify: Notify | None = None,
) -> LoadedProgram:
    """Like `start.load`, for a program in memory and its constants' bytes by digest."""
    check_target(device)
    slots = device_slots(planned)
    if device_map:
        _refuse_map_with(device)
    check_torch_ops(planned, slots, allow_torch_ops)
    backends: dict[Device, Backend] = {CPU: CpuBackend()}
    is_emulated = False
    if slots:
        chosen = _choose(slots, device, device_map or {}, notify or _warn)
        is_emulated = chosen is None
        if poison and chosen is not None:
            for backend in chosen.values():
                backend.close()
            raise UsageError("storages can be poisoned on the emulator only", hint="load on `emulator`")
        backends |= _emulators(slots, device == BY_TRITON) if chosen is None else chosen
    elif device not in (None, "cpu", "emulator", BY_TRITON):
        raise DeviceError(
            f"the program has no code for `{device}`",
            why="it was exported for the cpu",
            hint="run it on `cpu`",
        )
    return LoadedProgram(planned, constants, backends, EngineOptions(scrub or is_emulated, poison))


def device_slots(planned: PlannedProgram) -> list[Device]:
    """The accelerators that a program uses, sorted."""
    storages = (storage for method in planned.program.methods for storage in method.storages)
    used = {storage.device for storage in storages} | {variable.device for variable in planned.program.state}
    return sorted(used - {CPU})


def check_torch_ops(planned: PlannedProgram, slots: list[Device], allowed: bool) -> None:
    """UsageError when operators of an accelerator's program run on the host through torch without leave."""
    from .program import HostCall

    if allowed or not slots:
        return
    for method in planned.program.methods:
        calls = [instruction for instruction in method.instructions if isinstance(instruction, HostCall)]
        if calls:
            names = ", ".join(dict.fromkeys(f"`{call.target}`" for call in calls))
            raise UsageError(
                f"method `{method.name}` runs {len(calls)} operators on the host through torch",
                why=names,
                hint="allow it with `--allow-torch-ops`",
            )


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)


def _choose(
    slots: list[Device], device: str | None, device_map: Mapping[str, str], notify: Notify
) -> dict[Device, Backend] | None:
    """CUDA backends by slot, or None for the emulator."""
    if device in ("emulator", BY_TRITON):
        return None
    if device == "cpu":
        raise DeviceError(
            "the program has no code for `cpu`",
            why=f"it was exported for {', '.join(map(str, slots))}",
            hint="run it on `emulator`, or export with `--device cpu`",
        )
    try:
        return _cuda(slots, ordinals(slots, device, device_map))
    except DeviceError as error:
        if device is not None or device_map:
            raise
        notify(f"no CUDA device ({error}): running on the emulator")
        return None


def ordinals(slots: list[Device], device: str | None, device_map: Mapping[str, str]) -> dict[Device, int]:
    """Which GPU serves which slot; UsageError for names that are no GPUs or no slots."""
    mapping = gpus_of(device_map)
    if unknown := [str(slot) for slot in mapping if slot not in slots]:
        raise UsageError(
            f"the program has no slot `{unknown[0]}`", hint=f"its slots are {', '.join(map(str, slots))}"
        )
    if device is not None and ":" in device and not mapping:
        if len(slots) > 1:
            raise UsageError(
                f"`{device}` is one GPU and the program uses {len(slots)}",
                hint="say which GPU serves which slot with `--device-map`",
            )
        mapping = {slots[0]: as_device(device).index}
    return {slot: mapping.get(slot, slot.index) for slot in slots}


def _refuse_map_with(device: str | None) -> None:
    """UsageError where a device leaves nothing to map."""
    if device not in (None, "cuda"):
        why = "a map says which GPU serves which slot"
        raise UsageError(f"cannot use device `{device}` with a device map", why=why, hint="drop one of them")


def _cuda(slots: list[Device], gpus: Mapping[Device, int]) -> dict[Device, Backend]:
    from .cuda.backend import CudaBackend  # lazy: nothing else needs cuda-python

    made: dict[Device, CudaBackend] = {}
    try:
        for slot in slots:
            made[slot] = CudaBackend(slot, gpus[slot])
        introduce(made.values())
    except BaseException:
        for backend in made.values():
            backend.close()
        raise
    return {**made}


def _emulators(slots: list[Device], by_triton: bool) -> dict[Device, Backend]:
    from .emulator import EmulatorBackend, Machine  # lazy: only here are kernels interpreted

    if by_triton:
        from .emulator.triton_copy import interpreter

        interpreter()  # refuses where torch or triton is missing
    machine = Machine()
    return {slot: EmulatorBackend(slot, machine, by_triton=by_triton) for slot in slots}

"""Devices as people name them, refused by name where there is no such thing."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import UsageError
from .program import Device

BY_TRITON = "emulator:triton"
"""The emulator with Triton's own interpreter for generated kernels."""
_HINT = "devices are `cuda`, `cuda:N`, `emulator`, `emulator:triton` and `cpu`"


def as_device(device: Device | str) -> Device:
    """A device or its name; UsageError for what is neither."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise UsageError(f"`{device!r}` is no device", hint="a device has a name, such as `cuda:0`")
    try:
        return Device.parse(device)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_target(device: str | None) -> None:
    """UsageError for what a program cannot be loaded on, whatever it was exported for."""
    if device is None:
        return
    if not isinstance(device, str):
        raise UsageError(f"`{device!r}` is no device", hint="a device has a name, such as `cuda:0`")
    if device in ("cpu", "emulator", BY_TRITON):
        return
    if device.partition(":")[0] != "cuda":
        raise UsageError(f"unknown device `{device}`", hint=_HINT)
    as_device(device)


def gpus_of(device_map: Mapping[str, str] | None) -> dict[Device, int]:
    """Which GPU serves which slot; UsageError for what is no map, or names no GPUs."""
    if device_map is None:
        return {}
    if not isinstance(device_map, Mapping):
        hint = 'write `{"cuda:0": "cuda:1"}`'
        raise UsageError(
            f"`{device_map!r}` is no device map", why="it says which GPU serves which slot", hint=hint
        )
    pairs = {as_device(slot): as_device(gpu) for slot, gpu in device_map.items()}
    if others := [str(gpu) for gpu in pairs.values() if gpu.kind != "cuda"]:
        raise UsageError(f"no slot is served by `{others[0]}`", hint="a map names GPUs, such as `cuda:1`")
    return {slot: gpu.index for slot, gpu in pairs.items()}

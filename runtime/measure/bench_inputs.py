"""Inputs of a measurement: read from a file, and put where a method takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import DType
from ..tensors.host import HostTensor

if TYPE_CHECKING:
    from ..engine import LoadedMethod, LoadedProgram


def place_inputs(program: LoadedProgram, method: LoadedMethod, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs where the method takes them: in device memory, or pinned in the host's.

    So has whoever calls often, and so do the ways of running a model that devplan is compared with.
    """
    description = method.description
    homes = {
        port.name: description.storage(description.value(port.value).storage)
        for port in description.inputs
        if port.value
    }

    def place(name: str, value: Any) -> Any:
        if name not in homes:
            return value
        home = homes[name]
        on_device = home.external and home.device.kind != "cpu"
        return program.to_device(value, home.device) if on_device else program.pin(value)

    return {name: place(name, value) for name, value in inputs.items()}


def read_inputs(path: str) -> dict[str, Any]:
    """Inputs by name from an ``.npz`` file, as `bench.measure_cold_start` writes it."""
    given: dict[str, Any] = {}
    with np.load(path) as file:
        for key in file.files:
            name, _, dtype = key.partition(":")
            given[name] = HostTensor(file[key], DType.from_name(dtype)) if dtype else file[key]
    return given

"""Named memory that outlives a call."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from ..artifact.atomic import AtomicFile
from ..backend import Backend
from ..calls.inputs import host_array
from ..errors import ArtifactError, ExecutionError, UsageError
from ..program import Device, StateVariable
from ..tensors.host import Array, HostTensor, HostValue, host_value, numpy_dtype
from .session import Session


class State:
    """A program's state by name. Every call takes effect at once, between calls of methods.

    `get` copies out, `set` copies in, `reset` restores the initial values that the artifact holds.
    """

    def __init__(
        self,
        variables: Mapping[str, StateVariable],
        addresses: Mapping[str, int],
        backends: Mapping[Device, Backend],
        initial: Mapping[str, memoryview],
        session: Session,
    ) -> None:
        self._variables, self._addresses, self._backends = variables, addresses, backends
        self._initial, self._session = initial, session

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the program's order."""
        return tuple(self._variables)

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def get(self, name: str) -> HostValue:
        """A copy of the current value.

        Raises:
            UsageError: there is no such name.
            ExecutionError: a call failed while it wrote the state, which is undefined since.
        """
        variable = self._variable(name)
        with self._session.exclusive():
            return self._read(variable)

    def _read(self, variable: StateVariable) -> HostValue:
        if variable.name in self._session.unknown:
            hint = "`reset`, `set` or `load` it"
            raise ExecutionError(
                f"state `{variable.name}` is undefined", why="a call failed that writes it", hint=hint
            )
        raw = np.empty(variable.shape, numpy_dtype(variable.dtype))
        if variable.nbytes:
            self._backends[variable.device].download(self._addresses[variable.name], _flat(raw))
        return host_value(raw, variable.dtype)

    def values(self) -> dict[str, HostValue]:
        """Copies of all current values, of one moment: no call comes in between. Raises as `get` does."""
        with self._session.exclusive():
            return {name: self._read(variable) for name, variable in self._variables.items()}

    def set(self, name: str, value: object) -> None:
        """Replace the value; UsageError when name, shape or dtype do not fit."""
        variable = self._variable(name)
        with self._session.exclusive():
            self._write(variable, host_array(value, f"state `{name}`", variable.dtype, variable.shape))
        self._session.restored([name])

    def reset(self, *names: str) -> None:
        """Restore the initial values of these, or of all."""
        with self._session.exclusive():
            for variable in [self._variable(name) for name in names or self._variables]:
                self._write_initial(variable)
        self._session.restored(names or self._variables)

    def save(self, path: str | Path) -> None:
        """Write all values to a NumPy ``.npz`` file, in one step.

        Types that NumPy lacks are kept as bits, under ``NAME|DTYPE``.
        """
        arrays: dict[str, Array] = {}
        for name, value in self.values().items():
            if isinstance(value, HostTensor):
                arrays[f"{name}|{value.dtype}"] = value.raw
            else:
                arrays[name] = value
        stream: Any = AtomicFile(Path(path))
        with stream as file, ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def load(self, path: str | Path) -> None:
        """Set all values from a file that `save` wrote; UsageError, and none is set, when it does not fit."""
        arrays = _arrays_of(Path(path))
        wanted = {_key(variable): variable for variable in self._variables.values()}
        if set(arrays) != set(wanted):
            raise UsageError(
                f"`{path}` does not hold this program's state",
                why=f"it has {sorted(arrays)}, the program has {sorted(wanted)}",
            )
        given: dict[str, Array] = {}
        for key, variable in wanted.items():
            label = f"state `{variable.name}` of `{path}`"
            raw = arrays[key]
            if raw.dtype != numpy_dtype(variable.dtype):
                raise UsageError(f"{label} has dtype `{raw.dtype}`", why=f"wanted {variable.dtype}")
            value = host_value(raw, variable.dtype)
            given[variable.name] = host_array(value, label, variable.dtype, variable.shape)
        with self._session.exclusive():
            for name, raw in given.items():
                self._write(self._variables[name], raw)
        self._session.restored(given)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names whose value a failed call left undefined."""
        return tuple(sorted(self._session.unknown))

    def write_all_initial(self) -> None:
        """Give every variable its initial value (at load)."""
        for variable in self._variables.values():
            self._write_initial(variable)

    def copy_from(self, other: State) -> None:
        """Take over the values of a clone's origin."""
        for name, value in other.values().items():
            self.set(name, value)

    def _variable(self, name: str) -> StateVariable:
        if name not in self._variables:
            raise UsageError(
                f"there is no state `{name}`", hint=f"the program's state is {list(self._variables)}"
            )
        return self._variables[name]

    def _write(self, variable: StateVariable, raw: Array) -> None:
        self._session.writes += 1
        if variable.nbytes:
            data = np.ascontiguousarray(raw)
            self._backends[variable.device].upload(self._addresses[variable.name], _flat(data))

    def _initial_bytes(self, variable: StateVariable) -> memoryview:
        data = self._initial.get(variable.initial)
        if data is None or data.nbytes != variable.nbytes:
            got = "missing" if data is None else f"{data.nbytes} bytes instead of {variable.nbytes}"
            raise ArtifactError(f"the initial value of state `{variable.name}` is {got}")
        return data

    def _write_initial(self, variable: StateVariable) -> None:
        self._session.writes += 1
        if not variable.nbytes:
            return
        backend, address = self._backends[variable.device], self._addresses[variable.name]
        if variable.initial:
            backend.upload(address, self._initial_bytes(variable))
        else:
            backend.fill(address, variable.nbytes, 0)


_UNREADABLE = (
    OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error,
    KeyError, NotImplementedError, OverflowError, RuntimeError, MemoryError, struct.error,
)  # fmt: skip
"""What NumPy and zipfile raise for files that are damaged, encrypted, or something else."""


def _arrays_of(path: Path) -> dict[str, Array]:
    """What is in an ``.npz`` file; UsageError when it is none."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except _UNREADABLE as error:
        why = str(getattr(error, "strerror", None) or error)
        raise UsageError(f"cannot read state from `{path}`", why=why) from error


def _key(variable: StateVariable) -> str:
    native = host_value(np.empty(0, numpy_dtype(variable.dtype)), variable.dtype)
    return f"{variable.name}|{variable.dtype}" if isinstance(native, HostTensor) else variable.name


def _flat(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)

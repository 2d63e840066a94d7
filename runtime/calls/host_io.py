"""Large host inputs and outputs without a copy in between: the transfer uses the caller's memory itself.

A planned program copies an input from a place of its own in pinned memory, and an output to one. Where the
caller's array is pinned already, or an output is large, the copy's host end is moved there instead, call by
call: a `HostEnd` holds where it is. In a CUDA graph that sets a parameter of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ..backend import Backend, Operand, Step
from ..memory.shared import Shared
from ..program import CPU, Copy, CopyKind, Instruction, Method, Port, Storage
from ..tensors.host import Array, HostTensor, address_of, host_value, is_native, numpy_dtype
from .inputs import IsLent, Store, host_array, refuse_lent
from .outputs import host_fetch

SMALL = 64 << 10
"""Bytes up to which copying on the host, some microseconds, is not worth moving an end for.

From 128 KiB on the C library takes an array's memory from the system, page by page: 193 KiB of an output were
copied in 40 us.
"""


@dataclass
class HostEnd:
    """The host end of one copy: ``planned`` is the program's own place, ``address`` the one in use.

    ``followers`` make a change known to captured graphs; each says whether it could take the address.
    ``mover`` makes the copy.
    """

    planned: int
    address: int = 0
    followers: list[Callable[[int], bool]] = field(default_factory=list[Callable[[int], bool]])
    mover: MovesHostEnds | None = None

    def __post_init__(self) -> None:
        self.address = self.planned

    def move(self, address: int) -> bool:
        """Use another place from now on; False, and the planned place, when a graph cannot."""
        if address == self.address:
            return True
        if all(follow(address) for follow in self.followers):
            self.address = address
            return True
        for follow in self.followers:
            follow(self.planned)
        self.address = self.planned
        return False

    def reset(self) -> None:
        """Use the planned place again."""
        self.move(self.planned)


class MovesHostEnds(Protocol):
    """What a backend offers if its copies can read and write the caller's host memory."""

    def bind_moving(self, copy: Copy, source: Operand, destination: Operand, end: HostEnd) -> Step:
        """A step that copies from or to wherever ``end`` is when it runs."""
        ...

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether the device can copy from this host memory at full speed."""
        ...


def mover_of(backend: Backend) -> MovesHostEnds | None:
    """The backend, if it can."""
    made: Any = backend
    return made if hasattr(backend, "bind_moving") else None


def host_ends(
    method: Method, operands: Mapping[str, Operand], mover: Callable[[Copy], MovesHostEnds | None]
) -> dict[str, HostEnd]:
    """The ends that may move, by the name of the input's or output's value; ``mover`` is asked for each copy.

    A port's host storage has to be touched by one copy alone, whole, dense and over `SMALL` bytes. Outputs
    may share it: the end is that of the first which is all of it.
    """
    storages = {storage.name: storage for storage in method.storages}
    storage_of = {value.name: value.storage for value in method.values}
    users = users_by_storage(method)
    given = [storage_of[port.value] for port in method.inputs if port.value]
    shown = [storage_of[name] for name in method.results]
    ends: dict[str, HostEnd] = {}
    moved: set[str] = set()
    for ports, kind in ((method.inputs, CopyKind.H2D), (method.outputs, CopyKind.D2H)):
        for port in filter(lambda port: port.value, ports):
            home = storages[storage_of[port.value]]
            is_shared = [*given, *shown].count(home.name) > 1 if kind is CopyKind.H2D else home.name in given
            if is_shared or home.name in moved:
                continue
            copy = _only_copy(users.get(home.name, []), kind)
            if copy is not None and _is_whole(port.value, home, copy, operands) and (found := mover(copy)):
                ends[port.value] = HostEnd(operands[port.value].address, mover=found)
                moved.add(home.name)
    return ends


def users_by_storage(method: Method) -> dict[str, list[Instruction]]:
    """The instructions that touch each storage, in order."""
    storage_of = {value.name: value.storage for value in method.values}
    users: dict[str, list[Instruction]] = {}
    for instruction in method.instructions:
        for storage in {storage_of[name] for name in (*instruction.reads, *instruction.writes)}:
            users.setdefault(storage, []).append(instruction)
    return users


def _only_copy(users: list[Instruction], kind: CopyKind) -> Copy | None:
    if len(users) == 1 and isinstance(users[0], Copy) and users[0].kind is kind:
        return users[0]
    return None


def _is_whole(value: str, storage: Storage, copy: Copy, operands: Mapping[str, Operand]) -> bool:
    host, device = (
        (copy.source, copy.destination) if copy.kind is CopyKind.H2D else (copy.destination, copy.source)
    )
    own, other = operands[host], operands[device]
    return (
        host == value
        and storage.device == CPU
        and not storage.external
        and own.span_nbytes == own.numel * own.dtype.itemsize > SMALL
        and own.strides == other.strides
        and own.shape == other.shape
    )


def moving_store(port: Port, operand: Operand, end: HostEnd, plain: Store, is_lent: IsLent) -> Store:
    """Takes an input where it is if it is pinned and laid out as planned; else ``plain`` copies it."""
    label = f"input `{port.name}`"
    steps = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
    nbytes, mover = operand.span_nbytes, end.mover
    assert mover is not None
    held: list[Array] = []

    def store(given: Any) -> None:
        array = host_array(given, label, operand.dtype, operand.shape)
        refuse_lent(array, label, is_lent)
        address = address_of(array)
        if array.strides == steps and mover.is_pinned(address, nbytes) and end.move(address):
            held[:] = [array]  # until the next call: the transfer reads it
            return
        held.clear()
        end.reset()
        plain(array if is_native(operand.dtype) else HostTensor(array, operand.dtype))

    return store


class MovingOutput:
    """An output that is written straight into memory of the caller's: a pinned block from a pool."""

    def __init__(self, operand: Operand, end: HostEnd, shared: Shared) -> None:
        self._operand, self._end, self._shared = operand, end, shared
        self._copied = host_fetch(operand)
        self._release: Step | None = None

    def prepare(self) -> None:
        """Before a call: find a block. Without one, the output is copied as small ones are."""
        if self._release is not None:  # a call failed
            self.drop()
        taken = self._shared.take_host(self._operand.span_nbytes)
        if taken is None:
            self._end.reset()
        elif self._end.move(taken[0]):
            self._release = taken[1]
        else:
            taken[1]()

    def drop(self) -> None:
        """Give a block back that no call has filled; the next call writes to the planned place."""
        self._end.reset()
        release, self._release = self._release, None
        if release is not None:
            release()

    def part(self, operand: Operand) -> Callable[[], Any]:
        """Fetches a copy of another output in this one's memory, before `fetch` or after it."""

        def fetch() -> Any:
            shift = self._end.address - self._end.planned
            return host_fetch(replace(operand, address=operand.address + shift))()

        return fetch

    def fetch(self) -> Any:
        """The output as the caller's own."""
        operand, release = self._operand, self._release
        if release is None:
            return self._copied()
        self._release = None
        return host_value(owned_array(self._end.address, operand, release), operand.dtype)


class _Owner:
    """Host memory that is given back when no array looks at it any more."""

    def __init__(self, interface: dict[str, Any], release: Step) -> None:
        self.__array_interface__, self._release = interface, release

    def __del__(self) -> None:
        self._release()


def owned_array(address: int, operand: Operand, release: Step) -> Array:
    """A raw array over host memory; ``release`` is called once, when the last view is dropped."""
    kind = numpy_dtype(operand.dtype)
    interface = {
        "version": 3,
        "shape": operand.shape,
        "typestr": kind.str,
        "data": (address, False),
        "strides": tuple(stride * kind.itemsize for stride in operand.strides),
    }
    return np.asarray(_Owner(interface, release))

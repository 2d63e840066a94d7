"""The memory of a loaded program: constants once per device, an arena per memory id, a block of state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from ..backend import Backend
from ..errors import ArtifactError, PlanError
from ..program import CPU, Constant, Device, Method, MethodPlan, PlannedProgram, Role, StateVariable
from ..tensors.host import address_of

Constants = Mapping[str, memoryview]
"""Bytes by digest, as the artifact's reader gives them."""

ALIGNMENT = 256


def align(nbytes: int) -> int:
    """The next multiple of 256."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class Releases:
    """What must be given back, last in first out; every one is tried, the first error is raised."""

    pending: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def add(self, release: Callable[[], None]) -> None:
        """Remember one."""
        self.pending.append(release)

    def close(self) -> None:
        """Run and forget all of them."""
        failed: Exception | None = None
        while self.pending:
            try:
                self.pending.pop()()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


@dataclass(frozen=True)
class Allocator:
    """Allocates on any device of a program, and remembers how to free. Host memory comes from the
    accelerator where there is one, so that it is pinned."""

    backends: Mapping[Device, Backend]
    releases: Releases

    def allocate(self, device: Device, nbytes: int) -> int:
        """An address that is valid until the releases are closed."""
        address, free = self.allocate_single(device, nbytes)
        self.releases.add(free)
        return address

    def allocate_single(self, device: Device, nbytes: int) -> tuple[int, Callable[[], None]]:
        """An address, and how to free it."""
        if device != CPU:
            backend = self.backends[device]
            address = backend.allocate(nbytes)
            return address, lambda: backend.free(address)
        backend = pinning(self.backends)
        address = backend.allocate_host(nbytes)
        return address, lambda: backend.free_host(address)


def pinning(backends: Mapping[Device, Backend]) -> Backend:
    """Who reserves host memory: an accelerator, so that it is pinned, else the host."""
    accelerators = [backend for slot, backend in sorted(backends.items()) if slot != CPU]
    return accelerators[0] if accelerators else backends[CPU]


def constant_addresses(
    planned: PlannedProgram, constants: Constants, allocator: Allocator
) -> dict[tuple[Device, str], int]:
    """Upload every constant that a device needs, each digest once; (device, digest) -> address.

    Constants of the host stay where they are (a mapped file) when they are aligned well enough.
    """
    needed = _needed_constants(planned)
    addresses: dict[tuple[Device, str], int] = {}
    for device in sorted({device for device, _ in needed}):
        wanted = {digest: constant for (slot, digest), constant in needed.items() if slot == device}
        for constant in wanted.values() if device == CPU else ():
            _bytes_of(constant, constants)
        if device == CPU:
            mapped = {digest: _address_of(constants[digest]) for digest in wanted}
            addresses |= {(CPU, digest): at for digest, at in mapped.items() if at % 64 == 0}
            wanted = {digest: constant for digest, constant in wanted.items() if mapped[digest] % 64}
        at = allocator.allocate(device, sum(align(c.nbytes) for c in wanted.values()))
        for digest, constant in wanted.items():
            addresses[device, digest] = at
            at += align(constant.nbytes)
        # One after the other: bytes that a recipe makes live no longer than their upload.
        pieces = ((addresses[device, digest], _bytes_of(c, constants)) for digest, c in wanted.items())
        _upload_all(allocator.backends[device], pieces, sum(c.nbytes for c in wanted.values()))
    return addresses


@runtime_checkable
class UploadsTogether(Protocol):
    """A backend that sends the pieces of one block in fewer copies."""

    def upload_all(self, pieces: Iterable[tuple[int, memoryview]], total: int) -> None:
        """Copy all of them, now, in the order of their addresses; padding between them may be overwritten."""
        ...


def _upload_all(backend: Backend, pieces: Iterable[tuple[int, memoryview]], total: int) -> None:
    if isinstance(backend, UploadsTogether):
        backend.upload_all(pieces, total)
        return
    for address, data in pieces:
        if data.nbytes:
            backend.upload(address, data)


def _address_of(data: memoryview) -> int:
    return address_of(np.frombuffer(data, np.uint8)) if data.nbytes else 0


def _needed_constants(planned: PlannedProgram) -> dict[tuple[Device, str], Constant]:
    by_name = {constant.name: constant for constant in planned.program.constants}
    needed: dict[tuple[Device, str], Constant] = {}
    for method in planned.program.methods:
        for storage in method.storages:
            if storage.role is Role.CONSTANT:
                if storage.content not in by_name:
                    raise PlanError(f"storage `{storage.name}` holds an unknown constant `{storage.content}`")
                constant = by_name[storage.content]
                needed[storage.device, constant.digest] = constant
    return needed


def _bytes_of(constant: Constant, constants: Constants) -> memoryview:
    if constant.digest not in constants:
        raise ArtifactError(f"the bytes of constant `{constant.name}` are missing")
    data = constants[constant.digest]
    if data.nbytes != constant.nbytes:
        raise ArtifactError(
            f"constant `{constant.name}` has {data.nbytes} bytes instead of {constant.nbytes}"
        )
    return data


def constants_nbytes(planned: PlannedProgram, devices: Collection[Device] | None = None) -> int:
    """Bytes of the constants on these devices (on all), each digest once per device."""
    needed = _needed_constants(planned)
    return sum(c.nbytes for (device, _), c in needed.items() if devices is None or device in devices)


@dataclass(frozen=True)
class ArenaBlock:
    """One arena as allocated: as large as the most demanding method needs."""

    memory_id: int
    device: Device
    address: int
    nbytes: int


def allocate_arenas(planned: PlannedProgram, allocator: Allocator) -> dict[int, ArenaBlock]:
    """One block per memory id; PlanError when methods disagree on the device of one."""
    sizes: dict[int, tuple[Device, int]] = {}
    for plan in planned.plan.methods:
        for arena in plan.arenas:
            if arena.kind == "state":
                continue  # state has a block of its own, by name
            device, nbytes = sizes.get(arena.memory_id, (arena.device, 0))
            if device != arena.device:
                raise PlanError(f"memory {arena.memory_id} is on `{device}` and on `{arena.device}`")
            sizes[arena.memory_id] = (device, max(nbytes, arena.nbytes))
    return {
        memory_id: ArenaBlock(memory_id, device, allocator.allocate(device, nbytes), nbytes)
        for memory_id, (device, nbytes) in sorted(sizes.items())
    }


def state_addresses(variables: tuple[StateVariable, ...], allocator: Allocator) -> dict[str, int]:
    """An address for each state variable, in one block per device."""
    addresses: dict[str, int] = {}
    for device in sorted({variable.device for variable in variables}):
        mine = [variable for variable in variables if variable.device == device]
        at = allocator.allocate(device, sum(align(variable.nbytes) for variable in mine))
        for variable in mine:
            addresses[variable.name] = at
            at += align(variable.nbytes)
    return addresses


def storage_addresses(
    method: Method,
    plan: MethodPlan,
    arenas: Mapping[int, ArenaBlock],
    constants: Mapping[tuple[Device, str], int],
    states: Mapping[str, int],
    digests: Mapping[str, str],
) -> dict[str, int]:
    """Addresses of all storages but the caller's own; PlanError when an allocation leaves its arena."""
    allocations = {allocation.storage: allocation for allocation in plan.allocations}
    addresses: dict[str, int] = {}
    for storage in method.storages:
        if storage.role is Role.CONSTANT:
            addresses[storage.name] = constants[storage.device, digests[storage.content]]
        elif storage.role is Role.STATE:
            if storage.content not in states:
                raise PlanError(f"storage `{storage.name}` holds an unknown state `{storage.content}`")
            addresses[storage.name] = states[storage.content]
        elif storage.name in allocations:
            allocation = allocations[storage.name]
            arena = arenas.get(allocation.memory_id)
            if arena is None or arena.device != storage.device:
                raise PlanError(f"storage `{storage.name}` has no arena on `{storage.device}`")
            if allocation.offset < 0 or allocation.offset + storage.reserved_nbytes > arena.nbytes:
                raise PlanError(f"storage `{storage.name}` leaves arena {allocation.memory_id}")
            addresses[storage.name] = arena.address + allocation.offset
    return addresses

"""Small host inputs and outputs that a kernel reads and writes where they are, in place of a copy.

A copy of a few bytes costs some microseconds of a call that may take ten: two engines of the GPU hand over to
each other. Pinned memory has one address for host and GPU, so the kernel that reads an input, or writes an
output, can use the host's place itself. A reader then waits for the bus: so only where few launches of few
programs do, and only for small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..backend import Backend, Operand, Step
from ..expr import evaluate
from ..program import CPU, Copy, CopyKind, Device, Instruction, Launch, Method, Role
from .host_io import users_by_storage

_MOST_PROGRAMS = 256
"""Each of them may read the same bytes over the bus."""
_MOST_READERS = 3
"""Each waits about a microsecond for the bus, where the copy takes five."""

_HELD = (Role.CONSTANT, Role.STATE)
"""Memory that outlives a call."""

Take = Callable[[Device, int], tuple[int, Step]]
"""Reserves a block of so many bytes on a device; gives its address and how to give it back."""


@dataclass
class Direct:
    """Where a method's values are when some copies are saved.

    The plan may share the host's place of an input with that of an output, since the one is copied before the
    other; without the copies both are in use at once, so that each gets a block of its own.
    """

    planned: dict[str, Operand]
    """For callers: the host ends are in their blocks, the device ends where the plan has them."""
    used: dict[str, Operand]
    """For the instructions: the device ends of saved copies are in the blocks, too."""
    saved: set[int] = field(default_factory=set[int])
    """Indices of the copies."""
    releases: list[Step] = field(default_factory=list[Step])

    def close(self) -> None:
        """Give the blocks back. Idempotent."""
        while self.releases:
            self.releases.pop()()


def use_host_ends(
    method: Method,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    backends: Mapping[Device, Backend],
    take: Take,
) -> Direct:
    """Find the copies that can be saved, and do without them.

    Backends offer ``direct_read_nbytes`` and ``direct_write_nbytes``: up to how many bytes their kernels use
    pinned host memory at no loss.
    """
    direct = Direct(dict(operands), dict(operands))
    try:
        for index, ends in _savable(method, operands, bindings, backends):
            block, release = take(CPU, operands[ends.host].span_nbytes)
            direct.releases.append(release)
            direct.saved.add(index)
            for end in (ends.host, ends.device):
                moved = _moved(method, operands, end, block)
                direct.used.update(moved)
                if end == ends.host:
                    direct.planned.update(moved)
    except BaseException:
        direct.close()
        raise
    return direct


def _savable(
    method: Method,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    backends: Mapping[Device, Backend],
) -> Iterator[tuple[int, _Ends]]:
    """Copies, by index, that are small and whose bytes few launches use."""
    users = users_by_storage(method)
    for index, copy in enumerate(method.instructions):
        if not isinstance(copy, Copy) or copy.kind not in (CopyKind.H2D, CopyKind.D2H):
            continue
        ends = _Ends.of(copy)
        backend = backends[operands[ends.device].device]
        if not _is_small(method, ends, operands, bindings, backend):
            continue
        if _are_few_launches(method, users, ends, bindings):
            yield index, ends


@dataclass(frozen=True)
class _Ends:
    """A copy, and its values by where they are."""

    copy: Copy
    host: str
    device: str
    uploads: bool

    @classmethod
    def of(cls, copy: Copy) -> _Ends:
        if copy.kind is CopyKind.H2D:
            return cls(copy, copy.source, copy.destination, True)
        return cls(copy, copy.destination, copy.source, False)


def _moved(method: Method, operands: Mapping[str, Operand], end: str, block: int) -> dict[str, Operand]:
    """All values of an end's storage, with the storage at ``block``."""
    home, shift = method.value(end).storage, block - operands[end].address
    return {
        value.name: replace(operands[value.name], address=operands[value.name].address + shift)
        for value in method.values
        if value.storage == home and value.name in operands
    }


def _is_small(
    method: Method,
    ends: _Ends,
    operands: Mapping[str, Operand],
    bindings: Mapping[str, int],
    backend: Backend,
) -> bool:
    """Whether both ends are whole storages of the same dense bytes, few enough to be used over the bus."""
    kind = "direct_read_nbytes" if ends.uploads else "direct_write_nbytes"
    most: Any = getattr(backend, kind, 0)
    host, device = operands[ends.host], operands[ends.device]
    if host.shape != device.shape or host.strides != device.strides:
        return False
    nbytes = host.numel * host.dtype.itemsize
    if not 0 < nbytes == host.span_nbytes <= most:
        return False
    homes = {method.value(end).storage for end in (ends.host, ends.device)}
    whole = [s for s in method.storages if s.name in homes and evaluate(s.nbytes, bindings) == nbytes]
    return len(whole) == 2 and not any(s.external or s.role in _HELD for s in whole)


def _are_few_launches(
    method: Method, users: Mapping[str, list[Instruction]], ends: _Ends, bindings: Mapping[str, int]
) -> bool:
    """Whether few launches of few programs read what was uploaded, or one writes what is downloaded."""
    host, device = (users[method.value(end).storage] for end in (ends.host, ends.device))
    others = [user for user in device if user is not ends.copy]
    launches = [user for user in others if isinstance(user, Launch)]
    most = _MOST_READERS if ends.uploads else 1
    if len(host) != 1 or len(launches) != len(others) or not 1 <= len(launches) <= most:
        return False
    home = method.value(ends.device).storage
    for launch in launches:
        wrong = launch.writes if ends.uploads else launch.reads
        if home in {method.value(name).storage for name in wrong}:
            return False
        programs = math.prod(evaluate(size, bindings) for size in launch.grid)
        if ends.uploads and programs > _MOST_PROGRAMS:
            return False
    return True

"""What a program and its clones hold together: constants, devices, and pooled blocks for device outputs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from ..backend import Backend, Step
from ..errors import ExecutionError
from ..program import CPU, Device, PlannedProgram
from .allocator import Allocator, Constants, Releases, constant_addresses, pinning

_KEPT_PER_SIZE = 4
HOST_LIMIT = 1 << 30
"""Bytes of pinned memory that outputs may hold at once; past them outputs are copied to ordinary memory."""

Block = tuple[Device, int, int]
"""Where it is, its bytes, its address."""


class Shared:
    """Constants on their devices and the backends that own them, counted by those who use them.

    Programs, clones and outputs in device memory that outlive their program each hold one count; the last
    one to let go frees everything.
    """

    def __init__(
        self, planned: PlannedProgram, constants: Constants, backends: Mapping[Device, Backend]
    ) -> None:
        self.planned, self.constants, self.backends = planned, constants, backends
        self._lock, self._count = threading.Lock(), 1
        self._returned: deque[Block | None] = deque()
        """What was let go, until `_settle` takes it back: blocks, or None for a bare count."""
        self._releases = Releases()
        for backend in backends.values():
            self._releases.add(backend.close)
        self._pool: dict[tuple[Device, int], list[int]] = {}
        self._host_nbytes = 0
        try:
            for backend in backends.values():
                backend.load(planned.program.kernels)
            allocator = Allocator(backends, self._releases)
            self.addresses = constant_addresses(planned, constants, allocator)
        except BaseException:
            self._releases.close()
            raise

    def retain(self) -> None:
        """Hold one more count; ExecutionError when the last was let go."""
        with self._lock:
            self._hold()
        self._settle()

    def _hold(self) -> None:
        if self._count == 0:
            raise ExecutionError("the program is closed")
        self._count += 1

    def release(self) -> None:
        """Let one count go; the last frees constants and closes the devices."""
        self._returned.append(None)
        self._settle()

    def take_host(self, nbytes: int) -> tuple[int, Step] | None:
        """A pinned block for a host output; None when `HOST_LIMIT` is reached."""
        if self._host_nbytes + nbytes > HOST_LIMIT and not self._pool.get((CPU, nbytes)):
            return None
        return self.take(CPU, nbytes)

    def take(self, device: Device, nbytes: int) -> tuple[int, Step]:
        """A block for an output of the caller's, and how to give it back (once)."""
        with self._lock:
            self._hold()
            free = self._pool.setdefault((device, nbytes), [])
            address = free.pop() if free else None
        self._settle()
        if address is None:
            try:
                address = self._allocate(device, nbytes)
            except BaseException:
                self.release()
                raise
        return address, lambda: self._give(device, nbytes, address)

    def _give(self, device: Device, nbytes: int, address: int) -> None:
        self._returned.append((device, nbytes, address))
        self._settle()

    def _settle(self) -> None:
        """Take back what was let go, unless the lock is held: then who holds it does so, when done.

        Programs and blocks are let go by the garbage collector too, which may run in a thread that has the
        lock: to wait for it there would be to wait for ever.
        """
        while self._returned and self._lock.acquire(blocking=False):
            try:
                surplus, is_last = self._take_back()
            finally:
                self._lock.release()
            for device, nbytes, address in surplus:
                self._free(device, nbytes, address)
            if is_last:
                self._drain()
                self._releases.close()

    def _take_back(self) -> tuple[list[Block], bool]:
        """Blocks that the pool does not keep, and whether nobody holds a count any more."""
        surplus: list[Block] = []
        while self._returned:
            block = self._returned.popleft()
            self._count -= 1
            if block is not None:
                free = self._pool[block[:2]]
                if len(free) < _KEPT_PER_SIZE:
                    free.append(block[2])
                else:
                    surplus.append(block)
        return surplus, self._count == 0

    def _drain(self) -> None:
        for (device, nbytes), addresses in self._pool.items():
            while addresses:
                self._free(device, nbytes, addresses.pop())

    def _allocate(self, device: Device, nbytes: int) -> int:
        if device != CPU:
            return self.backends[device].allocate(nbytes)
        address = pinning(self.backends).allocate_host(nbytes)
        with self._lock:
            self._host_nbytes += nbytes
        self._settle()
        return address

    def _free(self, device: Device, nbytes: int, address: int) -> None:
        if device != CPU:
            self.backends[device].free(address)
            return
        pinning(self.backends).free_host(address)
        with self._lock:
            self._host_nbytes -= nbytes

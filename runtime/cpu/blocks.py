"""Host memory in aligned blocks, looked up by address: the stuff that emulated devices are made of."""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from ..errors import ExecutionError
from ..tensors.host import Array, address_of, bytes_at


class Blocks:
    """Aligned blocks of host memory by address. Every block ends with a guard that nothing may reach."""

    def __init__(self, owner: str, alignment: int = 256) -> None:
        self._owner, self._alignment = owner, alignment
        self._starts: list[int] = []
        self._held: dict[int, tuple[int, Array]] = {}

    def allocate(self, nbytes: int) -> int:
        """The address of a new block; its bytes are not cleared."""
        try:
            memory: Array = np.empty(nbytes + 2 * self._alignment, np.uint8)
        except MemoryError as error:
            raise ExecutionError(
                f"{self._owner} has no memory left", why=f"{nbytes} bytes were wanted"
            ) from error
        base = address_of(memory)
        address = base + -base % self._alignment
        self._held[address] = (nbytes, memory)  # in this order: other threads look blocks up meanwhile
        bisect.insort(self._starts, address)
        return address

    def free(self, address: int) -> None:
        """Give a block back; ExecutionError when there is none at that address."""
        if address not in self._held:
            raise ExecutionError(
                f"{self._owner} is asked to free address {address:#x}, which it does not hold"
            )
        self._starts.remove(address)
        del self._held[address]

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies within one block."""
        bounds = self.bounds(address)
        return bounds is not None and address + nbytes <= bounds[1]

    def bounds(self, address: int) -> tuple[int, int] | None:
        """First and one past the last address of the block that an address lies in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        held = self._held.get(start)
        if held is None:
            return None
        end = start + held[0]
        return (start, end) if address < end or address == start else None

    @property
    def count(self) -> int:
        """Blocks in use."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(nbytes for nbytes, _ in self._held.values())

    def clear(self) -> None:
        """Drop all blocks."""
        self._starts.clear()
        self._held.clear()


def copy_in(address: int, data: memoryview) -> None:
    """Host bytes to an address."""
    bytes_at(address, data.nbytes)[:] = data.cast("B") if data.contiguous else memoryview(data.tobytes())


def copy_out(address: int, out: memoryview) -> None:
    """Bytes at an address to writable host memory."""
    out.cast("B")[:] = bytes_at(address, out.nbytes)


def set_bytes(address: int, nbytes: int, byte: int) -> None:
    """Fill memory with a byte."""
    ctypes.memset(address, byte, nbytes)

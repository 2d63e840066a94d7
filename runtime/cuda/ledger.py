"""What a GPU's free memory fell by, step by step, for who wants to know: `bench` does.

While a ledger is open each step that may take device memory notes what it took, by the driver's word, less
what steps within it noted. So the parts add up to the whole, and what no step explains has a name as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Ledger:
    """Device bytes by step; ``requested`` are bytes that were asked of the driver and not given back.

    Args:
        free: gives the free bytes of all GPUs concerned, and leaves the thread's context as it was.
    """

    def __init__(self, free: Callable[[], int]) -> None:
        self._free, self._within = free, 0
        self._blocks: dict[int, int] = {}
        self.taken: Counter[str] = Counter()

    @property
    def requested(self) -> int:
        """Bytes of the blocks that were allocated since the ledger was opened, and still are."""
        return sum(self._blocks.values())

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Note what the steps within take, under this name but for what they note themselves."""
        before, outside, self._within = self._free(), self._within, 0
        try:
            yield
        finally:
            taken = before - self._free()
            self.taken[name] += taken - self._within
            self._within = outside + taken

    def allocated(self, address: int, nbytes: int) -> None:
        """A block was reserved."""
        self._blocks[address] = nbytes

    def freed(self, address: int) -> None:
        """A block was given back."""
        self._blocks.pop(address, None)


_open: list[Ledger] = []


@contextmanager
def opened(ledger: Ledger) -> Generator[Ledger]:
    """Let all backends note in this ledger."""
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


def current() -> Ledger | None:
    """The ledger that is open, if any."""
    return _open[-1] if _open else None


@contextmanager
def noted(name: str) -> Generator[None]:
    """Note what a step takes, where a ledger is open."""
    ledger = current()
    if ledger is None:
        yield
        return
    with ledger.span(name):
        yield

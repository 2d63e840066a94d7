"""Who may use a program's memory now: one user at a time, nobody after a failure that left it undefined."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from ..backend import Backend
from ..errors import DevplanError, ExecutionError
from ..program import Device


class Session:
    """The lock, the generation and the health of one program's memory.

    ``blocked`` says why no method can run, and is empty while one can. ``generation`` counts calls, so that
    borrowed outputs know when they are stale.
    """

    __slots__ = ("backends", "blocked", "generation", "is_closed", "lock", "unknown", "writes")

    def __init__(self, backends: Mapping[Device, Backend]) -> None:
        self.backends = backends
        self.lock = threading.Lock()
        self.blocked, self.generation, self.is_closed = "", 0, False
        self.writes = 0
        """How often state was set from outside, which what was borrowed of it must know, too."""
        self.unknown: set[str] = set()
        """State that a failed call left undefined."""

    def current(self) -> int:
        """The generation."""
        return self.generation

    def current_state(self) -> int:
        """What changes whenever state may have been written: by a call, or from outside."""
        return self.generation + self.writes

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """One user at a time; ExecutionError for the second, and after `close`."""
        if not self.lock.acquire(blocking=False):
            raise busy()
        try:
            self.check_open()
            yield
        finally:
            self.lock.release()

    def check_open(self) -> None:
        """ExecutionError after `close`."""
        if self.is_closed:
            raise ExecutionError("the program is closed")

    def close(self) -> None:
        """Refuse everything from now on; borrowed outputs are stale."""
        self.is_closed, self.blocked = True, "the program is closed"
        self.generation += 1

    def failed(self, method: str, written: Iterable[str], error: BaseException) -> BaseException:
        """Take note of a call that failed while it ran, and return the error to raise for it.

        If the devices still answer, the program goes on as soon as the state that the method writes is set
        or reset; if not, it is dead.
        """
        try:
            for backend in self.backends.values():
                backend.synchronize()
        except Exception as broken:
            self.blocked = f"the device failed in an earlier call ({broken}); load the program again"
        else:
            self.unknown.update(written)
            if self.unknown:
                names = ", ".join(f"`{name}`" for name in sorted(self.unknown))
                self.blocked = f"state {names} is undefined since a call failed; `reset`, `set` or `load` it"
        if isinstance(error, DevplanError) or not isinstance(error, Exception):
            return error
        return ExecutionError(f"method `{method}` failed", why=f"{type(error).__name__}: {error}")

    def restored(self, names: Iterable[str]) -> None:
        """State was set: when none is undefined any more, methods can run again."""
        if self.unknown:
            self.unknown.difference_update(names)
            if not self.unknown:
                self.blocked = ""


def busy() -> ExecutionError:
    """The refusal of a second user."""
    return ExecutionError(
        "the program is in use by another thread",
        why="one call runs at a time",
        hint="give each thread a `clone()`",
    )

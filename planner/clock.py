"""A guard in processor seconds that is cheap to ask."""

from __future__ import annotations

from time import monotonic, process_time


class Deadline:
    """Over once the process has computed for so many seconds.

    Processor time, since a busy machine should not change a plan. Reading it can be a slow system call, so
    the wall clock, which cannot be behind it, is asked first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wall = monotonic() + seconds
        self._end = process_time() + seconds

    def is_over(self) -> bool:
        """Whether the time is up."""
        if monotonic() < self._wall:
            return False
        left = self._end - process_time()
        self._wall = monotonic() + left
        return left <= 0


NEVER = Deadline(float("inf"))

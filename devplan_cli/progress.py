"""Progress of an export: a bar per stage on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .console import Output, console
from .words import duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_WIDTH = 10


@dataclass
class Stages:
    """Told (stage, fraction, detail); keeps the time of each stage and shows it."""

    output: Output
    bars: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _tasks: dict[str, TaskID] = field(default_factory=dict[str, "TaskID"])
    _current: str = ""
    _began: float = 0.0

    def __call__(self, stage: str, fraction: float, detail: str) -> None:
        """A stage has come so far."""
        if stage != self._current:
            self.finish()
            self._current, self._began = stage, time.perf_counter()
        if self.bars is not None:
            task = self._tasks.get(stage)
            if task is None:
                task = self._tasks[stage] = self.bars.add_task(f"{stage:<{_WIDTH}}", total=1.0, detail="")
            self.bars.update(task, completed=fraction, detail=detail[:36])

    def finish(self) -> None:
        """The current stage is over."""
        if not self._current:
            return
        spent = time.perf_counter() - self._began
        self.seconds[self._current] = self.seconds.get(self._current, 0.0) + spent
        if self.bars is not None:
            self.bars.update(self._tasks[self._current], completed=1.0, detail="")
        else:
            self.output.say(f"  {self._current:<{_WIDTH}} {duration(spent)}")
        self._current = ""


@contextmanager
def stages(output: Output) -> Generator[Stages]:
    """Show stages while the block runs: bars on a terminal, unless they are switched off."""
    shown = console(stderr=True)
    if not (shown.is_terminal and output.progress) or output.quiet:
        plain = Stages(output)
        yield plain
        plain.finish()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=shown, transient=False) as bars:
        watched = Stages(output, bars)
        yield watched
        watched.finish()

"""Where the command prints: results on standard output, the rest on standard error, JSON as one document."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ..passes.narrow import is_mapping, is_sequence
from .streams import standard_output, tell, write_document_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 80


@dataclass(frozen=True)
class Output:
    """How a verb prints. With ``json`` standard output holds one document and nothing else."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    progress: bool = True

    @property
    def tells_results(self) -> bool:
        """Whether anything of a result is printed, as a document or for a person."""
        return self.json or not self.quiet

    def say(self, text: str) -> None:
        """A line for a person on standard error."""
        if not self.quiet:
            tell(text, getattr(sys.stderr, "beneath", sys.stderr))

    def detail(self, text: str) -> None:
        """A line for one who asked for more."""
        if self.verbose:
            self.say(text)

    def show(self, *items: RenderableType) -> None:
        """Results for a person on standard output: text and tables of rich."""
        if not (self.json or self.quiet):
            stdout = console()
            with standard_output():
                with stdout.capture() as captured:
                    for item in items:
                        stdout.print(item, markup=False, highlight=False, soft_wrap=isinstance(item, str))
                print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)

    def document(self, document: dict[str, Any]) -> None:
        """The JSON document, when one was asked for."""
        if self.json:
            write_document(document)


def console(*, stderr: bool = False) -> Console:
    """A console that is as wide as the terminal, or 80 columns; colour only on a terminal.

    Standard output is no narrower than that: a terminal wraps lines, while a table would drop what it holds.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    made = Console(file=stream, highlight=False, emoji=False, legacy_windows=False)
    if not stream.isatty() or (made.width < _WIDTH and not stderr):
        made.width = _WIDTH
    return made


class _Muffler(io.StringIO):
    """A standard error that keeps what is written to it to itself; ``beneath`` is the real one."""

    def __init__(self, beneath: TextIO) -> None:
        super().__init__()
        self.beneath = beneath


@contextmanager
def muffled(active: bool) -> Generator[None]:
    """Keep a library's own reports from the user, who gets one line of ours; `Output.say` still speaks."""
    if not active:
        yield
        return
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(_Muffler(sys.stderr)):
            yield
    finally:
        logging.disable(logging.NOTSET)


def write_document(document: dict[str, Any]) -> None:
    """Print one JSON document. Numbers that JSON lacks (NaN, infinities) become null."""
    write_document_text(json.dumps(_plain(document), indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    if is_mapping(value):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_sequence(value):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, int | float | str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

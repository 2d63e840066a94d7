"""Where the command prints: results on standard output, the rest on standard error, JSON as one document."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TextIO

from ..passes.narrow import is_mapping, is_sequence

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_document_stream: IO[str] | None = None


@dataclass(frozen=True)
class Output:
    """How a verb prints. With ``json`` standard output holds one document and nothing else."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    progress: bool = True

    def say(self, text: str) -> None:
        """A line for a person on standard error."""
        if not self.quiet:
            print(text, file=getattr(sys.stderr, "beneath", sys.stderr), flush=True)

    def detail(self, text: str) -> None:
        """A line for one who asked for more."""
        if self.verbose:
            self.say(text)

    def show(self, *items: RenderableType) -> None:
        """Results for a person on standard output: text and tables of rich."""
        if not (self.json or self.quiet):
            stdout = console()
            with stdout.capture() as captured:
                for item in items:
                    stdout.print(item, markup=False, highlight=False, soft_wrap=isinstance(item, str))
            lines = captured.get().splitlines()
            print("\n".join(line.rstrip() for line in lines), flush=True)

    def document(self, document: dict[str, Any]) -> None:
        """The JSON document, when one was asked for."""
        if self.json:
            write_document(document)


def console(*, stderr: bool = False) -> Console:
    """A console that is as wide as the terminal, or 80 columns; colour only on a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 80
    return Console(file=stream, width=width, highlight=False, emoji=False, legacy_windows=False)


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


@contextmanager
def document_mode(active: bool) -> Generator[None]:
    """Keep standard output for the JSON document: all else that is written to it goes to standard error."""
    global _document_stream
    if not active:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(saved), "w", encoding="utf-8") as stream:
            _document_stream = stream
            yield
    finally:
        _document_stream = None
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def write_document(document: dict[str, Any]) -> None:
    """Print one JSON document. Numbers that JSON lacks (NaN, infinities) become null."""
    text = json.dumps(_plain(document), indent=2, ensure_ascii=False)
    stream = _document_stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


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

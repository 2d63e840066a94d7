"""The standard streams as a process finds them: closed, full, without a reader, or with few letters."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TextIO

STDOUT = "standard output"

_document_descriptor: int | None = None
"""Where the JSON document goes, once standard output is kept for it."""


def mend_streams() -> None:
    """Open what is closed on the null device, and print letters that an encoding lacks as escapes.

    With a closed descriptor (``devplan ... >&-``) the next file that is opened, an artifact say, would get
    its number, and with it all that is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _mended(sys.stdout), _mended(sys.stderr)


def _mended(stream: TextIO | None) -> TextIO:
    if stream is None:
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
        reconfigure(errors="backslashreplace")
    return stream


def keep_stdout_for_a_document() -> None:
    """From now on all that is printed goes to standard error, but for `write_document_text`.

    It stays so to the end of the process: what a model file registered with `atexit` prints, too.
    """
    global _document_descriptor
    if _document_descriptor is None:
        sys.stdout.flush()
        _document_descriptor = os.dup(1)
        os.dup2(2, 1)


def write_document_text(text: str) -> None:
    """Write to standard output, past what is printed; `OSError` names it."""
    if _document_descriptor is None:
        with standard_output():
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    # A name that is not UTF-8 is in the text as lone surrogates, which escaped so are JSON again.
    rest = memoryview(text.encode("utf-8", "backslashreplace"))
    with standard_output():
        while rest:
            rest = rest[os.write(_document_descriptor, rest) :]


@contextmanager
def standard_output() -> Generator[None]:
    """Let an `OSError` of what is printed name standard output; a reader that has gone is left as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(1)
        raise OSError(error.errno, error.strerror, STDOUT) from error


def silence(descriptor: int) -> None:
    """Send a stream to the null device: what is still held back must not fail again when Python ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def tell(text: str, stream: TextIO | None = None) -> None:
    """A line on standard error. Where that cannot be written (a full disk), work goes on without it."""
    try:
        print(text, file=stream or sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        with suppress(OSError):
            silence(2)

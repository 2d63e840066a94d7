"""How a failure ends: one line on standard error, a JSON document where asked for, an exit code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from ..runtime.errors import EXPORT_PACKAGES, DevplanError, MismatchError, UsageError, not_installed
from .console import write_document
from .streams import STDOUT, tell

INTERRUPTED = 130


class Differs(MismatchError):
    """Results or artifacts differ; ``document`` is what was found, for ``--json``."""

    def __init__(self, what: str, document: Mapping[str, Any], *, why: str, hint: str) -> None:
        super().__init__(what, why=why, hint=hint)
        self.document = document


def report(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Print what went wrong and return the exit code. The traceback only with ``verbose``."""
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted")
        return INTERRUPTED
    known = error if isinstance(error, DevplanError) else _as_known(error)
    if verbose:
        traceback.print_exception(error)
    if as_json:
        message = f"{known.what}: {known.why}" if known.why else known.what
        found: Mapping[str, Any] = known.document if isinstance(known, Differs) else dict[str, Any]()
        failure = {"code": known.code, "kind": known.kind, "message": message, "hint": known.hint}
        with suppress(OSError):  # it may be standard output that has failed
            write_document({**found, "error": failure})
    with suppress(BrokenPipeError):
        tell(known.line())
    return known.code


def _as_known(error: BaseException) -> DevplanError:
    """An error in the contract's words for what is none of ours."""
    if (shown := getattr(error, "format_message", None)) is not None:
        return _wrong_usage(error, str(shown()))
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return DevplanError("out of memory", why=text, hint="close other programs, or use a smaller model")
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXPORT_PACKAGES:
        return not_installed(error.name, f"this needs `{error.name}`")
    why = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return DevplanError("internal error", why=why, hint="`--verbose` shows the traceback; please report it")


def _of_system(error: OSError) -> DevplanError:
    """What the system refuses: a file, or standard output (which has no name where the parser prints)."""
    why = str(error.strerror)
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return DevplanError("the current folder is gone", why=why, hint="go to one that is there")
    if error.filename in (None, STDOUT):
        hint = "check the free space, or send standard output elsewhere"
        return DevplanError(
            "cannot write to standard output" if error.filename else "cannot write", why=why, hint=hint
        )
    hint = "check the path, its permissions and the free space"
    return DevplanError(f"cannot use `{error.filename}`", why=why, hint=hint)


def _wrong_usage(error: BaseException, message: str) -> UsageError:
    """The command line parser's complaint. Its words are kept; only their form changes."""
    message = message.strip().rstrip(".")
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "devplan")
    hint = f"see `{path} --help`"
    name = getattr(error, "option_name", None)
    if name and context is not None and type(error).__name__ == "NoSuchOption":
        options = [
            text
            for parameter in context.command.params
            for text in (*parameter.opts, *parameter.secondary_opts)
        ]
        close = get_close_matches(name, options, n=1)
        hint = f"did you mean `{close[0]}`; {hint}" if close else hint
        return UsageError(f"unknown option `{name}`", hint=hint)
    if match := re.match(r"No such command '([^']+)'", message):
        close = (
            get_close_matches(match[1], list(getattr(context.command, "commands", ())), n=1)
            if context
            else []
        )
        hint = f"did you mean `{close[0]}`; {hint}" if close else hint
        return UsageError(f"unknown verb `{match[1]}`", hint=hint)
    return UsageError("wrong usage", why=message[:1].lower() + message[1:], hint=hint)

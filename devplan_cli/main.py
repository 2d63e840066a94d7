"""The devplan command: parse, print, choose the exit code; compute nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from ..runtime.errors import DevplanError, UsageError
from .arguments import fill_optional_values
from .failures import INTERRUPTED, report
from .streams import keep_stdout_for_a_document, mend_streams, silence, standard_output

_HELP = """Export PyTorch models to planned device programs, and run them without torch.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, 3 the model cannot be exported, 4 results or
artifacts differ, 5 a budget is exceeded, 6 no device, 7 the artifact is damaged.
"""
VERBS = ("export", "run", "inspect", "verify", "bench", "tune", "diff", "doctor")


def application(words: Sequence[str]) -> typer.Typer:
    """The command with the verb that these words name, or with all of them.

    Each verb is imported, and its options are read from its signature, at a cost of tens of milliseconds.
    """
    made = typer.Typer(
        name="devplan",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(help=_HELP)(devplan)
    asked = next((word for word in words if not word.startswith("-")), "")
    for verb in (asked,) if asked in VERBS else VERBS:
        module = import_module(f".{verb}", __package__)
        made.command(epilog=module.EXAMPLE)(getattr(module, verb))
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        from .versions import version_lines

        print("\n".join(version_lines()))
        raise typer.Exit


def devplan(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit."),
    ] = False,
) -> None:
    """The command without a verb."""


def main(argv: list[str] | None = None) -> None:
    """Run the command and leave the process with the contract's exit code."""
    words = fill_optional_values(sys.argv[1:] if argv is None else argv)
    as_json, verbose = "--json" in words, "--verbose" in words or "-v" in words
    if not (verbose or sys.warnoptions):
        warnings.simplefilter("ignore")  # what libraries say to their developers is nothing to a user
    mend_streams()
    if as_json:
        keep_stdout_for_a_document()
    code = _call(words, as_json=as_json, verbose=verbose)
    sys.exit(_flush(code, as_json=as_json))


def _call(words: list[str], *, as_json: bool, verbose: bool) -> int:
    try:
        result = application(words)(words, prog_name="devplan", standalone_mode=False)
    except BrokenPipeError:
        return _broken_pipe()
    except (typer.Abort, KeyboardInterrupt):
        return report(KeyboardInterrupt(), as_json=as_json, verbose=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the parser has caught it
            return _broken_pipe()
        return report(_exited(error), as_json=as_json, verbose=verbose)
    except BaseException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed
            error = UsageError("wrong usage", why="a verb is missing", hint="write `devplan export model.py`")
        return report(error, as_json=as_json, verbose=verbose)
    if result == INTERRUPTED:  # the parser has caught the interrupt
        return report(KeyboardInterrupt(), as_json=as_json, verbose=False)
    return result if isinstance(result, int) else 0


def _exited(error: SystemExit) -> DevplanError:
    """Code that is not ours wants to end the process: its exit code would pass for one of the contract's."""
    why = f"the model or a library that it uses called `sys.exit({error.code!r})`"
    return DevplanError("ended before it was done", why=why, hint="`--verbose` shows from where")


def _flush(code: int, *, as_json: bool) -> int:
    try:
        with standard_output():
            if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]  # a model may set it so
                sys.stdout.flush()
    except BrokenPipeError:
        return _broken_pipe()
    except OSError as error:
        return code or report(error, as_json=as_json, verbose=False)
    return code


def _broken_pipe() -> int:
    """The reader of our output has gone (``devplan inspect x | head``): stop without a word, as others do."""
    for descriptor in (1, 2):
        silence(descriptor)
    return INTERRUPTED + 11

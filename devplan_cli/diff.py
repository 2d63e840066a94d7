"""``devplan diff OLD NEW``: what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output
from .failures import Differs

EXAMPLE = """Examples:

devplan diff main.pte mine.pte

devplan diff main.pte mine.pte --markdown >> $GITHUB_STEP_SUMMARY
"""


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", show_default=False, help="The artifact before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", show_default=False, help="The artifact after.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a pull request.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Say what changed: copies, arenas, kernels, constants, signatures; code 4 if what matters did."""
    from .artifacts import open_artifact
    from .differences import differences, document
    from .differences_view import lines, markdown_lines

    out = Output(json, quiet, verbose)
    changes = differences(open_artifact(old), open_artifact(new))
    matters = [change for change in changes if change.matters]
    if not json:
        out.show(*(markdown_lines(old.name, new.name, changes) if markdown else lines(changes)))
    if matters:
        why = f"{matters[0].what}" + (f" and {len(matters) - 1} more" if len(matters) > 1 else "")
        what = f"`{new}` differs from `{old}`"
        raise Differs(what, document(changes), why=why, hint="`--markdown` lists all changes for a review")
    out.document(document(changes))
    return 0

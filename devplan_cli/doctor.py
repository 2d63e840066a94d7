"""``devplan doctor``: what this machine has and lacks for exporting and for running."""

from __future__ import annotations

from . import flags
from .console import Output

EXAMPLE = """Example:

devplan doctor --json
"""


def doctor(json: flags.Json = False, quiet: flags.Quiet = False, verbose: flags.Verbose = False) -> int:
    """Say what this machine has and lacks for exporting and for running, with the mend for each."""
    from .checks import all_checks, document

    out = Output(json, quiet, verbose)
    checks = all_checks()
    out.document(document(checks))
    if not json:
        from .doctor_view import view

        out.show(*view(checks))
    return 0

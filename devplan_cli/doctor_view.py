"""What `doctor` shows a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checks import Finding, abilities
from .words import table

if TYPE_CHECKING:
    from rich.console import RenderableType

_USES = {
    "export": "export for CUDA",
    "run": "run on CUDA",
    "emulator": "run on the emulator",
    "cpu": "run host programs",
}


def view(findings: list[Finding]) -> list[RenderableType]:
    """What can be done here, all findings, and the mends of what is missing."""
    made = table("", "", "what", "found+")
    for finding in findings:
        made.add_row("ok" if finding.ok else "--", finding.name, finding.found)
    can = table("", "", "")
    for use, possible in abilities(findings).items():
        can.add_row(_USES[use], "yes" if possible else "no")
    missing = [finding for finding in findings if not finding.ok]
    mends: list[RenderableType] = [f"{finding.name}: {finding.mend}" for finding in missing]
    return [made, "", can, *(["", "To mend:", *mends] if mends else [])]

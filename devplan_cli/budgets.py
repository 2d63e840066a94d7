"""Budgets of an export: what is over one, by how much, and what it consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.errors import BudgetError
from ..runtime.program import Copy, CopyKind, PlannedProgram
from .words import count, size

if TYPE_CHECKING:
    from ..passes.config.read import Config


def check_plan(planned: PlannedProgram, config: Config) -> None:
    """`BudgetError` when there are too many copies. The planner itself keeps the memory budget."""
    copies = [(method.name, i) for method in planned.program.methods for i in method.instructions]
    transfers = [(name, i) for name, i in copies if isinstance(i, Copy) and i.kind is not CopyKind.LOCAL]
    if config.max_copies is not None and len(transfers) > config.max_copies:
        found = "; ".join(
            f"`{c.source}` {c.kind.value} in `{name}` ({c.reason})" for name, c in transfers[:3]
        )
        what = f"{count(len(transfers), 'copy', 'copies')} exceed the budget of {config.max_copies}"
        raise BudgetError(
            what, why=found, hint="keep tensors on the device with `--io device`, or raise the budget"
        )


def check_artifact(nbytes: int, config: Config) -> None:
    """`BudgetError` when the artifact is too large."""
    budget = config.max_artifact_size
    if budget is not None and nbytes > budget:
        what = f"the artifact of {size(nbytes)} exceeds the budget of {size(budget)}"
        hint = "use `--dtype float16`, fewer architectures, `--weights external`, or raise the budget"
        raise BudgetError(what, why=f"{nbytes} bytes are more than {budget}", hint=hint)

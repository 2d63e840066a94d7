"""Ask OR-Tools' CP-SAT whether a height can be reached (extra ``solver``).

The solver is strong at the yes-or-no question at the bound and weak at minimising, so only that is asked.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..runtime.errors import UsageError
from .problem import Placement, Problem


def decide(problem: Problem, capacity: int, seconds: float) -> Placement | None:
    """A placement of at most ``capacity``, or None if none was found within the (deterministic) time.

    Raises UsageError when OR-Tools is not installed.
    """
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        hint = "install the extra `solver`, or plan without it"
        raise UsageError("the constraint solver is not installed", why=str(error), hint=hint) from error
    model = cp_model.CpModel()
    lives: list[Any] = []
    places: list[Any] = []
    starts: list[Any] = []
    for index, buffer in enumerate(problem.buffers):
        step = buffer.alignment
        rank = model.new_int_var(0, max(capacity - buffer.size, 0) // step, f"o{index}")
        lives.append(
            model.new_fixed_size_interval_var(buffer.lower, buffer.upper - buffer.lower, f"t{index}")
        )
        places.append(model.new_fixed_size_interval_var(rank * step, buffer.size, f"a{index}"))
        starts.append(rank)
    model.add_no_overlap_2d(lives, places)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # the same answer every time, unlike a race
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = 2 * seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    offsets = tuple(
        int(solver.value(start)) * buffer.alignment
        for start, buffer in zip(starts, problem.buffers, strict=True)
    )
    return Placement(offsets, problem.height(offsets), "constraint solver")

"""The optional constraint solver: right where it is installed, named where it is not."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from devplan.planner.offsets import place
from devplan.planner.problem import Buffer, Problem
from devplan.planner.solver import decide
from devplan.runtime.errors import UsageError

PROBLEM = Problem((Buffer(0, 2, 8, 8), Buffer(1, 3, 4, 4), Buffer(2, 4, 8, 8)))


def test_it_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(UsageError, match="the constraint solver is not installed"):
        decide(PROBLEM, 12, 1.0)


def test_nobody_needs_it_where_the_bound_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    assert place(PROBLEM, "fast", solver=True).height == 12


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs the extra `solver`")
def test_it_says_yes_with_a_placement_and_no_with_none() -> None:
    found = decide(PROBLEM, 12, 5.0)
    assert found is not None and found.height == 12
    assert decide(PROBLEM, 11, 5.0) is None

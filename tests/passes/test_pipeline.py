"""Pipelines: names, options, order, passes from files, and what a failing pass says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from devplan.passes.base import Pass, PassResult, Stage
from devplan.passes.options import ExportOptions, IoRule, PlacementRule
from devplan.passes.pipeline import BUILT_IN, PassRun, build_pipeline, pass_class, pass_names, run_stage
from devplan.passes.placed.graph import GraphOutput, Node, NodeKind, PlacedGraph, TensorType
from devplan.passes.placed.place import PlaceOperators
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import PassError, UnsupportedOperatorError, UsageError

PURE = pass_names()[pass_names().index("place-operators") :]
"""The built-in passes that need no torch."""

F = TensorType(DType.FLOAT32, (4,), 16)


def relu(method: str = "forward") -> PlacedGraph:
    x = Node("x", NodeKind.INPUT, type=F)
    y = Node("y", NodeKind.CALL, "aten.relu.default", ("x",), F)
    return PlacedGraph(method, (x, y), (GraphOutput("y", "y"),))


@pytest.mark.torch
def test_every_built_in_pass_is_found_under_the_name_it_has() -> None:
    for name, _ in BUILT_IN:
        assert pass_class(name).name == name


@pytest.mark.torch
def test_the_built_in_order_goes_by_stages() -> None:
    stages = [pass_class(name).stage for name in pass_names()]
    assert stages == sorted(stages)


def test_export_options_reach_the_passes_that_have_such_fields() -> None:
    rules = (PlacementRule("cpu", operator="relu"),)
    options = ExportOptions(pipeline=PURE, device="cuda:1", placement=rules, allow_host_ops=True)
    place = next(p for p in build_pipeline(options) if isinstance(p, PlaceOperators))
    assert (place.device, place.placement, place.allow_host_ops) == ("cuda:1", rules, True)


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (
            ExportOptions(pipeline=("insert-copie",)),
            "there is no pass `insert-copie`",
            "did you mean `insert-copies`?",
        ),
        (
            ExportOptions(pipeline=PURE, pass_options={"insert-copies": {"speed": 1}}),
            "pass `insert-copies` has no option `speed`",
            "valid: none",
        ),
        (
            ExportOptions(pipeline=PURE, pass_options={"insert-copis": {}}),
            "there is no pass `insert-copis` to set options of",
            "did you mean `insert-copies`?",
        ),
        (
            ExportOptions(pipeline=PURE, pass_options={"place-operators": {"device": "cpu"}}),
            "`device` is no option of pass `place-operators` alone",
            "by its flag",
        ),
        (ExportOptions(pipeline=("nothing.py:Gone",)), "there is no file `nothing.py`", ""),
    ],
)
def test_a_wrong_pipeline_is_refused_with_what_would_be_right(
    options: ExportOptions, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_pipeline(options)
    assert what in str(caught.value)
    assert hint in caught.value.hint


USER_PASS = '''
from dataclasses import dataclass, replace
from typing import ClassVar
from devplan.passes.base import Pass, PassResult, Stage
from devplan.passes.placed.graph import PlacedGraph

@dataclass(frozen=True)
class RenameMethod(Pass[PlacedGraph]):
    """Rename the method."""

    name: ClassVar[str] = "rename-method"
    stage: ClassVar[Stage] = Stage.PLACED
    to: str = "main"
    strength: int = 1

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        graph = replace(subject, name=self.to)
        return PassResult(graph, graph != subject)
'''


def test_a_pass_of_the_user_comes_from_a_file_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_PASS)
    options = ExportOptions(
        pipeline=("place-operators", "insert-copies", "mine.py:RenameMethod"),
        pass_options={"RenameMethod": {"to": "renamed"}},
    )
    (graph,) = run_stage(build_pipeline(options, folder=tmp_path), Stage.PLACED, [relu()])
    assert graph.name == "renamed"


def test_wrong_option_types_and_names_in_a_user_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_PASS)
    wrong = ExportOptions(
        pipeline=("mine.py:RenameMethod",), pass_options={"rename-method": {"strength": "big"}}
    )
    with pytest.raises(UsageError, match="it must be int, not str: 'big'"):
        build_pipeline(wrong, folder=tmp_path)
    (tmp_path / "needy.py").write_text(USER_PASS.replace('to: str = "main"', "to: str"))
    with pytest.raises(UsageError, match="pass `rename-method` needs its option `to`"):
        build_pipeline(ExportOptions(pipeline=("needy.py:RenameMethod",)), folder=tmp_path)
    with pytest.raises(UsageError) as caught:
        pass_class("mine.py:RenameMethud", tmp_path)
    assert "did you mean `RenameMethod`?" in caught.value.hint
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        pass_class("broken.py:X", tmp_path)


@dataclass(frozen=True)
class Fail(Pass[PlacedGraph]):
    name: ClassVar[str] = "fail"
    stage: ClassVar[Stage] = Stage.PLACED
    times: int = 2

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        raise KeyError("gone")


@dataclass(frozen=True)
class Lie(Pass[PlacedGraph]):
    name: ClassVar[str] = "lie"
    stage: ClassVar[Stage] = Stage.PLACED
    changed: bool = True

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        return PassResult(subject if self.changed else replace(subject, name="other"), self.changed)


@dataclass(frozen=True)
class Early(Pass[PlacedGraph]):
    name: ClassVar[str] = "early"
    stage: ClassVar[Stage] = Stage.EXPORTED

    def run(self, subject: PlacedGraph) -> PassResult[PlacedGraph]:
        return PassResult(subject, False)


def test_a_failing_pass_is_named_with_its_options_its_method_and_those_before_it() -> None:
    with pytest.raises(PassError) as caught:
        run_stage([PlaceOperators(), Fail()], Stage.PLACED, [relu()])
    assert str(caught.value) == (
        "pass `fail(times=2)` failed on method `forward`: KeyError: 'gone' (passes before it: `place-operators`)"
    )
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("changed", "text"), [(True, "says changed, but"), (False, "says unchanged, but")])
def test_a_pass_that_lies_about_its_change_is_caught(changed: bool, text: str) -> None:
    with pytest.raises(PassError, match=text):
        run_stage([Lie(changed)], Stage.PLACED, [relu()])


def test_errors_that_the_user_must_act_on_go_through_as_they_are() -> None:
    no_relu = PlaceOperators(supports=lambda operator, device: "no kernel" if device.kind == "cuda" else None)
    with pytest.raises(UnsupportedOperatorError):
        run_stage([no_relu], Stage.PLACED, [relu()])


def test_stages_out_of_order_are_refused(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(USER_PASS.replace("Stage.PLACED", "Stage.EXPORTED"))
    options = ExportOptions(pipeline=("place-operators", "early.py:RenameMethod"))
    with pytest.raises(UsageError, match="pass `rename-method` cannot come after `place-operators`"):
        build_pipeline(options, folder=tmp_path)


def test_a_pipeline_without_the_copy_pass_is_refused_by_the_verifier() -> None:
    with pytest.raises(PassError, match="`y` reads `x` on cuda:0, which is on cpu"):
        run_stage([PlaceOperators()], Stage.PLACED, [relu()])


def test_an_observer_is_told_of_every_pass_and_method() -> None:
    told: list[PassRun] = []
    passes = build_pipeline(ExportOptions(pipeline=PURE))
    run_stage(passes, Stage.PLACED, [relu("a"), relu("b")], observe=told.append)
    placed = [p.name for p in passes if p.stage is Stage.PLACED]
    assert [(run.ran.name, run.subject.name) for run in told] == [(p, m) for p in placed for m in "ab"]


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    options = ExportOptions(pipeline=PURE, placement=(PlacementRule("cpu", operator="aten.rleu.default"),))
    with pytest.raises(UsageError) as caught:
        run_stage(build_pipeline(options), Stage.PLACED, [relu()])
    assert "`aten.relu.default`" in caught.value.hint


def test_io_rules_are_checked_against_all_methods() -> None:
    good = ExportOptions(pipeline=PURE, io=(IoRule("h2d", "device", "b", "x"),))
    graphs = run_stage(build_pipeline(good), Stage.PLACED, [relu("a"), relu("b")])
    assert [str(graph.nodes[0].device) for graph in graphs] == ["cpu", "cuda:0"]
    bad = ExportOptions(pipeline=PURE, io=(IoRule("h2d", "device", "c"),))
    with pytest.raises(UsageError) as caught:
        run_stage(build_pipeline(bad), Stage.PLACED, [relu("a"), relu("b")])
    assert caught.value.code == 2
    assert "valid names: `a`, `b`" in caught.value.hint

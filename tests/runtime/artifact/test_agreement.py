"""A file tells its program twice, and both tellings must say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write, writer
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError
from devplan.runtime.program import Device, PlannedProgram


def in_method(planned: PlannedProgram, **changes: Any) -> PlannedProgram:
    (method,) = planned.program.methods
    return replace(planned, program=replace(planned.program, methods=(replace(method, **changes),)))


def in_plan(planned: PlannedProgram, **changes: Any) -> PlannedProgram:
    (plan,) = planned.plan.methods
    return replace(planned, plan=replace(planned.plan, methods=(replace(plan, **changes),)))


def method_of(planned: PlannedProgram) -> Any:
    return planned.program.methods[0]


OTHERWISE: list[tuple[Callable[[PlannedProgram], PlannedProgram], str]] = [
    (lambda p: in_method(p, name="backward"), "method `forward` has no delegate 0"),
    (lambda p: in_method(p, inputs=method_of(p).inputs[:1]), "number of inputs 1, not 2"),
    (lambda p: in_method(p, outputs=method_of(p).outputs[::-1]), "`z` of the outputs is value 3, not 7"),
    (
        lambda p: in_method(p, values=tuple(replace(v, dtype=DType.INT32) if v.name == "dx" else v for v in method_of(p).values)),
        "value `dx` is",
    ),
    (
        lambda p: in_method(p, storages=tuple(replace(s, device=Device("cuda", 1)) if s.device.kind == "cuda" else s for s in method_of(p).storages)),
        "value `dx` is",
    ),
    (
        lambda p: in_plan(p, allocations=tuple(replace(a, offset=512) if a.storage == "s_dy" else a for a in p.plan.methods[0].allocations)),
        "value `dy` is",
    ),
    (
        lambda p: in_plan(p, arenas=tuple(replace(a, nbytes=1024) for a in p.plan.methods[0].arenas)),
        r"buffer sizes \[0, 1024, 1024, 1024\], not \[0, 768, 768, 256\]",
    ),
    (
        lambda p: in_plan(p, arenas=tuple(replace(a, device=Device("cuda", 1)) if a.memory_id == 3 else a for a in p.plan.methods[0].arenas)),
        "buffer devices",
    ),
    (lambda p: in_method(p, instructions=method_of(p).instructions[:-2]), "number of instructions 5, not 7"),
    (
        lambda p: in_method(p, instructions=tuple(replace(i, target="aten::abs.out") if getattr(i, "target", "") == "aten::relu.out" else i for i in method_of(p).instructions)),
        "call 4 is",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), OTHERWISE, ids=[message for _, message in OTHERWISE])
def test_a_program_table_that_says_otherwise(
    change: Callable[[PlannedProgram], PlannedProgram],
    message: str,
    sample: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truthful = writer.program_table
    monkeypatch.setattr(writer, "program_table", lambda planned, *rest: truthful(change(planned), *rest))
    write(tmp_path / "m.pte", sample.planned, sample.sources())
    with pytest.raises(ArtifactError, match=message):
        read(tmp_path / "m.pte")


def test_a_delegate_that_says_otherwise(sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truthful = writer.region

    def lying(*given: Any) -> Any:
        table = truthful(*given)
        table.operands[0].offset += 256
        return table

    monkeypatch.setattr(writer, "region", lying)
    write(tmp_path / "m.pte", sample.planned, sample.sources())
    with pytest.raises(ArtifactError, match="the places of its values differ"):
        read(tmp_path / "m.pte")

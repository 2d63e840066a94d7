"""Sizes that depend on data in a file: both tellings have them, and what contradicts itself is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write, writer
from devplan.runtime.artifact.layout import version_of
from devplan.runtime.backend import Operand
from devplan.runtime.calls.counted import Counts
from devplan.runtime.describe import describe
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, ExecutionError
from devplan.runtime.program import CPU, Count, Method, SourceLocation

Change = Callable[[Method], Method]


def count(**changes: Any) -> Change:
    return lambda method: replace(method, counts=(replace(method.counts[0], **changes),))


def output(index: int, **changes: Any) -> Change:
    def change(method: Method) -> Method:
        outputs = list(method.outputs)
        outputs[index] = replace(outputs[index], **changes)
        return replace(method, outputs=tuple(outputs))

    return change


BROKEN: list[tuple[Change, str]] = [
    (count(value="w"), "count `u0` is value `w`: it is no integer on the host"),
    (count(value="flag"), "count `u0` is value `flag`: it is no integer on the host"),
    (count(value="nothing"), "count `u0` is value `nothing`: there is no such value"),
    (count(lower=4), "count `u0` runs from 4 to 3"),
    (count(lower=-1), "count `u0` runs from -1 to 3"),
    (count(upper=5), "`z` counts up to 5 along dimension 0, which has 4"),
    (count(name="u1"), "`z` counts `u0`: there is no such count"),
    (output(0, axis=2), "`z` counts along dimension 2"),
    (lambda method: replace(method, counts=method.counts * 2), "u0"),
    (count(is_difference=True), "count `u0` is a difference: it must be 0, and no output's size"),
    (count(is_difference=True, upper=0), "count `u0` is a difference: it must be 0, and no output's size"),
    (
        lambda method: replace(
            method, inputs=(replace(method.inputs[0], count="u0"), *method.inputs[1:])
        ),
        "`x` counts `u0`: it is no output with a value",
    ),
]  # fmt: skip


def changed(planned: Any, change: Change) -> Any:
    (method,) = planned.program.methods
    return replace(planned, program=replace(planned.program, methods=(change(method),)))


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_what_contradicts_itself_is_neither_written_nor_read(
    change: Change, message: str, counted_sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = changed(counted_sample.planned, change)
    with pytest.raises(ArtifactError) as caught:
        write(tmp_path / "m.pte", planned, counted_sample.sources())
    assert message in str(caught.value)
    monkeypatch.setattr(writer, "verify", lambda _: None)
    try:
        write(tmp_path / "m.pte", planned, counted_sample.sources())
    except Exception:
        return  # a dangling name has no index: such a file cannot be made
    with pytest.raises(ArtifactError):
        read(tmp_path / "m.pte")


def test_the_version_tells_readers_that_know_of_none(sample: Any, counted_sample: Any) -> None:
    assert version_of(sample.planned.program) == 1
    assert version_of(counted_sample.planned.program) == 2


def test_a_difference_reads_back_as_one_whatever_its_name(counted_sample: Any, tmp_path: Path) -> None:
    (method,) = counted_sample.planned.program.methods
    plain = replace(method.outputs[0], count="", axis=0)
    apart = replace(method.counts[0], name="apart", upper=0, is_difference=True)
    named = replace(apart, name="a difference", is_difference=False)
    made = replace(method, counts=(apart, named), outputs=(plain, *method.outputs[1:]))
    planned = changed(counted_sample.planned, lambda _: made)
    write(tmp_path / "m.pte", planned, counted_sample.sources())
    artifact = read(tmp_path / "m.pte")
    assert artifact.planned == planned
    (described,) = describe(artifact)["methods"]
    assert [(each["name"], each["difference"]) for each in described["counts"]] == [
        ("apart", True),
        ("a difference", False),
    ]


def test_the_message_is_chosen_by_what_a_count_is() -> None:
    place = ctypes.c_int64(2)
    at = Operand(ctypes.addressof(place), DType.INT64, (), (), CPU)
    origin = SourceLocation(operator="aten.mul.Tensor")
    size = Count("a difference", "n", 0, 0, origin)
    for count, message in (
        (size, "a size of method `forward` that depends on data is 2, declared is at most 0"),
        (replace(size, name="u0", is_difference=True), "two sizes of method `forward` .* differ by 2"),
    ):
        method = Method("forward", (), (), (), (), (), counts=(count,))
        with pytest.raises(ExecutionError, match=message):
            Counts(method, {"n": at}).check()


def test_a_file_tells_the_count_its_bounds_and_its_outputs(counted_sample: Any, tmp_path: Path) -> None:
    write(tmp_path / "m.pte", counted_sample.planned, counted_sample.sources())
    artifact = read(tmp_path / "m.pte")
    assert artifact.planned == counted_sample.planned
    (method,) = describe(artifact)["methods"]
    z, cache = method["outputs"]
    assert z["shape"] == ["u0", 4] and z["max_shape"] == [4, 4]
    assert z["data_dependent"] == {"dimension": 0, "count": "u0", "lower": 0, "upper": 3}
    assert cache["data_dependent"] is None
    assert method["counts"] == [
        {
            "name": "u0",
            "lower": 0,
            "upper": 3,
            "difference": False,
            "outputs": ["z"],
            "origin": "aten.nonzero.default model.py:4",
        }
    ]

"""Every broken invariant has a message of its own, the same whether a file is written or read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import decode, read, write, writer
from devplan.runtime.artifact.verify import MethodChecker
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError
from devplan.runtime.expr import Expr
from devplan.runtime.program import (
    Allocation,
    CopyKind,
    Device,
    LiveRange,
    Method,
    MethodPlan,
    PlannedProgram,
    Program,
    Symbol,
)

Change = Callable[[PlannedProgram], PlannedProgram]


def in_program(**changes: Callable[[Program], Any]) -> Change:
    return lambda planned: replace(
        planned, program=replace(planned.program, **{k: f(planned.program) for k, f in changes.items()})
    )


def in_method(**changes: Callable[[Method], Any]) -> Change:
    def method(program: Program) -> tuple[Method, ...]:
        (one,) = program.methods
        return (replace(one, **{key: change(one) for key, change in changes.items()}),)

    return in_program(methods=method)


def in_plan(**changes: Callable[[MethodPlan], Any]) -> Change:
    def run(planned: PlannedProgram) -> PlannedProgram:
        (one,) = planned.plan.methods
        changed = replace(one, **{key: change(one) for key, change in changes.items()})
        return replace(planned, plan=replace(planned.plan, methods=(changed,)))

    return run


def each(items: tuple[Any, ...], key: str, name: str, **changes: Any) -> tuple[Any, ...]:
    return tuple(replace(item, **changes) if getattr(item, key) == name else item for item in items)


def allocation(name: str, **changes: Any) -> Change:
    return in_plan(allocations=lambda plan: each(plan.allocations, "storage", name, **changes))


def live(name: str, begin: int, end: int) -> Change:
    return in_plan(live_ranges=lambda plan: each(plan.live_ranges, "storage", name, begin=begin, end=end))


def arena(number: int, **changes: Any) -> Change:
    return in_plan(arenas=lambda plan: each(plan.arenas, "memory_id", number, **changes))


def storage(name: str, **changes: Any) -> Change:
    return in_method(storages=lambda method: each(method.storages, "name", name, **changes))


def value(name: str, **changes: Any) -> Change:
    return in_method(values=lambda method: each(method.values, "name", name, **changes))


def instruction(index: int, new: Any) -> Change:
    return in_method(
        instructions=lambda m: (
            *m.instructions[:index],
            new(m.instructions[index]),
            *m.instructions[index + 1 :],
        )
    )


def kernel(**changes: Any) -> Change:
    return in_program(kernels=lambda program: (replace(program.kernels[0], **changes),))


BROKEN: list[tuple[Change, str]] = [
    # the plan
    (allocation("s_dy", offset=0), "storages `s_dx` and `s_dy` overlap while both are live"),
    (allocation("s_z", offset=0), "storages `s_y` and `s_z` overlap while both are live"),
    (allocation("s_dx", offset=768), "storage `s_dx` ends at byte 832: its arena has 768"),
    (allocation("s_dx", offset=2**40), "its arena has 768"),
    (allocation("s_dx", offset=64), "storage `s_dx` is at 64: not aligned to 256"),
    (allocation("s_dx", nbytes=32), "storage `s_dx` has 32 bytes: it needs 64"),
    (allocation("s_dx", memory_id=9), "storage `s_dx` is in memory 9: there is no such arena"),
    (allocation("s_dx", memory_id=1, offset=512), "storage `s_dx` is on cuda:0: its arena is on cpu"),
    (in_plan(allocations=lambda plan: plan.allocations[1:]), "storage `s_x` has no place"),
    (in_plan(allocations=lambda plan: (*plan.allocations, plan.allocations[0])), "storage `s_x` has two places"),
    (
        in_plan(allocations=lambda plan: (*plan.allocations, Allocation("s_w", 2, 0, 64))),
        "storage `s_w` has a place in an arena: its memory is given elsewhere",
    ),
    (arena(2, memory_id=0), "impossible memory id 0"),
    (arena(2, memory_id=1), "impossible memory id 1"),
    (live("s_dx", 0, 4), "instruction 4 uses `dx`: its storage is live in [0, 4)"),
    (live("s_dx", 3, 2), "`s_dx` is live in [3, 2)"),
    (live("s_dx", 0, 11), "`s_dx` is live in [0, 11)"),
    (in_plan(live_ranges=lambda p: (*p.live_ranges, LiveRange("s_x", 0, 1))), "`s_x` has a live range"),
    (lambda planned: replace(planned, plan=replace(planned.plan, methods=())), "a method has no plan"),
    # names and references
    (in_program(methods=lambda p: (*p.methods, *p.methods)), "there are two methods named `forward`"),
    (in_program(kernels=lambda p: (*p.kernels, *p.kernels)), "there are two kernels named `add`"),
    (in_method(values=lambda m: (*m.values, m.values[0])), "there are two values named `x`"),
    (in_method(storages=lambda m: (*m.storages, m.storages[0])), "there are two storages named `s_x`"),
    (in_method(inputs=lambda m: (*m.inputs, m.inputs[0])), "there are two inputs named `x`"),
    (storage("s_w", content="v"), "storage `s_w` holds `v`: there is no such constant"),
    (storage("s_cache", content="v"), "storage `s_cache` holds `v`: there is no such state"),
    (
        in_method(outputs=lambda m: (replace(m.outputs[1], aliases=("state", "v")),)),
        "`cache` aliases state `v`: there is no such thing",
    ),
    (instruction(7, lambda jump: replace(jump, target=10)), "instruction 7 jumps to 10"),
    (instruction(1, lambda launch: replace(launch, region=5)), "instruction 1 is of region 5: there are 2"),
    # sizes and windows
    (value("dx", offset=4), "value `dx` ends at byte 68: `s_dx` has 64"),
    (value("dx", shape=(4, 5)), "value `dx` ends at byte 68"),
    (value("dx", strides=(4,)), "value `dx` has 2 dimensions and 1 strides"),
    (value("dx", shape=(4, Expr("s0"))), "a dimension of `dx` is `s0`: `s0` is no symbol of the method"),
    (value("dx", shape=(4, Expr("4 // 0"))), "a dimension of `dx` is `4 // 0`"),
    (value("dx", shape=(4, Expr("-4"))), "a dimension of `dx` is -4"),
    (storage("s_dx", alignment=3), "storage `s_dx` is aligned to 3: it must be a power of two"),
    (storage("s_dx", nbytes=Expr("64")), "storage `s_dx` is dynamic and has no bound"),
    (storage("s_w", nbytes=65), "storage `s_w` has 65 bytes: `w` has 64"),
    (in_method(symbols=lambda _: (Symbol("s0", 1, 4, "y", 0),)), "symbol `s0` is read from `y`"),
    (in_method(symbols=lambda _: (Symbol("s0", 5, 4, "x", 0),)), "symbol `s0` runs from 5 to 4"),
    (in_method(symbols=lambda _: (Symbol("s0", 1, 4, "x", 2),)), "symbol `s0` is dimension 2 of `x`"),
    # devices
    (storage("s_dx", device=Device("cuda", 1)), "instruction 1 runs on cuda:0: `dx` is on cuda:1"),
    (instruction(0, lambda copy: replace(copy, kind=CopyKind.D2H)), "instruction 0 is called d2h"),
    (instruction(0, lambda copy: replace(copy, kind=CopyKind.LOCAL)), "it goes from cpu to cuda:0"),
    (instruction(5, lambda call: replace(call, writes=("dx",))), "instruction 5 runs on the host: `dx` is on cuda:0"),
    (value("dx", dtype=DType.INT32), "instruction 0 copies `x` to `dx`: their types differ"),
    # calls
    (kernel(codes=()), "kernel `add` has no code for `sm_80`"),
    (in_program(architectures=lambda _: ("sm_100",)), "kernel `add` has no code for `sm_100`"),
    (instruction(1, lambda launch: replace(launch, arguments=())), "instruction 1 gives `add` 0 arguments: it takes 4"),
    (instruction(1, lambda launch: replace(launch, grid=(1, -1, 1))), "a grid dimension of instruction 1 is -1"),
    (instruction(2, lambda call: replace(call, function="fft")), "instruction 2 calls `fft`"),
    (instruction(2, lambda call: replace(call, writes=())), "instruction 2 writes nothing"),
    (instruction(5, lambda call: replace(call, target="rm -rf /")), "instruction 5 calls `rm -rf /`"),
    # contents
    (
        in_program(constants=lambda p: (replace(p.constants[0], nbytes=128),)),
        "`kv` has 64 bytes, and 128 elsewhere with the same digest",
    ),
    (in_program(constants=lambda p: (replace(p.constants[0], shape=(99, 4)),)), "constant `w` has 64 bytes"),
    (in_program(state=lambda p: (replace(p.state[0], shape=(99, 4)),)), "state `kv` has 64 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_it_is_not_written(change: Change, message: str, sample: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        write(tmp_path / "m.pte", change(sample.planned), sample.sources())
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_it_is_not_read(sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs, forged into files by a writer that checks nothing, with the same messages.

    Some cannot be put into bytes at all (a dangling name has no index); most can.
    """
    monkeypatch.setattr(writer, "verify", lambda _: None)
    told = 0
    for change, message in BROKEN:
        try:
            write(tmp_path / "m.pte", change(sample.planned), sample.sources())
        except Exception:
            continue
        with pytest.raises(ArtifactError) as caught:
            read(tmp_path / "m.pte")
        told += message in str(caught.value)
    assert told >= 30


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "s0.real",
        "[1]",
        "9 ** 9 ** 9",
        "1 << s0",
        "(1 << 60) << 60",
        "1 +",
        "(" * 500,
        "min",
        "\0",
    ],
)
def test_hostile_expressions_are_not_evaluated(text: str, sample: Any) -> None:
    """They are refused when the side table is read, or when the size at the symbols' bounds is computed."""
    (method,) = sample.planned.program.methods
    with pytest.raises(ArtifactError):
        check = MethodChecker(replace(method, symbols=(Symbol("s0", 1, 9, "x", 0),)), {}, {}, {})
        check.size(decode.expressions([text])[0], "it")

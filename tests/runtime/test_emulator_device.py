"""The emulated device: its memory is not the host's, its copies are counted, and it runs whole programs."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load_planned
from devplan.runtime.backend import Operand
from devplan.runtime.calls.binding import CopyTally
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.emulator import EmulatorBackend, Machine
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import ArtifactError, DeviceError, ExecutionError, UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import (
    CPU,
    Allocation,
    Copy,
    CopyKind,
    Device,
    LiveRange,
    Plan,
    PlannedProgram,
    Port,
    Role,
)

CUDA, OTHER = Device("cuda", 0), Device("cuda", 1)

DOUBLE = """
@triton.jit
def double(x_ptr, y_ptr, xnumel, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    mask = i < xnumel
    x = tl.load(x_ptr + i, mask)
    tl.store(y_ptr + i, x + x, mask)
"""
DOUBLE_PARAMETERS = (("x_ptr", "*fp32"), ("y_ptr", "*fp32"), ("xnumel", "i32"))


def add_double(program: Any) -> None:
    program.kernel("double", DOUBLE, DOUBLE_PARAMETERS, XBLOCK=4)


def chain(program: Any, length: int = 4) -> Any:
    """y = x * 2 ** length."""
    method = program.method()
    at = method.input("x", (10,))
    for index in range(length):
        made = method.tensor(f"t{index}", (10,))
        method.launch("double", [at], [made], 10, grid=(3, 1, 1))
        at = made
    method.output("y", at)
    add_double(program)
    return program


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_a_program_runs_under_its_plan(program: Any, packed: bool, static: bool) -> None:
    loaded = load_planned(chain(program).planned(packed=packed, static=static), {}, "emulator", poison=static)
    x = np.random.default_rng(0).random(10, np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(loaded.method()(x)["y"], 16 * x)
    assert loaded.copies.counts[CopyKind.H2D] == loaded.copies.counts[CopyKind.D2H] == 3
    assert loaded.copies.nbytes[CopyKind.H2D] == 120
    assert loaded.devices[CUDA] == "emulator"
    if static:
        assert loaded.method().no_graph_reason == "the emulator has no graphs"


def test_copies_are_counted_where_they_run(program: Any) -> None:
    backend = EmulatorBackend(CUDA)
    loaded = LoadedProgram(chain(program).planned(), {}, {CUDA: backend, CPU: CpuBackend()})
    loaded.method()(np.ones(10, np.float32))
    assert backend.copies == loaded.copies != CopyTally()


def broken(planned: PlannedProgram, storage: str, **changes: Any) -> PlannedProgram:
    """The plan with one storage moved, or its life cut short."""
    (plan,) = planned.plan.methods
    moved = tuple(
        Allocation(a.storage, a.memory_id, changes.get("offset", a.offset), a.nbytes)
        if a.storage == storage
        else a
        for a in plan.allocations
    )
    lives = tuple(
        LiveRange(r.storage, r.begin, changes.get("end", r.end)) if r.storage == storage else r
        for r in plan.live_ranges
    )
    return replace(planned, plan=Plan((replace(plan, allocations=moved, live_ranges=lives),)))


def test_a_plan_with_an_overlap_gives_wrong_numbers(program: Any) -> None:
    """The emulator runs the plan itself: two storages in one place show."""
    method = program.method()
    x = method.input("x", (10,))
    for name in ("a", "b"):
        method.tensor(name, (10,))
        method.launch("double", [x if name == "a" else "a"], [name], 10, grid=(3, 1, 1))
    method.output("a", "a")
    method.output("b", "b")
    add_double(program)
    good = program.planned()
    place = {a.storage: a.offset for a in good.plan.methods[0].allocations}
    x = np.ones(10, np.float32)
    assert load_planned(good, {}, "emulator").method()(x)["a"][0] == 2
    assert load_planned(broken(good, "b", offset=place["a"]), {}, "emulator").method()(x)["a"][0] == 4


def test_poison_shows_a_life_that_ends_too_early(program: Any) -> None:
    planned = broken(chain(program).planned(), "t1", end=3)  # written at 2, read at 3
    x = np.ones(10, np.float32)
    assert load_planned(planned, {}, "emulator").method()(x)["y"][0] == 16
    assert np.isnan(load_planned(planned, {}, "emulator", poison=True).method()(x)["y"]).all()


def test_reading_what_was_never_written_shows(program: Any) -> None:
    method = program.method()
    method.input("x", (10,))
    method.tensor("never", (10,))
    method.output("y", "never")
    loaded = load_planned(program.planned(), {}, "emulator")
    assert np.isnan(loaded.method()(np.ones(10, np.float32))["y"]).all()


def operand(address: int, device: Device, count: int = 4) -> Operand:
    return Operand(address, DType.FLOAT32, (count,), (1,), device)


def test_host_and_device_pointers_are_not_taken_for_each_other() -> None:
    machine = Machine()
    backend, second = EmulatorBackend(CUDA, machine), EmulatorBackend(OTHER, machine)
    device, host, foreign = backend.allocate(16), backend.allocate_host(16), second.allocate(16)
    h2d = Copy(CopyKind.H2D, "s", "d")
    backend.bind(h2d, {"s": operand(host, CPU), "d": operand(device, CUDA)}, {})()
    for source, destination, message in (
        (operand(device, CPU), operand(device, CUDA), "host value `s` has an address of `cuda:0`"),
        (operand(host, CPU), operand(host, CUDA), "it is a host address"),
        (operand(host, CPU), operand(foreign, CUDA), "it belongs to `cuda:1`"),
        (operand(host, CPU), operand(device, CUDA, 5), "reaches beyond its block"),
        (operand(host, CPU), operand(host, CPU), "does not fit"),
    ):
        with pytest.raises(ExecutionError, match=message):
            backend.bind(h2d, {"s": source, "d": destination}, {})
    with pytest.raises(ExecutionError, match="host address"):
        backend.upload(host, memoryview(bytes(16)))
    with pytest.raises(ExecutionError, match="does not hold"):
        backend.free(host)


def test_two_emulated_devices(program: Any) -> None:
    method = program.method()
    x = method.input("x", (10,))
    there = method.tensor("there", (10,), device=OTHER)
    method.copy(x, there, CopyKind.D2D)
    y = method.tensor("y", (10,), device=OTHER)
    method.launch("double", [there], [y], 10, grid=(3, 1, 1))
    method.output("y", y)
    add_double(program)
    loaded = load_planned(program.planned(), {}, "emulator")
    x = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)
    assert loaded.copies.counts[CopyKind.D2D] == 1


def test_dynamic_shapes_launch_grids_of_their_own(program: Any, symbolic: Any) -> None:
    method = program.method()
    n = symbolic(method, "s0", 0, 100, "x", 0)
    x = method.input("x", (n,))
    y = method.tensor("y", (n,))
    method.launch("double", [x], [y], n, grid=(Expr("(s0 + 3) // 4"), 1, 1))
    method.output("y", y)
    add_double(program)
    loaded = load_planned(program.planned(packed=True), {}, "emulator", poison=True)
    for size in (1, 100, 7, 0, 50):
        x = np.random.default_rng(size).random(size, np.float32)
        np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)


def test_device_tensors(program: Any) -> None:
    method = program.method()
    method.tensor("x", (10,), role=Role.INPUT, external=True)
    method.inputs.append(Port("x", "x"))
    method.tensor("y", (10,), role=Role.OUTPUT, external=True)
    method.launch("double", ["x"], ["y"], 10, grid=(3, 1, 1))
    method.outputs.append(Port("y", "y"))
    add_double(program)
    loaded = load_planned(program.planned(), {}, "emulator")
    at = loaded.to_device(np.arange(10, dtype=np.float32))
    for _ in range(4):
        at = loaded.method()(at)["y"]
    np.testing.assert_array_equal(at.numpy(), 16 * np.arange(10))
    assert loaded.copies == CopyTally()
    with pytest.raises(UsageError, match="must be in the memory of `cuda:0`"):
        loaded.method()(np.arange(10, dtype=np.float32))


def test_choosing_a_device(program: Any) -> None:
    planned = chain(program).planned()
    for device, error, message in (
        ("tpu", UsageError, "unknown device `tpu`"),
        ("cpu", DeviceError, "no code for `cpu`"),
        ("cuda:x", UsageError, "no valid index"),
    ):
        with pytest.raises(error, match=message):
            load_planned(planned, {}, device)
    with pytest.raises(UsageError, match="no slot `cuda:3`"):
        load_planned(planned, {}, device_map={"cuda:3": "cuda:0"})


def test_poison_is_for_the_emulator(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from devplan.runtime import loading

    monkeypatch.setattr(loading, "_cuda", lambda slots, gpus: {slot: EmulatorBackend(slot) for slot in slots})
    planned = chain(program).planned()
    with pytest.raises(UsageError, match="poisoned on the emulator only"):
        load_planned(planned, {}, "cuda", poison=True)
    loaded = load_planned(planned, {}, "cuda", scrub=True)
    np.testing.assert_array_equal(loaded.method()(np.ones(10, np.float32))["y"], 16)


def test_without_a_driver_the_emulator_runs_and_a_line_says_so(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from devplan.runtime import loading

    def no_driver(slots: Any, gpus: Any) -> Any:
        raise DeviceError("there is no CUDA driver")

    monkeypatch.setattr(loading, "_cuda", no_driver)
    planned, lines = chain(program).planned(), list[str]()
    loaded = load_planned(planned, {}, notify=lines.append)
    assert loaded.devices[CUDA] == "emulator"
    assert len(lines) == 1
    assert "running on the emulator" in lines[0]
    with pytest.warns(UserWarning, match="running on the emulator"):
        load_planned(planned, {})
    with pytest.raises(DeviceError, match="there is no CUDA driver"):
        load_planned(planned, {}, "cuda:0")


def test_host_operators_need_leave(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    method.tensor("h", device=CPU)
    method.copy(x, "h", CopyKind.D2H)
    method.tensor("g", device=CPU)
    method.host("aten::neg.out", ["h"], ["g"])
    method.outputs.append(Port("y", "g"))
    with pytest.raises(UsageError, match=r"1 operators on the host through torch: `aten::neg.out`"):
        load_planned(program.planned(), {}, "emulator")


def test_kernels_without_source_are_refused(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch("secret", [x], [y])
    method.output("y", y)
    program.kernel("secret", "", (("x_ptr", "*fp32"), ("y_ptr", "*fp32")))
    loaded = load_planned(program.planned(), {}, "emulator")
    with pytest.raises(ArtifactError, match="kernel `secret` carries no source"):
        loaded.method().prepare()


def test_memory_stays_flat_over_calls_loads_and_clones(program: Any) -> None:
    planned = chain(program).planned(packed=True)
    loaded, x = load_planned(planned, {}, "emulator"), np.ones(10, np.float32)
    loaded.method()(x)
    tracemalloc.start()
    before = 0
    for round_ in range(220):
        with loaded.clone() as clone, load_planned(planned, {}, "emulator") as again:
            for each in (loaded, clone, again):
                # Not by numpy.testing, which keeps some bytes of each comparison.
                assert (each.method()(x)["y"] == 16).all()
        if round_ == 20:
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 5_000


def test_clones_in_three_threads(program: Any) -> None:
    """One clone per thread, each with inputs of its own."""
    loaded = load_planned(chain(program).planned(packed=True), {}, "emulator", poison=True)
    wrong: list[int] = []

    def work(seed: int, clone: LoadedProgram) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            x = rng.random(10, np.float32)
            if not np.array_equal(clone.method()(x)["y"], 16 * x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed, loaded.clone())) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

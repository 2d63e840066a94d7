"""Large host inputs and outputs: the transfer uses the caller's memory, and everybody keeps what is theirs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from devplan.runtime import load_planned
from devplan.runtime.calls.host_io import HostEnd
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.measure.bench_inputs import place_inputs
from devplan.runtime.measure.profile import write_trace
from devplan.runtime.program import CPU, CopyKind, Port
from devplan.runtime.tensors.host import address_of

SIZE = 128 << 10
KERNEL = """
@triton.jit
def double(x_ptr, y_ptr, xnumel, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    mask = i < xnumel
    x = tl.load(x_ptr + i, mask)
    tl.store(y_ptr + i, x + x, mask)
"""


def doubler(program: Any, size: int = SIZE, shares: bool = False) -> LoadedProgram:
    """y = 2 * x, both on the host; then y[3:5] as ``part``, before it, and y again, if outputs share memory."""
    method = program.method()
    at, made = method.input("x", (size,)), method.tensor("t", (size,))
    method.launch("double", [at], [made], size, grid=(-(-size // 1024), 1, 1))
    method.output("y", made)
    if shares:
        part = method.view("part", "y_host", (2,), (1,), 12)
        method.outputs[:] = [Port("part", part), *method.outputs, Port("again", "y_host")]
    program.kernel("double", KERNEL, (("x_ptr", "*fp32"), ("y_ptr", "*fp32"), ("xnumel", "i32")), XBLOCK=1024)
    return load_planned(program.planned(packed=True), {}, "emulator", poison=True)


def staged(loaded: LoadedProgram) -> np.ndarray[Any, Any]:
    """The planned place of the input on the host."""
    bound = loaded.method().bound
    assert bound is not None
    port = loaded.method().description.inputs[0]
    operand = bound.operands[port.value]
    from devplan.runtime.tensors.host import array_at

    return array_at(operand.address, operand.dtype, operand.shape, operand.strides)


def test_a_pinned_input_is_read_in_place(program: Any) -> None:
    loaded = doubler(program)
    loaded.method().prepare()
    staged(loaded)[...] = -1
    x = loaded.pinned_empty((SIZE,), "float32")
    assert isinstance(x, np.ndarray)
    for turn in range(3):
        x[...] = np.arange(SIZE) + turn
        np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)
    assert not np.array_equal(staged(loaded), x), "nothing was copied to the planned place"
    assert loaded.copies.counts[CopyKind.H2D] == 3


@pytest.mark.parametrize("layout", ["pageable", "reversed", "columns"])
def test_an_input_that_cannot_be_used_in_place_is_copied(program: Any, layout: str) -> None:
    loaded = doubler(program)
    pinned = loaded.pin(np.arange(2 * SIZE, dtype=np.float32))
    assert isinstance(pinned, np.ndarray)
    x = {
        "pageable": np.arange(SIZE, dtype=np.float32),
        "reversed": pinned[:SIZE][::-1],
        "columns": pinned[::2],
    }[layout]
    np.testing.assert_array_equal(loaded.method()(pinned[:SIZE])["y"], 2 * pinned[:SIZE])
    np.testing.assert_array_equal(loaded.method()(x)["y"], 2 * x)
    np.testing.assert_array_equal(loaded.method()(pinned[SIZE:])["y"], 2 * pinned[SIZE:])


def test_outputs_are_the_callers_own(program: Any) -> None:
    loaded = doubler(program)
    inputs = [np.full(SIZE, turn, np.float32) for turn in range(12)]
    outputs = [loaded.method()(x)["y"] for x in inputs]
    assert len({address_of(y) for y in outputs}) == 12
    for x, y in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(y, 2 * x)
    outputs[0][...] = 7
    loaded.close()
    np.testing.assert_array_equal(outputs[1], 2 * inputs[1])


def test_dropped_outputs_are_used_again(program: Any) -> None:
    loaded, x = doubler(program), np.ones(SIZE, np.float32)
    first = address_of(loaded.method()(x)["y"])
    assert {address_of(loaded.method()(x)["y"]) for _ in range(20)} == {first}


def test_a_view_keeps_its_output(program: Any) -> None:
    loaded, x = doubler(program), np.arange(SIZE, dtype=np.float32)
    view = loaded.method()(x)["y"][5:9]
    for _ in range(5):
        loaded.method()(0 * x)
    np.testing.assert_array_equal(view, 2 * x[5:9])


def test_borrowed_outputs_are_in_the_planned_place(program: Any) -> None:
    loaded, x = doubler(program), np.arange(SIZE, dtype=np.float32)
    own = loaded.method()(x)["y"]
    borrowed = loaded.method()(2 * x, borrow=True)["y"]
    np.testing.assert_array_equal(borrowed.numpy(), 4 * x)
    np.testing.assert_array_equal(own, 2 * x)
    np.testing.assert_array_equal(loaded.method()(x)["y"], own)


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["moved", "not moved"])
def test_outputs_that_share_memory_are_copies_of_their_own(
    program: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("devplan.runtime.memory.shared.HOST_LIMIT", limit)
    loaded = doubler(program, shares=True)
    kept: list[dict[str, Any]] = []
    for turn in range(3):
        made = loaded.method()(np.arange(SIZE, dtype=np.float32) + turn)
        assert (made["y"].base is not None) == bool(limit)
        wanted = 2 * (np.arange(SIZE, dtype=np.float32) + turn)
        kept.append({"part": wanted[3:5], "y": wanted, "again": wanted} | {"made": made})
    for expected in kept:
        made = expected.pop("made")
        for name, array in expected.items():
            np.testing.assert_array_equal(made[name], array)
        made["y"][...] = -1
        np.testing.assert_array_equal(made["part"], expected["part"])
        np.testing.assert_array_equal(made["again"], expected["again"])


def test_past_the_limit_outputs_are_ordinary_memory(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devplan.runtime.memory.shared.HOST_LIMIT", 2 * SIZE * 4)
    loaded = doubler(program)
    outputs = [loaded.method()(np.full(SIZE, turn, np.float32))["y"] for turn in range(5)]
    for turn, y in enumerate(outputs):
        assert (y == 2 * turn).all()
    assert [y.base is None for y in outputs] == [False, False, True, True, True]


def test_everything_is_given_back(program: Any) -> None:
    loaded = doubler(program)
    accelerator = next(backend for slot, backend in loaded.backends.items() if slot != CPU)
    output = loaded.method()(loaded.pin(np.ones(SIZE, np.float32)))["y"]
    loaded.close()
    blocks = accelerator._host  # type: ignore[attr-defined]
    assert (output == 2).all() and len(blocks._held) == 2, "one in the caller's hands, one pooled"
    del output, loaded
    gc.collect()
    assert not blocks._held


def test_small_tensors_are_copied_as_before(program: Any) -> None:
    loaded = doubler(program, 100)
    y = loaded.method()(np.ones(100, np.float32))["y"]
    assert (y == 2).all() and y.base is None


def test_a_graph_that_cannot_follow_keeps_the_planned_place() -> None:
    end, taken = HostEnd(1000), list[int]()

    def follow(address: int) -> bool:
        taken.append(address)
        return address != 3000

    end.followers.append(follow)
    assert end.move(2000) and end.address == 2000
    assert not end.move(3000) and end.address == 1000
    end.reset()
    assert taken == [2000, 3000, 1000]


def test_timing_the_parts_stores_the_inputs_again(program: Any, tmp_path: Any) -> None:
    """The planned place of an input is free for others once it was read: here for the output."""
    loaded, x = doubler(program), np.ones(SIZE, np.float32)
    placed = place_inputs(loaded, loaded.method(), {"x": x})
    seen: list[float] = []
    refill = loaded.method().refill

    def noted(inputs: Any) -> None:
        refill(inputs)
        seen.append(float(staged(loaded).max()))

    method = loaded.method()
    method.refill = noted  # type: ignore[method-assign]
    write_trace(loaded, method, placed, tmp_path / "trace.json")
    assert seen and set(seen) == {1.0}

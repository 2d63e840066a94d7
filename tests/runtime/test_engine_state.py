"""State, clones, threads and failures of loaded programs, on a fake device that fails where it is told to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import ArtifactError, ExecutionError, UsageError
from devplan.runtime.program import CPU, CopyKind, Device, Port
from devplan.runtime.recording import RecordingBackend, elementwise
from devplan.runtime.tensors.host import HostTensor

CUDA = Device("cuda", 0)


def test_a_second_thread_is_refused(doubler: Any) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(operands: Mapping[str, Operand]) -> None:
        inside.set()
        leave.wait(5)

    loaded, _ = doubler.load({"double": slow})
    x = np.ones(4, np.float32)
    thread = threading.Thread(target=loaded.method(), args=(x,))
    thread.start()
    inside.wait(5)
    with pytest.raises(ExecutionError, match="in use by another thread"):
        loaded.method()(x)
    leave.set()
    thread.join()
    loaded.method()(x)


def test_missing_initial_values_are_an_artifact_error(program: Any) -> None:
    program.variable(program.method(), "s", (4,), initial=np.ones(4, np.float32))
    program.bytes.clear()
    with pytest.raises(ArtifactError, match="initial value of state `s` is missing"):
        program.load()


def counter(program: Any, initial: np.ndarray | None = None) -> Any:
    method = program.method()
    x = method.input("x")
    total = program.variable(method, "total", (4,), initial=initial)
    method.launch("add", [x, total], [total])
    method.output("y", total)
    program.kernel("add")
    return {"add": elementwise(lambda x, total: x + total, "x_device", "total", "total")}


def test_state_over_three_calls(program: Any, tmp_path: Any) -> None:
    loaded, _ = program.load(counter(program, np.full(4, 10, np.float32)))
    one = np.ones(4, np.float32)
    assert [loaded.method()(one)["y"][0] for _ in range(3)] == [11, 12, 13]
    np.testing.assert_array_equal(loaded.state.get("total"), 13)
    loaded.state.save(tmp_path / "state.npz")
    loaded.state.set("total", np.zeros(4, np.float32))
    assert loaded.method()(one)["y"][0] == 1
    loaded.state.reset("total")
    assert loaded.method()(one)["y"][0] == 11
    loaded.state.load(tmp_path / "state.npz")
    assert loaded.method()(one)["y"][0] == 14
    with pytest.raises(UsageError, match="no state `other`"):
        loaded.state.get("other")
    with pytest.raises(UsageError, match="state `total` has size 3"):
        loaded.state.set("total", np.zeros(3, np.float32))


def test_state_starts_as_zeros_without_initial_values(program: Any) -> None:
    loaded, _ = program.load(counter(program))
    assert loaded.method()(np.ones(4, np.float32))["y"][0] == 1


def test_clones_have_their_own_state_and_arena(program: Any) -> None:
    loaded, fake = program.load(counter(program, np.full(4, 10, np.float32)))
    one = np.ones(4, np.float32)
    loaded.method()(one)
    fresh, copied = loaded.clone(), loaded.clone(copy_state=True)
    assert fresh.method()(one)["y"][0] == 11
    assert copied.method()(one)["y"][0] == 12
    assert loaded.method()(one)["y"][0] == 12
    loaded.close()
    assert fresh.method()(one)["y"][0] == 12
    fresh.close()
    copied.close()
    assert fake.blocks.count == 0
    assert fake.closed


def test_three_threads_with_three_clones(program: Any) -> None:
    loaded, _ = program.load(counter(program))
    totals: dict[int, float] = {}

    def work(step: int, clone: LoadedProgram) -> None:
        for _ in range(200):
            totals[step] = clone.method()(np.full(4, step, np.float32))["y"][3]

    threads = [threading.Thread(target=work, args=(step, loaded.clone())) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == {1: 200, 2: 400, 3: 600}


def test_a_failed_step_leaves_a_stateless_program_usable(doubler: Any, double: Any) -> None:
    failing = [True]
    loaded, _ = doubler.load(double, fail=lambda line: line.startswith("launch") and failing[0])
    x = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="failed on purpose"):
        loaded.method()(x)
    failing[0] = False
    np.testing.assert_array_equal(loaded.method()(x)["y"], 2)


def test_a_failed_step_leaves_state_unknown_until_it_is_set(program: Any) -> None:
    work, failing = counter(program), [True]
    loaded, _ = program.load(work, fail=lambda line: line.startswith("d2h") and failing[0])
    one = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="on purpose"):
        loaded.method()(one)
    failing[0] = False
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.method()(one)
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.state.get("total")
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.clone(copy_state=True)
    loaded.state.reset()
    assert loaded.method()(one)["y"][0] == 1


def test_a_failed_device_is_dead_and_says_so(doubler: Any, double: Any) -> None:
    loaded, fake = doubler.load(double, fail=lambda line: line.startswith("synchronize"))
    x = np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="failed on purpose"):
        loaded.method()(x)
    fake.fail = lambda line: False
    with pytest.raises(ExecutionError, match="load the program again"):
        loaded.method()(x)


def test_a_failed_capture_runs_step_by_step_and_says_why(doubler: Any, double: Any) -> None:
    loaded, _ = doubler.load(double, fail=lambda line: line.startswith("capture"))
    np.testing.assert_array_equal(loaded.method()(np.ones(4, np.float32))["y"], 2)
    assert "the capture failed: capture 3" in loaded.method().no_graph_reason


def test_failed_load_gives_memory_back(doubler: Any) -> None:
    fake = RecordingBackend(CUDA, fail=lambda line: line == "allocate cuda:0 512")
    with pytest.raises(ExecutionError, match="on purpose"):
        LoadedProgram(doubler.planned(), {}, {CUDA: fake, CPU: CpuBackend()})
    assert fake.blocks.count == 0
    assert fake.closed


def test_an_error_of_the_work_itself_is_wrapped(doubler: Any) -> None:
    def broken(operands: Mapping[str, Operand]) -> None:
        raise ZeroDivisionError("no")

    loaded, _ = doubler.load({"double": broken})
    with pytest.raises(ExecutionError, match="method `forward` failed: ZeroDivisionError: no"):
        loaded.method()(np.ones(4, np.float32))


def test_outputs_that_are_state(program: Any) -> None:
    method = program.method()
    x = method.input("x", to=CPU)
    total = program.variable(method, "total", (4,), device=CPU)
    method.copy(x, total, CopyKind.LOCAL)
    method.outputs.append(Port("y", total, ("state", "total")))
    loaded, _ = program.load()
    first = loaded.method()(np.ones(4, np.float32))["y"]
    loaded.method()(np.zeros(4, np.float32))
    np.testing.assert_array_equal(first, 1)
    np.testing.assert_array_equal(loaded.state.get("total"), 0)
    assert loaded.method().no_graph_reason == "nothing runs on a device"


def test_interrupted_calls_leave_state_unknown(program: Any) -> None:
    def interrupted(operands: Mapping[str, Operand]) -> None:
        raise KeyboardInterrupt

    counter(program)
    loaded, _ = program.load({"add": interrupted})
    with pytest.raises(KeyboardInterrupt):
        loaded.method()(np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="state `total` is undefined"):
        loaded.method()(np.ones(4, np.float32))
    assert loaded.state.unknown == ("total",)
    loaded.state.set("total", np.zeros(4, np.float32))
    assert loaded.state.unknown == ()


def test_a_failure_to_bind_changes_nothing(program: Any) -> None:
    failing = [True]
    loaded, _ = program.load(counter(program), fail=lambda line: line.startswith("bind") and failing[0])
    with pytest.raises(ExecutionError, match="on purpose"):
        loaded.method()(np.ones(4, np.float32))
    failing[0] = False
    assert loaded.method()(np.ones(4, np.float32))["y"][0] == 1


def test_state_of_bfloat16_is_saved_and_loaded(program: Any, tmp_path: Any) -> None:
    method = program.method()
    program.variable(method, "cache", (2, 2), DType.BFLOAT16)
    loaded, _ = program.load()
    loaded.state.set("cache", HostTensor.from_float32([[1, 2], [3, 4.5]], DType.BFLOAT16))
    loaded.state.save(tmp_path / "state.npz")
    loaded.state.reset()
    np.testing.assert_array_equal(np.asarray(loaded.state.get("cache")), 0)
    loaded.state.load(tmp_path / "state.npz")
    np.testing.assert_array_equal(np.asarray(loaded.state.get("cache")), [[1, 2], [3, 4.5]])
    np.savez(tmp_path / "other.npz", wrong=np.zeros(3))
    with pytest.raises(UsageError, match="does not hold this program's state"):
        loaded.state.load(tmp_path / "other.npz")
    with pytest.raises(UsageError, match="cannot read state"):
        loaded.state.load(tmp_path / "missing.npz")


def two_variables(program: Any) -> LoadedProgram:
    method = program.method()
    for name in ("a", "b"):
        program.variable(method, name, (4,), initial=np.full(4, 7, np.float32))
    loaded: LoadedProgram = program.load()[0]
    return loaded


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (np.zeros(3, np.float32), "state `b` of .* has size 3 in dimension 0 instead of 4"),
        (np.zeros(4, np.float64), "state `b` of .* has dtype `float64`"),
        (np.zeros((2, 2), np.float32), "state `b` of .* has 2 dimensions instead of 1"),
    ],
)
def test_a_state_file_that_does_not_fit_sets_nothing(
    program: Any, tmp_path: Any, b: np.ndarray, message: str
) -> None:
    loaded = two_variables(program)
    np.savez(tmp_path / "s.npz", a=np.zeros(4, np.float32), b=b)
    with pytest.raises(UsageError, match=message):
        loaded.state.load(tmp_path / "s.npz")
    np.testing.assert_array_equal(loaded.state.get("a"), 7)


@pytest.mark.parametrize("harm", ["cut", "flipped", "text", "empty", "one array"])
def test_a_damaged_state_file_is_refused(program: Any, tmp_path: Any, harm: str) -> None:
    loaded, path = two_variables(program), tmp_path / "s.npz"
    loaded.state.save(path)
    data = bytearray(path.read_bytes())
    if harm == "one array":
        np.save(tmp_path / "one.npy", np.zeros(4))
        data = bytearray((tmp_path / "one.npy").read_bytes())
    data[len(data) // 4] ^= 0xFF if harm == "flipped" else 0
    texts = {"cut": bytes(data[: len(data) // 2]), "text": b"no archive", "empty": b""}
    path.write_bytes(texts.get(harm, bytes(data)))
    with pytest.raises(UsageError, match=r"cannot read state|does not hold"):
        loaded.state.load(path)
    np.testing.assert_array_equal(loaded.state.get("b"), 7)


def test_a_state_file_is_written_whole_or_not_at_all(
    program: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = two_variables(program), tmp_path / "s.npz"
    loaded.state.save(path)
    before = path.read_bytes()

    def write_array(file: Any, *rest: Any, **options: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", write_array)
    with pytest.raises(OSError, match="no space left"):
        loaded.state.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

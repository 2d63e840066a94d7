"""What callers do wrong: refused with a line that says so, never a traceback, never another result."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime import artifact, load
from devplan.runtime.artifact import read, write
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.errors import DeviceError, ExecutionError, UsageError
from devplan.runtime.loading import load_planned
from devplan.runtime.memory.shared import Shared
from devplan.runtime.program import CPU, CopyKind, Device, Port, Role
from devplan.runtime.tensors.host import HostTensor, host_value, numpy_dtype

Identity = Callable[..., LoadedProgram]
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def identity(program: Any) -> Identity:
    """y = x of a given type and shape, on the emulator."""

    def make(dtype: DType = DType.FLOAT32, shape: tuple[int, ...] = (4,), *literals: Any) -> LoadedProgram:
        method = program.method()
        x = method.input("x", shape, dtype)
        method.inputs += [Port(f"s{index}", "", literal=value) for index, value in enumerate(literals)]
        method.output("y", x)
        return load_planned(program.planned(), program.bytes, "emulator")

    return make


# --- what is passed in ----------------------------------------------------------------------------


class Interface:
    """Something with NumPy's array interface, that is no array."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self.held = array


STRUCT = np.array([(1, 2.5), (3, 4.5), (5, 6.5), (7, 8.5)], [("a", "u1"), ("b", "<f4")])


@pytest.mark.parametrize(
    "value",
    [X[::-1], np.repeat(X, 2)[::2], np.broadcast_to(np.float32(3), 4), STRUCT["b"], np.asfortranarray(X),
     Interface(X), Interface(X[::-1])],
    ids=["backwards", "every second", "one for all", "of a structure", "fortran", "interface", "its reverse"],
)  # fmt: skip
def test_odd_strides_are_normalised(identity: Identity, value: Any) -> None:
    with identity() as program:
        got = program.method()(value)["y"]
    want = value.held if isinstance(value, Interface) else value
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ma.array(X, mask=[1, 0, 0, 0]), "`x` is a masked array"),
        (X.astype(">f4"), "dtype `>f4`"),
        (X.astype(complex), "dtype `complex128`"),
        (X.astype(object), "dtype `object`"),
        (X.astype("datetime64[s]"), "dtype `datetime64"),
        (np.array(["a"] * 4), "dtype `<U1`"),
        (STRUCT, "has dtype"),
        (X.astype(np.float64), "has dtype `float64` instead of `float32`"),
        (X.astype(bool), "has dtype `bool` instead of `float32`"),
        (X.reshape(2, 2), "2 dimensions instead of 1"),
        (X[:0], "size 0 in dimension 0 instead of 4"),
        (np.float32(1), "0 dimensions instead of 1"),
        (1.0, "0 dimensions instead of 1"),
        ([1, 2, 3, 4], "of type `list`"),
        (None, "of type `NoneType`"),
        (b"1234", "of type `bytes`"),
    ],
)
def test_what_is_no_such_tensor_is_refused(identity: Identity, value: Any, message: str) -> None:
    with identity() as program:
        method = program.method()
        with pytest.raises(UsageError, match=message):
            method(value)
        np.testing.assert_array_equal(method(X)["y"], X)


@pytest.mark.parametrize(
    "told",
    [{}, {"data": None}, {"shape": ...}, {"typestr": ...}, {"typestr": "zz"}, {"data": (0, False), "strides": (4, 4)}],
)  # fmt: skip
def test_an_interface_that_tells_nonsense_is_refused(identity: Identity, told: dict[str, Any]) -> None:
    class Odd:
        def __init__(self) -> None:
            good = {"shape": (4,), "typestr": "<f4", "version": 3}
            self.__array_interface__ = {k: value for k, value in (good | told).items() if value is not ...}

    with identity() as program, pytest.raises(UsageError, match="`x`"):
        program.method()(Odd())


@pytest.mark.parametrize("error", [TypeError("t"), KeyError("k"), OSError("o"), BufferError()])
def test_a_producer_that_fails_is_told(identity: Identity, error: Exception) -> None:
    class Producer:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self) -> Any:
            raise error

    with identity() as program, pytest.raises(UsageError, match="cannot be read as a host tensor"):
        program.method()(Producer())


@pytest.mark.parametrize(
    ("dtype", "value", "kept"),
    [
        (DType.BFLOAT16, 1.5, 1.5), (DType.BFLOAT16, 3, 3), (DType.FLOAT8_E5M2, -2.0, -2), (DType.FLOAT16, 7, 7),
        (DType.FLOAT32, True, 1), (DType.FLOAT32, float("inf"), float("inf")), (DType.INT32, True, 1),
        (DType.INT8, -128, -128), (DType.UINT64, 2**64 - 1, 2**64 - 1), (DType.BOOL, 0, False),
        (DType.INT32, 1.5, None), (DType.INT32, 2.0, None), (DType.INT32, 2**31, None), (DType.UINT8, -1, None),
        (DType.BOOL, 2, None), (DType.BOOL, 1.0, None), (DType.FLOAT32, 1e300, None), (DType.FLOAT16, 70000, None),
        (DType.BFLOAT16, 1e300, None), (DType.FLOAT8_E4M3FN, 1e4, None), (DType.FLOAT64, 10**400, None),
        (DType.INT64, float("nan"), None),
    ],
)  # fmt: skip
def test_numbers_are_taken_as_they_are_or_refused(
    identity: Identity, dtype: DType, value: Any, kept: Any
) -> None:
    with identity(dtype, ()) as program:
        method = program.method()
        if kept is None:
            with pytest.raises(UsageError, match="`x`"):
                method(value)
        else:
            got = method(value)["y"]
            assert (got.float32() if isinstance(got, HostTensor) else got) == kept


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E5M2])
def test_bits_of_another_type_are_no_host_tensor(dtype: DType) -> None:
    for bits in (np.ones(4, np.float32), np.ones(4, ">u2"), np.ones(4, np.int8), [1, 2]):
        with pytest.raises(UsageError, match="the bits of a `HostTensor` are"):
            HostTensor(bits, dtype)  # type: ignore[arg-type]
    for make in (HostTensor, HostTensor.from_float32):
        with pytest.raises(UsageError, match="a `HostTensor` is not float32"):
            make(np.ones(4, np.float32), DType.FLOAT32)
        with pytest.raises(UsageError, match="no element type `float31`"):
            make(np.ones(4, np.float32), "float31")  # type: ignore[arg-type]
    named = HostTensor.from_float32([1.5, -2], str(dtype))
    assert named.dtype is dtype and (named.raw == HostTensor.from_float32([1.5, -2], dtype).raw).all()


def test_burnt_in_values_are_compared_whatever_is_given(identity: Identity) -> None:
    with identity(DType.FLOAT32, (4,), 2.0, float("nan"), None) as program:
        method = program.method()
        method(X, np.float64(2), float("nan"), None)
        method(X, np.array(2.0))
        for bad in (np.zeros(3), 3.0, "2", [2.0, 2.0], None):
            with pytest.raises(UsageError, match=r"it was 2\.0 at export"):
                method(X, bad)
        with pytest.raises(UsageError, match="it was nan at export"):
            method(X, 2.0, 1.0)


def test_inputs_by_name_come_as_a_mapping(identity: Identity) -> None:
    with identity() as program:
        for wrong in ([X], "x", 3):
            with pytest.raises(UsageError, match="inputs are given by name"):
                program.method().run(wrong)  # type: ignore[arg-type]


def test_host_tensors_go_to_torch_and_back_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype, kind in ((DType.BFLOAT16, "bfloat16"), (DType.FLOAT8_E5M2, "float8_e5m2")):
        tensor = HostTensor.from_float32(np.arange(6).reshape(2, 3), dtype)
        for host in (tensor, HostTensor(tensor.raw.T, dtype), HostTensor(tensor.raw[:, ::2], dtype)):
            theirs = torch.from_dlpack(host)
            assert str(theirs.dtype) == f"torch.{kind}" and theirs.data_ptr() == tensor.raw.ctypes.data
            np.testing.assert_array_equal(theirs.float().numpy(), host.float32())
    with pytest.raises(BufferError, match="another device"):
        tensor.__dlpack__(dl_device=(2, 0))
    copied = torch.from_dlpack(tensor, copy=True)
    assert copied.data_ptr() != tensor.raw.ctypes.data
    frozen = HostTensor(np.broadcast_to(tensor.raw[0], (2, 3)), dtype)
    with pytest.raises(BufferError, match="read-only"):
        frozen.__dlpack__()
    assert frozen.__dlpack__(max_version=(1, 0)) is not None


# --- views of the arena ---------------------------------------------------------------------------


def test_an_array_of_a_borrowed_output_is_a_copy_where_numpy_says_so(identity: Identity) -> None:
    with identity() as program:
        method = program.method()
        borrowed = method(X, borrow=True)["y"]
        copy, again = np.array(borrowed), np.array(borrowed, np.float32)
        view, wider = np.asarray(borrowed), np.asarray(borrowed, np.float64)
        with pytest.raises(ValueError, match="by a copy only"):
            np.asarray(borrowed, np.float64, copy=False)
        assert not view.flags.writeable and np.shares_memory(view, borrowed.numpy())
        method(X + 1)
        for array in (copy, again, wider):
            np.testing.assert_array_equal(array, X)
        with pytest.raises(ExecutionError, match="used too late"):
            np.array(borrowed)


def test_a_tensor_of_a_borrowed_output_raises_once_overwritten(program: Any) -> None:
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.copy(x, y, CopyKind.LOCAL)
    method.outputs.append(Port("y", y))
    with load_planned(program.planned(), program.bytes, "emulator") as loaded:
        tensor = loaded.method()(X, borrow=True)["y"].device_array()
        np.testing.assert_array_equal(tensor.numpy(), X)
        loaded.method()(X)
        with pytest.raises(ExecutionError, match="used too late"):
            tensor.numpy()
        last = loaded.method()(X, borrow=True)["y"].device_array()
    with pytest.raises(ExecutionError, match="the program was closed"):
        last.numpy()


def test_a_view_of_the_arena_is_no_input_of_the_same_program(identity: Identity) -> None:
    """Storing the inputs may overwrite it before it is read."""
    with identity() as program, program.clone() as twin:
        method = program.method()
        view = np.asarray(method(X, borrow=True)["y"])
        np.testing.assert_array_equal(twin.method()(view)["y"], X)
        copy = view.copy()
        for borrowed in (view, view[:], view.reshape(2, 2).reshape(4)):
            with pytest.raises(UsageError, match="`x` is a borrowed output of this program"):
                method(borrowed)
        np.testing.assert_array_equal(method(copy)["y"], X)
        frozen = X.copy()
        frozen.flags.writeable = False
        np.testing.assert_array_equal(method(frozen)["y"], X)


def test_a_large_view_of_the_arena_is_none_either(identity: Identity) -> None:
    """Pinned memory is read in place."""
    large = np.arange(1 << 15, dtype=np.float32)
    with identity(DType.FLOAT32, large.shape) as program:
        view = np.asarray(program.method()(large, borrow=True)["y"])
        with pytest.raises(UsageError, match="a borrowed output of this program"):
            program.method()(view)


@pytest.fixture
def on_device(program: Any, symbolic: Any) -> Identity:
    """y = x of [s, 3] on the device, both in the caller's memory."""

    def make() -> LoadedProgram:
        method = program.method()
        rows = symbolic(method, "s", 1, 8, "x", 0)
        for name, role in (("x", Role.INPUT), ("y", Role.OUTPUT)):
            method.tensor(name, (rows, 3), DType.FLOAT32, Device("cuda"), role, external=True)
        method.copy("x", "y", CopyKind.LOCAL)
        method.inputs.append(Port("x", "x"))
        method.outputs.append(Port("y", "y"))
        return load_planned(program.planned(), program.bytes, "emulator")

    return make


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 4), np.float32), "size 4 in dimension 1 instead of 3"),
        (np.ones((2, 3), np.int32), "dtype `int32` instead of `float32`"),
        (np.ones(2, np.float32), "1 dimensions instead of 2"),
        (np.float32(1), "0 dimensions"),
        (np.ones((9, 3), np.float32), "size 9 in dimension 0"),
        (np.ones((0, 3), np.float32), "size 0 in dimension 0"),
    ],
)
def test_device_tensors_are_checked_before_anything_is_bound_to_them(
    on_device: Identity, array: Any, message: str
) -> None:
    good = np.arange(6, dtype=np.float32).reshape(2, 3)
    with on_device() as program:
        method = program.method()
        with pytest.raises(UsageError, match=message):
            method(program.to_device(array))
        assert method.bound is None
        np.testing.assert_array_equal(method(program.to_device(good))["y"].numpy(), good)


def test_a_tensor_of_another_emulated_program_is_refused(on_device: Identity, program: Any) -> None:
    first = on_device()
    tensor = first.to_device(np.ones((2, 3), np.float32))
    program.methods.clear()
    with on_device() as second, pytest.raises(UsageError, match="another program's"):
        second.method()(tensor)
    first.close()


def test_what_is_borrowed_of_state_is_stale_once_that_is_set(program: Any, tmp_path: Path) -> None:
    method = program.method()
    kept = program.variable(method, "kept", (4,))
    method.copy(method.input("x"), kept, CopyKind.LOCAL)
    method.outputs.append(Port("kept", kept, ("state", "kept")))
    method.output("copy", kept)
    with load_planned(program.planned(), program.bytes, "emulator") as loaded:
        state = loaded.state
        loaded.method()(X)
        state.save(tmp_path / "s.npz")
        changes: list[Callable[[], None]] = [
            state.reset,
            lambda: state.set("kept", X),
            lambda: state.load(tmp_path / "s.npz"),
        ]
        for change in changes:
            outputs = loaded.method()(X, borrow=True)
            np.testing.assert_array_equal(outputs["kept"].device_array().numpy(), X)
            state.get("kept")
            np.testing.assert_array_equal(outputs["kept"].numpy(), X)
            change()
            with pytest.raises(ExecutionError, match="used too late"):
                outputs["kept"].numpy()
            np.testing.assert_array_equal(outputs["copy"].numpy(), X)


# --- closed programs ------------------------------------------------------------------------------


def test_a_closed_program_gives_out_no_memory(identity: Identity) -> None:
    program = identity()
    kept, pinned = program.to_device(X), program.pin(X)
    twin = program.clone()
    program.close()
    program.close()
    calls: list[Callable[[], Any]] = [
        lambda: program.to_device(X),
        lambda: program.pin(X),
        lambda: program.pinned_empty((2,), "float32"),
        lambda: program.clone(),
        lambda: program.method()(X),
        lambda: program.state.values(),
        program.prepare,
    ]
    for call in calls:
        with pytest.raises(ExecutionError, match="the program is closed"):
            call()
    np.testing.assert_array_equal(twin.method()(X)["y"], X)
    np.testing.assert_array_equal(kept.numpy(), X)
    twin.close()
    np.testing.assert_array_equal(pinned, X)
    with pytest.raises(ExecutionError, match="the program is closed"):
        twin.pinned_empty((2,), "float32")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((2,), "float31", "no element type `float31`"), ((2,), None, "no element type `None`"),
     ((-2,), "float32", "cannot have the shape"), ((2.5,), "float32", "cannot have the shape"),
     ("ab", "float32", "cannot have the shape"), ((1 << 70,), "int8", "cannot have the shape"), ((True,), "float32", "cannot have the shape")],
)  # fmt: skip
def test_memory_of_no_shape_or_type_is_refused(
    identity: Identity, shape: Any, dtype: Any, message: str
) -> None:
    with identity() as program, pytest.raises(UsageError, match=message):
        program.pinned_empty(shape, dtype)


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "cuda:²", "gpu", "", 0, None])
def test_a_tensor_goes_to_no_device_that_is_none(identity: Identity, device: Any) -> None:
    with identity() as program, pytest.raises(UsageError):
        program.to_device(X, device)


# --- loading --------------------------------------------------------------------------------------


@pytest.fixture
def artifacts(program: Any, tmp_path: Path) -> tuple[Path, Path]:
    """One for a GPU, one for the host."""
    method = program.method()
    method.output("y", method.input("x"))
    gpu = write(tmp_path / "gpu.pte", program.planned(), program.bytes).path
    program.methods.clear()
    method = program.method()
    x = method.input("x", to=CPU)
    method.tensor("y", (4,), DType.FLOAT32, CPU, Role.OUTPUT)
    method.copy(x, "y", CopyKind.LOCAL)
    method.outputs.append(Port("y", "y"))
    return gpu, write(tmp_path / "cpu.pte", program.planned(), program.bytes).path


@pytest.mark.parametrize(
    "device", ["cuda:x", "cuda:-1", "cuda:²", "cuda:1:2", "cuda:999", "gpu", "emulator:0", "CUDA:0", "", 0, X]
)
def test_what_is_no_device_is_wrong_usage_whatever_the_program_is_for(
    artifacts: tuple[Path, Path], device: Any
) -> None:
    for path in artifacts:
        with pytest.raises(UsageError):
            load(path, device)


def test_a_program_for_the_host_has_no_code_for_a_gpu(artifacts: tuple[Path, Path]) -> None:
    with pytest.raises(DeviceError, match="no code for `cuda:0`"):
        load(artifacts[1], "cuda:0")


@pytest.mark.parametrize(
    "given",
    [{"cuda:0": "cpu"}, {"cuda:0": "gpu"}, {"cuda:0": 1}, {0: "cuda:1"}, {"cpu": "cuda:0"},
     "cuda:0=cuda:1", [("cuda:0", "cuda:1")]],
)  # fmt: skip
def test_what_is_no_device_map_is_wrong_usage(artifacts: tuple[Path, Path], given: Any) -> None:
    with pytest.raises(UsageError):
        load(artifacts[0], device_map=given)


@pytest.mark.parametrize("given", ["model.safetensors", Path("model.safetensors")])
def test_one_file_of_weights_may_stand_alone(
    artifacts: tuple[Path, Path], given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is one path, not as many as it has letters."""
    asked: list[Path] = []

    def reading(path: Path, *, weights: list[Path]) -> Any:
        asked.extend(weights)
        return read(path)

    monkeypatch.setattr(artifact, "read", reading)
    load(artifacts[0], "emulator", weights=given).close()
    assert asked == [Path("model.safetensors")]


# --- threads and the garbage collector ------------------------------------------------------------


def test_all_state_is_saved_and_cloned_of_one_moment(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call comes between two variables: what they hold together would never have been."""
    method = program.method()
    for name in ("a", "b"):
        method.copy(method.input(name), program.variable(method, f"state_{name}", (4,)), CopyKind.LOCAL)
    loaded, device = program.load()
    ones = np.ones(4, np.float32)
    loaded.method()(ones, ones)
    download, refused = device.download, list[str]()

    def with_a_call_after(address: int, out: memoryview) -> None:
        download(address, out)
        try:
            loaded.method()(2 * ones, 2 * ones)
        except ExecutionError as error:
            refused.append(error.what)

    monkeypatch.setattr(device, "download", with_a_call_after)
    loaded.state.save(tmp_path / "state.npz")
    values = loaded.state.values()
    monkeypatch.setattr(device, "download", download)
    with np.load(tmp_path / "state.npz") as saved:
        assert all((saved[name] == 1).all() for name in saved.files)
    assert all((value == 1).all() for value in values.values())
    assert refused == ["the program is in use by another thread"] * 4


def test_what_is_dropped_amid_the_locks_own_work_is_taken_back_later(identity: Identity) -> None:
    """The garbage collector may drop an output in a thread that holds the lock, which must not wait for it."""
    program = identity()
    shared: Shared = program._shared
    tensors = [program.to_device(X) for _ in range(7)]
    done = threading.Event()

    def drop() -> None:
        with shared._lock:
            tensors.clear()
            gc.collect()
        shared._settle()
        done.set()

    threading.Thread(target=drop, daemon=True).start()
    assert done.wait(10), "it waits for its own lock"
    assert shared._count == 1 and sum(map(len, shared._pool.values())) == 4
    program.close()
    assert shared._count == 0 and not any(shared._pool.values())


def test_a_program_that_is_dropped_amid_the_locks_own_work_is_closed_later(identity: Identity) -> None:
    program = identity()
    twin = program.clone()
    shared: Shared = program._shared
    done = threading.Event()
    held = [twin]
    del twin

    def drop() -> None:
        with shared._lock:
            held.clear()
            gc.collect()
        shared._settle()
        done.set()

    threading.Thread(target=drop, daemon=True).start()
    assert done.wait(10), "it waits for its own lock"
    assert shared._count == 1
    np.testing.assert_array_equal(program.method()(X)["y"], X)


def test_outputs_may_be_dropped_in_any_thread(identity: Identity) -> None:
    program = identity()
    shared: Shared = program._shared

    def use() -> None:
        for _ in range(200):
            assert (program.to_device(X).numpy() == X).all()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert shared._count == 1
    program.close()


# --- zero elements --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_every_type_and_no_elements(identity: Identity, dtype: DType, shape: tuple[int, ...]) -> None:
    with identity(dtype, shape) as program:
        got = program.method()(host_value(np.zeros(shape, numpy_dtype(dtype)), dtype))["y"]
        assert got.shape == shape and (got.dtype is dtype or got.dtype == numpy_dtype(dtype))
        assert program.to_device(got).numpy().shape == shape
        assert program.pin(got).shape == shape

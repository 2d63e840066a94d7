"""Device tensors on a fake driver whose device memory is host memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.backend import Operand
from devplan.runtime.cuda import backend as backend_module
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import DeviceError, ExecutionError, UsageError
from devplan.runtime.program import Device
from devplan.runtime.tensors import dlpack
from devplan.runtime.tensors.host import HostTensor
from devplan.runtime.tensors.tensor import DeviceTensor


@pytest.fixture(autouse=True)
def shared(gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `cuda:0` be the fake GPU."""
    monkeypatch.setattr(backend_module, "_shared", {0: gpu})


NATIVE = [
    np.uint8,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
    np.bool_,
    np.uint32,
]


@pytest.mark.parametrize("kind", NATIVE)
def test_a_host_array_goes_there_and_back(kind: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    tensor = DeviceTensor.from_host(array)
    assert (tensor.shape, tensor.strides, str(tensor.dtype)) == ((2, 3, 4), (12, 4, 1), np.dtype(kind).name)
    assert tensor.device == Device("cuda", 0)
    back = tensor.numpy()
    assert isinstance(back, np.ndarray) and back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_bfloat16_goes_there_and_back_bit_for_bit() -> None:
    host = HostTensor.from_float32(np.linspace(-3, 3, 7), DType.BFLOAT16)
    back = DeviceTensor.from_host(host).numpy()
    assert isinstance(back, HostTensor)
    assert np.array_equal(back.raw, host.raw)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_odd_shapes_are_tensors_too(shape: tuple[int, ...]) -> None:
    back = DeviceTensor.from_host(np.ones(shape, np.float32)).numpy()
    assert isinstance(back, np.ndarray)
    assert back.shape == shape and (back == 1).all()


def test_memory_is_freed_with_the_last_view(cu: Any) -> None:
    before = len(cu.memory)
    tensor = DeviceTensor.from_host(np.zeros((4, 4), np.float32))
    view = tensor[1:3]
    del tensor
    gc.collect()
    assert len(cu.memory) == before + 1
    del view
    gc.collect()
    assert len(cu.memory) == before


indices = st.one_of(st.integers(-3, 2), st.slices(3).filter(lambda part: part.step is None or part.step > 0))


@given(st.tuples(indices, indices), st.permutations([0, 1, 2]))
def test_views_are_numpys(index: tuple[int | slice, ...], order: list[int]) -> None:
    array = np.arange(27, dtype=np.int32).reshape(3, 3, 3)
    view = DeviceTensor.from_host(array).permute(*order)[index]
    back = view.numpy()
    assert np.array_equal(np.asarray(back), array.transpose(order)[index])


@given(
    st.lists(st.sampled_from([0, -1, slice(1, None), slice(None, None, 2), None, np.int64(1)]), max_size=4),
    st.integers(0, 4),
)
def test_views_have_new_and_unnamed_dimensions(parts: list[Any], at: int) -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    index = (*parts[:at], ..., *parts[at:])
    if sum(part is not None for part in parts) > 3:
        with pytest.raises(IndexError):
            DeviceTensor.from_host(array)[index]
        return
    back = DeviceTensor.from_host(array)[index].numpy()
    assert np.array_equal(np.asarray(back), array[index])


@pytest.mark.parametrize("index", [True, 1.5, "a", [0, 1], (..., ...), slice(None, None, -1), 5])
def test_what_is_no_view_is_an_index_error(index: Any) -> None:
    with pytest.raises(IndexError):
        DeviceTensor.from_host(np.zeros((3, 3), np.float32))[index]


def test_orders_and_shapes_come_as_tuples_too() -> None:
    tensor = DeviceTensor.from_host(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert tensor.reshape((3, 2)).shape == tensor.permute((-1, 0)).shape == (3, 2)
    with pytest.raises(UsageError, match="no order of 2 dimensions"):
        tensor.permute(0, -2)


def test_bytes_in_another_order_are_refused_rather_than_mistaken() -> None:
    for wrong in (np.ones(3, ">f4"), np.array(["a"]), np.ones(2, complex), object()):
        with pytest.raises(UsageError):
            DeviceTensor.from_host(wrong)


def test_host_tensors_of_other_libraries_are_copied_bfloat16_included() -> None:
    bits = np.array([[1, 2], [3, 4]], np.uint16)
    described = dlpack.Description(bits.ctypes.data, DType.BFLOAT16, (2, 2), (2, 1), (dlpack.CPU_DEVICE, 0))

    class Producer:
        def __dlpack__(self, **_: Any) -> Any:
            return dlpack.export(described, bits, None)

        def __dlpack_device__(self) -> tuple[int, int]:
            return described.device

    back = DeviceTensor.from_host(Producer()).numpy()
    assert isinstance(back, HostTensor) and np.array_equal(back.raw, bits)


def test_a_clone_on_another_gpu_is_dense_and_its_own(cu: Any) -> None:
    cu.count = 2
    tensor = DeviceTensor.from_host(np.arange(24, dtype=np.int16).reshape(2, 3, 4)).permute(2, 0, 1)
    clone = tensor.clone("cuda:1")
    assert (clone.device, clone.is_contiguous) == (Device("cuda", 1), True)
    assert "cuMemcpyPeerAsync" in cu.names()
    assert np.array_equal(np.asarray(clone.numpy()), np.asarray(tensor.numpy()))
    for wrong, error in (("cpu", UsageError), ("gpu", UsageError), ("cuda:7", DeviceError)):
        with pytest.raises(error):
            tensor.clone(wrong)


def test_a_strided_view_can_be_written() -> None:
    tensor = DeviceTensor.from_host(np.zeros((3, 4), np.int16))
    tensor[:, 1:3].write(np.arange(6, dtype=np.int16).reshape(3, 2))
    assert np.array_equal(np.asarray(tensor.numpy()), [[0, 0, 1, 0], [0, 2, 3, 0], [0, 4, 5, 0]])


def test_reshape_is_a_view_or_refused() -> None:
    tensor = DeviceTensor.from_host(np.arange(12, dtype=np.int64))
    assert tensor.reshape(3, -1).shape == (3, 4)
    assert tensor.reshape(3, 4).pointer == tensor.pointer
    with pytest.raises(UsageError):
        tensor.reshape(5, 2)
    with pytest.raises(UsageError, match="contiguous"):
        tensor.reshape(3, 4).permute(1, 0).reshape(12)


def test_a_clone_has_memory_of_its_own() -> None:
    tensor = DeviceTensor.from_host(np.arange(4, dtype=np.float32))
    clone = tensor.clone("cuda:0")
    tensor.write(np.zeros(4, np.float32))
    assert np.array_equal(np.asarray(clone.numpy()), [0, 1, 2, 3])


def test_numpy_does_not_copy_it_unnoticed() -> None:
    with pytest.raises(UsageError, match=r"by itself"):
        np.asarray(DeviceTensor.from_host(np.zeros(3)))


def test_writing_another_type_is_refused() -> None:
    tensor = DeviceTensor.from_host(np.zeros(4, np.float32))
    for wrong in (np.zeros(4, np.float64), np.zeros((2, 2), np.float32), np.zeros(4, np.complex64)):
        with pytest.raises(UsageError):
            tensor.write(wrong)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_dlpack_keeps_type_shape_strides_and_address(dtype: DType, version: tuple[int, int] | None) -> None:
    tensor = DeviceTensor.empty((4, 6), dtype).permute(1, 0)
    described, release = dlpack.consume(tensor.__dlpack__(stream=-1, max_version=version))
    assert described == dlpack.Description(tensor.pointer, dtype, (6, 4), (1, 6), (dlpack.CUDA, 0))
    release()


@pytest.mark.parametrize("consumed", [False, True])
def test_dlpack_holds_memory_as_long_as_the_consumer(cu: Any, consumed: bool) -> None:
    before = len(cu.memory)
    capsule = DeviceTensor.empty((8,), "float32").__dlpack__(stream=-1)
    release = dlpack.consume(capsule)[1] if consumed else None
    gc.collect()
    assert len(cu.memory) == before + 1
    if release is not None:
        del capsule
        gc.collect()
        assert len(cu.memory) == before + 1
        release()
    else:
        del capsule
    gc.collect()
    assert len(cu.memory) == before


def test_a_capsule_is_consumed_once() -> None:
    capsule = DeviceTensor.empty((8,), "float32").__dlpack__(stream=-1)
    dlpack.consume(capsule)[1]()
    with pytest.raises(BufferError):
        dlpack.consume(capsule)


def test_numpy_reads_what_dlpack_writes() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    described = dlpack.Description(array.ctypes.data, DType.INT32, (3, 2), (1, 3), (dlpack.CPU_DEVICE, 0))

    class Producer:
        def __dlpack__(self, *, max_version: Any = None, **_: Any) -> Any:
            return dlpack.export(described, array, max_version)

        def __dlpack_device__(self) -> tuple[int, int]:
            return described.device

    assert np.array_equal(np.from_dlpack(Producer()), array.T)


def test_dlpack_reads_what_numpy_writes() -> None:
    array = np.zeros((2, 3), np.bool_)[:, ::2]
    described, release = dlpack.consume(array.__dlpack__())
    assert (described.address, described.dtype, described.shape, described.strides) == (
        array.ctypes.data, DType.BOOL, (2, 2), (3, 2),
    )  # fmt: skip
    release()


class Foreign:
    """Another library's tensor on the fake GPU: keeps DLPack or the array interface to itself on request."""

    def __init__(self, tensor: DeviceTensor, ordinal: int = 0, kind: int = dlpack.CUDA) -> None:
        self.tensor, self.device, self.streams = tensor, (kind, ordinal), []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int) -> Any:  # an old producer: no `max_version`
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=-1)


def test_a_foreign_tensor_is_used_in_place_on_our_stream(gpu: CudaBackend) -> None:
    tensor = DeviceTensor.from_host(np.arange(6, dtype=np.float16).reshape(2, 3))
    foreign = Foreign(tensor)
    assert gpu.describe(foreign) == tensor.operand
    assert foreign.streams == [gpu.stream]


def test_the_array_interface_goes_both_ways(gpu: CudaBackend, cu: Any) -> None:
    tensor = DeviceTensor.empty((4, 6), "bfloat16").permute(1, 0)

    class ByInterface:
        __cuda_array_interface__ = tensor.__cuda_array_interface__ | {"stream": 4321}

    assert gpu.describe(ByInterface()) == tensor.operand
    assert ("cuEventRecord", "event", 4321) in cu.calls


def test_the_array_interface_is_asked_of_the_driver_where_there_are_two_gpus(
    gpu: CudaBackend, cu: Any
) -> None:
    tensor = DeviceTensor.empty((4,), "float32")
    cu.count = 2  # and the driver says that every address is GPU 1's
    foreign = type("Foreign", (), {"__cuda_array_interface__": tensor.__cuda_array_interface__})()
    with pytest.raises(UsageError, match="is on GPU 1"):
        gpu.describe(foreign)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.zeros(3), "not in the memory of an NVIDIA GPU"),
        ([1, 2], "is no GPU tensor"),
        (
            type(
                "Odd", (), {"__cuda_array_interface__": {"typestr": "<c8", "shape": (2,), "data": (0, False)}}
            )(),
            "<c8",
        ),
        (
            type(
                "Masked",
                (),
                {
                    "__cuda_array_interface__": {
                        "typestr": "<f4",
                        "shape": (2,),
                        "data": (0, False),
                        "mask": object(),
                    }
                },
            )(),
            "a masked tensor",
        ),
    ],
)
def test_what_is_no_gpu_tensor_is_refused(gpu: CudaBackend, value: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        gpu.describe(value)


def test_a_tensor_of_another_gpu_is_refused(gpu: CudaBackend) -> None:
    with pytest.raises(UsageError, match="is on GPU 1"):
        gpu.describe(Foreign(DeviceTensor.empty((1,), "int8"), ordinal=1))


def test_the_programs_own_outputs_are_tensors(gpu: CudaBackend) -> None:
    released: list[int] = []
    address = gpu.allocate(16)
    operand = Operand(address, DType.FLOAT32, (4,), (1,), gpu.device)
    tensor = gpu.wrap(operand, lambda: released.append(1))
    tensor.write(np.ones(4, np.float32))
    assert np.array_equal(np.asarray(tensor.numpy()), np.ones(4))
    del tensor
    gc.collect()
    assert released == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceTensor.empty((2.5,), "float32"), "cannot have the shape"),  # type: ignore[arg-type]
        (lambda: DeviceTensor.empty((2, -1), "float32"), "cannot have the shape"),
        (lambda: DeviceTensor.empty((2,), "float31"), "no element type `float31`"),
        (lambda: DeviceTensor.empty((2,), "float32", "cuda:x"), "no valid index"),
        (lambda: DeviceTensor.empty((2,), "float32", "cpu"), "lives on a GPU"),
        (lambda: DeviceTensor.empty((2,), "float32", 0), "`0` is no device"),  # type: ignore[arg-type]
        (lambda: DeviceTensor.from_host([[1, 2], [3]]), "rows are of different lengths"),
        (lambda: DeviceTensor.from_host(["a"]), "has dtype"),
        (lambda: DeviceTensor.from_host(np.ma.array([1.0], mask=[True])), "masked"),
        (lambda: DeviceTensor.empty((2, 3), "int8").reshape(2.0, 3.0), "are no integers"),  # type: ignore[arg-type]
        (lambda: DeviceTensor.empty((2, 3), "int8").reshape(True, 6), "are no integers"),
        (lambda: DeviceTensor.empty((2, 3), "int8").permute("ab"), "are no integers"),  # type: ignore[arg-type]
        (lambda: DeviceTensor.empty((2, 3), "int8").clone("cuda:x"), "no valid index"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_wrong_usage(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_one_extent_is_a_shape() -> None:
    assert DeviceTensor.empty(3, "int8").shape == (3,)  # type: ignore[arg-type]
    assert DeviceTensor.empty(np.int64(3), "int8").shape == (3,)  # type: ignore[arg-type]


class ByInterface:
    """Another library's tensor, by the array interface."""

    def __init__(self, **changes: Any) -> None:
        good = {"shape": (2,), "typestr": "<f4", "data": (256, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {
            key: value for key, value in (good | changes).items() if value is not ...
        }


@pytest.mark.parametrize(
    "changes",
    [
        {"data": ...}, {"shape": ...}, {"typestr": ...}, {"data": (None, False)}, {"data": 256},
        {"shape": (-2,)}, {"shape": 2}, {"strides": (4, 4)}, {"strides": (6,)}, {"typestr": ">f4"},
        {"typestr": "<c8"}, {"mask": object()},
    ],
)  # fmt: skip
def test_a_malformed_interface_is_wrong_usage(changes: Any) -> None:
    with pytest.raises(UsageError):
        DeviceTensor.of(ByInterface(**changes))


def test_a_foreign_tensor_without_elements_has_no_address() -> None:
    tensor = DeviceTensor.of(ByInterface(shape=(0, 3), data=(0, False)))
    assert tensor.shape == (0, 3)
    empty = tensor.numpy()
    assert isinstance(empty, np.ndarray) and empty.shape == (0, 3)


def test_a_tensor_that_is_nowhere_is_wrong_usage() -> None:
    class Nowhere:
        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError

        def __dlpack_device__(self) -> Any:
            raise ValueError("Unknown device type meta for Dlpack")

    with pytest.raises(UsageError, match="device type meta"):
        DeviceTensor.of(Nowhere())


def test_what_its_owner_holds_read_only_is_not_written() -> None:
    mine = DeviceTensor.from_host(np.zeros(2, np.float32))
    interface = mine.__cuda_array_interface__ | {"data": (mine.pointer, True)}
    tensor = DeviceTensor.of(ByInterface(**interface))
    for each in (tensor, tensor[:1]):
        with pytest.raises(UsageError, match="read-only"):
            each.write(np.ones(each.shape, np.float32))
        assert each.__cuda_array_interface__["data"][1] is True
        with pytest.raises(BufferError, match="read-only"):
            each.__dlpack__()
        described, release = dlpack.consume(each.__dlpack__(max_version=(1, 0)))
        assert described.is_read_only
        release()
    again = tensor.clone()
    again.write(np.ones(2, np.float32))
    assert np.array_equal(np.asarray(again.numpy()), [1, 1])


def test_lent_memory_is_asked_for_each_time() -> None:
    whole = DeviceTensor.from_host(np.arange(6, dtype=np.float32))
    stale: list[str] = []

    def check() -> None:
        if stale:
            raise ExecutionError(stale[0])

    backend = whole._backend
    tensor = backend.wrap(whole.operand, lambda: None, check)  # type: ignore[attr-defined]
    views = [tensor, tensor[1:], tensor.reshape(2, 3), tensor.reshape(2, 3).permute(1, 0)]
    uses: list[Any] = [
        lambda t: t.numpy(), lambda t: t.clone(), lambda t: t.pointer, lambda t: t.operand,
        lambda t: t.__dlpack__(), lambda t: t.__cuda_array_interface__, lambda t: t[0],
        lambda t: t.write(np.zeros(t.shape, np.float32)),
    ]  # fmt: skip
    for view in views:
        for use in uses[:-1]:
            use(view)
    stale.append("too late")
    for view in views:
        assert view.shape and "DeviceTensor" in repr(view)
        for use in uses:
            with pytest.raises(ExecutionError, match="too late"):
                use(view)
    assert np.array_equal(np.asarray(whole.numpy()), np.arange(6))


BASE = np.arange(4 * 5 * 12, dtype=np.float32).reshape(4, 5, 12)
VIEWS = [BASE[::-1], BASE[:, ::-1], BASE[..., ::-2], BASE.transpose(2, 0, 1), BASE.transpose(2, 0, 1)[::-1],
         BASE[1:3, ::2, ::-3], BASE[..., 3], BASE[2:3, :, 1:2], np.broadcast_to(BASE[0], (30, 5, 12)),
         np.broadcast_to(BASE[:, :1], (4, 50, 12)), np.lib.stride_tricks.sliding_window_view(BASE[0, 0], 3),
         BASE[:0], BASE[3, 4, 5:6].reshape(())]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.shape} by {view.strides}")
@pytest.mark.parametrize("typestr", ["<f4", "<V2"])
def test_any_strides_of_other_libraries_are_read_as_numpy_reads_them(view: Any, typestr: str) -> None:
    halves = HostTensor.from_float32(BASE, DType.BFLOAT16)
    whole = DeviceTensor.from_host(BASE if typestr == "<f4" else halves)
    itemsize = whole.dtype.itemsize
    shift = (view.__array_interface__["data"][0] - BASE.__array_interface__["data"][0]) // 4
    foreign = ByInterface(
        shape=view.shape,
        typestr=typestr,
        data=(whole.pointer + shift * itemsize, False),
        strides=tuple(step // 4 * itemsize for step in view.strides),
    )
    tensor = DeviceTensor.of(foreign)
    for each in (tensor, tensor.clone(), tensor.contiguous()):
        np.testing.assert_array_equal(np.asarray(each.numpy()), view)


@pytest.mark.parametrize("gap", [1, 16])
def test_a_view_that_takes_too_many_copies_goes_by_the_host(gap: int) -> None:
    """More than `MAX_BLOCKS` rectangles: most views of three and more dimensions in another order."""
    array = np.arange(80 * 60 * 70 * gap, dtype=np.int32).reshape(80, 60, 70, gap)
    tensor = DeviceTensor.from_host(array).permute(2, 1, 0, 3)[..., 0]
    want = array.transpose(2, 1, 0, 3)[..., 0]
    for each in (tensor, tensor.clone()):
        assert np.array_equal(np.asarray(each.numpy()), want)
    with pytest.raises(ExecutionError, match="too scattered"):
        tensor.write(want)

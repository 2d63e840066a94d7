"""The CUDA backend against a driver that records and fails on request."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.runtime.backend import Backend, Operand
from devplan.runtime.cuda import driver, staging
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.cuda.ledger import Ledger, opened
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, DeviceError, ExecutionError, UsageError
from devplan.runtime.program import (
    CPU,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
    LibraryCall,
    Ref,
    SourceLocation,
)

GPU = Device("cuda", 0)


def add_kernel(shared: int = 0, form: str = "cubin", *, waits: bool = False) -> Kernel:
    architecture = "sm_90" if form == "cubin" else "sm_80"
    elf = b"\x7fELF\x02".ljust(18, b"\0") + b"\xbe".ljust(46, b"\0")
    data = elf if form == "cubin" else b".version 8.0\n.target sm_80\n"
    code = KernelCode(architecture, form, "add_kernel", data, 8, shared, waits)
    return Kernel("add", (KernelParameter("x", "*fp32"), KernelParameter("n", "i32")), (code,))


LAUNCH = Launch("add", (Ref("x"), 5), (3, 1, 1), ("x",), ("x",), origin=SourceLocation("encoder", "aten.add"))


def on_gpu(address: int, shape: tuple[int, ...] = (5,), dtype: DType = DType.FLOAT32) -> Operand:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Operand(address, dtype, shape, strides, GPU)


def on_host(array: np.ndarray, dtype: DType) -> Operand:
    strides = tuple(step // array.itemsize for step in array.strides)
    return Operand(int(array.ctypes.data), dtype, array.shape, strides, CPU)


def test_it_answers_as_a_backend(gpu: CudaBackend) -> None:
    backend: Backend = gpu
    assert (backend.device, backend.label, backend.no_graph_reason) == (GPU, "Fake GPU", "")
    assert gpu.info.architecture == "sm_90"


def test_memory_goes_there_and_back(gpu: CudaBackend) -> None:
    data = np.arange(12, dtype=np.uint8)
    address = gpu.allocate(12)
    gpu.upload(address, memoryview(data.tobytes()))
    out = bytearray(12)
    gpu.download(address, memoryview(out))
    assert bytes(out) == data.tobytes()
    gpu.fill(address, 12, 0xFF)
    gpu.download(address, memoryview(out))
    assert bytes(out) == b"\xff" * 12


@pytest.mark.parametrize("threads", [False, True])
def test_a_large_upload_passes_through_pinned_chunks(
    gpu: CudaBackend, cu: Any, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    chunk = 4 << 20
    monkeypatch.setattr(staging, "_CHUNK", chunk)
    monkeypatch.setattr(staging, "_LARGE", 0 if threads else 64 << 20)
    data = np.random.default_rng(0).integers(0, 256, 5 * chunk + 5, np.uint8)
    address = gpu.allocate(data.nbytes)
    gpu.upload(address, memoryview(data))
    out = bytearray(data.nbytes)
    gpu.download(address, memoryview(out))
    assert out == data.tobytes()
    assert cu.names().count("cuMemHostAlloc") == 4
    assert cu.names().count("cuEventSynchronize") == 2  # six chunks through four buffers


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 1500), min_size=1, max_size=12),
    gaps=st.lists(st.sampled_from([0, 1, 255, 256, 3000]), min_size=12, max_size=12),
    small=st.sampled_from([0, 1 << 20]),
)
def test_pieces_of_a_block_lie_where_they_belong_however_they_are_sent(
    cu: Any, sizes: list[int], gaps: list[int], small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_LITTLE_CHUNK", 1000)
        patch.setattr(staging, "_SMALL", small)
        cu.calls.clear()
        made = staging.Staging(cu, 1)
        base = cu.cuMemAlloc(sum(sizes) + sum(gaps))[1]
        random, at, pieces = np.random.default_rng(1), base, list[tuple[int, bytes]]()
        for size, gap in zip(sizes, gaps, strict=False):
            pieces.append((at, random.integers(0, 256, size, np.uint8).tobytes()))
            at += size + gap
        made.upload_all(((at, memoryview(data)) for at, data in pieces), sum(sizes))
        assert all(ctypes.string_at(at, len(data)) == data for at, data in pieces)
        copies = [call for call in cu.calls if call[0] == "cuMemcpyHtoDAsync"]
        assert len(copies) <= len(pieces) if small else sum(call[3] for call in copies) >= sum(sizes)
        made.close()


def test_constants_are_sent_in_few_copies(cu: Any) -> None:
    """The layout of `memory.constant_addresses`: 256-aligned pieces of one block."""
    made, base = staging.Staging(cu, 1), cu.cuMemAlloc(64 * 65536)[1]
    data = memoryview(np.random.default_rng(2).integers(0, 256, 65500, np.uint8).tobytes())
    made.upload_all(((base + index * 65536, data) for index in range(64)), 64 * 65500)
    assert cu.names().count("cuMemcpyHtoDAsync") == 1
    assert all(ctypes.string_at(base + index * 65536, 65500) == data for index in range(64))


def test_releasing_puts_the_threads_context_back(gpu: CudaBackend, cu: Any) -> None:
    address, step = gpu.allocate(16), gpu.capture([])
    cu.calls.clear()
    gpu.free(address)  # as the garbage collector may do amid a launch on another GPU
    del step
    released = ["cuCtxPushCurrent", "cuMemFree", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuGraphExecDestroy"]
    assert cu.names() == [*released, "cuCtxPopCurrent"]


def test_out_of_memory_says_how_much_and_what_to_do(gpu: CudaBackend, cu: Any) -> None:
    cu.fail["cuMemAlloc"] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ExecutionError) as error:
        gpu.allocate(4096)
    line = error.value.line()
    assert "4096 bytes" in line and "CUDA_ERROR_OUT_OF_MEMORY" in line and "free memory" in line


def test_a_launch_passes_grid_threads_and_shared_memory(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel(shared=64 << 10)])
    step = gpu.bind(LAUNCH, {"x": on_gpu(gpu.allocate(20))}, {})
    step()
    (name, function, *rest) = cu.calls[-1]
    assert (name, function, rest[:7]) == (
        "cuLaunchKernel",
        "function add_kernel",
        [3, 1, 1, 256, 1, 1, 64 << 10],
    )
    assert ("cuFuncSetAttribute", "function add_kernel") in [call[:2] for call in cu.calls]


def test_a_kernel_that_waits_by_itself_is_launched_early(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel(shared=1024, waits=True)])
    gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})()
    (name, config, function, _, extra) = cu.calls[-1]
    assert (name, function, extra) == ("cuLaunchKernelEx", "function add_kernel", 0)
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (3, 256, 1024)
    assert config.numAttrs == len(config.attrs) == 1
    assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    cu.fail["cuLaunchKernelEx"] = cu.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ExecutionError, match="launch kernel `add`"):
        gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})()


def test_replaying_and_waiting_is_two_calls_of_the_driver(gpu: CudaBackend, cu: Any) -> None:
    run = gpu.capture([]).and_wait()
    cu.calls.clear()
    run()
    assert cu.names() == ["cuGraphLaunch", "cuStreamSynchronize"]
    cu.calls.clear()
    cu.fail["cuGraphLaunch"] = cu.CUresult.CUDA_ERROR_INVALID_VALUE  # as without a context
    run()
    assert cu.names() == ["cuGraphLaunch", "cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize"]


def test_early_launches_can_be_switched_off(cu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVPLAN_EARLY_LAUNCH", "0")
    gpu = CudaBackend(GPU)
    gpu.load([add_kernel(waits=True)])
    gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})()
    assert cu.calls[-1][0] == "cuLaunchKernel"


def test_code_is_loaded_once_and_only_when_launched(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    assert "cuModuleLoadData" not in cu.names()
    for _ in range(2):
        gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    assert cu.names().count("cuModuleLoadData") == 1


@pytest.mark.parametrize("counts", [True, False])
def test_the_memory_that_code_takes_is_counted_on_request(
    gpu: CudaBackend, cu: Any, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    free = [1 << 36]

    def load(image: bytes) -> str:
        free[0] -= 2 << 20
        return "module"

    monkeypatch.setattr(cu, "_cuModuleLoadData", load, raising=False)
    monkeypatch.setattr(cu, "_cuMemGetInfo", lambda: (free[0], 1 << 37), raising=False)
    gpu.load([add_kernel()])
    noting = Ledger(lambda: gpu.free_nbytes())
    with opened(noting) if counts else nullcontext():
        for _ in range(2):
            gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    assert noting.taken["code"] == (2 << 20 if counts else 0)
    assert ("cuMemGetInfo" in cu.names()) == counts


def test_an_artifact_for_other_gpus_is_refused_at_load(cu: Any) -> None:
    cu.capability = (8, 0)
    backend = CudaBackend(GPU)
    with pytest.raises(DeviceError, match=r"sm_90 \(cubin\)"):
        backend.load([add_kernel()])


def test_ptx_is_used_and_reported(gpu: CudaBackend) -> None:
    gpu.load([add_kernel(form="ptx")])
    assert gpu.uses_ptx == ("add",)


@pytest.mark.parametrize(
    ("form", "data"),
    [
        ("cubin", b""),
        ("cubin", b"\x7fELF"),
        ("cubin", b"\x7fELF\x02".ljust(18, b"\0") + b"\x3e".ljust(46, b"\0")),  # for x86-64
        ("cubin", b".version 8.0\n.target sm_90\n"),
        ("ptx", b"\x7fELF\x02" + bytes(59)),
        ("ptx", b""),
    ],
)
def test_what_is_no_code_is_refused_before_the_driver_sees_it(
    gpu: CudaBackend, cu: Any, form: str, data: bytes
) -> None:
    kernel = add_kernel(form=form)
    damaged = replace(kernel, codes=(replace(kernel.codes[0], data=data),))
    with pytest.raises(ArtifactError, match=f"code of kernel `add` for sm_.0 is no {form}"):
        gpu.load([damaged])
    assert "cuModuleLoadData" not in cu.names()


def test_damaged_code_is_a_device_error(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    cu.fail["cuModuleLoadData"] = cu.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="load kernel `add`") as error:
        gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    assert "aten.add in encoder" in error.value.line()


def test_a_failed_launch_names_the_kernel(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    step = gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    cu.fail["cuLaunchKernel"] = cu.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ExecutionError, match="launch kernel `add`"):
        step()


def test_copies_go_both_ways_and_leave_gaps_alone(gpu: CudaBackend) -> None:
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    there, back = gpu.allocate(24), np.full((2, 5), -1, np.float32)
    operands = {
        "a": on_host(source, DType.FLOAT32),
        "b": on_gpu(there, (2, 3)),
        "c": on_host(back[:, :3], DType.FLOAT32),
    }
    gpu.bind(Copy(CopyKind.H2D, "a", "b"), operands, {})()
    gpu.bind(Copy(CopyKind.D2H, "b", "c"), operands, {})()
    assert np.array_equal(back, np.pad(source, ((0, 0), (0, 2)), constant_values=-1))


@pytest.mark.parametrize(
    ("dtype", "kind", "value"),
    [
        (DType.FLOAT32, np.float32, 1.5),
        (DType.FLOAT64, np.float64, 1.1),
        (DType.INT64, np.int64, -1),
        (DType.INT64, np.int64, 1 << 40),
        (DType.FLOAT16, np.float16, -2.0),
        (DType.BOOL, np.bool_, True),
        (DType.UINT8, np.uint8, 255),
        (DType.FLOAT32, np.float32, float("-inf")),
    ],
)
def test_fill_writes_every_element(gpu: CudaBackend, dtype: DType, kind: Any, value: Any) -> None:
    out = on_gpu(gpu.allocate(7 * dtype.itemsize), (7,), dtype)
    gpu.bind(LibraryCall("fill", (), ("out",), (("value", value),)), {"out": out}, {})()
    raw = bytearray(7 * dtype.itemsize)
    gpu.download(out.address, memoryview(raw))
    assert np.array_equal(np.frombuffer(raw, kind), np.full(7, value, kind))


def test_what_cuda_does_not_serve_is_refused(gpu: CudaBackend) -> None:
    with pytest.raises(DeviceError, match="sort"):
        gpu.bind(LibraryCall("sort", (), ()), {}, {})
    with pytest.raises(ExecutionError, match="runs on the host"):
        gpu.bind(HostCall("aten::sort.out", (), (), ()), {}, {})


def test_a_graph_replays_without_having_run(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    step = gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    replay = gpu.capture([step, step])
    assert replay.nodes == 3
    assert not cu.capturing
    replay()
    assert cu.calls[-1] == ("cuGraphLaunch", "executable", gpu.stream)


def test_a_graph_goes_to_the_callers_stream(gpu: CudaBackend, cu: Any) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 4242

    replay = gpu.capture([])
    gpu.use_stream(Stream())
    replay()
    assert cu.calls[-1] == ("cuGraphLaunch", "executable", 4242)
    gpu.use_stream(None)
    replay()
    assert cu.calls[-1][-1] != 4242
    for wrong in ("stream", True, None.__class__):
        with pytest.raises(UsageError, match="no CUDA stream"):
            gpu.use_stream(wrong)


@pytest.mark.parametrize("broken", [False, True])
def test_a_failed_capture_leaves_the_backend_usable(gpu: CudaBackend, cu: Any, broken: bool) -> None:
    def fails() -> None:
        raise ExecutionError("cublasLtMatmul failed", why="CUBLAS_STATUS_INTERNAL_ERROR")

    cu.breaks_in_capture, before = broken, gpu.stream
    with pytest.raises(ExecutionError, match="INTERNAL_ERROR"):
        gpu.capture([fails])
    cu.breaks_in_capture = False
    assert not cu.capturing
    assert (gpu.stream != before) is broken
    gpu.capture([])()
    gpu.synchronize()


def test_instantiation_errors_are_execution_errors(gpu: CudaBackend, cu: Any) -> None:
    cu.fail["cuGraphInstantiate"] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ExecutionError, match="instantiate"):
        gpu.capture([])
    assert "cuGraphDestroy" in cu.names()


def test_a_graph_is_destroyed_with_its_step(gpu: CudaBackend, cu: Any) -> None:
    step = gpu.capture([])
    assert "cuGraphExecDestroy" not in cu.names()
    del step
    assert cu.names().count("cuGraphExecDestroy") == 1


def test_closing_twice_releases_once(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    replay = gpu.capture([])
    gpu.close()
    gpu.close()
    for name in ("cuModuleUnload", "cuGraphExecDestroy", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"):
        assert cu.names().count(name) == 1
    with pytest.raises(ExecutionError, match="released"):
        replay()


def test_a_fork_shares_code_and_not_the_stream(gpu: CudaBackend, cu: Any) -> None:
    gpu.load([add_kernel()])
    fork = gpu.fork()
    fork.bind(LAUNCH, {"x": on_gpu(256)}, {})
    gpu.bind(LAUNCH, {"x": on_gpu(256)}, {})
    assert cu.names().count("cuModuleLoadData") == 1
    assert fork.stream != gpu.stream
    fork.close()
    assert "cuModuleUnload" not in cu.names()


def test_a_gpu_that_is_not_there_is_a_device_error(cu: Any) -> None:
    with pytest.raises(DeviceError, match="no GPU 3"):
        CudaBackend(Device("cuda", 0), 3)


def test_no_driver_is_exit_6_with_a_mend(monkeypatch: pytest.MonkeyPatch, cu: Any) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so was not found\nmore")

    monkeypatch.setattr(cu, "cuInit", missing, raising=False)
    with pytest.raises(DeviceError) as error:
        CudaBackend(GPU)
    assert error.value.line() == (
        "error: there is no CUDA driver (code 6): libcuda.so was not found; run it with `--device emulator`, "
        "or on a machine with an NVIDIA GPU and its driver"
    )
    assert driver.cuda_available() == (False, "there is no CUDA driver: libcuda.so was not found")


def test_devices_are_described(cu: Any) -> None:
    assert [(info.name, info.architecture, info.multiprocessors) for info in driver.devices()] == [
        ("Fake GPU", "sm_90", 132)
    ]
    assert driver.driver_version() == "13.1"
    assert driver.cuda_available() == (True, "")

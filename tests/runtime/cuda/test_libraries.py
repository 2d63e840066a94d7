"""cuBLASLt and cuDNN calls against stand-ins that record: what is asked of the library, and what is refused."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.cuda.ledger import Ledger, opened
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import DeviceError, ExecutionError
from devplan.runtime.program import Device, LibraryCall

GPU = Device("cuda", 0)


def dense(shape: tuple[int, ...], address: int = 1 << 20, dtype: DType = DType.FLOAT16) -> Operand:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return Operand(address, dtype, shape, tuple(reversed(strides)), GPU)


A, B, OUT, BIAS, SPACE = (
    dense((8, 16)),
    dense((16, 24)),
    dense((8, 24)),
    dense((24,)),
    dense((64,), 1 << 21, DType.UINT8),
)
OPERANDS = {"a": A, "b": B, "out": OUT, "bias": BIAS, "space": SPACE}


def matmul(*reads: str, **attributes: Any) -> LibraryCall:
    return LibraryCall("matmul", reads, ("out", "space"), tuple(attributes.items()), "space")


def test_a_product_is_bound_once_and_run_with_the_first_algorithm(gpu: CudaBackend, lt: Any) -> None:
    step = gpu.bind(matmul("a", "b"), OPERANDS, {})
    step()
    step()
    assert lt.products == [0, 0]


@pytest.mark.parametrize(
    ("epilogue", "has_bias", "number"),
    [("none", False, 1), ("none", True, 4), ("relu", False, 2), ("relu", True, 6), ("gelu_tanh", True, 36)],
)
def test_epilogues_are_the_librarys(
    gpu: CudaBackend, lt: Any, epilogue: str, has_bias: bool, number: int
) -> None:
    reads = ("a", "b", "bias") if has_bias else ("a", "b")
    gpu.bind(matmul(*reads, epilogue=epilogue, has_bias=has_bias), OPERANDS, {})
    assert ("MatmulDesc", 7, number.to_bytes(4, "little")) in lt.attributes
    assert (("MatmulDesc", 8, BIAS.address.to_bytes(8, "little")) in lt.attributes) is has_bias


def test_the_librarys_tanh_gelu_never_stands_for_the_exact_one(gpu: CudaBackend, lt: Any) -> None:
    with pytest.raises(DeviceError, match="gelu_erf"):
        gpu.bind(matmul("a", "b", epilogue="gelu_erf"), OPERANDS, {})


def test_only_the_planned_workspace_is_offered(gpu: CudaBackend, lt: Any) -> None:
    gpu.bind(matmul("a", "b"), OPERANDS, {})
    assert ("MatmulPreference", 1, (64).to_bytes(8, "little")) in lt.attributes


def test_half_precision_sums_stay_float32(gpu: CudaBackend, lt: Any) -> None:
    gpu.bind(matmul("a", "b"), OPERANDS, {})
    assert ("MatmulPreference", 3, (2).to_bytes(4, "little")) in lt.attributes


def test_the_library_is_told_of_addresses_that_are_less_aligned(gpu: CudaBackend, lt: Any) -> None:
    gpu.bind(matmul("a", "b"), OPERANDS | {"b": dense((16, 24), (1 << 20) + 34)}, {})
    told = {
        attribute: int.from_bytes(raw, "little")
        for kind, attribute, raw in lt.attributes
        if kind == "MatmulPreference"
    }
    assert (told[5], told[6], told[7], told[8]) == (2, 256, 256, 256)  # the library's first operand is b


def test_a_tuned_algorithm_is_taken_by_key(gpu: CudaBackend, lt: Any) -> None:
    library = gpu.library("cublaslt")
    key = library.key(matmul("a", "b"), OPERANDS)
    assert library.algorithms(matmul("a", "b"), OPERANDS) == 3
    gpu.tuning = {key: 2}
    gpu.bind(matmul("a", "b"), OPERANDS, {})()
    gpu.tuning = {key: 99}  # from another version of the library
    gpu.bind(matmul("a", "b"), OPERANDS, {})()
    assert lt.products == [2, 0]


@pytest.mark.parametrize(
    "change",
    [{"a": dense((8, 16), dtype=DType.FLOAT32), "b": dense((16, 24), dtype=DType.FLOAT32), "out": dense((8, 24), dtype=DType.FLOAT32)},
     {"b": Operand(1 << 20, DType.FLOAT16, (16, 24), (1, 16), GPU)},
     {"space": dense((128,), 1 << 21, DType.UINT8)},
     {"a": dense((8, 16), (1 << 20) + 2)}],
)  # fmt: skip
def test_keys_tell_products_apart(gpu: CudaBackend, lt: Any, change: dict[str, Operand]) -> None:
    library = gpu.library("cublaslt")
    assert library.key(matmul("a", "b"), OPERANDS) != library.key(matmul("a", "b"), OPERANDS | change)


def test_no_algorithm_and_failures_are_errors_that_name_the_product(gpu: CudaBackend, lt: Any) -> None:
    lt.status["Matmul"] = 13
    step = gpu.bind(matmul("a", "b"), OPERANDS, {})
    with pytest.raises(ExecutionError, match="CUBLAS_STATUS_EXECUTION_FAILED for matmul 1x8x24x16 float16"):
        step()
    lt.offered = 0
    with pytest.raises(ExecutionError, match="no algorithm"):
        gpu.bind(matmul("a", "b"), OPERANDS | {"space": dense((8,), 1 << 21, DType.UINT8)}, {})


def test_a_missing_library_says_how_to_install_it(gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("cublasLt: not found\nsearched here and there")

    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(load_nvidia_dynamic_lib=missing))
    with pytest.raises(DeviceError) as error:
        gpu.bind(matmul("a", "b"), OPERANDS, {})
    assert error.value.line() == (
        "error: cuBLASLt was not found (code 6): cublasLt: not found; "
        'install it: `pip install "devplan[cuda]"`, or export with `--no-library-calls`'
    )


# --- cuDNN ----------------------------------------------------------------------------------------


class Tensor:
    """A tensor of the graph."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def setter(value: Any) -> Tensor:
            self.given[name.removeprefix("set_")] = value
            return self

        return setter


class Graph:
    """`cudnn.pygraph`: records nodes; engines need ``needs[index]`` bytes."""

    def __init__(self, module: FakeCudnn, **_: Any) -> None:
        self.module, self.nodes, self.limit, self.notes = module, [], 0, []
        module.graphs.append(self)

    def tensor(self, **given: Any) -> Tensor:
        return Tensor(**given)

    def __getattr__(self, name: str) -> Any:
        def node(*arguments: Any, **given: Any) -> Any:
            self.nodes.append((name, given))
            return (Tensor(), None) if name == "sdpa" else Tensor()

        return node

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        self.limit = nbytes

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.notes = notes

    def get_execution_plan_count(self) -> int:
        return len(self.module.needs)

    def build_plans(self, policy: Any) -> None:
        if not [need for need in self.module.needs if need <= self.limit]:
            raise RuntimeError("no engine\nand a long story")

    def get_workspace_size(self) -> int:
        return next(need for need in self.module.needs if need <= self.limit)

    def build_plan_at_index(self, index: int) -> None:
        if self.module.needs[index] > self.limit:
            raise RuntimeError("barred")

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.module.needs[index]

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        self.module.executed.append((None, sorted(pointers.values()), workspace))

    def execute_plan_at_index(self, pointers: Any, workspace: int, index: int, handle: Any) -> None:
        self.module.executed.append((index, sorted(pointers.values()), workspace))


class _Enumeration:
    def __getattr__(self, name: str) -> str:
        return name


class FakeCudnn:
    """The module `cudnn`."""

    cudnnGraphNotSupportedError = NotImplementedError
    data_type = heur_mode = numerical_note = build_plan_policy = _Enumeration()

    def __init__(self) -> None:
        self.needs, self.graphs, self.executed, self.streams = [0], [], [], []

    def pygraph(self, **given: Any) -> Graph:
        return Graph(self, **given)

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> str:
        return "handle"

    def destroy_handle(self, handle: str) -> None:
        return

    def set_stream(self, handle: str, stream: int) -> None:
        self.streams.append(stream)


@pytest.fixture
def dnn(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    fake = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", fake)  # type: ignore[arg-type]
    return fake


def convolution(**changes: Any) -> LibraryCall:
    attributes = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1} | changes
    reads = ("x", "w", "bias") if attributes.get("has_bias") else ("x", "w")
    return LibraryCall("convolution", reads, ("y", "space"), tuple(attributes.items()), "space")


IMAGES = {
    "x": dense((1, 8, 6, 6), 256), "w": dense((4, 8, 3, 3), 512), "y": dense((1, 4, 6, 6), 768),
    "bias": dense((4,), 1024), "space": SPACE,
}  # fmt: skip


KINDS = ("conv_fprop", "conv_dgrad", "bias", "relu", "sdpa")


def names(graph: Graph) -> list[str]:
    return [name for name, _ in graph.nodes if name in KINDS]


def test_bias_and_relu_join_the_convolution(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    step = gpu.bind(convolution(has_bias=True, activation="relu"), IMAGES, {})
    assert names(dnn.graphs[0]) == ["conv_fprop", "bias", "relu"]
    step()
    assert dnn.executed == [(None, [256, 512, 768, 1024], SPACE.address)]
    assert dnn.streams == [gpu.stream]


def test_one_dimension_is_made_two(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    line = {
        "x": dense((2, 8, 50), 256),
        "w": dense((4, 8, 5), 512),
        "y": dense((2, 4, 50), 768),
        "space": SPACE,
    }
    gpu.bind(convolution(stride=(2,), padding=(2,), dilation=(3,)), line, {})
    (_, given), *_ = [node for node in dnn.graphs[0].nodes if node[0] == "conv_fprop"]
    assert given["image"].given["dim"] == [2, 8, 1, 50]
    assert given["image"].given["stride"] == [400, 50, 50, 1]
    assert (given["stride"], given["padding"], given["dilation"]) == ([1, 2], [0, 2], [1, 3])


def test_a_transposed_convolution_is_a_gradient(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    gpu.bind(convolution(transposed=True), IMAGES, {})
    assert names(dnn.graphs[0]) == ["conv_dgrad"]


@pytest.mark.parametrize(("dtype", "allow", "exact"), [
    (DType.FLOAT32, False, True), (DType.FLOAT32, True, False), (DType.FLOAT16, False, False),
])  # fmt: skip
def test_float32_means_float32(
    gpu: CudaBackend, dnn: FakeCudnn, dtype: DType, allow: bool, exact: bool
) -> None:
    images = {name: dense(o.shape, o.address, dtype) for name, o in IMAGES.items() if name != "space"}
    gpu.bind(convolution(allow_tf32=allow), images | {"space": SPACE}, {})
    assert dnn.graphs[0].notes == (["TENSOR_CORE", "DOWN_CONVERT_INPUTS"] if exact else [])


def test_a_residual_is_added_before_the_bias(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    """The order for which cuDNN has kernels; any other it compiles, and such kernels read the residual early."""
    call = convolution(has_bias=True, has_added=True, activation="relu")
    operands = IMAGES | {"added": dense((1, 4, 6, 6), 2048)}
    gpu.bind(replace(call, reads=("x", "w", "bias", "added")), operands, {})
    made = [name for name, _ in dnn.graphs[0].nodes]
    assert [name for name in made if name in ("add", *KINDS)] == ["conv_fprop", "add", "bias", "relu"]


def test_a_recorded_cudnn_kernel_waits_for_the_end_of_the_one_before(
    gpu: CudaBackend, dnn: FakeCudnn, cu: Any
) -> None:
    step = gpu.bind(convolution(), IMAGES, {})
    cu.calls.clear()
    gpu.capture([step, step])
    added = [call[1:] for call in cu.calls if call[0] == "cuGraphAddEmptyNode"]
    assert added == [(77, ["last node"], 1)] * 2
    assert [call[2] for call in cu.calls if "UpdateCapture" in call[0]] == [["empty node"]] * 2
    assert "cuMemsetD32Async" not in cu.names()


def test_a_cudnn_kernel_on_a_stream_waits_too(gpu: CudaBackend, dnn: FakeCudnn, cu: Any) -> None:
    step = gpu.bind(convolution(), IMAGES, {})
    cu.calls.clear()
    step()
    step()
    assert cu.names().count("cuMemsetD32Async") == 2 and cu.names().count("cuMemAlloc") == 1
    gpu.close()
    assert cu.names().count("cuMemFree") == 1


def test_the_memory_that_a_library_takes_is_counted_on_request(
    gpu: CudaBackend, dnn: FakeCudnn, cu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 36]

    def create_handle() -> str:
        free[0] -= 2 << 20
        return "handle"

    monkeypatch.setattr(dnn, "create_handle", create_handle)
    monkeypatch.setattr(cu, "_cuMemGetInfo", lambda: (free[0], 1 << 37), raising=False)
    with opened(Ledger(lambda: free[0])) as noting:
        for _ in range(2):
            gpu.bind(convolution(), IMAGES, {})
    assert noting.taken["code"] == 2 << 20


def test_what_calls_are_offered_and_need_is_known(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    dnn.needs = [48]
    gpu.bind(convolution(), IMAGES, {})
    (use,) = gpu.workspaces.values()
    assert (use.function, use.offered, use.needed) == ("convolution", 64, 48)


def test_engines_keep_within_the_planned_workspace(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    dnn.needs = [1000, 64]
    gpu.bind(convolution(), IMAGES, {})
    assert dnn.graphs[0].limit == 64
    dnn.needs = [1000]
    with pytest.raises(DeviceError, match="within 64 bytes of workspace: no engine"):
        gpu.bind(convolution(), IMAGES, {})


def test_a_tuned_engine_is_taken_by_key(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    dnn.needs = [0, 1000, 32]
    library = gpu.library("cudnn")
    assert library.algorithms(convolution(), IMAGES) == 3
    with pytest.raises(DeviceError):
        library.bind(convolution(), IMAGES, 1)
    gpu.tuning = {library.key(convolution(), IMAGES): 2}
    gpu.bind(convolution(), IMAGES, {})()
    gpu.bind(convolution(padding=(0, 0)), IMAGES, {})()
    assert [index for index, _, _ in dnn.executed] == [2, None]


@pytest.mark.parametrize("hint", [1, 7])
def test_a_tuned_engine_that_cannot_be_built_leaves_the_choice_to_cudnn(
    gpu: CudaBackend, dnn: FakeCudnn, hint: int
) -> None:
    dnn.needs = [0, 1000, 32]  # the second needs more workspace than there is, an eighth does not exist
    gpu.tuning = {gpu.library("cudnn").key(convolution(), IMAGES): hint}
    gpu.bind(convolution(), IMAGES, {})()
    assert [index for index, _, _ in dnn.executed] == [None]


def test_a_version_is_told_without_beginning_a_library(gpu: CudaBackend, dnn: FakeCudnn, lt: Any) -> None:
    assert gpu.library_version("cublaslt") == 130100 == gpu.library("cublaslt").version
    assert gpu.library_version("cublaslt") == 130100
    assert gpu.library_version("cudnn") == gpu.library("cudnn").version
    with pytest.raises(DeviceError, match="no library `cufft`"):
        gpu.library_version("cufft")


def test_attention_gets_its_scale_and_mask(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    heads = {name: dense((1, 4, 8, 16), 256 * place) for place, name in enumerate("qkvo", 1)}
    heads["mask"] = dense((8, 8), 4096)
    attributes = (("scale", None), ("is_causal", False), ("has_mask", True))
    gpu.bind(LibraryCall("attention", ("q", "k", "v", "mask"), ("o",), attributes), heads, {})
    (_, given), *_ = [node for node in dnn.graphs[0].nodes if node[0] == "sdpa"]
    assert (given["attn_scale"], given["use_causal_mask"], given["generate_stats"]) == (0.25, False, False)
    assert given["bias"].given["dim"] == [1, 1, 8, 8]


def test_what_cudnn_lacks_is_refused(gpu: CudaBackend, dnn: FakeCudnn) -> None:
    mixed = IMAGES | {"w": dense((4, 8, 3, 3), 512, DType.FLOAT32)}
    with pytest.raises(DeviceError, match="one floating type"):
        gpu.bind(convolution(), mixed, {})
    with pytest.raises(DeviceError, match="no activation `gelu`"):
        gpu.bind(convolution(activation="gelu"), IMAGES, {})
    heads = {name: dense((1, 4, 8, 16), 256, DType.FLOAT32) for name in "qkvo"}
    with pytest.raises(DeviceError, match="no fused attention of float32"):
        gpu.bind(LibraryCall("attention", ("q", "k", "v"), ("o",), ()), heads, {})


def test_a_missing_cudnn_says_how_to_install_it(gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(DeviceError, match="cuDNN is not usable") as error:
        gpu.bind(convolution(), IMAGES, {})
    assert "devplan[cuda]" in error.value.hint


def test_loading_cudnn_never_imports_torch(
    gpu: CudaBackend, dnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    refused: list[str] = []

    def create_handle() -> None:
        with pytest.raises(ImportError, match="for cuDNN's sake"):
            importlib.import_module("torch")
        refused.append("handle")

    monkeypatch.setattr(dnn, "create_handle", create_handle)
    gpu.bind(convolution(), IMAGES, {})
    assert refused == ["handle"] and "torch" not in sys.modules

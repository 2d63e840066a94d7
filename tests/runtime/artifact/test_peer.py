"""ExecuTorch's own reader and runtime take our files for what we say they are.

Needs the peer, which no one else does: ``pip install --no-deps --target DIR executorch==1.5.1 ruamel.yaml
tabulate pandas``, then ``DEVPLAN_EXECUTORCH=DIR pytest tests/runtime/artifact/test_peer.py``. It runs in a
process of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from devplan.planner import plan
from devplan.runtime.artifact import WrittenFile, read, write
from devplan.runtime.artifact.weights import Weights
from devplan.runtime.describe import describe
from devplan.runtime.dtypes import DType
from devplan.runtime.expr import Expr
from devplan.runtime.program import (
    CPU,
    Argument,
    Constant,
    Copy,
    CopyKind,
    HostCall,
    Instruction,
    Jump,
    Method,
    Port,
    Program,
    Ref,
    Region,
    Role,
    Storage,
    Symbol,
    Value,
)

Array = npt.NDArray[Any]
TARGET = os.environ.get("DEVPLAN_EXECUTORCH", "")


class Peer:
    """The peer's process, started once; `ask` sends a request of `peer.py`."""

    def __init__(self) -> None:
        path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), TARGET) if part)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def reply(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("reply "):
                return json.loads(line.removeprefix("reply "))
        return None

    def ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(part) for part in request]) + "\n")
        self._process.stdin.flush()
        found = self.reply()
        assert not (isinstance(found, dict) and "error" in found), found["error"]
        return found

    def view(self, path: Path) -> dict[str, Any]:
        """What its reader sees."""
        found: dict[str, Any] = self.ask("read", path)
        return found

    def run(self, path: Path, inputs: Mapping[str, Array], *data: Path) -> list[Array]:
        """What its runtime computes."""
        source, destination = path.with_suffix(".in.npz"), path.with_suffix(".out.npz")
        np.savez(source, **inputs)
        self.ask("run", path, source, destination, *data)
        with np.load(destination) as arrays:
            return [arrays[name] for name in arrays.files]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    if not TARGET and importlib.util.find_spec("executorch") is None:
        pytest.skip("executorch is not installed")
    process = Peer()
    if process.reply() is None:
        pytest.fail("executorch is installed, but cannot be imported")
    yield process
    process.close()


pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Host:
    """A method of ATen kernels on the host, built step by step; constants are added where they are used."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.body: list[Instruction] = []
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.symbols: list[Symbol] = []
        self.constants: list[Constant] = []
        self.data: dict[str, bytes] = {}

    def value(self, name: str, shape: tuple[Any, ...], dtype: DType = DType.FLOAT32, **storage: Any) -> str:
        sizes = [size if isinstance(size, int) else 8 for size in shape]
        strides = tuple(int(np.prod(sizes[index + 1 :])) for index in range(len(shape)))
        bound = int(np.prod(sizes)) * dtype.itemsize
        is_dynamic = any(isinstance(size, Expr) for size in shape)
        nbytes = Expr(f"s0 * {bound // 8}") if is_dynamic else bound
        self.storages.append(Storage(f"s_{name}", CPU, nbytes, max_nbytes=bound, **storage))
        self.values.append(Value(name, f"s_{name}", dtype, shape, strides))
        return name

    def input(self, name: str, shape: tuple[Any, ...], dtype: DType = DType.FLOAT32) -> str:
        self.inputs.append(Port(name, self.value(name, shape, dtype, role=Role.INPUT)))
        return name

    def output(self, name: str) -> None:
        self.outputs.append(Port(name, name))

    def constant(self, name: str, array: Array) -> str:
        data = np.ascontiguousarray(array, np.float32).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.data[digest] = data
        self.value(name, array.shape, role=Role.CONSTANT, content=name)
        strides = self.values[-1].strides
        self.constants.append(
            Constant(name, digest, len(data), DType.FLOAT32, array.shape, tuple(map(int, map(str, strides))))
        )
        return name

    def call(self, target: str, arguments: tuple[Argument, ...], *results: str) -> None:
        reads = [item for item in arguments if isinstance(item, Ref)]
        reads += [
            inner for item in arguments if isinstance(item, tuple) for inner in item if isinstance(inner, Ref)
        ]
        self.body.append(HostCall(target, arguments, tuple(item.name for item in reads), results, 0))

    def write(self, path: Path, weights: Weights = "embed") -> WrittenFile:
        method = Method(
            "forward", tuple(self.inputs), tuple(self.outputs), tuple(self.storages), tuple(self.values),
            tuple(self.body), (Region(CPU, "aten", len(self.body)),), tuple(self.symbols),
        )  # fmt: skip
        planned = plan(Program((method,), tuple(self.constants)))
        sources = {digest: (lambda data=data: data) for digest, data in self.data.items()}
        return write(path, planned, sources, weights=weights)


def assert_agreement(peer: Peer, path: Path) -> None:
    """The peer's view against `inspect`: methods, ports, buffers, devices, constants."""
    artifact = read(path)
    document, view = describe(artifact), peer.view(path)
    assert [entry["name"] for entry in view["plans"]] == [method["name"] for method in document["methods"]]
    for seen, told in zip(view["plans"], document["methods"], strict=True):
        for direction in ("inputs", "outputs"):
            tensors = [seen["values"][number] for number in seen[direction]]
            if direction == "outputs":  # sizes that depend on data come behind them
                counts = tensors[len(told[direction]) :]
                assert [tensor["scalar_type"] for tensor in counts] == [DType.INT64.scalar_type] * len(
                    told["counts"]
                )
                tensors = tensors[: len(told[direction])]
            for tensor, port in zip(tensors, told[direction], strict=True):
                if "literal" in port:
                    assert tensor is None
                    continue
                assert tensor["sizes"] == port["max_shape"]
                assert tensor["device"] == port["device"]
                assert DType.from_scalar_type(tensor["scalar_type"]) is DType.from_name(port["dtype"])
        arenas = {arena["memory_id"]: arena for arena in told["arenas"]}
        assert seen["buffer_sizes"][0] == 0
        for memory_id, nbytes in enumerate(seen["buffer_sizes"][1:], 1):
            assert nbytes == arenas.get(memory_id, {"planned_bytes": 0})["planned_bytes"]
            assert seen["buffer_devices"].get(str(memory_id), "cpu") == arenas[memory_id]["device"]
        allocations = {
            (memory_id, item["offset"])
            for memory_id, arena in arenas.items()
            for item in arena["allocations"]
        }
        for tensor in seen["values"]:
            if tensor is not None and tensor["allocation"]:
                assert tuple(tensor["allocation"]) in allocations
        assert set(seen["delegates"]) <= {"DevplanBackend"}
        assert all(json.loads(tree)[0] == 1 for tree in seen["trees"])
    assert document["constants"]["count"] == len(artifact.planned.program.constants)
    assert "devplan.manifest" in view["named"]


def test_the_reader_agrees_on_a_device_program(sample: Any, peer: Peer, tmp_path: Path) -> None:
    write(tmp_path / "m.pte", sample.planned, sample.sources())
    assert_agreement(peer, tmp_path / "m.pte")
    (seen,) = peer.view(tmp_path / "m.pte")["plans"]
    assert seen["buffer_sizes"] == [0, 768, 768, 256]
    assert seen["buffer_devices"] == {"2": "cuda:0", "3": "cuda:0"}
    assert seen["calls"] == [
        "KernelCall", "DelegateCall", "KernelCall", "KernelCall", "KernelCall", "JumpFalseCall", "KernelCall",
    ]  # fmt: skip
    assert seen["operators"][:2] == ["et_copy::_h2d_copy.out", "et_copy::_d2h_copy.out"]


def linear_relu() -> tuple[Host, Array, Array]:
    generator = np.random.default_rng(0)
    weight, bias = generator.standard_normal((16, 8)), generator.standard_normal(8)
    host = Host()
    x = host.input("x", (4, 16))
    w, b = host.constant("weight", weight), host.constant("bias", bias)
    host.call("aten::addmm.out", (Ref(b), Ref(x), Ref(w), 1, 1), host.value("h", (4, 8)))
    host.call("aten::relu.out", (Ref("h"),), host.value("y", (4, 8), role=Role.OUTPUT))
    host.output("y")
    return host, weight.astype(np.float32), bias.astype(np.float32)


def test_the_reader_finds_the_constants_bytes(peer: Peer, tmp_path: Path) -> None:
    host, weight, bias = linear_relu()
    path = host.write(tmp_path / "m.pte").path
    assert_agreement(peer, path)
    found = peer.view(path)["constants"]
    # Each runs up to the next one's beginning there, so the padding between them counts for the first.
    assert found[1] == hashlib.sha256(weight.tobytes()).hexdigest()
    assert found[2] == hashlib.sha256(bias.tobytes()).hexdigest()


def test_the_runtime_executes_linear_and_relu(peer: Peer, tmp_path: Path) -> None:
    host, weight, bias = linear_relu()
    path = host.write(tmp_path / "m.pte").path
    x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    (y,) = peer.run(path, {"x": x})
    np.testing.assert_allclose(y, np.maximum(x @ weight + bias, 0), atol=1e-5)


def test_the_reader_and_the_runtime_take_our_data_file(peer: Peer, tmp_path: Path) -> None:
    host, weight, bias = linear_relu()
    written = host.write(tmp_path / "m.pte", "external")
    assert written.data is not None
    assert peer.ask("data", written.data) == {
        "weight": {
            "scalar_type": 6, "sizes": [16, 8], "dim_order": [0, 1], "sha256": hashlib.sha256(weight.tobytes()).hexdigest(),
        },
        "bias": {
            "scalar_type": 6, "sizes": [8], "dim_order": [0], "sha256": hashlib.sha256(bias.tobytes()).hexdigest(),
        },
    }  # fmt: skip
    x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    (y,) = peer.run(written.path, {"x": x}, written.data)
    np.testing.assert_allclose(y, np.maximum(x @ weight + bias, 0), atol=1e-5)


def test_the_runtime_executes_several_results_lists_and_copies(peer: Peer, tmp_path: Path) -> None:
    """`topk` has two results, `cat` takes a list of tensors, `sum` a list of integers."""
    host = Host()
    x = host.input("x", (4, 16))
    host.call(
        "aten::topk.values",
        (Ref(x), 3, -1, True, True),
        host.value("best", (4, 3)),
        host.value("at", (4, 3), DType.INT64),
    )
    host.value("again", (4, 3))
    host.body.append(Copy(CopyKind.LOCAL, "best", "again"))
    host.call("aten::cat.out", ((Ref("again"), Ref(x)), 1), host.value("both", (4, 19)))
    host.call("aten::sum.IntList_out", (Ref("both"), (1,), True, None), host.value("total", (4, 1)))
    host.call("aten::mul.Scalar_out", (Ref("total"), 0.5), host.value("half", (4, 1)))
    for name in ("best", "at", "half"):
        host.output(name)
    path = host.write(tmp_path / "m.pte").path
    assert_agreement(peer, path)
    x_data = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    best, at, half = peer.run(path, {"x": x_data})
    order = np.argsort(-x_data, axis=1)[:, :3]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(best, np.take_along_axis(x_data, order, 1))
    np.testing.assert_allclose(
        half, (best.sum(1, keepdims=True) + x_data.sum(1, keepdims=True)) / 2, atol=1e-5
    )


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_the_runtime_takes_our_jumps(value: float, peer: Peer, tmp_path: Path) -> None:
    """`y = x + 1 if any(x > 0) else x - 1`, with a conditional and an unconditional jump."""
    host = Host()
    x = host.input("x", (4,))
    host.call("aten::gt.Scalar_out", (Ref(x), 0), host.value("positive", (4,), DType.BOOL))
    host.call("aten::any.all_out", (Ref("positive"),), host.value("flag", (), DType.BOOL))
    host.body.append(Jump(5, "flag"))
    host.value("y", (4,), role=Role.OUTPUT)
    host.call("aten::add.Scalar_out", (Ref(x), 1, 1), "y")
    host.body.append(Jump(6))
    host.call("aten::add.Scalar_out", (Ref(x), -1, 1), "y")
    host.output("y")
    path = host.write(tmp_path / "m.pte").path
    (y,) = peer.run(path, {"x": np.full(4, value, np.float32)})
    np.testing.assert_array_equal(y, np.full(4, 2 * value, np.float32))


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_runtime_takes_dynamic_shapes(rows: int, peer: Peer, tmp_path: Path) -> None:
    host = Host()
    host.symbols.append(Symbol("s0", 1, 8, "x", 0))
    x = host.input("x", (Expr("s0"), 4))
    host.call("aten::relu.out", (Ref(x),), host.value("y", (Expr("s0"), 4), role=Role.OUTPUT))
    host.output("y")
    path = host.write(tmp_path / "m.pte").path
    assert_agreement(peer, path)
    data = np.random.default_rng(3).standard_normal((rows, 4)).astype(np.float32)
    (y,) = peer.run(path, {"x": data})
    np.testing.assert_array_equal(y, np.maximum(data, 0))


def test_the_runtime_takes_permuted_views_in_their_portable_form(peer: Peer, tmp_path: Path) -> None:
    """`x @ w.T + b` with a transposed window onto the weight, and a copy of a permuted view."""
    generator = np.random.default_rng(4)
    weight, bias = generator.standard_normal((8, 16)), generator.standard_normal(8)
    host = Host()
    x = host.input("x", (4, 16))
    w, b = host.constant("weight", weight), host.constant("bias", bias)
    host.values.append(Value("turned", f"s_{w}", DType.FLOAT32, (16, 8), (1, 16)))
    host.call("aten::addmm.out", (Ref(b), Ref(x), Ref("turned"), 1, 1), host.value("h", (4, 8)))
    host.values.append(Value("across", "s_h", DType.FLOAT32, (8, 2, 2), (1, 8, 16)))
    host.call(
        "aten::clone.out",
        (Ref("across"), "torch.contiguous_format"),
        host.value("y", (8, 2, 2), role=Role.OUTPUT),
    )
    host.output("y")
    path = host.write(tmp_path / "m.pte").path
    assert_agreement(peer, path)
    assert peer.view(path)["plans"][0]["operators"] == ["aten::linear.out", "aten::permute_copy.out"]
    data = generator.standard_normal((4, 16)).astype(np.float32)
    (y,) = peer.run(path, {"x": data})
    h = data @ weight.T.astype(np.float32) + bias.astype(np.float32)
    np.testing.assert_allclose(y, h.reshape(2, 2, 8).transpose(2, 1, 0), atol=1e-5)


def test_the_runtime_executes_an_exported_model(peer: Peer, tmp_path: Path) -> None:
    """Convolution, batch norm, pooling, a permuted copy and a linear layer, exported for the cpu."""
    torch = pytest.importorskip("torch")
    from devplan.passes.api import export

    class Permute(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)

    torch.manual_seed(0)
    nn = torch.nn
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.MaxPool2d(2), Permute())
    model = nn.Sequential(*body, nn.Linear(128, 10), nn.Sigmoid()).eval()
    x = torch.randn(2, 3, 8, 8)
    path = export(model, (x,), device="cpu").write(tmp_path / "m.pte")
    assert_agreement(peer, path)
    (y,) = peer.run(path, {"x": x.numpy()})
    np.testing.assert_allclose(y, model(x).detach().numpy(), atol=1e-5)


def test_the_runtime_executes_a_program_with_buckets_by_the_plan_at_the_bound(
    peer: Peer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from devplan.passes.api import export

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    shapes = ({0: torch.export.Dim("batch", max=8)},)
    x = torch.randn(8, 8)
    exported = export(model, (x,), dynamic_shapes=shapes, device="cpu", buckets={"batch": [2, 8]})
    path = exported.write(tmp_path / "m.pte")
    assert [bucket["sizes"] for bucket in describe(read(path))["methods"][0]["buckets"]] == [
        {"batch": 2},
        {"batch": 8},
    ]
    assert_agreement(peer, path)
    (y,) = peer.run(path, {"x": x.numpy()})
    np.testing.assert_allclose(y, model(x).detach().numpy(), atol=1e-5)


def test_the_reader_finds_a_size_that_depends_on_data_behind_results_at_their_bound(
    peer: Peer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from devplan.passes.api import export

    class Positive(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x > 0).nonzero() * 2

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    path = export(Positive(), (x,), device="cpu").write(tmp_path / "m.pte")
    assert_agreement(peer, path)
    assert len(peer.view(path)["plans"][0]["outputs"]) == 2

"""Exports without weights: nothing of them is in memory or in the artifact, and files give them at load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplan.devplan_cli.tensor_files import write_many
from devplan.passes.export import ExportResult, export
from devplan.passes.options import ExportOptions
from devplan.passes.source.hollow import without_weights
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.passes.source.state_dict import constants_with
from devplan.runtime import load, load_planned
from devplan.runtime.artifact import read, write
from devplan.runtime.artifact.weights import GIVEN, REFERENCE
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError, DevplanError, UsageError
from devplan.runtime.tensors.host import HostTensor
from devplan.runtime.weights.recipes import Part, Recipe
from devplan.runtime.weights.safetensors import open_safetensors
from devplan.runtime.weights.supply import Supply

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
WORDS = torch.arange(6)[None]
IMAGE = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)


class Net(torch.nn.Module):
    """Projections that are merged, a tied weight, statistics, a convolution, a table, and state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 16)
        self.key, self.query = torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(16, 8)
        self.back = torch.nn.Linear(16, 20, bias=False)
        self.back.weight = self.words.weight
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.register_buffer("table", torch.linspace(0, 1, 16), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, words: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(1)
        x = self.words(words) * self.table
        return self.key(x) * self.query(x) + self.count, self.back(x), self.norm(self.conv(image))


def model() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.norm.running_mean.normal_()
        net.norm.running_var.uniform_(0.5, 1)
    return net


@cache
def hollow(**options: Any) -> ExportResult:
    """The model built and exported without its weights."""
    with without_weights():
        net = Net().eval()
    assert all(parameter.is_meta for parameter in net.parameters())
    method = MethodSource("forward", net, (WORDS, IMAGE))
    given: dict[str, Any] = {"architectures": ("sm_80",), "weights": "none", **options}
    return export(ModelSource("net", (method,)), ExportOptions(**given))


def saved() -> dict[str, Any]:
    """What a checkpoint holds: a tied tensor once, and no state of the runtime."""
    held = {name: t.detach().numpy() for name, t in model().state_dict().items()}
    return {name: array for name, array in held.items() if name not in ("count", "back.weight")}


def wanted(dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    with torch.no_grad():
        return [t.float().numpy() for t in model().to(dtype)(WORDS, IMAGE.to(dtype))]


def check(program: Any, tolerance: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
    outputs = program.method("forward")(WORDS, IMAGE.to(dtype)).values()
    for got, want in zip(outputs, wanted(dtype), strict=True):
        assert float(np.abs(np.asarray(got, np.float32) - want).max()) <= tolerance * max(
            np.abs(want).max(), 1
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_weights_given_at_load_equal_eager(tmp_path: Path, device: str, dtype: str) -> None:
    result = hollow(device=device, dtype=None if dtype == "float32" else dtype)
    write(tmp_path / "net.pte", result.planned, result.constants, weights="none", recipes=result.recipes)
    write_many(tmp_path / "net.safetensors", saved())
    where = "emulator" if device == "cuda" else "cpu"
    with load(tmp_path / "net.pte", where, weights=[tmp_path / "net.safetensors"]) as program:
        check(program, 1e-5 if dtype == "float32" else 3e-2, getattr(torch, dtype))


def test_an_artifact_without_weights_holds_none_of_them(tmp_path: Path) -> None:
    result = hollow()
    write(tmp_path / "net.pte", result.planned, result.constants, weights="none", recipes=result.recipes)
    artifact = read(tmp_path / "net.pte")
    given = [blob for blob in artifact.blobs if blob.location == GIVEN]
    assert sum(blob.nbytes for blob in given) == 4 * sum(
        p.numel() for p in model().parameters()
    ) + 2 * 16 * 4 + (
        8 * 4  # the zeros of the merged layer that has no bias
    )
    assert len(artifact.constant_segment) < 512  # the table of 16 numbers, and padding
    artifact.verify_constants()
    with pytest.raises(UsageError, match="without its weights"):
        load(tmp_path / "net.pte", "emulator")


def test_a_wrapper_around_the_published_model_finds_its_names(tmp_path: Path) -> None:
    result = hollow()
    for rename in (lambda name: f"model.net.{name}", lambda name: name):
        given = {rename(name): torch.from_numpy(array) for name, array in saved().items()}
        with load_planned(result.planned, constants_with(result, given), "emulator") as program:
            check(program)


def test_names_without_the_prefix_that_all_share_serve_too() -> None:
    parts = [Part(("net.a.weight",), (2,)), Part(("net.b.weight",), (2,))]
    recipes = [Recipe((part,), DType.FLOAT32, (2,), (1,)) for part in parts]
    supply = Supply.fitted("w", {"a.weight": Fixed([1, 2]), "b.weight": Fixed([3, 4])}, recipes)
    assert [list(np.frombuffer(supply.make(recipe), np.float32)) for recipe in recipes] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda held: held.pop("query.bias"), "has no tensor `query.bias`.*1 of"),
        (
            lambda held: held.update({"query.weight": held["query.weight"].T}),
            r"`query.weight` is float32\[16x8\]",
        ),
        (lambda held: held.update({"query.bias": held["query.bias"].astype(np.int32)}), r"is int32\[8\]"),
    ],
)
def test_other_weights_are_refused_in_one_line(tmp_path: Path, spoil: Any, words: str) -> None:
    result = hollow()
    write(tmp_path / "net.pte", result.planned, result.constants, weights="none", recipes=result.recipes)
    held = saved()
    spoil(held)
    write_many(tmp_path / "bad.safetensors", held)
    with pytest.raises(UsageError, match=words) as caught:
        load(tmp_path / "net.pte", "emulator", weights=[tmp_path / "bad.safetensors"])
    assert "\n" not in str(caught.value)


def test_reference_keeps_all_weights_in_the_files(tmp_path: Path) -> None:
    held = saved()
    names = sorted(held)
    write_many(tmp_path / "1.safetensors", {name: held[name] for name in names[::2]})
    write_many(tmp_path / "2.safetensors", {name: held[name] for name in names[1::2]})
    files = (tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    result = hollow(weights="reference", weights_files=files)
    assert all(recipe.nbytes for recipe in result.recipes.values())
    path = tmp_path / "net.pte"
    write(path, result.planned, result.constants, weights="reference", files=files, recipes=result.recipes)
    artifact = read(path)
    artifact.verify_constants()  # digests are of the very bytes, merged ones too
    assert {blob.digest for blob in artifact.blobs if blob.location == REFERENCE} >= set(result.recipes)
    with load(path, "emulator") as program:
        check(program)
    with pytest.raises(UsageError, match="has its weights"):
        read(path, weights=files)
    write_many(files[0], {name: held[name] for name in names[2::2]})
    with pytest.raises(ArtifactError, match="is not the one that it was exported with"):
        read(path)


def test_a_model_on_the_meta_device_is_not_embedded() -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(3, 3)
    method = MethodSource("forward", net, (torch.ones(1, 3),))
    with pytest.raises(DevplanError, match="meta device"):
        export(ModelSource("net", (method,)), ExportOptions())
    result = export(ModelSource("net", (method,)), ExportOptions(architectures=("sm_80",), weights="none"))
    assert len(result.recipes) == 2


def test_weights_that_are_not_there_cannot_be_rounded() -> None:
    with pytest.raises(UsageError, match="`--quantize` with `--weights none`"):
        hollow(quantize="int8-weight-only")


def test_casting_reaches_tensors_that_plain_attributes_hold_too() -> None:
    from devplan.passes.exported.method import cast_methods

    net = torch.nn.Module()
    net.register_buffer("cache", torch.zeros(2))
    net.held = [net.cache]
    net.forward = lambda: net.cache
    (cast,) = cast_methods([MethodSource("forward", net)], "float16")
    assert cast.module.held[0] is cast.module.cache and cast.module.cache.dtype == torch.float16
    assert net.cache.dtype == torch.float32


class Fixed:
    """A tensor of a weights file, of one dimension."""

    def __init__(self, values: list[float], dtype: DType = DType.FLOAT32) -> None:
        self.dtype, self.shape = dtype, (len(values),)
        array = np.asarray(values, np.float32)
        self._raw = HostTensor.from_float32(array, dtype).raw if dtype is DType.BFLOAT16 else array

    def read(self) -> memoryview:
        return self._raw.view(np.uint8).data

    def digest(self) -> str:
        raise AssertionError("not asked for")


def test_recipes_cast_stack_and_lay_out() -> None:
    tensors = {"a": Fixed([1.0, 2.00390625]), "b": Fixed([3.0, -4.0], DType.BFLOAT16)}
    recipe = Recipe((Part(("a",), (2,)), Part((), (1,)), Part(("b",), (2,))), DType.BFLOAT16, (5,), (1,))
    raw = np.frombuffer(Supply.fitted("w", tensors, [recipe]).make(recipe), np.uint16)
    assert list(HostTensor(raw, DType.BFLOAT16).float32()) == [1.0, 2.0, 0.0, 3.0, -4.0]  # rounded to even


BIG = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(12288, 12288) for _ in range(4)))
example_inputs = (torch.ones(1, 12288),)
"""


@pytest.mark.parametrize("weights", ["none", "reference"])
def test_weights_above_two_gib_are_never_in_memory(tmp_path: Path, weights: str) -> None:
    (tmp_path / "big.py").write_text(BIG)
    command = [sys.executable, "-m", "devplan.devplan_cli", "export", "big.py", "--json", "--arch", "sm_90"]
    command += ["--weights", weights]
    if weights == "reference":
        hollow_file(tmp_path / "big.safetensors")
        command += ["--weights-file", "big.safetensors"]
    paths = [str(ROOT.parent)] if ROOT.name == "devplan" else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["constants"]["bytes"] > 2 << 30 and made["constants"]["location"] == weights
    assert made["peak_rss_bytes"] < 1 << 30
    assert (tmp_path / "big.pte").stat().st_size < 1 << 20


def hollow_file(path: Path) -> None:
    """A safetensors file of the big model whose bytes are a hole in the disk."""
    header: dict[str, Any] = {}
    end = 0
    for index in range(4):
        for name, shape in ((f"{index}.weight", [12288, 12288]), (f"{index}.bias", [12288])):
            begin, end = end, end + 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert open_safetensors(path).nbytes > 2 << 30


def test_caches_that_nothing_is_in_take_no_memory() -> None:
    with without_weights():
        cache = torch.zeros(1 << 28)
        small = torch.zeros((2, 3), dtype=torch.int64)
        scalar = torch.zeros([])
    assert small.shape == (2, 3) and small.dtype == torch.int64 and scalar.shape == ()
    assert resident(cache) < 1 << 20
    assert cache.shape == (1 << 28,) and cache.dtype == torch.float32 and not cache[:: 1 << 24].any()
    assert resident(torch.zeros(1 << 25)) == 1 << 27  # what PyTorch's own take


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory that are there, by the kernel's count."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for at in range(begin // page, end // page, 1 << 16):
            pages.seek(at * 8)
            count = min(1 << 16, end // page - at)
            total += int((np.frombuffer(pages.read(8 * count), np.uint64) >> np.uint64(63)).sum())
    return total * page

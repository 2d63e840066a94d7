"""SOURCE in all its forms, and what is said of a file that misses the convention."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

torch = pytest.importorskip("torch")

from devplan.passes.source.load import resolve  # noqa: E402
from devplan.runtime.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.torch

NET = """

    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)
        def forward(self, x):
            return self.linear(x)
"""


@pytest.fixture
def write(tmp_path: Path):
    """Write a model file and return its path as text."""

    def writer(text: str, name: str = "net.py", head: str = NET) -> str:
        file = tmp_path / name
        file.write_text(dedent(head) + dedent(text))
        return str(file)

    return writer


@pytest.mark.parametrize("model", ["Net()", "Net", "lambda: Net()"])
def test_a_model_is_a_module_or_what_makes_one(write, model: str) -> None:
    source = resolve(write(f"model = {model}\nexample_inputs = (torch.ones(2, 4),)"))
    (method,) = source.methods
    assert (source.name, method.name) == ("net", "forward")
    assert method.module(*method.args).shape == (2, 3)


@pytest.mark.parametrize(
    "inputs", ['{"x": torch.ones(2, 4)}', 'lambda: {"x": torch.ones(2, 4)}', "lambda: (torch.ones(2, 4),)"]
)
def test_example_inputs_are_a_tuple_a_dict_or_what_makes_one(write, inputs: str) -> None:
    (method,) = resolve(write(f"model = Net()\nexample_inputs = {inputs}")).methods
    assert method.module(*method.args, **method.kwargs).shape == (2, 3)


def test_another_attribute_of_the_file_names_the_artifact(write) -> None:
    source = resolve(write("model = None\nsmall = Net()\nexample_inputs = (torch.ones(2, 4),)") + ":small")
    assert source.name == "small"
    assert isinstance(source.methods[0].module, torch.nn.Module)


def test_a_module_of_a_package_is_imported_from_the_current_folder(write, tmp_path, monkeypatch) -> None:
    package = tmp_path / "zoo_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write("net = Net()\nexample_inputs = (torch.ones(2, 4),)", "zoo_of_tests/tiny.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert resolve("zoo_of_tests.tiny:net").name == "net"


def test_a_saved_program_keeps_its_export(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),))
    torch.export.save(program, str(tmp_path / "saved.pt2"))
    (method,) = resolve(str(tmp_path / "saved.pt2")).methods
    assert method.exported is not None
    assert method.args[0].shape == (2, 4)


def test_a_class_of_executorchs_convention_serves(write) -> None:
    text = """
    class Example:
        def get_eager_model(self):
            return Net()
        def get_example_inputs(self):
            return (torch.ones(2, 4),)
        def get_dynamic_shapes(self):
            return {"x": {0: torch.export.Dim("batch", max=8)}}
    """
    path = write(text)
    for source in (resolve(path), resolve(f"{path}:Example")):
        assert source.methods[0].dynamic_shapes["x"][0].__name__ == "batch"


def test_methods_share_the_state_of_their_module(write) -> None:
    text = """
    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(2))
        def store(self, x):
            self.kept.copy_(x)
            return x
        def recall(self, scale):
            return self.kept * scale
    cache = Cache()
    methods = {
        "store": {"function": cache.store, "example_inputs": (torch.ones(2),)},
        "recall": {"function": cache.recall, "example_inputs": {"scale": torch.ones(1)}},
    }
    """
    store, recall = resolve(write(text)).methods
    assert [name for name, _ in store.module.named_buffers()] == ["kept"]
    assert dict(store.module.named_buffers())["kept"] is dict(recall.module.named_buffers())["kept"]
    program = torch.export.export(store.module, store.args).run_decompositions({})
    assert list(program.graph_signature.buffers_to_mutate.values()) == ["kept"]
    assert "scale" in torch.export.export(recall.module, (), recall.kwargs).graph_signature.user_inputs


def test_a_function_sees_the_parameters_of_the_modules_it_reads(write) -> None:
    text = """
    net = Net()
    def double(x):
        return net(x) * 2
    methods = {"double": {"function": double, "example_inputs": (torch.ones(2, 4),)}}
    """
    (method,) = resolve(write(text)).methods
    program = torch.export.export(method.module, method.args)
    assert set(program.graph_signature.parameters) == {"net.linear.weight", "net.linear.bias"}


def test_one_factory_in_two_methods_makes_one_module(write) -> None:
    text = """
    entry = {"module": Net, "example_inputs": (torch.ones(2, 4),)}
    methods = {"a": entry, "b": entry}
    """
    a, b = resolve(write(text)).methods
    assert a.module is b.module


def test_training_mode_is_left_with_a_note(write) -> None:
    text = "model = torch.nn.Sequential(torch.nn.Dropout())\nexample_inputs = (torch.ones(2),)"
    source = resolve(write(text))
    assert not source.methods[0].module.training
    assert "training mode" in source.notes[0]


INPUTS = "example_inputs = (torch.ones(2, 4),)\n"
BAD = {
    "no model": (INPUTS + "modle = Net()", ["does not define `model`", "did you mean `modle` at net.py:11"]),
    "no inputs": ("model = Net()", ["`model` (net.py:10) but no `example_inputs`"]),
    "model of the wrong type": (INPUTS + "model = 3", ["`model` at net.py:11 is a `int`", "nn.Module"]),
    "a factory of the wrong type": (INPUTS + "model = lambda: 3", ["`model()` at net.py:11 made a `int`"]),
    "a factory that needs arguments": (INPUTS + "def model(width): ...", ["takes parameters (width)"]),
    "a factory that raises": (
        INPUTS + "def model():\n    return 1 / 0",
        ["`ZeroDivisionError` at net.py:12"],
    ),
    "a lone tensor": ("model = Net()\nexample_inputs = torch.ones(2)", ["net.py:11 is a `Tensor`", "(x,)`"]),
    "an array": (
        "import numpy as n\nmodel = Net()\nexample_inputs = (n.ones(2),)",
        ["`ndarray`", "from_numpy"],
    ),
    "shapes": (INPUTS + "model = Net()\ndynamic_shapes = 3", ["`dynamic_shapes` at net.py:12 is a `int`"]),
    "methods that are a list": ("methods = [1]", ["`methods` at net.py:10 is a `list`"]),
    "a method's key": ('methods = {"a": {"modul": Net}}', ["unknown key `modul`", "did you mean `module`"]),
    "a method without a module": (
        'methods = {"a": {"example_inputs": ()}}',
        ["one of `module` and `function`"],
    ),
    "a method without inputs": ('methods = {"a": {"module": Net}}', ['methods["a"]', "no `example_inputs`"]),
    "a raise on import": (
        "def f():\n    raise ValueError('no  such\\nthing')\nf()",
        ["net.py:11: no such thing"],
    ),
    "an exit on import": ("raise SystemExit(3)", ["`SystemExit` at net.py:10"]),
    "a missing package": ("import absent_package", ["net.py:10", "install the package that provides"]),
    "a syntax error": ("def f(:\n", ["`SyntaxError` at net.py:10"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_off_the_convention_is_refused_in_one_line(write, case: str) -> None:
    text, expected = BAD[case]
    with pytest.raises(UsageError) as caught:
        resolve(write(text))
    line = caught.value.line()
    assert line.startswith("error: cannot use `") and "\n" not in line and "(code 2)" in line
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("absent.py", "no such file"),
        ("model", "a SOURCE is"),
        ("no_such_package.module:net", "there is no module"),
        ("devplan.runtime.errors:Absent", "does not define `Absent`"),
    ],
)
def test_what_is_no_source_is_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        resolve(text)


def test_a_near_file_name_is_suggested(write, tmp_path: Path) -> None:
    write("", "encoder.py")
    with pytest.raises(UsageError, match="no such file") as caught:
        resolve(str(tmp_path / "encodr.py"))
    assert "encoder.py" in caught.value.hint


def test_a_damaged_saved_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_bytes(b"not a program")
    with pytest.raises(UsageError, match=r"torch\.export\.load"):
        resolve(str(tmp_path / "bad.pt2"))

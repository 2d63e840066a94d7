"""The emulator's arithmetic against Triton's own interpreter: types of results and values, pair by pair."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from devplan.runtime.emulator import types
from devplan.runtime.emulator.source import names_for_kernels
from devplan.runtime.emulator.tensor import Tensor

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
OPERATIONS = (
    "x + y", "x - y", "x * y", "x / y", "x // y", "x % y", "x & y", "x | y", "x ^ y", "x < y", "x == y",
    "tl.where(x > 1, x, y)", "tl.maximum(x, y)", "x + 1", "x * 2.5", "x / 2", "3 - x", "1 / x", "x > 0.5",
    "-x", "x.to(tl.float32) * y", "tl.sum(x, 0)", "tl.max(x, 0)", "tl.cumsum(x, 0)", "x * True",
)  # fmt: skip

SCRIPT = """
import os, sys, itertools
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch, triton, triton.language as tl
operations, dtypes, out = eval(sys.argv[1]), eval(sys.argv[2]), sys.argv[3]
TEXT = '''
import triton, triton.language as tl
@triton.jit
def k(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    made = {}
    TYPES.append(str(made.dtype))
    tl.store(out_ptr + i, made.to(tl.float64))
'''
X, Y = [7, 3, 0, 5, 2, 1, 9, 4], [2, 3, 1, 4, 7, 5, 3, 6]
results = {}
for number, operation in enumerate(operations):
    path = f"{out}.{number}.py"
    open(path, "w").write(TEXT.format(operation))
    scope = {"TYPES": [], "__file__": path, "__name__": f"m{number}"}
    import importlib.util
    spec = importlib.util.spec_from_file_location(f"m{number}", path)
    module = importlib.util.module_from_spec(spec); module.TYPES = scope["TYPES"]; spec.loader.exec_module(module)
    for a, b in itertools.product(dtypes, dtypes):
        x = torch.tensor(X, dtype=getattr(torch, a)); y = torch.tensor(Y, dtype=getattr(torch, b))
        made = torch.zeros(8, dtype=torch.float64)
        scope["TYPES"].clear()
        try:
            module.k[(1,)](x, y, made, N=8)
            results[f"{operation}|{a}|{b}"] = np.array(scope["TYPES"] + [repr(v) for v in made.tolist()])
        except Exception as error:
            pass
np.savez(out, **results)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result type and values of each operation on each pair of types, by Triton's interpreter."""
    folder = tmp_path_factory.mktemp("triton")
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        str(folder / "script.py"),
        repr(OPERATIONS),
        repr(DTYPES),
        str(folder / "out.npz"),
    ]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True)
    with np.load(folder / "out.npz") as file:
        return {name: file[name] for name in file.files}


def ours(operation: str, left: str, right: str) -> tuple[str, list[float]]:
    """The same by the emulator."""
    names = names_for_kernels()

    def given(values: list[int], dtype: str) -> Tensor:
        kind = types.BY_NAME[dtype.replace("float", "fp")]
        return Tensor(np.array([values], kind.held), kind)

    scope = {"x": given([7, 3, 0, 5, 2, 1, 9, 4], left), "y": given([2, 3, 1, 4, 7, 5, 3, 6], right)}
    with np.errstate(all="ignore"):
        made = eval(operation, dict(names), scope)
        wide = np.broadcast_to(made.to(types.FLOAT64).data.reshape(1, -1), (1, 8))
    return str(made.dtype), wide[0].tolist()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_types_and_values(operation: str, theirs: dict[str, Any]) -> None:
    compared = 0
    for left in DTYPES:
        for right in DTYPES:
            expected = theirs.get(f"{operation}|{left}|{right}")
            if expected is None:
                continue  # Triton refuses the pair
            dtype, values = ours(operation, left, right)
            assert dtype == expected[0], f"{operation} of {left} and {right}"
            np.testing.assert_allclose(
                values, [float(v) for v in expected[1:]], rtol=1e-3, err_msg=f"{left} {right}"
            )
            compared += 1
    assert compared >= 16

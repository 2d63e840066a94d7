"""An operator of PyTorch's database for tests: its samples as modules, and what each comes to."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree as pytree

from devplan.passes import export as exporting
from devplan.passes.exported.random_numbers import STATE
from devplan.passes.options import ExportOptions
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.runtime.errors import DevplanError
from devplan.runtime.tensors.host import HostTensor
from tests.zoo.measure import load, without_code

DTYPES = ("float32", "int64", "bool", "float16", "bfloat16")
"""The element types that are measured, as torch names them."""

LARGEST = 1 << 16
"""Elements of a sample; larger ones take the emulator long and say nothing more."""

WITHOUT_CONTENT = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators whose results hold whatever lay there."""


@dataclass(frozen=True)
class Sample:
    """A call: the tensors among its arguments, and the function of them that puts the others in place."""

    text: str
    tensors: tuple[torch.Tensor, ...]
    call: Callable[..., Any]


class Calls(torch.nn.Module):
    """All samples of a module, one after the other, each on tensors of its own."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = samples
        self.writes = False
        """Whether a sample writes into its operands, which would be inputs of the method."""

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        """What they return, flat, complex numbers as pairs."""
        given = iter([tensor.clone() for tensor in tensors] if self.writes else tensors)
        made = [sample.call(*islice(given, len(sample.tensors))) for sample in self.samples]
        return [_real(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class TimeLimit(BaseException):
    """A sample took too long."""


def measure_operator(
    info: Any, dtype: torch.dtype, count: int, limit: float
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How many samples came to what, and what is to be told of those that are not right."""
    torch.manual_seed(0)
    samples = choose(info, dtype, count)
    if not samples:
        return {}, []
    status, _ = measure(samples, info.name, limit)
    if status in ("right", "random"):
        return {status: len(samples)}, []
    found, errors = Counter[str](), list[dict[str, str]]()
    for sample in samples:
        status, error = measure([sample], info.name, limit)
        found[status] += 1
        if error:
            errors.append({"status": status, "sample": sample.text, "error": error})
    return dict(found), errors


def choose(info: Any, dtype: torch.dtype, count: int) -> list[Sample]:
    """Samples of different kinds: ranks, empty ones, strides, keywords; then others, evenly."""
    op = info.op
    given = [g for g in islice(info.sample_inputs("cpu", dtype, requires_grad=False), 400) if _is_usual(g)]
    strided = [g.noncontiguous() for g in given[:1]]
    kinds: dict[str, list[Any]] = {}
    for one in [*given, *strided]:
        kinds.setdefault(_kind(one), []).append(one)
    firsts = [one[0] for one in kinds.values()]
    if len(firsts) < count:
        firsts += [one for others in kinds.values() for one in others[1:]][: count - len(firsts)]
    step = max(len(firsts) / count, 1.0)
    chosen = [firsts[int(index * step)] for index in range(min(count, len(firsts)))]
    return [_sample(op, one) for one in chosen]


def _is_usual(given: Any) -> bool:
    leaves = pytree.tree_leaves((given.input, given.args, given.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() for t in tensors) <= LARGEST and all(t.layout is torch.strided for t in tensors)


def _kind(given: Any) -> str:
    def described(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{leaf.dtype}{leaf.dim()}{leaf.numel() == 0}{leaf.is_contiguous()}"
        return repr(leaf)

    leaves = pytree.tree_leaves((given.input, given.args, given.kwargs))
    return " ".join([*map(described, leaves), *given.kwargs])


def _sample(op: Callable[..., Any], given: Any) -> Sample:
    leaves, spec = pytree.tree_flatten(((given.input, *given.args), given.kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return op(*args, **kwargs)

    shown = [_shown(leaf) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(shown, spec)
    text = ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
    return Sample(text[:300], tuple(leaves[place] for place in places), call)


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    strides = "" if leaf.is_contiguous() else f" by {list(leaf.stride())}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{strides}"


def measure(samples: Sequence[Sample], name: str, limit: float) -> tuple[str, str]:
    """What a module of these samples comes to, and the reason."""
    module, tensors = Calls(samples), tuple(t for sample in samples for t in sample.tensors)
    try:
        with torch.no_grad():
            used = _copies(tensors)
            expected = module(*used)
            module.writes = not all(map(_equal, used, tensors))
            torch.manual_seed(1)
            again = module(*_copies(tensors))
    except Exception as error:
        return "unbuilt", f"eager: {type(error).__name__}: {error}"[:300]
    is_random = name in WITHOUT_CONTENT or not all(map(_equal, expected, again))
    try:
        with _limited(limit * len(samples)):
            outputs, is_drawn = _run(module, tensors)
    except DevplanError as error:
        kind = ("refused" if _traces(module, tensors) else "untraceable") if error.code == 3 else "failed"
        return kind, error.line()[:500]
    except TimeLimit:
        return "timeout", f"more than {limit * len(samples):g} s"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        return "traceback", f"{type(error).__name__} at {place}: {error}"[:500]
    is_random = is_random or is_drawn  # some samples fix eager's seed
    exact = expected if is_random else _in_float64(module, tensors, expected)
    wrong = [w for w in map(_difference, outputs, expected, exact, [is_random] * len(exact)) if w]
    if len(outputs) != len(expected):
        wrong = [f"{len(outputs)} outputs of {len(expected)}"]
    return ("wrong", wrong[0]) if wrong else ("random" if is_random else "right", "")


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Clones of the same strides."""
    return [t.clone(memory_format=torch.preserve_format) for t in tensors]


def _run(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """The outputs, and whether the program draws random numbers."""
    source = ModelSource("operator", (MethodSource("forward", module, tuple(_copies(tensors))),))
    with mock.patch.object(exporting, "compile_kernels", without_code):
        result = exporting.export(source, ExportOptions(architectures=("sm_90",)))
    with load(result) as program:
        outputs = program.method("forward")(*_copies(tensors)).values()
        return [_as_torch(output) for output in outputs], STATE in program.state.names


def _as_torch(output: Any) -> torch.Tensor:
    if isinstance(output, HostTensor):
        raw = output.raw.reshape(-1).view(f"int{8 * output.raw.itemsize}")
        return torch.from_numpy(raw.copy()).view(getattr(torch, str(output.dtype))).view(output.shape)
    return torch.as_tensor(np.array(output))


def _traces(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    try:
        torch.export.export(module, tuple(_copies(tensors)), strict=False).run_decompositions({})
    except Exception:
        return False
    return True


def _in_float64(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], expected: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results from operands in float64; eager's where that is not possible."""
    wide = [t.double() if t.is_floating_point() else t for t in _copies(tensors)]
    try:
        with torch.no_grad():
            exact: list[torch.Tensor] = module(*wide)
    except Exception:
        return expected
    same = len(exact) == len(expected) and all(
        a.shape == b.shape for a, b in zip(exact, expected, strict=True)
    )
    return exact if same else expected


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _difference(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, is_random: bool) -> str:
    """How far ours is from what is right; empty where it is near eager's or as near to the exact as that.

    Near is what `torch.testing.assert_close` calls so; as near is four times the largest error of eager.
    """
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"{ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
    if is_random:
        return ""
    if not (eager.is_floating_point() or eager.is_complex()):
        return "" if torch.equal(ours, eager) else f"{_some(ours, eager)}"
    error = (eager.to(exact.dtype) - exact).abs()
    allowed = 4 * float(error[error.isfinite()].max()) if error.isfinite().any() else 0.0
    rtol, atol = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}.get(
        eager.dtype, (1.3e-6, 1e-5)
    )
    near = torch.isclose(ours, eager, rtol=rtol, atol=atol, equal_nan=True)
    as_near = torch.isclose(ours.to(exact.dtype), exact, rtol=rtol, atol=atol + allowed, equal_nan=True)
    return "" if bool((near | as_near).all()) else _some(ours[~(near | as_near)], eager[~(near | as_near)])


def _some(ours: torch.Tensor, eager: torch.Tensor) -> str:
    is_other = ours != eager
    shown = [t[is_other].flatten()[:4].tolist() for t in (ours, eager)]
    return f"{int(is_other.sum())} elements of {ours.numel()}: {shown[0]}, eager {shown[1]}"


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

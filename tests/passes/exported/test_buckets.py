"""Buckets from a user's words to sizes of symbols, and exported models at every size they declare."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

import devplan
from devplan.passes.exported.buckets import LIMIT, check_declared, method_buckets
from devplan.passes.exported.dimensions import declared
from devplan.passes.options import BucketRule
from devplan.passes.source.load import resolve
from devplan.passes.source.model import MethodSource
from devplan.planner import check
from devplan.runtime.errors import UsageError
from devplan.runtime.program import Symbol
from tests.support.exporting import assert_close, export_module, loaded

pytestmark = pytest.mark.torch

BATCH = Symbol("s7", 1, 32, "x", 0, "batch")
LENGTH = Symbol("s9", 2, 128, "x", 1)
OTHER = Symbol("s7", 1, 8, "tokens", 0, "batch")
SYMBOLS = {"decode": (OTHER,), "prefill": (BATCH, LENGTH)}


def buckets(*rules: BucketRule, own: Any = None) -> dict[str, tuple[tuple[int, ...], ...]]:
    return method_buckets(SYMBOLS, own or {}, rules)


# --- rules ---------------------------------------------------------------------------------------------


def test_a_rule_is_for_every_method_that_has_the_dimension() -> None:
    assert buckets(BucketRule("batch", (1, 8))) == {
        "decode": ((1,), (8,)),
        "prefill": ((1, 128), (8, 128)),  # the length stays at its bound
    }


def test_sizes_of_several_dimensions_are_combined() -> None:
    found = buckets(BucketRule("prefill.batch", (1, 8)), BucketRule("x:1", (16, 64)))
    assert found == {"prefill": ((1, 16), (1, 64), (8, 16), (8, 64))}


@pytest.mark.parametrize("name", ["batch", "prefill.batch", "x:0", "prefill.x:0"])
def test_a_dimension_has_these_names(name: str) -> None:
    assert buckets(BucketRule(name, (4,)))["prefill"] == ((4, 128),)


def test_the_last_rule_for_a_dimension_wins_whatever_it_is_called() -> None:
    assert buckets(BucketRule("batch", (1, 8)), BucketRule("tokens:0", (2,)))["decode"] == ((2,),)


def test_the_model_files_rules_are_its_methods_own_and_give_way() -> None:
    own = {"decode": (BucketRule("batch", (1, 2)),)}
    assert buckets(own=own) == {"decode": ((1,), (2,))}
    assert buckets(BucketRule("decode.batch", (4,)), own=own) == {"decode": ((4,),)}
    with pytest.raises(UsageError, match="no method has a dynamic dimension"):
        buckets(own={"decode": (BucketRule("x:1", (4,)),)})


REFUSED = [
    (
        BucketRule("bacth", (1,)),
        "did you mean `batch`; .*`batch` of `decode` from 1 to 8, `batch` of `prefill`",
    ),
    (BucketRule("x:2", (1,)), "`x:1` of `prefill` from 2 to 128"),
    (BucketRule("batch", (4, 16)), "`batch` of `decode` from 1 to 8 does not admit 16"),
    (BucketRule("prefill.batch", (33, 64)), "`batch` of `prefill` from 1 to 32 does not admit 33, 64"),
    (BucketRule("x:1", (1,)), "`x:1` of `prefill` from 2 to 128 does not admit 1"),
]


@pytest.mark.parametrize(("rule", "message"), REFUSED, ids=[rule.dimension for rule, _ in REFUSED])
def test_what_names_no_dimension_or_size_is_refused_with_what_does(rule: BucketRule, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        buckets(rule)
    assert caught.match("cannot use buckets of")
    assert re.search(message, caught.value.line())


def test_too_many_combinations_are_refused() -> None:
    sizes = tuple(range(2, 12))
    with pytest.raises(UsageError, match=f"100 buckets: 10 x 10 combinations; at most {LIMIT}"):
        buckets(BucketRule("prefill.batch", sizes), BucketRule("x:1", sizes))


def test_a_program_without_dynamic_dimensions_says_so() -> None:
    with pytest.raises(UsageError) as caught:
        method_buckets({"forward": ()}, {}, [BucketRule("batch", (1,))])
    assert "none: export with `dynamic_shapes`" in caught.value.line()


# --- what `dynamic_shapes` says ------------------------------------------------------------------------


class Nested(torch.nn.Module):
    def forward(self, x: Any, d: Any, *rest: Any, y: Any = None) -> Any:
        return x


def test_dimensions_are_found_in_containers_keywords_and_variadic_arguments() -> None:
    x, batch, n = torch.ones(4, 2), Dim("batch", max=8), Dim("n", min=2, max=9)
    shapes = {
        "x": {0: batch},
        "d": {"a": {0: batch}, "b": [None, {1: n}]},
        "rest": (None, {0: batch}),
        "y": (n, None),
    }
    source = MethodSource("f", Nested(), (x, {"a": x, "b": [x, x]}, x, x), {"y": x}, shapes)
    found = declared(source)
    assert {place: dim.__name__ for place, dim in found.dims.items()} == {
        ("x", 0): "batch",
        ("d.a", 0): "batch",
        ("d.b.1", 1): "n",
        ("input3", 0): "batch",
        ("y", 0): "n",
    }
    assert found.is_complete


@pytest.mark.parametrize("entry", [Dim.AUTO, Dim.DYNAMIC, 2 * Dim("half", max=8)])
def test_where_torch_finds_dimensions_itself_nothing_is_refused_early(entry: Any) -> None:
    source = MethodSource("f", torch.nn.ReLU(), (torch.ones(4, 2),), {}, ({0: entry},))
    assert not declared(source).is_complete
    check_declared([source], [BucketRule("anything", (1,))])


def test_a_wrong_name_is_refused_before_anything_is_exported() -> None:
    source = MethodSource("f", torch.nn.ReLU(), (torch.ones(4, 2),), {}, ({0: Dim("batch", max=8)},))
    check_declared([source], [BucketRule("batch", (8,)), BucketRule("input:0", (1,))])
    for rule in (BucketRule("bach", (8,)), BucketRule("batch", (9,)), BucketRule("input:1", (1,))):
        with pytest.raises(UsageError, match="cannot use buckets"):
            check_declared([source], [rule])


# --- model files and the Python interface --------------------------------------------------------------

FILE = """
import torch
from torch.export import Dim

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
example_inputs = (torch.randn(4, 4),)
dynamic_shapes = {"input": {0: Dim("batch", max=8)}}
buckets = {"batch": [1, 8]}
"""


def test_a_model_file_declares_buckets(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    assert resolve(str(tmp_path / "net.py")).methods[0].buckets == (BucketRule("batch", (1, 8)),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("buckets = 3", "`buckets` at net.py:9 is a `int`, expected a dict of sizes by dimension"),
        ('buckets = {"batch": [0]}', "the sizes of `batch` must be whole numbers, 1 or more"),
        ('buckets = {"batch": "8"}', "the sizes of `batch` must be whole numbers"),
    ],
)
def test_a_model_file_that_declares_them_otherwise_is_refused(
    line: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(FILE.replace('buckets = {"batch": [1, 8]}', line))
    with pytest.raises(UsageError) as caught:
        resolve(str(tmp_path / "net.py"))
    assert message in caught.value.line()


def test_the_python_interface_takes_them_and_wins_over_nothing_it_does_not_name() -> None:
    exported = devplan.export(
        torch.nn.Linear(4, 4),
        (torch.randn(4, 4),),
        dynamic_shapes=({0: Dim("batch", max=8)},),
        buckets={"batch": [2, 8]},
        arch="sm_80",
    )
    (plan,) = exported.planned.plan.methods
    assert [bucket.sizes for bucket in plan.buckets] == [(2,), (8,)]
    with pytest.raises(UsageError, match="cannot use `buckets`: the sizes of `batch`"):
        devplan.export(torch.nn.ReLU(), (torch.randn(4),), buckets={"batch": []})


# --- exported models ------------------------------------------------------------------------------------


class Tokens(torch.nn.Module):
    """A sum over a dynamic length, a product over a dynamic batch, a softmax, a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.outer(torch.nn.functional.gelu(self.inner(x)))
        pooled = torch.softmax(h.sum(1), -1)
        return torch.cat([x, h], 1), pooled


def test_results_are_those_of_eager_at_each_bucket_between_and_at_the_bound() -> None:
    module = Tokens().eval()
    shapes = ({0: Dim("batch", max=6), 1: Dim("length", max=20)},)
    rules = (BucketRule("batch", (1, 4)), BucketRule("length", (1, 16)))
    result = export_module(module, (torch.randn(3, 5, 8),), dynamic_shapes=shapes, buckets=rules)
    check(result.planned)
    (plan,) = result.planned.plan.methods
    assert [bucket.sizes for bucket in plan.buckets] == [(1, 1), (1, 16), (4, 1), (4, 16)]
    assert [symbol.label for symbol in result.planned.program.methods[0].symbols] == ["batch", "length"]
    generator = torch.Generator().manual_seed(1)
    with loaded(result, poison=True) as program:
        sizes = [(1, 1), (1, 16), (4, 1), (4, 16), (2, 3), (5, 17), (6, 20), (4, 16), (1, 1)]
        for batch, length in sizes:
            x = torch.randn(batch, length, 8, generator=generator)
            for got, wanted in zip(program.method()(x.numpy()).values(), module(x), strict=True):
                assert_close(got, wanted)
        method = program.method()
        assert [use.calls for use in method.buckets] == [2, 1, 1, 2]
        assert method.other_calls == 3
        assert {use.no_graph_reason for use in method.buckets} == {"the emulator has no graphs"}


class Counter(torch.nn.Module):
    """State that outlives calls of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        return x * 2 + self.seen


def test_state_is_one_for_all_buckets() -> None:
    module, eager = Counter().eval(), Counter().eval()
    result = export_module(
        module,
        (torch.randn(3, 8),),
        dynamic_shapes=({0: Dim("batch", max=6)},),
        buckets=(BucketRule("batch", (1, 4)),),
    )
    with loaded(result, poison=True) as program, torch.no_grad():
        for rows in (1, 4, 6, 2, 4, 1):
            x = torch.randn(rows, 8)
            assert_close(program.method()(x.numpy())["output"], eager(x))
        np.testing.assert_allclose(program.state.get("seen"), eager.seen.numpy(), rtol=1e-5)


def test_without_device_planning_the_sizes_still_run_and_a_note_says_what_is_lost() -> None:
    module = torch.nn.Linear(8, 8).eval()
    result = export_module(
        module,
        (torch.randn(3, 8),),
        dynamic_shapes=({0: Dim("batch", max=6)},),
        buckets=(BucketRule("batch", (1, 4)),),
        device_planning=False,
    )
    assert "buckets of `forward` have no plans and no graphs" in result.planned.program.methods[0].notes[-1]
    with loaded(result) as program:
        x = torch.randn(4, 8)
        assert_close(program.method()(x.numpy())["output"], module(x))
        assert program.method().buckets == ()


def test_a_dimension_may_be_as_small_as_its_dim_says() -> None:
    """Torch traces with 2 and more; a `Dim` that admits 1 admits it at run time."""
    module = Tokens().eval()
    result = export_module(
        module,
        (torch.randn(3, 5, 8),),
        dynamic_shapes=({0: Dim("batch", max=6), 1: Dim("length", min=3, max=9)},),
    )
    assert [symbol.lower for symbol in result.planned.program.methods[0].symbols] == [1, 3]

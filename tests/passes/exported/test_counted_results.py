"""Results whose size depends on data, and declared bounds: against eager, for any masks, wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")

from exporting import export_module, loaded  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from devplan.passes.options import IoRule  # noqa: E402
from devplan.runtime import LoadedProgram  # noqa: E402
from devplan.runtime.describe import describe_method  # noqa: E402
from devplan.runtime.errors import ExecutionError, UnsupportedOperatorError  # noqa: E402
from devplan.runtime.program import CopyKind  # noqa: E402
from devplan.runtime.tensors.host import HostTensor  # noqa: E402

pytestmark = pytest.mark.torch
BOUND = 9


class Function(torch.nn.Module):  # type: ignore[misc]
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def found(x: Any) -> Any:
    """Each way to find something; the first three and the number have one count, the others their own."""
    mask = x > 0
    return {
        "places": mask.nonzero(),
        "chosen": x[mask],
        "selected": torch.masked_select(x, mask) + 1,
        "rows": F.relu(x[mask.any(1)]) * 2,
        "columns": x[:, mask.all(0)],
        "kept": x[torch.where(x[:, 0] > 0)[0], 1],
        "number": x[mask].shape[0],
        "sum": x[mask].sum(0),
    }


def bounded(x: Any) -> Any:
    places = (x > 0).nonzero()
    torch._check(places.shape[0] <= BOUND)
    return {"places": places, "doubled": x[x > 0] * 2}


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
FEW = torch.where(torch.arange(24).reshape(6, 4) % 5 == 0, 1.0, -1.0)
ROWS = torch.export.Dim("rows", min=1, max=8)
FLOATS = st.floats(-2, 2, width=32)


def call(program: LoadedProgram, *inputs: Any) -> dict[str, Any]:
    results = program.method("forward")(*(np.asarray(x) for x in inputs))
    return {k: v.numpy() if hasattr(v, "numpy") else v for k, v in results.items()}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(got) == list(wanted)
    for name, want in wanted.items():
        expected = want.numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
        assert got[name].shape == expected.shape, name
        if name == "sum":
            np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(got[name], expected)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def program(request: pytest.FixtureRequest) -> Iterator[LoadedProgram]:
    """`found` with dynamic rows and a bucket."""
    result = export_module(
        Function(found), (X,), dynamic_shapes=(({0: ROWS},),), device=request.param, buckets=_rows(4)
    )
    with loaded(result, "emulator" if request.param == "cuda" else "cpu") as made:
        yield made


def _rows(*sizes: int) -> tuple[Any, ...]:
    from devplan.passes.options import BucketRule

    return (BucketRule("input0:0", sizes),)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=arrays.arrays(np.float32, st.tuples(st.integers(1, 8), st.just(4)), elements=FLOATS))
def test_any_mask_of_any_rows_gives_what_eager_gives(x: Any, program: LoadedProgram) -> None:
    assert_same(call(program, x), found(torch.from_numpy(x)))


def test_results_of_one_mask_have_one_count(program: LoadedProgram) -> None:
    (method,) = program.planned.program.methods
    counted = {port.name: port.count for port in method.outputs}
    assert counted["places"] == counted["chosen"] == counted["selected"]
    assert len({counted[name] for name in ("places", "rows", "columns", "kept")}) == 4
    assert len(method.counts) == 4
    assert counted["number"] == counted["sum"] == ""
    document = describe_method(method, program.planned.plan.method("forward"))
    assert document["outputs"][4]["data_dependent"] == {
        "dimension": 1, "count": counted["columns"], "lower": 0, "upper": 4,
    }  # fmt: skip
    assert document["outputs"][0]["shape"] == [counted["places"], 2]
    assert document["outputs"][0]["max_shape"] == [32, 2]
    assert document["counts"][0]["outputs"] == ["places", "chosen", "selected"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_declared_bound_shrinks_the_plan_and_is_checked(device: str) -> None:
    def unbounded(x: Any) -> Any:
        return {"places": (x > 0).nonzero(), "doubled": x[x > 0] * 2}

    x, few = torch.ones(40, 40), torch.zeros(40, 40)
    few[3, 4:11] = 5
    result, larger = (export_module(Function(f), (x,), device=device) for f in (bounded, unbounded))
    (method,) = result.planned.program.methods
    assert [(count.lower, count.upper) for count in method.counts] == [(0, BOUND)]
    nbytes, without = (
        {str(arena.device): arena.nbytes for arena in each.planned.plan.methods[0].arenas}
        for each in (result, larger)
    )
    assert all(without[each] - nbytes[each] > 1500 * 16 for each in nbytes)
    with loaded(result, "emulator" if device == "cuda" else "cpu") as program:
        assert_same(call(program, few), bounded(few))
        with pytest.raises(ExecutionError) as caught:
            call(program, x)
        assert "is 1600, declared is at most 9" in str(caught.value)
        assert "test_counted_results.py" in caught.value.why
        assert_same(call(program, few), bounded(few))


def test_a_bound_is_checked_where_no_result_shows_it_and_state_is_undefined_after_a_failure() -> None:
    class Seen(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            rows = x[x[:, 0] > 0]
            torch._check(rows.shape[0] <= 2)
            self.seen += rows.sum(0)
            return self.seen * 1

    module = Seen()
    with loaded(export_module(module, (X,), device="cuda"), "emulator") as program:
        (port,) = program.planned.program.methods[0].outputs
        assert port.count == "" and len(program.planned.program.methods[0].counts) == 1
        two = -X.abs()
        two[1:3] *= -1
        np.testing.assert_allclose(program.method()(two.numpy())["output"], module(two).numpy(), rtol=1e-6)
        with pytest.raises(ExecutionError, match="is 6, declared is at most 2"):
            program.method()(X.abs().numpy())
        with pytest.raises(ExecutionError, match="seen"):
            program.method()(two.numpy())
        program.state.reset()
        np.testing.assert_allclose(program.method()(two.numpy())["output"], two[1:3].sum(0).numpy())


def test_a_least_and_an_exact_size_are_promises_too() -> None:
    def function(x: Any) -> Any:
        row, column = (x[:, 0] > 0).nonzero(), (x[0] > 0).nonzero()
        torch._check(row.shape[0] >= 2)
        torch._check(column.shape[0] == 3)
        return row, column

    good, bad = -torch.ones(6, 4), -torch.ones(6, 4)
    good[:2, 0], good[0, 2:], bad[0, 1:] = 1, 1, 1
    with loaded(export_module(Function(function), (good,), device="cuda"), "emulator") as program:
        (method,) = program.planned.program.methods
        assert [port.count for port in method.outputs][1] == ""
        row, column = program.method()(good.numpy()).values()
        np.testing.assert_array_equal(row, function(good)[0])
        np.testing.assert_array_equal(column, function(good)[1])
        with pytest.raises(ExecutionError, match="is 0, the model needs at least 2"):
            program.method()(bad.numpy())


def test_what_stays_on_the_device_has_its_true_shape_and_only_the_count_is_copied() -> None:
    rule = (IoRule("both", "device"),)
    result = export_module(Function(bounded), (FEW,), device="cuda", io=rule)
    with loaded(result, "emulator") as program:
        given = program.to_device(FEW.numpy())
        results = program.method()(given)
        assert results["places"].shape == (5, 2) and results["doubled"].shape == (5,)
        assert_same({k: v.numpy() for k, v in results.items()}, bounded(FEW))
        counts = program.copies.counts
        assert (counts[CopyKind.H2D], counts[CopyKind.D2H]) == (0, 1)
        assert program.copies.nbytes[CopyKind.D2H] == 8


@pytest.mark.parametrize("options", [{"device_planning": False}, {"device": "cpu", "device_planning": False}])
def test_a_program_without_a_plan_cuts_and_checks_as_well(options: dict[str, Any]) -> None:
    result = export_module(Function(bounded), (FEW,), **{"device": "cuda", **options})
    with loaded(result, "cpu" if "cpu" in options.values() else "emulator") as program:
        assert_same(call(program, FEW), bounded(FEW))
        with pytest.raises(ExecutionError, match="at most 9"):
            call(program, -FEW)


def test_large_borrowed_and_narrow_results() -> None:
    """Over the size at which the transfer writes into the caller's memory; bfloat16; and views of the arena."""

    def function(x: Any) -> Any:
        return x[x > 0], x[:, x[0] > 0].to(torch.bfloat16)

    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    with loaded(export_module(Function(function), (x,), device="cuda"), "emulator") as program:
        for given in (x, -x, -x.abs()):
            chosen, narrow = program.method()(given.numpy()).values()
            want = function(given)
            np.testing.assert_array_equal(chosen, want[0].numpy())
            assert isinstance(narrow, HostTensor) and narrow.raw.flags.c_contiguous
            np.testing.assert_array_equal(narrow.float32(), want[1].float().numpy())
        borrowed, _ = program.method()(x.numpy(), borrow=True).values()
        np.testing.assert_array_equal(borrowed.numpy(), x[x > 0].numpy())
        assert len(program.planned.program.methods[0].counts) == 2


def prefix(x: Any, length: Any) -> Any:
    size = length.item()
    torch._check(size >= 0)
    torch._check(size <= 5)
    ones = torch.arange(size) + x[:size, 0]
    return x[:size] * 2, x[:size].sum(0), ones, torch.zeros(size, 3) + 1, x[0].expand(size, 4).sum(), size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_that_are_read_from_data(device: str) -> None:
    module = Function(prefix)
    with loaded(
        export_module(module, (X, torch.tensor(3)), device=device), "emulator" if device == "cuda" else "cpu"
    ) as program:
        for length in (0, 1, 3, 5):
            for got, want in zip(
                call(program, X, torch.tensor(length)).values(),
                prefix(X, torch.tensor(length)),
                strict=True,
            ):
                np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5)
        with pytest.raises(ExecutionError, match="is 6, declared is at most 5"):
            call(program, X, torch.tensor(6))
        with pytest.raises(ExecutionError, match="is -1, the model needs at least 0"):
            call(program, X, torch.tensor(-1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_repeats_by_data(device: str) -> None:
    def function(x: Any, repeats: Any) -> Any:
        longer = x.repeat_interleave(repeats, 0)
        torch._check(longer.shape[0] <= 12)
        return longer, longer.sum(0)

    result = export_module(Function(function), (X, torch.ones(6, dtype=torch.int64)), device=device)
    with loaded(result, "emulator" if device == "cuda" else "cpu") as program:
        for repeats in ([1] * 6, [0, 1, 2, 0, 3, 1], [0] * 6, [0, 0, 0, 0, 0, 12], [12, 0, 0, 0, 0, 0]):
            got = list(call(program, X, np.array(repeats)).values())
            want = function(X, torch.tensor(repeats))
            np.testing.assert_array_equal(got[0], want[0].numpy())
            np.testing.assert_allclose(got[1], want[1].numpy(), rtol=1e-5, atol=1e-5)
        with pytest.raises(ExecutionError, match="is 13, declared is at most 12"):
            call(program, X, np.array([13, 0, 0, 0, 0, 0]))


def ordered(x: Any) -> Any:
    chosen, rows = x[x > 0], x[x[:, 0] > 0]
    return (
        *chosen.sort(descending=True), chosen.sort()[0], torch.where(chosen < 9, chosen * 10, 9).to(torch.int32).sort(descending=True)[0],
        (chosen > 1).sort()[0], *rows.sort(0), *rows.sort(1), rows[rows[:, 1].argsort()], *rows.topk(2, dim=1),
    )  # fmt: skip


def best(x: Any) -> Any:
    """A detector's end: those above a threshold, the best of them, and what belongs to them."""
    scores, kept = x[:, 0].abs(), torch.where(x[:, 0].abs() > 0.1)[0]
    value, place = scores[kept].topk(2)
    again = kept[scores[kept].argsort(descending=True)][:3]
    return value, kept[place], x[kept][place], x[again], x[kept][x[kept][:, 1] > 0], x[kept - 6].sum(0)


def cuts(x: Any) -> Any:
    rows = x[x[:, 0] > 0]
    return (
        rows[:3], rows[1:], rows[:-1], rows[-2:], rows[1:-1], rows[-3:-1] * 2, rows[:0], rows[2:9],
        rows.sort(0, descending=True)[0][:2].sum(0), (x > 0).nonzero()[:5],
    )  # fmt: skip


SPECIAL = torch.where(X > 1, float("nan"), torch.where(X > 0.5, float("inf"), X))


@pytest.mark.parametrize("function", [ordered, best, cuts])
def test_order_and_parts_of_what_was_found_equal_eager(function: Callable[..., Any]) -> None:
    with loaded(export_module(Function(function), (X,), device="cuda"), "emulator", poison=True) as program:
        for x in (X, -X, X.abs() + 1, -X.abs() - 1, SPECIAL, X[[5, 0, 1, 1, 2, 4]]):
            for got, want in zip(call(program, x).values(), function(x), strict=True):
                assert got.shape == want.shape
                np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


def test_more_of_the_best_than_there_are_fails_as_eager_does() -> None:
    def three(x: Any) -> Any:
        return x[x > 0].topk(3)[0]

    with loaded(export_module(Function(three), (X,), device="cuda"), "emulator") as program:
        two = torch.full((6, 4), -1.0)
        two[0, :2] = 1
        with pytest.raises(RuntimeError):
            three(two)
        with pytest.raises(ExecutionError, match="is 2, the model needs at least 3"):
            call(program, two)


def test_a_size_without_a_bound_is_refused_with_the_way_to_declare_one() -> None:
    def function(x: Any, repeats: Any) -> Any:
        return x.repeat_interleave(repeats, 0)

    with pytest.raises(UnsupportedOperatorError, match="has no bound") as caught:
        export_module(Function(function), (X, torch.ones(6, dtype=torch.int64)), device="cuda")
    assert "torch._check(n <= bound)" in (caught.value.hint or "")
    assert "repeat_interleave" in str(caught.value)


def test_sizes_that_an_operator_needs_equal_are_compared() -> None:
    def function(x: Any) -> Any:
        made = x.clone()
        made[x[:, 0] > 0] = x[x[:, 1] > 0] + 1
        left, right = x[x[:, 2] > 0], x[x[:, 3] > 0]
        torch._check(left.shape[0] == right.shape[0])
        return left * right, made

    good = torch.tensor([[1.0, -1, 2, -2], [-1, 1, -2, 2], [3, 4, 5, 6]])
    longer, other = good.clone(), good.clone()
    longer[1, 2], other[0, 1] = 7, 8
    with loaded(export_module(Function(function), (good,), device="cuda"), "emulator") as program:
        for got, want in zip(call(program, good).values(), function(good), strict=True):
            np.testing.assert_array_equal(got, want.numpy())
        for x, operator in ((longer, "aten.mul.Tensor"), (other, "aten.index_put")):
            with pytest.raises((RuntimeError, IndexError)):
                function(x)
            with pytest.raises(ExecutionError, match="differ by 1") as caught:
                call(program, x)
            assert operator in (caught.value.why or "") and "test_counted_results.py" in (
                caught.value.why or ""
            )

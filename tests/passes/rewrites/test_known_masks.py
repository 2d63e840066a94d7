"""Masks that a model makes of places: those that show all keys or the past are left out, others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devplan.passes.rewrites.known_masks import Shown, shown
from devplan.tests.support.exporting import assert_close, export_module, loaded
from devplan.tests.support.functions import Function, against_eager

pytestmark = pytest.mark.torch
ROWS = 6


def number(node: torch.fx.Node) -> float | None:
    """No constant is read."""
    return None


def found(mask: Callable[[], Any]) -> Shown | None:
    """What is known of a mask, by the graph of what makes it."""
    graph = torch.export.export(Function(mask), ()).graph
    (made,) = graph.output_node().all_input_nodes
    return shown(made, number)


def places(size: int = ROWS, start: int = 0) -> Any:
    return torch.arange(start, start + size)


def begins_anew(positions: Any) -> Any:
    """How often positions begin anew up to each place, as `transformers` counts packed sequences."""
    before = positions[:, :1] - 1
    return (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)


def as_transformers() -> Any:
    """The causal mask that `transformers` makes while it is exported."""
    batch, rows, columns = torch.arange(1)[:, None, None, None], places()[:, None], places()[None, :]
    positions = places()[None].expand(1, -1)
    sequences = begins_anew(positions)
    past = positions[batch, columns] <= positions[batch, rows]
    same = sequences[batch, rows] == sequences[batch, columns]
    return (past.new_ones((), dtype=torch.bool) & past & same).expand(1, -1, ROWS, ROWS)


MASKS: dict[str, tuple[Callable[[], Any], Shown | None]] = {
    "every place is at least 0": (lambda: (places()[:, None] >= 0).expand(ROWS, ROWS), Shown.ALL),
    "ones": (lambda: torch.ones(ROWS, ROWS, dtype=torch.bool), Shown.ALL),
    "the past": (lambda: places()[None, :] <= places()[:, None], Shown.PAST),
    "the past, from the other side": (lambda: places()[:, None] > places()[None, :] - 1, Shown.PAST),
    "the past, both counted from 3": (lambda: places(start=3) <= places(start=3)[:, None], Shown.PAST),
    "the past, added": (
        lambda: torch.where(places()[None, :] <= places()[:, None], 0.0, float("-inf")),
        Shown.PAST,
    ),
    "the past within a window that holds all": (
        lambda: (places() <= places()[:, None]) & (places() > places()[:, None] - ROWS),
        Shown.PAST,
    ),
    "as transformers makes it": (as_transformers, Shown.PAST),
    "the past without the place itself": (lambda: places() < places()[:, None], None),
    "the past within a window": (
        lambda: (places() <= places()[:, None]) & (places() > places()[:, None] - 2),
        None,
    ),
    "the future": (lambda: places() >= places()[:, None], None),
    "one place, broadcast": (lambda: (places(1)[:, None] >= places()).expand(ROWS, ROWS), None),
    "every other key": (lambda: torch.arange(0, 2 * ROWS, 2) <= places()[:, None], None),
    "no key": (lambda: torch.zeros(ROWS, ROWS, dtype=torch.bool), None),
    "hidden softly": (lambda: torch.where(places() <= places()[:, None], 0.0, -1.0), None),
    "positions that begin anew": (
        lambda: (
            (begins_anew(places()[None] % 3)[:, None] == begins_anew(places()[None] % 3)[..., None])
            & (places() <= places()[:, None])
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_shows(name: str) -> None:
    mask, expected = MASKS[name]
    assert found(mask) is expected
    hidden = mask() if mask().dtype == torch.bool else mask() == 0
    truth = torch.ones(ROWS, ROWS, dtype=torch.bool)
    if expected is not None:
        wanted = truth if expected is Shown.ALL else truth.tril()
        assert torch.equal(hidden.broadcast_to(wanted.shape) if hidden.dim() <= 2 else hidden[0, 0], wanted)


@st.composite
def lines(draw: Any) -> Callable[[], Any]:
    """A tensor of places: counted, moved along rows or columns, shifted, sliced."""
    start, step = draw(st.integers(-3, 3)), draw(st.sampled_from((-2, -1, 1, 2)))
    size = draw(st.sampled_from((1, ROWS)))
    axis, shift = draw(st.sampled_from((0, 1))), draw(st.integers(-ROWS, ROWS))
    return lambda: torch.arange(start, start + step * size, step).unsqueeze(axis) + shift


COMPARISONS = (torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne)


@given(st.lists(st.tuples(st.sampled_from(COMPARISONS), lines(), lines()), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_what_is_said_of_a_mask_is_so(parts: list[Any]) -> None:
    def mask() -> Any:
        both = torch.ones((), dtype=torch.bool)
        for compare, first, second in parts:
            both = both & compare(first(), second())
        return both.expand(ROWS, ROWS)

    said, truth = found(mask), mask()
    if said is Shown.ALL:
        assert truth.all()
    if said is Shown.PAST:
        assert torch.equal(truth, torch.ones(ROWS, ROWS).tril().bool())


def attended(query: Any, key: Any, value: Any) -> Any:
    rows = torch.arange(query.shape[2])
    mask = rows[None, :] <= rows[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def heads(rows: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(1, 2, rows, 16, generator=generator).half() for _ in range(3))


def test_the_kernel_itself_hides_the_future() -> None:
    result = export_module(Function(attended), heads(40))
    (kernel,) = result.planned.program.kernels
    known = dict(kernel.constants)
    assert (known["CAUSAL"], known["MASKED"]) == (True, False)
    assert against_eager(attended, *heads(40)).status == "right"


def test_dynamic_sizes_are_no_hindrance() -> None:
    class Dynamic(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return attended(query, key, value)

    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {name: {2: rows} for name in ("query", "key", "value")}
    result = export_module(Dynamic(), heads(40), dynamic_shapes=shapes)
    (kernel,) = result.planned.program.kernels
    assert dict(kernel.constants)["CAUSAL"]
    with loaded(result) as program:
        for size in (2, 17, 64):
            (ours,) = program.method()(*heads(size)).values()
            assert_close(ours, attended(*heads(size)), tolerance=2e-3)

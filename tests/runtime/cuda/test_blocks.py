"""Strided copies as rectangles: against NumPy, and never a byte outside the tensor."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.backend import Operand
from devplan.runtime.cuda.blocks import blocks_of
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ExecutionError
from devplan.runtime.program import CPU


def operand(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = DType.INT16) -> Operand:
    return Operand(0, dtype, shape, strides, CPU)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape and two sets of strides: permuted and padded, the source perhaps broadcast."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))

    def strides(broadcast: bool) -> tuple[int, ...]:
        order = draw(st.permutations(range(len(shape))))
        made, step = [0] * len(shape), 1
        for dimension in order:
            if broadcast and draw(st.booleans()):
                continue
            made[dimension] = step
            step *= shape[dimension]
            step += draw(st.integers(0, 2))
        return tuple(made)

    return shape, strides(draw(st.booleans())), strides(False)


@given(layouts())
def test_blocks_move_what_numpy_moves(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, source_strides, destination_strides = layout
    source = np.arange(4000, dtype=np.int16)
    wanted, got = np.full(4000, -1, np.int16), np.full(4000, -1, np.int16)

    def view(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(array, shape, [2 * stride for stride in strides])

    view(wanted, destination_strides)[...] = view(source, source_strides)
    source_bytes, got_bytes = source.view(np.uint8), got.view(np.uint8)
    for block in blocks_of(operand(shape, source_strides), operand(shape, destination_strides)):
        assert block.rows == 1 or min(block.source_pitch, block.destination_pitch) >= block.width
        for row in range(block.rows):
            at = block.source + row * block.source_pitch
            to = block.destination + row * block.destination_pitch
            got_bytes[to : to + block.width] = source_bytes[at : at + block.width]
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(
    ("shape", "source", "destination", "count"),
    [
        ((8, 16, 32), dense((8, 16, 32)), dense((8, 16, 32)), 1),  # dense: one run
        ((8, 16, 32), (1024, 64, 1), dense((8, 16, 32)), 1),  # rows of a wider matrix: one rectangle
        ((64, 64), (1, 64), (64, 1), 64),  # a transposition: a rectangle per row
        ((3, 0, 2), (0, 2, 1), (0, 2, 1), 0),  # no elements
    ],
)
def test_few_blocks_are_enough(
    shape: tuple[int, ...], source: tuple[int, ...], destination: tuple[int, ...], count: int
) -> None:
    assert len(blocks_of(operand(shape, source), operand(shape, destination))) == count


def test_a_copy_in_too_many_pieces_is_refused_with_the_number() -> None:
    shape = (100, 100, 100)
    with pytest.raises(ExecutionError, match="10000 separate copies"):
        blocks_of(operand(shape, (1, 100, 10000)), operand(shape, dense(shape)))


def test_a_copy_between_unlike_tensors_is_refused() -> None:
    with pytest.raises(ExecutionError, match="one shape and dtype"):
        blocks_of(operand((2,), (1,)), operand((3,), (1,)))

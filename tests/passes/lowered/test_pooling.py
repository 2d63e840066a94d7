"""Average pools that are taken apart here, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from devplan.passes.lowered.pooling import average  # noqa: E402

pytestmark = pytest.mark.torch

aten = torch.ops.aten


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[int], list[Any]]:
    """Extents, and the arguments of a pool that eager accepts for them."""
    extents = [draw(st.integers(1, 14)) for _ in range(2)]
    ceil_mode = draw(st.booleans())
    kernel = [draw(st.integers(1, 30 if ceil_mode else 12)) for _ in range(2)]
    stride = [draw(st.integers(1, 40)) for _ in range(2)]
    padding = [draw(st.integers(0, each // 2)) for each in kernel]
    divisor = draw(st.none() | st.integers(1, 9))
    return extents, [kernel, stride, padding, ceil_mode, draw(st.booleans()), divisor]


@given(pools())
@settings(deadline=None, max_examples=300)
def test_large_windows_equal_eager(pool: tuple[list[int], list[Any]]) -> None:
    extents, arguments = pool
    x = torch.randn(2, 3, *extents, dtype=torch.float64)
    try:
        wanted = aten.avg_pool2d.default(x, *arguments)
    except RuntimeError:  # the windows do not fit
        assume(False)
    made = average(2)(x, *arguments)
    assume(made is not NotImplemented)
    torch.testing.assert_close(made, wanted)


def test_three_dimensions_and_half_precision() -> None:
    x = torch.randn(2, 5, 8, 9, dtype=torch.float16)
    arguments: list[Any] = [[2, 4, 5], [1, 2, 3], [1], True, False]
    wanted = aten.avg_pool3d.default(x.float(), *arguments)
    torch.testing.assert_close(average(3)(x, *arguments), wanted.half())


@pytest.mark.parametrize("arguments", [[[5, 5], [1, 1]], [[7, 7]], [[6, 6], [6, 6], [3, 3]]])
def test_what_inductor_does_well_is_left_to_it(arguments: list[Any]) -> None:
    assert average(2)(torch.randn(1, 1, 14, 14), *arguments) is NotImplemented

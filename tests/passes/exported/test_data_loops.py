"""Python loops over what a mask selects: unrolled, each turn kept only where its element is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exporting import assert_close, export_module, loaded  # noqa: E402

from devplan.runtime.errors import UnsupportedOperatorError  # noqa: E402

pytestmark = pytest.mark.torch


class Experts(torch.nn.Module):  # type: ignore[misc]
    """Three layers, of which a row of the input takes the one that its first element names; and a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.experts = torch.nn.ModuleDict({f"expert_{at}": torch.nn.Linear(4, 4) for at in range(3)})

    def forward(self, x: Any) -> Any:
        chosen = torch.nn.functional.one_hot(x[:, 0].long().clamp(0, 2), 3)
        return self.function(self.experts, x, chosen)


def in_place(experts: Any, x: Any, chosen: Any) -> Any:
    """As `transformers` spells it: the expert's name is text, its rows are added where they belong."""
    result = torch.zeros_like(x)
    for expert in (chosen.sum(0) > 0).nonzero():
        (row,) = torch.where(chosen[:, expert].squeeze(1))
        made = experts[f"expert_{expert[0]}"](x[None, row].reshape(-1, 4))
        result.index_add_(0, row, made * chosen[row, expert, None])
    return result


def bound_anew(experts: Any, x: Any, chosen: Any) -> Any:
    """A sum, a last value and a product that do not leave things as they are where a turn has nothing to do."""
    total, last, made = torch.zeros(4), torch.ones(()), x * 2
    for expert in torch.where(chosen.any(0))[0]:
        total = total + experts[f"expert_{expert}"](x).sum(0) + 1
        last = expert + last * 0.5
        made *= 3
    return total, last, made


def views_of_it(experts: Any, x: Any, chosen: Any) -> Any:
    """Writes go through views, and through two names of one tensor."""
    result = torch.zeros(3, 4)
    same = result.transpose(0, 1)
    for expert in (chosen.sum(0) > 1).nonzero().squeeze(1):
        result[expert] = experts[f"expert_{expert}"](x).sum(0)
        first, _ = same.split(2)
        first += 1
        if int(expert) == 1:
            continue
        result[0].mul_(2)
    return result


def one_in_another(experts: Any, x: Any, chosen: Any) -> Any:
    count, seen = torch.zeros(()), torch.zeros(3, 6)
    for expert in chosen.any(0).nonzero().flatten():
        for row in (chosen[:, expert] > 0).nonzero().flatten():
            count = count + 1
            seen[expert, row] += count
    return count, seen


def twice(experts: Any, x: Any, chosen: Any) -> Any:
    """The second loop finds the names of the first bound."""
    result = torch.zeros_like(x)
    for at in chosen.any(0).nonzero():
        (row,) = torch.where(chosen[:, at[0]])
        result[row] += 1
    for at in (chosen.sum(0) > 2).nonzero():
        (row,) = torch.where(chosen[:, at[0]])
        result[row] *= 5
    return result


FIRST = torch.tensor([[0.0, 1, 2, 1, 1, 0], [2, 2, 2, 2, 2, 2], [0, 2, 0, 0, 0, 2], [1, 0, 1, 0, 1, 0]])


@pytest.mark.parametrize(
    ("function", "device"),
    [(in_place, "cuda"), *((f, "cpu") for f in (in_place, bound_anew, views_of_it, one_in_another, twice))],
)
def test_turns_equal_eager(function: Callable[..., Any], device: str) -> None:
    """Whichever elements of the mask are true, all results are those of the loop itself."""
    rest = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    inputs = [torch.cat([first[:, None], rest], 1) for first in FIRST]
    module = Experts(function).eval()
    result = export_module(module, (inputs[0],), device=device)
    with loaded(result, "cpu" if device == "cpu" else "emulator") as program, torch.no_grad():
        for x in inputs:
            wanted = module(x)
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            got = program.method("forward")(x.numpy())
            for have, want in zip(got.values(), wanted, strict=True):
                assert_close(np.asarray(have), want)


def left_early(experts: Any, x: Any, chosen: Any) -> Any:
    result = torch.zeros(3)
    for at in chosen.any(0).nonzero().flatten():
        result[at] = 1
        break
    return result


def counted(experts: Any, x: Any, chosen: Any) -> Any:
    result = torch.zeros(3)
    for turn, at in enumerate(chosen.any(0).nonzero().flatten()):
        result[at] = turn
    return result


def a_number(experts: Any, x: Any, chosen: Any) -> Any:
    result, turns = torch.zeros(3), 0
    for at in chosen.any(0).nonzero().flatten():
        result[at] = 1
        turns += 1
    return result / turns


def a_number_after(experts: Any, x: Any, chosen: Any) -> Any:
    result = torch.zeros(3)
    for at in chosen.any(0).nonzero().flatten():
        number = int(at)
        result[number] = 1
    return result + number


def a_growing_list(experts: Any, x: Any, chosen: Any) -> Any:
    numbers: list[int] = []
    for at in chosen.any(0).nonzero().flatten():
        numbers.append(int(at))
    return x + sum(numbers)


def a_list(experts: Any, x: Any, chosen: Any) -> Any:
    return torch.stack([x * at for at in chosen.any(0).nonzero().flatten()]).sum(0)


def a_value(experts: Any, x: Any, chosen: Any) -> Any:
    for at in chosen.any(0).nonzero().flatten():
        made = x * at
    return made


def another_order(experts: Any, x: Any, chosen: Any) -> Any:
    result = torch.zeros(3)
    for at in chosen.any(0).nonzero().flatten().flip(0):
        result[at] = result.sum() + 1
    return result


def several_dimensions(experts: Any, x: Any, chosen: Any) -> Any:
    result = torch.zeros(6, 3)
    for at in chosen.nonzero():
        result[at[0], at[1]] = 1
    return result


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (left_early, "left early"),
        (counted, "no plain `for`"),
        (a_number, "`turns` changes"),
        (a_number_after, "`number` is used after it"),
        (a_growing_list, "`numbers` changes"),
        (a_list, "no plain `for`"),
        (a_value, "`aten.mul.Tensor` makes"),
        (another_order, "aten.flip"),
        (several_dimensions, "several dimensions"),
    ],
)
def test_what_a_turn_would_leave_behind_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"the loop at test_data_loops.py:[0-9]+") as error:
        export_module(Experts(function), (torch.ones(6, 4),), device="cpu")
    assert why in str(error.value)


class Few(torch.nn.Module):  # type: ignore[misc]
    """A loop over so few elements that torch takes none of its usual notes of their number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.count = count

    def forward(self, x: Any) -> Any:
        result = x * 2
        for at in (x[: self.count, 0] > 0).nonzero():
            result = self.layers[int(at)](result)
        return result


@pytest.mark.parametrize("count", [1, 2])
def test_a_mask_of_few_elements_turns_once_for_each(count: int) -> None:
    module = Few(count).eval()
    inputs = [
        torch.tensor(signs)[:, None] * torch.ones(3, 4) for signs in ([1.0, 1, 1], [1, -1, 1], [-1, -1, 1])
    ]
    with loaded(export_module(module, (inputs[0],), device="cpu"), "cpu") as program, torch.no_grad():
        for x in inputs:
            assert_close(program.method("forward")(x.numpy())["output"], module(x))

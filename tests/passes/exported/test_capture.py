"""What `torch.export` refuses, in the user's words; and experts that would loop over data."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from devplan.passes.exported.capture import export_method, grouped_experts  # noqa: E402
from devplan.passes.source.model import MethodSource  # noqa: E402
from devplan.runtime.errors import UnsupportedOperatorError  # noqa: E402

pytestmark = pytest.mark.torch


class Function(torch.nn.Module):  # type: ignore[misc]
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def loop_over_data(x: Any) -> Any:
    return sum(x[at] for at in (x > 0).nonzero().tolist())


def branch_on_data(x: Any) -> Any:
    return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(("function", "operator"), [(loop_over_data, "unbind"), (branch_on_data, "__bool__")])
def test_what_depends_on_data_is_refused_by_operator_and_line(function: Any, operator: str) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        export_method(MethodSource("forward", Function(function), (torch.ones(4),)))
    text = str(caught.value)
    assert caught.value.code == 3
    assert f"at operator `{operator}`" in text
    assert "test_capture.py:" in text
    assert "Caused by" not in text and "passes/" not in text  # where torch says which of our lines asked
    assert "`torch.cond`" in (caught.value.hint or "")


class Experts(torch.nn.Module):  # type: ignore[misc]
    """As `transformers` writes them: which way they compute stands in the configuration."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=way)

    def _apply_gate(self, x: Any) -> Any:
        return x

    def forward(self, x: Any) -> Any:
        return loop_over_data(x) if self.config._experts_implementation == "eager" else x.relu().sum()


def test_experts_that_loop_over_data_are_exported_as_grouped_products() -> None:
    experts = Experts("eager")
    assert "relu" in str(export_method(MethodSource("forward", experts, (torch.ones(4),))).graph)
    assert experts.config._experts_implementation == "eager"


def test_a_way_that_the_user_chose_is_kept_also_when_the_export_fails() -> None:
    experts = Experts("batched_mm")
    with pytest.raises(ZeroDivisionError), grouped_experts(torch.nn.Sequential(experts, Experts("eager"))):
        assert experts.config._experts_implementation == "batched_mm"
        raise ZeroDivisionError
    assert experts.config._experts_implementation == "batched_mm"


class Cast(torch.nn.Module):  # type: ignore[misc]
    """A model that casts a part of itself while it runs."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.router = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(kind)

    def forward(self, x: Any) -> Any:
        self.router = self.router.to(torch.float32)
        return self.router(x)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_a_module_that_is_cast_while_it_runs_is_cast_in_the_graph(kind: Any) -> None:
    module, x = Cast(kind).eval(), torch.randn(2, 4)
    before = module.state_dict(keep_vars=True)
    exported = export_method(MethodSource("forward", module, (x,)))
    after = module.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(
        after[name] is tensor and tensor.dtype in (kind, torch.int64) for name, tensor in before.items()
    )
    torch.testing.assert_close(exported.module()(x), module(x))

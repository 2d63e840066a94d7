"""What third-party models do that single operators do not show, each idiom distilled to a few lines of plain torch.

Each is exported for CUDA and compared with eager PyTorch on the emulator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from devplan.passes.api import export
from devplan.passes.exported.capture import export_method
from devplan.passes.exported.method import cast_methods
from devplan.passes.source.model import MethodSource, ModelSource
from devplan.runtime.errors import UnsupportedOperatorError
from devplan.tests.support.checking import checked
from devplan.tests.zoo.measure import measure

pytestmark = pytest.mark.torch
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Call(nn.Module):
    """A function as a module; its buffers are the keywords."""

    def __init__(self, function: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *inputs: torch.Tensor) -> Any:
        results = self.function(self, *inputs)
        return tuple(torch.view_as_real(r) if r.is_complex() else r for r in results)


def is_right(module: nn.Module, *inputs: Any, calls: int = 2) -> None:
    """Exports and equals eager, call by call."""
    source = ModelSource("idiom", (MethodSource("forward", module.eval(), inputs),))
    row = measure("idiom", "idioms", lambda: source, "cuda", code=False, calls=calls)
    assert (row.status, row.error) == ("right", "")


Z = torch.complex(rand(3, 4), rand(3, 4, seed=1))
W = torch.complex(rand(4, 5), rand(4, 5, seed=1))


def written(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A spectrum that is filled in by corners, as Fourier neural operators do."""
    made = torch.zeros(3, 4, dtype=torch.cfloat)
    made[:, :2] = z[:, :2]
    made[2, 1:] = x[2, 1:]
    made[1] = 1j
    return made


COMPLEX: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "numbers": lambda m, x, z: (
        x * 1j,
        1j * x,
        x + 2j,
        2j - x,
        (1 + 2j) / z,
        z * (2 - 1j),
        (3 * x).long() * 1j,
    ),
    "sums": lambda m, x, z: (torch.add(z, x, alpha=3), torch.sub(x, z), 1 - z, z - 0.5j, x / z),
    "real parts among them": lambda m, x, z: (
        torch.cat([z, x.to(torch.cfloat)]),
        torch.stack([z, x + 0j]),
        torch.where(x > 0, z, x.to(torch.cfloat)),
        (x > 0).to(torch.cfloat) * z,
        z.masked_fill(x > 0, 1.0),
        F.pad(z, (1, 2), value=1.0),
    ),
    "functions": lambda m, x, z: (z.sqrt(), z.log(), z.sin(), z.cos(), z**3, z**0.5, z**z, 2.0**z, z.sgn()),
    "writes": lambda m, x, z: (written(x, z), torch.zeros_like(z).index_add(0, torch.tensor([0, 0, 1]), z)),
    "pieces": lambda m, x, z: (*z.split(2, 1), *z.chunk(2, -1), *z.unbind(0), z.norm(dim=1), z == z),
    "weights": lambda m, x, z: (
        torch.einsum("bi,io->bo", z, m.w),
        F.linear(z, m.w.T.contiguous(), m.w[0]),
        x.to(torch.cfloat) @ m.w,
    ),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_inside_a_model(name: str) -> None:
    is_right(
        Call(lambda m, x, z: COMPLEX[name](m, x, torch.view_as_complex(z)), w=W),
        rand(3, 4),
        torch.view_as_real(Z),
    )


def test_a_cast_leaves_complex_tensors_complex() -> None:
    module = Call(lambda m, x: (x.to(torch.cfloat) @ m.w,), w=W)
    (cast,) = cast_methods([MethodSource("forward", module, (rand(3, 4),))], "float32")
    assert torch.equal(cast.module.w, W)  # type: ignore[arg-type]


def test_a_module_whose_weight_a_hook_computes_is_cast() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.utils.weight_norm(nn.Conv1d(4, 4, 3))
    (cast,) = cast_methods([MethodSource("forward", module, (rand(1, 4, 8),))], "float16")
    assert cast.module.weight_g.dtype == torch.float16
    with torch.no_grad():
        assert cast.module(cast.args[0]).dtype == torch.float16


class Cache(nn.Module):
    """Keys that are written where a counter on the device says, then read by attention under a mask of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 8, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys[:, :, self.position] = x[:, :, 0]
        self.keys[..., self.position, 1:3] = 0.5
        scores = (x @ self.keys.transpose(-1, -2)).masked_fill(torch.arange(8) > self.position, float("-inf"))
        self.position += 1
        return scores.softmax(-1) @ self.keys


def test_a_write_at_a_position_that_is_a_tensor() -> None:
    is_right(Cache(), rand(1, 2, 1, 4), calls=3)


def test_a_write_at_a_position_leaves_out_leading_dimensions_of_the_value() -> None:
    def write(m: Any, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = x.clone(), x.clone(), x.clone()
        first[at] = x[None, 0]
        second[1, at] = 2
        third[:, None, at] = x[:, :1]
        return first, second, third

    is_right(Call(write), rand(4, 4), torch.tensor(-2))


def test_a_read_at_a_position_that_is_a_tensor() -> None:
    def read(m: Any, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return m.table[at] * x, x[at - 1, :2], x[..., at], x[None, at, 1:], x[torch.tensor(1)], x[at, at]

    is_right(Call(read, table=rand(9)), rand(4, 4), torch.tensor(-2))


def test_numbers_read_from_tensors() -> None:
    def scaled(m: Any, x: torch.Tensor, t: torch.Tensor, n: torch.Tensor) -> tuple[Any, ...]:
        scale, count = t.item(), n.item()
        return (
            x * scale + count,
            x[count],
            x.select(1, count),
            torch.full((2, 3), scale),
            x.clamp(min=scale),
            x.masked_fill(x > 0, scale),
            x > scale,
            torch.tensor(scale),
            torch.tensor([count, 1]),
            x * round(scale, 1),
            x * (scale * 2 + 1) - scale / count,
            torch.arange(4) * scale,
            torch.where(x > 0, x, scale),
            torch.tensor(x[0].tolist()) * m.factor.item(),
        )

    is_right(Call(scaled, factor=torch.tensor(0.3)), rand(4, 4), torch.tensor(1.27), torch.tensor(2))


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 asks whether the exponent is 1")
def test_an_exponent_read_from_a_tensor() -> None:
    is_right(Call(lambda m, x, t: (x.abs() ** t.item(),)), rand(4, 4), torch.tensor(1.27))


def test_a_number_that_only_a_number_will_do_for_is_refused() -> None:
    with pytest.raises(
        UnsupportedOperatorError, match=r"aten.roll.*takes a number that is read from a tensor"
    ):
        export(Call(lambda m, x, n: (x.roll(n.item(), 0),)), (rand(3, 4), torch.tensor(2)))


def test_a_transformer_is_given_masks() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            mask = self.net.generate_square_subsequent_mask(target.size(1))
            result: torch.Tensor = self.net(
                source, target, tgt_mask=mask, src_key_padding_mask=hidden, memory_key_padding_mask=hidden
            )
            return result

    torch.manual_seed(0)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    is_right(Translator(), rand(2, 5, 16), rand(2, 4, 16), hidden)


def test_a_policy_asks_a_distribution() -> None:
    def act(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = torch.distributions.Categorical(logits=x)
        action = chosen.probs.argmax(-1)
        spread = torch.distributions.Normal(x, x.exp())
        return action, chosen.log_prob(action), chosen.entropy(), spread.log_prob(x * 2)

    is_right(Call(act), rand(3, 4))


def test_factorizations_of_constants_are_made_at_export() -> None:
    matrix = rand(4, 4) + 4 * torch.eye(4)

    def solve(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ torch.linalg.inv(m.a), x * torch.linalg.slogdet(m.a)[1], x @ torch.linalg.qr(m.a)[0]

    is_right(Call(solve, a=matrix), rand(3, 4))


def test_edges_that_a_mask_keeps_are_joined_with_loops() -> None:
    def convolved(m: Any, x: torch.Tensor, edges: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keeps = edges[0] != edges[1]
        loops = torch.arange(x.size(0)).repeat(2, 1)
        edges = torch.cat([edges[:, keeps], loops], dim=1)
        w = torch.cat([w[keeps], torch.ones(x.size(0))])
        source, target = edges[0], edges[1]
        degree = torch.zeros(x.size(0)).index_add(0, target, w)
        messages = x[source] * (degree.rsqrt()[source] * w * degree.rsqrt()[target]).unsqueeze(-1)
        return (torch.zeros_like(x).index_add(0, target, messages),)

    edges = torch.tensor([[0, 1, 2, 2, 3, 4], [1, 1, 0, 2, 4, 3]])
    is_right(Call(convolved), rand(5, 3), edges, rand(6).abs())


def test_what_two_masks_keep_is_joined() -> None:
    def both(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.cat([x[:1], x[x[:, 0] > 0], x[x[:, 1] > 0], x[:2]])
        return found, found.sum(0), found.amax(0)

    is_right(Call(both), rand(7, 3))


def test_checks_of_values_are_taken_to_hold() -> None:
    is_right(Call(checked), rand(3, 4))


@pytest.mark.parametrize("way", ["both", "later"])
def test_branches_that_do_something_depend_on_data(way: str) -> None:
    def branches(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if way == "both" and (x > 0).any():
            x = x + 1
        if x.sum() > 0:
            x = x * 2
            raise ValueError("after a change")
        return (x,)

    with pytest.raises(UnsupportedOperatorError, match=r"__bool__.*test_idioms.py"):
        export_method(MethodSource("forward", Call(branches), (rand(3, 4),)))


@dataclass
class Boxes:
    """What a detector returns."""

    corners: torch.Tensor
    labels: list[torch.Tensor]
    classes: int = 3


def test_data_classes_go_in_and_come_out() -> None:
    class Shift(nn.Module):
        def forward(self, boxes: Boxes) -> dict[str, Any]:
            return {"moved": Boxes(boxes.corners * boxes.classes, [boxes.labels[0] + 1])}

    given = Boxes(rand(2, 4), [torch.tensor([1, 2])])
    is_right(Shift(), given)
    planned = export(Shift(), (given,)).planned
    names = [port.name for port in planned.program.methods[0].outputs]
    assert names[:2] == ["moved.corners", "moved.labels.0"]


def test_attributes_that_a_model_keeps_between_calls_are_told() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.seen, self.quiet = 0, None, 1
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.seen = x
            self.quiet = 1
            self.total += x
            return x * self.steps

    module = Counting()
    (method,) = export(module, (rand(2),)).planned.program.methods
    (note,) = method.notes
    assert "`steps`, `seen` on itself" in note
    assert (module.steps, module.seen) == (0, None)


def moved(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.to("cuda") * 2,)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="such a build knows what it would be there")
def test_moving_a_tensor_to_the_gpu_is_hinted_at() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        export_method(MethodSource("forward", Call(moved), (rand(2),)))
    assert "write `x.device`" in caught.value.hint


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")
def test_a_tensor_is_moved_to_the_gpu_by_the_placement_alone() -> None:
    with export(Call(moved), (rand(2),), arch="sm_90").load("emulator") as program:
        (made,) = program.method("forward")(rand(2).numpy()).values()
    assert np.array_equal(made, rand(2).numpy() * 2)


def test_a_device_that_the_model_names_is_hinted_at() -> None:
    def run(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + torch.arange(2, device="cuda"),)

    with pytest.raises(UnsupportedOperatorError) as caught:
        export_method(MethodSource("forward", Call(run), (rand(2),)))
    assert "write `x.device`" in caught.value.hint


def test_what_is_no_data_of_torch_is_refused_by_its_name() -> None:
    class Sampler:
        def __init__(self, mean: torch.Tensor) -> None:
            self.mean = mean

    class Encoder(nn.Module):
        def forward(self, x: torch.Tensor) -> Sampler:
            return Sampler(x)

    with pytest.raises(UnsupportedOperatorError, match="returns a `Sampler`"):
        export_method(MethodSource("forward", Encoder(), (rand(2),)))


def test_a_cast_of_a_tensor_without_elements() -> None:
    module = Call(lambda m, x: (x,), none=torch.zeros(0, 3))
    (cast,) = cast_methods([MethodSource("forward", module, (rand(2),))], "float16")
    assert cast.module.none.shape == (0, 3)  # type: ignore[union-attr]


def test_a_constant_of_one_element_out_of_every_second_one() -> None:
    is_right(Call(lambda m, x: (x * m.a, m.a[0]), a=torch.tensor([[3.0, 4.0]])[:, ::2]), rand(2, 1))


def test_distributions_without_a_rule_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"draws random numbers.*make them an input"):
        export(Call(lambda m, x: (torch.poisson(x),)), (rand(3, 4).sigmoid(),))


def test_tracing_leaves_torch_as_it_was() -> None:
    before = (torch.Tensor.__getitem__, torch.distributions.Distribution._validate_args)
    export_method(MethodSource("forward", nn.ReLU(), (rand(2),)))
    assert (torch.Tensor.__getitem__, torch.distributions.Distribution._validate_args) == before

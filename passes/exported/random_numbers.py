"""Random numbers from a counter: operators with random results become arithmetic on a state of the program.

The state `STATE` counts calls. An element's bits are a hash of the count, the place of its operator in the
method and its own place (the finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). So every device and every kernel makes the same numbers, a method's calls
differ from one another, and a program repeats them after its state is reset. They are not those of eager
PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..inductor.overloads import is_overload, packet_name
from .inline import inline, stand_in

if TYPE_CHECKING:
    from .method import ExportedMethod

STATE = "random.calls"
"""The counter's name among the program's states."""

_GOLDEN = -0x61C8864680B583EB
"""2 ** 64 over the golden ratio, as a signed number."""


_MADE_OF_OTHERS = frozenset({"alpha_dropout", "feature_dropout", "feature_alpha_dropout"})


def is_random(node: torch.fx.Node) -> bool:
    """Whether a node's operator should be taken apart for the rules below."""
    return is_overload(node.target) and packet_name(node.target) in _MADE_OF_OTHERS


def _is_drawn(node: torch.fx.Node) -> bool:
    """Whether a node's result is random and there is a rule for it."""
    target = node.target
    if not is_overload(target) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return packet_name(target) in _RULES and node.kwargs.get("generator") is None


def count_random(method: ExportedMethod, calls: Tensor) -> bool:
    """Rewrite a method's graph in place; says whether there was anything random.

    ``calls`` is the counter that all methods share. Placement refuses operators that have no rule.
    """
    graph = method.graph.graph
    drawn = [node for node in graph.nodes if _is_drawn(node)]
    if not drawn:
        return False
    count = _counter(method, calls)
    for stream, node in enumerate(drawn):
        _rewrite(method, node, count, stream)
    graph.eliminate_dead_code()
    method.graph.recompile()
    return True


def _counter(method: ExportedMethod, calls: Tensor) -> torch.fx.Node:
    """The state's placeholder; the method leaves it one higher."""
    graph = method.graph.graph
    given: Any = next(n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))
    with graph.inserting_before(next(iter(graph.nodes))):
        count = graph.placeholder("b_random_calls")
    with given.fake_mode:
        count.meta["val"] = torch.empty((), dtype=torch.int64)
    (output,) = [n for n in graph.nodes if n.op == "output"]
    (following,) = inline(_next, [count], output)
    results: Any = output.args[0]
    output.args = ((following, *results),)
    method.contents[count.name], method.tensors[STATE] = STATE, calls
    method.state |= {STATE}
    method.updates = (*method.updates, (count.name, following.name))
    return count


def _next(calls: Tensor) -> Tensor:
    return calls + 1


def _rewrite(method: ExportedMethod, node: torch.fx.Node, count: torch.fx.Node, stream: int) -> None:
    target: Any = node.target
    rule, nodes = _RULES[packet_name(target)], list[torch.fx.Node](node.all_input_nodes)

    def run(calls: Tensor, *values: Any) -> Any:
        known = dict(zip(nodes, values, strict=True))
        map_arg: Any = torch.fx.map_arg  # typed for graphs, where values stand in for nodes here
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        kept = {k: v for k, v in kwargs.items() if k not in ("layout", "device", "pin_memory", "generator")}
        return rule(Draws(calls, stream), *args, **kept)

    made = inline(run, [count, *nodes], node)
    stand_in(method, node, made)


class Draws:
    """The random numbers of one operator in one call."""

    def __init__(self, calls: Tensor, stream: int) -> None:
        self._calls, self._stream = calls, stream

    def words(self, shape: Sequence[Any]) -> Tensor:
        """64 random bits an element, as int64."""
        place = torch.arange(math.prod(shape), device=self._calls.device).reshape(list(shape))
        key = _mixed(self._calls * _GOLDEN + self._stream)
        self._stream += 1 << 32
        # Multiplied as they are, places would become constants of an index, beyond what such can be.
        return _mixed(_mixed(place ^ key) + _GOLDEN)

    def uniform(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """In [0, 1), with as many bits as the type holds there."""
        bits = _BITS[dtype]
        whole = (self.words(shape) >> (64 - bits)) & ((1 << bits) - 1)
        wide = dtype if dtype == torch.float64 else torch.float32
        return (whole.to(wide) * 0.5**bits).to(dtype)

    def inside(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """In (0, 1), in float32 or float64."""
        bits = 52 if dtype == torch.float64 else 23
        whole = (self.words(shape) >> (64 - bits)) & ((1 << bits) - 1)
        return (whole.to(_wide(dtype)) + 0.5) * 0.5**bits

    def normal(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Box and Muller's, in float32 or float64."""
        radius = torch.sqrt(-2 * torch.log(self.inside(shape, dtype)))
        return radius * torch.cos(2 * math.pi * self.inside(shape, dtype))

    def exponential(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Of rate 1, above 0, in float32 or float64."""
        return -torch.log(self.inside(shape, dtype))


_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Zeros move in from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


# --- rules: as the operators of these names, with `Draws` in front -----------------------------------


def _rand(draws: Draws, size: Sequence[Any], *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    return draws.uniform(size, dtype or torch.get_default_dtype())


def _rand_like(draws: Draws, x: Tensor, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    return draws.uniform(x.shape, dtype or x.dtype)


def _randn(draws: Draws, size: Sequence[Any], *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    wanted = dtype or torch.get_default_dtype()
    return draws.normal(size, wanted).to(wanted)


def _randn_like(draws: Draws, x: Tensor, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    return _randn(draws, x.shape, dtype=dtype or x.dtype)


def _between(draws: Draws, shape: Sequence[Any], low: int, high: int, dtype: torch.dtype) -> Tensor:
    return (low + _shifted(draws.words(shape), 1) % (high - low)).to(dtype)


def _randint(draws: Draws, *given: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    *ends, size = given
    return _between(draws, size, ends[0] if len(ends) > 1 else 0, ends[-1], dtype or torch.int64)


def _randint_like(
    draws: Draws, x: Tensor, *ends: int, dtype: torch.dtype | None = None, **rest: Any
) -> Tensor:
    return _between(draws, x.shape, ends[0] if len(ends) > 1 else 0, ends[-1], dtype or x.dtype)


def _random(draws: Draws, x: Tensor, *ends: int | None, **rest: Any) -> Tensor:
    least, most = ends if len(ends) == 2 else (0, *(ends or (None,)))
    if most is None:
        most = (1 << _BITS[x.dtype]) + 1 if x.is_floating_point() else 2 if x.dtype == torch.bool else None
        most = min(torch.iinfo(x.dtype).max, (1 << 62) - 1) + 1 if most is None else most
    return _between(draws, x.shape, least or 0, most, x.dtype)


def _randperm(draws: Draws, n: int, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    return torch.argsort(draws.words([n]), stable=True).to(dtype or torch.int64)


def _bernoulli(draws: Draws, x: Tensor, p: Any = None, **rest: Any) -> Tensor:
    chance = x if p is None else p
    wide = _wide(chance.dtype) if isinstance(chance, Tensor) else torch.float32
    return (draws.uniform(x.shape, wide) < chance).to(x.dtype)


def _native_dropout(draws: Draws, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draws.uniform(x.shape, torch.float32) >= p
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _dropout(draws: Draws, x: Tensor, p: float, train: bool) -> Tensor:
    return _native_dropout(draws, x, p, train)[0] if train else x.clone()


def _uniform(draws: Draws, x: Tensor, low: float = 0.0, high: float = 1.0, **rest: Any) -> Tensor:
    return draws.uniform(x.shape, x.dtype) * (high - low) + low


def _normal(
    draws: Draws, mean: Any, std: Any = 1.0, size: Sequence[Any] | None = None, **rest: Any
) -> Tensor:
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not given:
        plain: Tensor = _randn(draws, size or (), **rest) * std + mean
        return plain
    shape = (mean + std).shape
    made: Tensor = draws.normal(shape, given[0].dtype) * std + mean
    return made.to(given[0].dtype)


def _normal_functional(draws: Draws, x: Tensor, mean: float = 0.0, std: float = 1.0, **rest: Any) -> Tensor:
    return (draws.normal(x.shape, x.dtype) * std + mean).to(x.dtype)


def _exponential(draws: Draws, x: Tensor, rate: float = 1.0, **rest: Any) -> Tensor:
    return (draws.exponential(x.shape, x.dtype) / rate).to(x.dtype)


def _log_normal(draws: Draws, x: Tensor, mean: float = 1.0, std: float = 2.0, **rest: Any) -> Tensor:
    return torch.exp(draws.normal(x.shape, x.dtype) * std + mean).to(x.dtype)


def _cauchy(draws: Draws, x: Tensor, median: float = 0.0, sigma: float = 1.0, **rest: Any) -> Tensor:
    return (torch.tan(math.pi * (draws.inside(x.shape, x.dtype) - 0.5)) * sigma + median).to(x.dtype)


def _geometric(draws: Draws, x: Tensor, p: float, **rest: Any) -> Tensor:
    return torch.ceil(-draws.exponential(x.shape, x.dtype) / math.log1p(-p)).to(x.dtype)


def _multinomial(draws: Draws, chances: Tensor, count: int, replacement: bool = False, **rest: Any) -> Tensor:
    """Without replacement those win whose exponential waits are shortest, which is that distribution."""
    wide = chances.to(_wide(chances.dtype))
    if count == 1 or not replacement:
        speed = wide / draws.exponential(wide.shape, wide.dtype)
        return speed.argmax(-1, keepdim=True) if count == 1 else speed.topk(count, -1)[1]
    total = wide.cumsum(-1)
    point = draws.inside((*wide.shape[:-1], count), wide.dtype) * total[..., -1:]
    return (point.unsqueeze(-1) >= total.unsqueeze(-2)).sum(-1).clamp(max=wide.size(-1) - 1)


_RULES: dict[str, Callable[..., Any]] = {
    "rand": _rand,
    "rand_like": _rand_like,
    "randn": _randn,
    "randn_like": _randn_like,
    "randint": _randint,
    "randint_like": _randint_like,
    "random": _random,
    "randperm": _randperm,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "dropout": _dropout,
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal_functional,
    "exponential": _exponential,
    "log_normal": _log_normal,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "multinomial": _multinomial,
}

"""A decoder's step for `bench_decoder_step.py`: what may be chosen about it, its operands, and how it is enqueued."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from bench_row_product import SHAPES, Kernel, Shape
from bench_split_attention import call_for as attention_call
from decoder_kernels import (
    GROUP,
    HEAD,
    HEADS,
    KEY_HEADS,
    KEYS,
    SLOTS,
    WORDS,
    attention,
    product_kernel,
    rotary,
)
from torch.nn import functional as F

from devplan.passes.kernels import split_attention
from devplan.passes.kernels.row_product import Blocks
from devplan.passes.lowered.compile_kernels import canonical, that_waits
from devplan.passes.tape import ExternCall, KernelSpec, OwnLaunch, Window
from devplan.runtime.dtypes import DType

LAYERS, POSITION, PLACES = 22, 1900, ("none", "before", "end")
QKV, OUT, GATE, DOWN, HEAD_PRODUCT = SHAPES[:5]
PRODUCTS = (QKV, OUT, GATE, DOWN, HEAD_PRODUCT)
TRIED = {
    QKV: ((2, 1024, 4), (2, 2048, 4), (4, 1024, 4)),
    OUT: ((2, 2048, 4), (2, 1024, 4), (4, 1024, 4, 2)),
    GATE: ((1, 1024, 4), (1, 1024, 4, 2), (1, 2048, 4), (2, 1024, 4)),
    DOWN: ((4, 2048, 4), (1, 1024, 4, 3), (2, 2048, 8, 2), (2, 2048, 4, 2), (4, 1024, 4, 3)),
    HEAD_PRODUCT: ((2, 1024, 4), (4, 1024, 4, 2), (4, 2048, 8)),
}
NAMES = {"qkv": QKV, "out": OUT, "gate": GATE, "down": DOWN, "head": HEAD_PRODUCT}


@dataclass(frozen=True)
class Attention:
    """How the part between two products is launched.

    ``kind``: `three` launches with the exporter's kernels, or `exported`, the two that it makes of them; or `rotary`, `parts` and `join` where `+` separates
    launches and `-` joins two in one. ``ahead``: whether the cache is fetched or loaded before the wait.
    """

    kind: str
    keys: int = 32
    warps: int = 4
    heads: int = 8
    ahead: str = ""
    stages: int = 2


ATTENTIONS = (
    Attention("three"),
    *(
        Attention("exported", keys, warps, ahead=ahead, stages=stages)
        for ahead, stages in (("fetch", 2), ("fetch", 1), ("", 2))
        for keys, warps in ((32, 4), (32, 8), (64, 4), (64, 8), (128, 4), (128, 8))
    ),
    *(Attention("rotary-parts+join", 64, 8, 8, ahead) for ahead in ("", "fetch", "load")),
    *(Attention("rotary-parts+join", 32, 4, 8, ahead) for ahead in ("fetch", "load")),
    *(Attention("rotary-parts-join", *sizes, "load") for sizes in ((64, 8, 8), (256, 8, 4))),
    Attention("none"),
)


@dataclass(frozen=True)
class Choice:
    """All that the search changes."""

    blocks: tuple[tuple[Shape, Blocks], ...]
    attention: Attention = ATTENTIONS[0]
    places: tuple[tuple[str, str], ...] = tuple((name, "none") for name in NAMES)
    ahead: tuple[tuple[tuple[str, str], tuple[float, int, float]], ...] = ()
    """For an edge, the megabytes fetched, by how many of the last programs, and after how many megabytes."""
    is_early: bool = True


def key_of(choice: Choice, name: str) -> Any:
    """Which kernel a choice takes for a product."""
    return NAMES[name], dict(choice.blocks)[NAMES[name]], dict(choice.places)[name]


def all_specs() -> dict[Any, KernelSpec]:
    """Every kernel that the search may need."""
    specs: dict[Any, KernelSpec] = {"rotary": rotary()}
    for shape, tried in TRIED.items():
        for b, place in product((Blocks(*each) for each in tried), PLACES):
            specs[shape, b, place] = product_kernel(shape, b, place)
    for each in ATTENTIONS[1:-1]:
        if each.kind == "exported":
            shape = split_attention.Shape(
                each.keys, 4 * KEYS // each.keys, 4 * KEYS // each.keys, each.warps, each.stages
            )
            parts = canonical(cached_step(shape).kernel)
            parts = parts if each.ahead else replace(parts, hints="")
            specs[each] = canonical(that_waits(parts))
            continue
        turns, joins = "rotary-parts" in each.kind, "parts-join" in each.kind
        specs[each] = attention(each.keys, each.warps, each.heads, turns, joins, each.ahead)
    for keys in (32, 64, 128):
        shape = split_attention.Shape(keys, 4 * KEYS // keys, 4 * KEYS // keys)
        pair = [s for s in split_attention.to_steps(attention_call(1), shape) if isinstance(s, OwnLaunch)]
        assert dict(pair[1].kernel.constants)["SPLITS"] == KEYS // keys
        for name, step in zip(("parts", "join"), pair, strict=True):
            specs[name, keys] = canonical(that_waits(canonical(step.kernel)))
    return specs


def cached_step(shape: split_attention.Shape) -> OwnLaunch:
    """What the exporter makes of attention with what stands before it."""

    def window(name: str, *sizes: int, dtype: DType = DType.FLOAT16) -> Window:
        return Window(name, dtype, sizes, tuple(torch.empty(sizes, device="meta").stride()))

    newest, cache = window("newest", 1, KEY_HEADS, 1, HEAD), window("cache", 1, KEY_HEADS, KEYS, HEAD)
    table, position = window("table", HEAD // 2), window("position", 1, dtype=DType.INT64)
    mask, query = window("mask", 1, KEYS, dtype=DType.BOOL), window("query", 1, HEADS, 1, HEAD)
    operands = (query, newest, newest, table, table, position, cache, cache, mask, HEAD**-0.5)
    call = ExternCall("devplan.cached_attention.default", operands, {}, (query,))
    return next(s for s in split_attention.to_cached_steps(call, shape) if isinstance(s, OwnLaunch))


@dataclass
class Layer:
    """A layer's weights and cache."""

    weights: dict[str, torch.Tensor]
    norms: dict[str, torch.Tensor]
    cache: torch.Tensor


@dataclass
class Step:
    """Operands of a step, and how to enqueue it."""

    kernels: dict[Any, Kernel]
    layers: list[Layer] = field(default_factory=list[Layer])

    def __post_init__(self) -> None:
        made: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}

        def weight(shape: Shape) -> torch.Tensor:
            return torch.randn(shape.weight_rows, shape.columns, **made) / shape.columns**0.5

        self.layers = [
            Layer(
                {name: weight(shape) for name, shape in NAMES.items() if name != "head"},
                {name: torch.rand(2048, **made) + 0.5 for name in ("qkv", "gate")},
                torch.randn(2, KEY_HEADS, KEYS, HEAD, **made),
            )
            for _ in range(LAYERS)
        ]
        self.head, self.norm = weight(HEAD_PRODUCT), torch.rand(2048, **made) + 0.5
        self.first = torch.randn(1, 2048, **made)
        self.x, self.h, self.mixed, self.query = (torch.zeros(1, 2048, **made) for _ in range(4))
        self.qkv, self.gated = torch.zeros(1, 2560, **made), torch.zeros(1, 5632, **made)
        self.logits = torch.zeros(1, 32000, **made)
        angles = POSITION * 10000.0 ** (-torch.arange(0, HEAD, 2, device="cuda") / HEAD)
        self.cosine, self.sine = angles.cos().half(), angles.sin().half()
        self.position = torch.tensor([POSITION], device="cuda")
        self.mask = torch.arange(KEYS, device="cuda")[None] <= self.position
        self.sums, self.marks = (
            torch.zeros(HEADS * 64 * HEAD, device="cuda"),
            torch.zeros(HEADS * 128, device="cuda"),
        )
        self.arrived = torch.zeros(HEADS, device="cuda", dtype=torch.int32)

    def nbytes(self) -> int:
        """Weights and caches, each read once."""
        of_layers = sum(w.nbytes for layer in self.layers for w in (*layer.weights.values(), layer.cache))
        return of_layers + self.head.nbytes

    def enqueue(self, choice: Choice) -> None:
        """All launches of a step, from `first` to `logits`."""
        x = self.first
        for index, layer in enumerate(self.layers):
            following = self.layers[index + 1] if index + 1 < len(self.layers) else None
            sources = {name: layer.weights[name] for name in ("out", "gate", "down")}
            self._product(
                choice,
                "qkv",
                [x, layer.weights["qkv"], layer.norms["qkv"], self.qkv],
                {**sources, "cache": layer.cache},
            )
            self._attention(choice, layer)
            self._product(choice, "out", [self.mixed, layer.weights["out"], x, self.h], sources)
            self._product(
                choice, "gate", [self.h, layer.weights["gate"], layer.norms["gate"], self.gated], sources
            )
            after = (
                {"qkv": self.head}
                if following is None
                else {"qkv": following.weights["qkv"], "cache": following.cache}
            )
            self._product(choice, "down", [self.gated, layer.weights["down"], self.h, self.x], after)
            x = self.x
        self._product(choice, "head", [x, self.head, self.norm, self.logits], {})

    def _product(
        self, choice: Choice, name: str, tensors: list[torch.Tensor], sources: dict[str, torch.Tensor]
    ) -> None:
        shape, blocks, *_ = key_of(choice, name)
        programs = -(-shape.outputs // blocks.rows)
        kernel = self.kernels[key_of(choice, name)]
        kernel.is_early = choice.is_early
        own = tensors[1]
        given = hints(choice, name, programs, {**sources, "own": own, "self": own})
        kernel(programs, [*(t.data_ptr() for t in tensors), *given])

    def _attention(self, choice: Choice, layer: Layer) -> None:
        how, keys, values = choice.attention, layer.cache[0], layer.cache[1]
        if how.kind == "none":
            return
        places = [self.qkv, self.cosine, self.sine, self.position, self.query, keys, values]

        def launch(name: Any, grid: tuple[int, int, int], tensors: list[torch.Tensor], *sizes: int) -> None:
            self.kernels[name].is_early = choice.is_early
            self.kernels[name](grid, [*(t.data_ptr() for t in tensors), *sizes])

        if how.kind == "exported":
            rest = self.qkv[0, HEADS * HEAD :]
            newest = [rest, rest[KEY_HEADS * HEAD :], self.position, self.cosine, self.sine]
            parts = [self.qkv, keys, values, self.mask, self.sums, self.marks, *newest]
            launch(how, (KEYS // how.keys, KEY_HEADS, 1), parts, KEYS)
            launch(("join", how.keys), (HEADS, 1, 1), [self.sums, self.marks, self.sums, self.mixed], HEADS)
            return
        if "rotary-" not in how.kind:
            launch("rotary", (HEADS + 2 * KEY_HEADS, 1, 1), places)
        if how.kind == "three":
            parts = [self.query, keys, values, self.mask, self.sums, self.marks]
            launch(("parts", how.keys), (KEYS // how.keys, KEY_HEADS, 1), parts, KEYS)
        else:
            tensors = [*places, self.mask, self.sums, self.marks, self.arrived, self.mixed]
            launch(how, (KEYS // how.keys, HEADS // how.heads, 1), tensors)
        if "-join" not in how.kind:
            launch(("join", how.keys), (HEADS, 1, 1), [self.sums, self.marks, self.sums, self.mixed], HEADS)

    def expected(self) -> torch.Tensor:
        """The logits in float32."""
        x = self.first.float()

        def turned(y: torch.Tensor) -> torch.Tensor:
            low, high = y.chunk(2, -1)
            c, s = self.cosine.float(), self.sine.float()
            return torch.cat([low * c - high * s, high * c + low * s], -1)

        for layer in self.layers:
            weights = {name: each.float() for name, each in layer.weights.items()}
            norms = {name: each.float() for name, each in layer.norms.items()}
            qkv = (F.rms_norm(x, (2048,), norms["qkv"], 1e-5) @ weights["qkv"].T).view(-1, HEAD)
            keys, values = layer.cache.float()
            keys[:, POSITION], values[:, POSITION] = turned(qkv[HEADS:-KEY_HEADS]), qkv[-KEY_HEADS:]
            query = turned(qkv[:HEADS]).view(KEY_HEADS, GROUP, HEAD)
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask)
            x = x + mixed.reshape(1, -1) @ weights["out"].T
            up = F.rms_norm(x, (2048,), norms["gate"], 1e-5) @ weights["gate"].T
            x = x + (F.silu(up[:, :5632]) * up[:, 5632:]) @ weights["down"].T
        return F.rms_norm(x, (2048,), self.norm.float(), 1e-5) @ self.head.float().T

    def error(self, choice: Choice, wanted: torch.Tensor) -> float:
        """The largest difference of three steps in a row, relative to the largest logit."""
        found = 0.0
        for _ in range(3):
            for layer in self.layers:
                layer.cache[:, :, POSITION] = float("nan")
            self.logits.fill_(float("nan"))
            self.enqueue(choice)
            torch.cuda.synchronize()
            error = float((self.logits.float() - wanted).abs().max() / wanted.abs().max())
            found = error if error != error else max(found, error)
        return found


def hints(choice: Choice, name: str, programs: int, sources: dict[str, torch.Tensor]) -> list[int]:
    """Values of the slots of a launch."""
    slots, full = list[int](), len(WORDS) * SLOTS
    if dict(choice.places)[name] == "none":
        return slots
    shape, blocks, _ = key_of(choice, name)
    for (_, target), (megabytes, most, offset) in (
        (e, a) for e, a in choice.ahead if e[0] == name and e[1] in sources
    ):
        source, count = sources[target], min(most, programs)
        pieces = 2 if target in ("gate", "cache") or (target in ("own", "self") and shape.is_gated) else 1
        begins = [source.data_ptr() + piece * source.nbytes // pieces for piece in range(pieces)]
        if target in ("own", "self"):
            tile = blocks.rows * shape.columns * 2
            distance = 0 if target == "self" else max(1, int(megabytes * 2**20 / (pieces * tile)))
            if distance < programs:
                slots += [w for b in begins for w in (b + distance * tile, tile, 0, programs - distance)]
            continue
        room = source.nbytes // pieces - int(offset * 2**20) // pieces
        share = -(-min(int(megabytes * 2**20) // pieces, room) // (count * 16)) * 16
        count = min(count, room // share) if share > 0 else 0  # none may pass the end
        if count > 0:
            slots += [
                w for b in begins for w in (b + int(offset * 2**20) // pieces, share, programs - count, count)
            ]
    return (slots + [0] * full)[:full]

"""Modules that torchao has quantised: their weights repacked as our kernels read them.

torchao is not imported; its tensors are known by their class names and attributes (0.18: `Int8Tensor`,
`Int4Tensor`, `Int4TilePackedTo4dTensor`, `IntxUnpackedToInt8Tensor`). Codes, scales and zeros stay what they
are, so that an artifact computes with the very weights that torchao chose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...runtime.errors import UnsupportedOperatorError
from ..exported.module_casts import computed_attributes
from ..source.model import MethodSource
from .weight import CHUNK, QuantizedWeight, bias_of, pack, words_per_chunk


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] taken apart: ``(code - bias) * scale + zero`` by groups of columns."""

    codes: torch.Tensor
    """[N, K], from 0 to 2**bits - 1."""
    scales: torch.Tensor
    """[N, groups]."""
    zeros: torch.Tensor | None
    bits: int
    group: int

    @property
    def obstacle(self) -> str:
        """Why no kernel reads such groups, or nothing."""
        columns = self.codes.shape[1]
        if self.group >= columns or self.group % words_per_chunk(self.bits) == 0:
            return ""
        return f"groups of {self.group} columns fit no kernel"

    def packed(self) -> QuantizedWeight:
        """For the kernels: a group is at most a row, and there are scales for whole chunks."""
        columns = self.codes.shape[1]
        words = pack(self.codes, self.bits)
        if self.group >= columns and self.zeros is None:
            return QuantizedWeight(words, self.scales.contiguous(), None, self.bits, 0)
        whole = -(columns // -CHUNK) * CHUNK
        group = whole if self.group >= columns else self.group
        missing = -(whole // -group) - self.scales.shape[1]
        scales, zeros = (
            None if t is None else torch.nn.functional.pad(t, (0, missing)).contiguous()
            for t in (self.scales, self.zeros)
        )
        assert scales is not None
        return QuantizedWeight(words, scales, zeros, self.bits, group)

    def dequantized(self) -> torch.Tensor:
        """The weights in float32."""
        made = (self.codes.float() - bias_of(self.bits)) * self._spread(self.scales)
        return made if self.zeros is None else made + self._spread(self.zeros)

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """The value of each column's group."""
        return values.float().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


class PackedLinear(torch.nn.Module):
    """A linear layer that reads a packed weight; it has a meaning for the exporter alone."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    factor: torch.Tensor | None

    def __init__(
        self, weight: QuantizedWeight, bias: torch.nn.Parameter | None, factor: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("words", weight.words)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("factor", factor)
        self.bias = bias
        self.bits, self.group = weight.bits, weight.group

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Casts leave the scales alone: another type would be other weights."""
        kept = {name: buffer for name, buffer in self._buffers.items() if name in ("scales", "zeros")}
        made: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            self._buffers[name] = after if after is None or before is None else before.to(after.device)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T + bias``, by the operator of ours; the argument's name is the layer's."""
        x = input if self.factor is None else input * self.factor
        made: torch.Tensor = torch.ops.devplan.quantized_linear(
            x, self.words, self.scales, self.zeros, self.bias, self.bits, self.group
        )
        return made


def is_torchao(tensor: object) -> bool:
    """Whether a tensor is one of torchao's."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.partition(".")[0] == "torchao"


def unwrap(
    methods: Sequence[MethodSource], *, pack_weights: bool
) -> tuple[list[MethodSource], Mapping[str, str]]:
    """Methods whose modules have no tensors of torchao, and a note for each that had some.

    Linear layers become `PackedLinear`, or get their weights back in floating point (without
    ``pack_weights``, and where no kernel reads such groups). The user's modules stay as they are; all
    methods are copied as one, so that what they share stays shared.

    Raises UnsupportedOperatorError for tensors of other kinds, and for activations that are quantised.
    """
    copied: dict[int, Any] = {}
    made, notes = list[MethodSource](), dict[str, str]()
    for method in methods:
        tensors = {} if method.exported is not None else _tensors(method.module)
        if not any(is_torchao(tensor) for tensor in tensors.values()):
            made.append(method)
            continue
        copied |= {id(tensor): tensor for tensor in tensors.values()} | computed_attributes(method.module)
        layers = _Layers(pack_weights)
        made.append(replace(method, module=layers.replace(copy.deepcopy(method.module, copied))))
        notes[method.name] = layers.note()
    return made, notes


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _Layers:
    """Replaces the layers of a module, and keeps what became of each."""

    def __init__(self, pack_weights: bool) -> None:
        self._pack_weights = pack_weights
        self._packed: list[str] = []
        self._plain: dict[str, str] = {}

    def replace(self, root: torch.nn.Module) -> torch.nn.Module:
        """The module without tensors of torchao, changed in place."""
        for name, module in list(root.named_modules()):
            if isinstance(module, PackedLinear):  # an earlier method shares it
                self._packed.append(_words(module.bits, module.group))
            elif isinstance(module, torch.nn.Linear) and is_torchao(module.weight):
                layer = self._layer(name, module)
                if not name:
                    return layer
                root.set_submodule(name, layer)
        for name, tensor in _tensors(root).items():
            if is_torchao(tensor):
                raise _unknown(name, tensor, "the weights of linear layers")
        return root

    def _layer(self, name: str, layer: torch.nn.Linear) -> torch.nn.Module:
        weight: Any = layer.weight
        read = codes_of(weight, f"{name}.weight".lstrip("."))
        factor = getattr(weight, "act_pre_scale", None)
        why = read.obstacle if self._pack_weights else "the program is for the host"
        if not why:
            packed = read.packed()
            self._packed.append(_words(packed.bits, packed.group))
            return PackedLinear(packed, layer.bias, factor)
        self._plain[name] = why
        plain = read.dequantized() if factor is None else read.dequantized() * factor.float()
        layer.weight = torch.nn.Parameter(plain.to(weight.dtype), requires_grad=False)
        return layer

    def note(self) -> str:
        """One sentence."""
        kinds = ", ".join(f"{self._packed.count(kind)} {kind}" for kind in dict.fromkeys(self._packed))
        told = f"torchao's weights: {len(self._packed)} linear layers read them packed"
        told += f" ({kinds})" if kinds else ""
        plain = ", ".join(f"`{name}` ({why})" for name, why in self._plain.items())
        return f"{told}; in floating point: {plain}" if plain else told


def _words(bits: int, group: int) -> str:
    return f"int{bits} in groups of {group}" if group else f"int{bits} by rows"


def codes_of(tensor: Any, name: str) -> Codes:
    """Take a tensor of torchao's apart; UnsupportedOperatorError for kinds that are not known."""
    readers: dict[str, Callable[[Any], Codes]] = {
        "Int8Tensor": _int8,
        "Int4Tensor": _int4,
        "Int4TilePackedTo4dTensor": _tile_packed,
        "IntxUnpackedToInt8Tensor": _unpacked,
    }
    kind = type(tensor).__name__
    if kind not in readers:
        raise _unknown(name, tensor, ", ".join(f"`{known}`" for known in readers))
    quantised = ("act_quant_kwargs", "activation_quantization")
    if any(getattr(tensor, attribute, None) is not None for attribute in quantised):
        raise UnsupportedOperatorError(
            f"`{name}` has torchao quantise activations", hint="quantise weights only"
        )
    return readers[kind](tensor)


def _unknown(name: str, tensor: Any, known: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"`{name}` is a `{type(tensor).__name__}` of torchao's",
        why=f"known are {known}",
        hint="export the model before torchao, with `--quantize`",
    )


def _int8(tensor: Any) -> Codes:
    """Symmetric or with whole zero points; one scale for the tensor, a row or a group of columns."""
    return _affine(tensor, 8)


def _unpacked(tensor: Any) -> Codes:
    """Codes of up to 8 bits, one in a byte."""
    width = int(str(tensor.target_dtype).removeprefix("torch.int"))
    return _affine(tensor, 4 if width <= 4 else 8)


def _affine(tensor: Any, bits: int) -> Codes:
    """``(q - zero_point) * scale`` with signed q [N, K]."""
    rows, columns = tensor.qdata.shape
    group = int(tensor.block_size[-1])
    scales = tensor.scale.reshape(-1, -(columns // -group)).expand(rows, -1)
    zeros: torch.Tensor | None = None
    if tensor.zero_point is not None and bool((tensor.zero_point != 0).any()):
        points = tensor.zero_point.reshape(-1, -(columns // -group)).expand(rows, -1)
        zeros = -points.to(torch.float32) * scales.float()
    return Codes(tensor.qdata.to(torch.int32) + bias_of(bits), scales, zeros, bits, group)


def _int4(tensor: Any) -> Codes:
    """Two signed codes in a byte, the even column low; scales and zeros [groups, N]."""
    low, high = tensor.qdata & 15, (tensor.qdata >> 4) & 15
    pairs = torch.stack([low, high], -1).flatten(1).to(torch.int32)
    codes = (pairs + 8) & 15  # two's complement to an offset of 8
    return Codes(codes, tensor.scale.t(), tensor.zero_point.t(), 4, int(tensor.block_size[-1]))


def _tile_packed(tensor: Any) -> Codes:
    """The layout of PyTorch's int4 product, [N / 8][K / 128][32][4] words, padded to its tiles.

    Lane t of a tile holds row t / 4; word j its columns of the k-tiles 2j and 2j + 1, of 16 columns each:
    from 2 * (t % 4) on, two neighbours and the two that lie 8 further, even ones in the low half.
    """
    words = tensor.qdata.to(torch.int64)
    tiles, outer, lanes, inner = words.shape
    nibbles = torch.stack([words >> (4 * p) & 15 for p in (0, 4, 1, 5, 2, 6, 3, 7)], -1)
    split = nibbles.reshape(tiles, outer, lanes // 4, 4, inner, 2, 2, 2)
    # tile, outer, row, column pair, word, k-tile, far, odd
    matrix = split.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(tiles * (lanes // 4), -1)
    rows, columns = tensor.shape
    group = int(tensor.block_size[-1])
    groups = -(columns // -group)
    scales, zeros = tensor.scale_and_zero.transpose(0, 1).unbind(-1)
    codes = matrix[:rows, :columns].to(torch.int32)
    return Codes(codes, scales[:rows, :groups], zeros[:rows, :groups], 4, group)

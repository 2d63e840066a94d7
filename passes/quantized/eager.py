"""Eager PyTorch with the weights that an artifact's codes stand for, to compare the artifact with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..inductor.interfaces import pytree
from .scheme import Selection
from .torchao import codes_of, is_torchao
from .weight import quantized


class RoundedWeights(TorchFunctionMode):
    """While active, linear layers and experts of a module read rounded weights, in floating point.

    ``notes`` are those of the artifact's method: they say by what scheme weights were rounded and which were
    left. ``dtype`` is what weights were cast to before; None: nothing. Weights of torchao's are read as the
    numbers that they stand for.
    """

    def __init__(self, module: torch.nn.Module, notes: Sequence[str], dtype: torch.dtype | None) -> None:
        super().__init__()
        found = [selection for note in notes if (selection := Selection.parse(note)) is not None]
        self._selection = found[0] if found else None
        self._dtype = dtype
        self._names: dict[int, set[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), set()).add(name.removesuffix(".weight"))
        self._rounded: dict[tuple[int, bool], torch.Tensor] = {}
        self._experts = {
            id(parameter): (parameter, is_flipped)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            for pattern, is_flipped in (self._selection.experts.items() if self._selection else ())
            if parameter.dim() == 3 and fnmatchcase(name.removesuffix(".weight"), pattern)
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of torch; those of `torch.nn.functional.linear` get another weight."""
        kwargs = kwargs or {}
        if func is F.embedding:
            given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            table = given["weight"]
            is_rounded = self._selection is not None and self._is_named(table, self._selection.embeddings)
            return F.embedding(given["input"], self._weight(table)) if is_rounded else func(*args, **kwargs)
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            return F.linear(given["input"], self._weight(given["weight"]), given.get("bias"))
        if func is torch.addmm and len(args) == 3:
            return func(*args[:2], self._weight(args[2], is_flipped=True), **kwargs)
        if self._experts:
            given = pytree.tree_map_only(torch.Tensor, self._expert, {"args": args, "kwargs": kwargs})
            return func(*given["args"], **given["kwargs"])
        return func(*args, **kwargs)

    def _expert(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor itself, or what experts' matrices are rounded to."""
        found = self._experts.get(id(tensor))
        return tensor if found is None else self._weight(tensor, is_flipped=found[1])

    def _weight(self, weight: torch.Tensor, *, is_flipped: bool = False) -> torch.Tensor:
        key = (id(weight), is_flipped)
        if key not in self._rounded:
            self._rounded[key] = self._round(weight, is_flipped=is_flipped)
        return self._rounded[key]

    def _is_named(self, weight: torch.Tensor, names: Iterable[str]) -> bool:
        return not self._names.get(id(weight), set()).isdisjoint(names)

    def _round(self, weight: torch.Tensor, *, is_flipped: bool) -> torch.Tensor:
        if is_torchao(weight):
            read = codes_of(weight, "weight")
            factor = getattr(weight, "act_pre_scale", None)
            plain = read.dequantized() if factor is None else read.dequantized() * factor.float()
            return plain.to(weight.dtype)
        if self._selection is None or id(weight) not in self._names or not weight.is_floating_point():
            return weight
        if self._is_named(weight, self._selection.embeddings):
            return quantized(weight.detach(), 8, 0).dequantized(weight.shape[1]).to(weight.dtype)
        if self._is_named(weight, self._selection.left):
            return weight
        scheme, cast = self._selection.scheme, weight.detach().to(self._dtype or weight.dtype)
        cast = cast.mT if is_flipped else cast
        made = quantized(cast, scheme.bits, scheme.group).dequantized(cast.shape[-1])
        made = made.reshape(cast.shape).to(weight.dtype)
        return made.mT if is_flipped else made

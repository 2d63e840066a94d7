"""Weights from files at load: names fitted to a program's recipes, and the constants that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..dtypes import DType
from ..errors import UsageError
from ..tensors.host import Array, HostTensor, is_native, numpy_dtype
from .recipes import Part, Recipe


class Stored(Protocol):
    """A tensor of a weights file; `safetensors.StoredTensor` is one."""

    @property
    def dtype(self) -> DType:
        """Its element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; it is row-major."""
        ...

    def read(self) -> memoryview:
        """Its bytes."""
        ...

    def digest(self) -> str:
        """SHA-256 of its bytes."""
        ...


@dataclass(frozen=True)
class Supply:
    """The tensors of one or more files, fitted to the names of a program's recipes.

    ``label`` is what messages call them. Names that the program has under a common prefix and the files
    without it, or the other way round, are the same (a wrapper module around the published one).
    """

    label: str
    tensors: Mapping[str, Stored]
    rename: Callable[[str], str] = str

    @classmethod
    def fitted(cls, label: str, tensors: Mapping[str, Stored], recipes: Sequence[Recipe]) -> Supply:
        """Check that every tensor is there, with its shape and a type that it can be cast from.

        Raises:
            UsageError: one line that names the first tensor that is missing or other than expected.
        """
        parts = [(part, recipe.dtype) for recipe in recipes for part in recipe.parts if part.names]
        names = [part.names for part, _ in parts]
        best = min(_renamings(names, tensors), key=lambda rename: len(_missing(names, tensors, rename)))
        if missing := _missing(names, tensors, best):
            why = f"{len(missing)} of {len(names)} weights are missing"
            near = f"; it holds `{next(iter(tensors))}`" if tensors else "; it holds no tensors"
            hint = "give the weights that the model was exported for"
            raise UsageError(f"`{label}` has no tensor `{missing[0][0]}`", why=why + near, hint=hint)
        supply = cls(label, tensors, best)
        for part, dtype in parts:
            supply._check(part, dtype)
        return supply

    def find(self, part: Part) -> Stored:
        """The tensor that a part means."""
        name = next(name for name in part.names if self.rename(name) in self.tensors)
        return self.tensors[self.rename(name)]

    def digest(self, recipe: Recipe) -> str:
        """SHA-256 of what `make` makes, without making it where a file has it."""
        first = self.find(recipe.parts[0]) if recipe.is_plain else None
        if first is not None and first.dtype == recipe.dtype:
            return first.digest()
        return hashlib.sha256(self.make(recipe)).hexdigest()

    def _check(self, part: Part, dtype: DType) -> None:
        found = self.find(part)
        is_castable = found.dtype == dtype or (found.dtype.is_floating and dtype.is_floating)
        if found.shape != part.shape or not is_castable:
            what = f"`{part.names[0]}` is {_type(found.dtype, found.shape)} in `{self.label}`"
            hint = "give the weights that the model was exported for"
            raise UsageError(what, why=f"{_type(dtype, part.shape)} is expected", hint=hint)

    def make(self, recipe: Recipe) -> memoryview:
        """The bytes of a constant, newly made."""
        rows = [self._part(part, recipe.dtype) for part in recipe.parts]
        whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
        order = sorted(range(whole.ndim), key=lambda d: (-recipe.strides[d], -recipe.shape[d]))
        flat: Array = np.ascontiguousarray(whole.reshape(recipe.shape).transpose(order)).reshape(-1)
        return flat.view(np.uint8).data if flat.size else memoryview(b"")

    def _part(self, part: Part, dtype: DType) -> Array:
        if not part.names:
            return np.zeros(part.shape, numpy_dtype(dtype))
        stored = self.find(part)
        raw = np.frombuffer(stored.read(), numpy_dtype(stored.dtype)).reshape(stored.shape)
        return raw if stored.dtype == dtype else cast(raw, stored.dtype, dtype)


def cast(raw: Array, source: DType, target: DType) -> Array:
    """Raw bits of one floating type as raw bits of another, rounded to nearest, ties to even."""
    values: Any = raw if is_native(source) else HostTensor(raw, source).float32()
    if is_native(target):
        with np.errstate(over="ignore"):
            return np.asarray(values.astype(numpy_dtype(target)))
    return HostTensor.from_float32(values.astype(np.float32), target).raw


class Constants(Mapping[str, memoryview]):
    """An artifact's constants by digest: windows into files, and those that recipes make when asked for.

    What a recipe made is kept for constants of the host alone, whose memory the program uses as it is.
    """

    def __init__(
        self,
        windows: Mapping[str, memoryview],
        recipes: Mapping[str, Recipe],
        supply: Supply | None,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self._windows, self._recipes = dict(windows), recipes
        self._supply, self._kept = supply, kept

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes by digest."""
        return self._recipes

    def __getitem__(self, digest: str) -> memoryview:
        if digest in self._windows:
            return self._windows[digest]
        recipe = self._recipes[digest]
        if self._supply is None:
            raise missing_weights(recipe)
        made = self._supply.make(recipe)
        if digest in self._kept:
            self._windows[digest] = made
        return made

    def __contains__(self, digest: object) -> bool:
        return digest in self._windows or digest in self._recipes

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._windows, *self._recipes))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self._windows, *self._recipes)))


def missing_weights(recipe: Recipe) -> UsageError:
    """The error of a program that is loaded without the weights that it was exported without."""
    return UsageError(
        "the artifact was exported without its weights",
        why=f"it needs `{recipe.names[0]}`",
        hint="give them: `--weights FILE.safetensors`",
    )


def _type(dtype: DType, shape: Sequence[int]) -> str:
    return f"{dtype}[{'x'.join(map(str, shape))}]"


def _missing(
    names: Sequence[tuple[str, ...]], tensors: Mapping[str, Stored], rename: Callable[[str], str]
) -> list[tuple[str, ...]]:
    return [some for some in names if not any(rename(name) in tensors for name in some)]


def _renamings(
    names: Sequence[tuple[str, ...]], tensors: Mapping[str, Stored]
) -> Iterator[Callable[[str], str]]:
    """Names as they are; without the first of the components that all share; with one that the files add."""
    yield str
    shared = _common_prefix([some[0] for some in names])
    for count in range(1, len(shared) + 1):
        prefix = ".".join(shared[:count]) + "."
        yield partial(_without, prefix)
    first = f".{names[0][0]}" if names else ""
    for name in tensors:
        if names and name.endswith(first):
            prefix = name.removesuffix(first) + "."
            yield partial(_with, prefix)


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def _with(prefix: str, name: str) -> str:
    return prefix + name


def _common_prefix(names: Sequence[str]) -> list[str]:
    """The leading components that all names have, never the whole of one."""
    split = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for components in zip(*split, strict=False):
        if len(set(components)) != 1:
            break
        shared.append(components[0])
    return shared

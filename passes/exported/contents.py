"""Constants and state of all methods: their names, their bytes, and what methods share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ...runtime.errors import UsageError
from ...runtime.program import CPU, Constant, Device, Role, StateVariable, Storage
from ...runtime.weights.recipes import Part, Recipe
from ..inductor.interfaces import storage_key
from ..quantized.weight import QuantizedWeight
from ..size_arithmetic import is_dense
from ..source.hollow import is_hollow
from .method import ExportedMethod
from .sizes import to_dtype


class Supplier(Protocol):
    """Files of weights that can tell what bytes a recipe will make."""

    def digest(self, recipe: Recipe) -> str:
        """SHA-256 of the bytes."""
        ...


@dataclass
class Contents:
    """Every tensor that methods hold, by the name it has in the program."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    state: set[str] = field(default_factory=set[str])
    digests: dict[str, str] = field(default_factory=dict[str, str])
    readers: dict[str, int] = field(default_factory=dict[str, int])
    """How many placeholders of all methods a content stands behind."""
    merged: dict[tuple[str, ...], tuple[torch.Tensor | None, ...]] = field(
        default_factory=dict[tuple[str, ...], tuple[torch.Tensor | None, ...]]
    )
    """Operands of layers that became one, by the names of what they were made of."""
    quantized: dict[tuple[str, int, int], QuantizedWeight] = field(
        default_factory=dict[tuple[str, int, int], QuantizedWeight]
    )
    """Quantised weights by the name of what was rounded, bits and group."""
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict[str, tuple[Part, ...]])
    """Of contents whose bytes are not here: the tensors of files that they are made of."""
    supplier: Supplier | None = None
    """Those files, where they are known already."""
    _named: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def name(self, method: str, wish: str, tensor: torch.Tensor) -> str:
        """The program's name of a tensor; the same memory has one name, whatever methods call it."""
        key = _identity(tensor)
        if key in self._named:
            return self._named[key]
        name = wish if wish not in self.tensors else f"{method}.{wish}"
        self.tensors[name] = tensor
        self._named[key] = name
        return name

    def digest(self, name: str) -> str:
        """SHA-256 of a tensor's bytes, computed once."""
        if name not in self.digests:
            self.digests[name] = self._digest(name)
        return self.digests[name]

    def _digest(self, name: str) -> str:
        recipe = self.recipe(name)
        if recipe is None:
            return hashlib.sha256(self.read(name)).hexdigest()
        return recipe.digest() if self.supplier is None else self.supplier.digest(recipe)

    def give_up(self, name: str, hollow: torch.Tensor, parts: tuple[Part, ...]) -> None:
        """Keep of a content only what files at load will make it of."""
        self.tensors[name], self.parts[name] = hollow, parts

    def recipe(self, name: str) -> Recipe | None:
        """How a content is made of files at load; None when its bytes are here."""
        if name not in self.parts:
            return None
        tensor = self.tensors[name]
        return Recipe(self.parts[name], to_dtype(tensor.dtype), tuple(tensor.shape), dense_strides(tensor))

    def lay_out_channels_last(self, name: str, dimension: int = 1) -> bool:
        """Store a 3-D or 4-D constant channels-last, unless something else reads it in the layout it has.

        Channels are ``dimension``: 1, or 0 for the weights of a depthwise convolution.
        """
        tensor = self.tensors[name]
        if self.readers.get(name, 0) != 1 or name in self.state:
            return False
        self.tensors[name] = channels_last(tensor, dimension)
        self.digests.pop(name, None)
        return True

    def read(self, name: str) -> memoryview:
        """The bytes, in the order of the tensor's dense strides; no copy where memory is dense."""
        return tensor_bytes(self.tensors[name])


def channels_last(tensor: torch.Tensor, dimension: int = 1) -> torch.Tensor:
    """A tensor [N, C, W] or [N, C, H, W] whose dimension 1, or another, is the densest."""
    if tensor.dim() == 3 or dimension != 1:
        return tensor.movedim(dimension, -1).contiguous().movedim(-1, dimension)
    return tensor.contiguous(memory_format=torch.channels_last)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (id(tensor),)
    if is_hollow(tensor):
        key = storage_key(tensor)
        return (key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def name_contents(
    methods: Sequence[ExportedMethod], *, are_given: bool = False, supplier: Supplier | None = None
) -> Contents:
    """Name all contents, and make state of what any method changes, in every method that reads it.

    With ``are_given`` what a saved model has comes from files at load: its values are forgotten here, if it
    had any. ``supplier`` knows those files already.
    """
    contents = Contents(supplier=supplier)
    for method in methods:
        renamed = {old: contents.name(method.name, old, t) for old, t in method.tensors.items()}
        method.contents = {node: renamed[old] for node, old in method.contents.items()}
        method.weights = {renamed[old]: names for old, names in method.weights.items()}
        method.tensors = {renamed[old]: t for old, t in method.tensors.items()}
        contents.state |= {renamed[old] for old in method.state}
        for name in method.contents.values():
            contents.readers[name] = contents.readers.get(name, 0) + 1
    for method in methods:
        method.state = frozenset(name for name in method.tensors if name in contents.state)
    if are_given:
        _forget_weights(methods, contents)
    return contents


def _forget_weights(methods: Sequence[ExportedMethod], contents: Contents) -> None:
    """Keep of all weights that no method changes only where they come from."""
    names: dict[str, tuple[str, ...]] = {}
    for method in methods:
        for name, others in method.weights.items():
            names[name] = tuple(dict.fromkeys((name, *names.get(name, ()), *others)))
    claims = Counter(other for name, others in names.items() for other in others if other != name)
    for name, others in names.items():
        tensor = contents.tensors[name]
        if name not in contents.state and tensor.numel():
            own = tuple(o for o in others if o == name or (o not in names and claims[o] == 1))
            hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            contents.give_up(name, hollow, (Part(own, tuple(tensor.shape)),))
    for method in methods:
        method.tensors = {name: contents.tensors[name] for name in method.tensors}
    for name, tensor in contents.tensors.items():
        if is_hollow(tensor) and name not in contents.parts and tensor.numel():
            why = "the model changes it, so that no file of weights has it"
            raise UsageError(f"`{name}` has no values", why=why, hint="build it on the cpu")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that a tensor's bytes are stored with: its own if dense, else row-major."""
    if is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor.stride()
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as bytes in the order of `dense_strides`."""
    if tensor.numel() == 0:
        return memoryview(b"")
    strides = dense_strides(tensor)
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
    flat = tensor.detach().permute(order).contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return array.data


def declare(
    contents: Contents, storages: Sequence[tuple[str, Storage]]
) -> tuple[tuple[Constant, ...], tuple[StateVariable, ...], Mapping[tuple[str, str], str]]:
    """Declare what the methods' storages hold.

    ``storages`` are (method, storage) of role CONSTANT or STATE. A constant on a second device is declared
    again under another name. Returns the declarations and (content, device) -> declared name.
    """
    constants: dict[str, Constant] = {}
    state: dict[str, StateVariable] = {}
    names: dict[tuple[str, str], str] = {}
    for _, storage in storages:
        tensor, device = contents.tensors[storage.content], storage.device
        nbytes = tensor.numel() * tensor.element_size()
        shape, dtype = tuple(tensor.shape), to_dtype(tensor.dtype)
        if storage.role is Role.STATE:
            initial = contents.digest(storage.content) if bool(tensor.any()) else ""
            names[storage.content, str(device)] = storage.content
            state.setdefault(
                storage.content, StateVariable(storage.content, dtype, shape, device, nbytes, initial)
            )
            continue
        name = _declared_name(storage.content, device, constants)
        names[storage.content, str(device)] = name
        digest = contents.digest(storage.content)
        constants[name] = Constant(name, digest, nbytes, dtype, shape, dense_strides(tensor), device)
    return tuple(constants.values()), tuple(state.values()), names


def _declared_name(content: str, device: Device, constants: Mapping[str, Constant]) -> str:
    held = constants.get(content)
    if held is None or held.device == device:
        return content
    return f"{content}@{device if device != CPU else 'cpu'}"

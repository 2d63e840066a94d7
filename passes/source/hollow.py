"""Models without their weights: parameters on the meta device, and what stands for them while exporting.

A parameter is known by its shape alone. Buffers that a module computes (tables of positions, masks, caches)
keep their values: no file of weights has them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...runtime.errors import UsageError
from ..inductor.interfaces import fake_mode, storage_key, tensor_tables, transient_buffers
from .model import MethodSource

_LARGE = 1 << 20


@contextmanager
def without_weights() -> Generator[None]:
    """Modules that are built inside have their parameters on the meta device.

    Memory that a parameter was allocated with is never touched, so that it is never there: initialisers run
    on the meta tensor and do nothing.
    """
    register = torch.nn.Module.register_parameter
    made: dict[int, tuple[weakref.ref[Any], torch.nn.Parameter]] = {}

    def hollow(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            known = made.get(id(param))
            if known is None or known[0]() is not param:
                empty = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                empty.__dict__.update(param.__dict__)
                known = made[id(param)] = (weakref.ref(param), empty)
            param = known[1]
        register(module, name, param)

    with mock.patch.object(torch.nn.Module, "register_parameter", hollow), _UntouchedZeros():
        yield


class _UntouchedZeros(TorchFunctionMode):
    """`torch.zeros` for the host that writes nothing: large caches are only there once they are used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        place = given.get("device") or torch.get_default_device()
        if func is torch.zeros and not given.keys() & {"out", "layout"} and torch.device(place).type == "cpu":
            like = func(*args, **{**given, "device": "meta"})
            if like.nbytes >= _LARGE:
                return untouched_zeros(like.shape, like.dtype).requires_grad_(like.requires_grad)
        return func(*args, **given)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the system has yet to give: `torch.zeros` would write them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(tuple(shape))


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values: on the meta device, or a fake of the export's."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")


@contextmanager
def on_the_host(methods: Sequence[MethodSource]) -> Generator[None]:
    """While inside, meta tensors of the modules are fakes on the host, as other tensors there expect.

    Raises:
        UsageError: a tensor without values is none that a file of weights would have.
    """
    mode, fakes, undo = fake_mode(), dict[int, torch.Tensor](), list[tuple[dict[str, Any], str, Any]]()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
        return fakes[id(tensor)]

    try:
        for table, name, tensor in _meta_tensors(methods):
            undo.append((table, name, tensor))
            table[name] = fake(tensor)
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def _meta_tensors(methods: Sequence[MethodSource]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(table, name, tensor) of every module's own tables."""
    for method in methods:
        for path, module in list(method.module.named_modules()):
            parameters, buffers = tensor_tables(module)
            for name, tensor in list(parameters.items()):
                if tensor is not None and tensor.is_meta:
                    yield parameters, name, tensor
            for name, buffer in list(buffers.items()):
                if buffer is not None and buffer.is_meta:
                    if name in transient_buffers(module):
                        full = f"{path}.{name}" if path else name
                        why = "it is not persistent, so that no file of weights has it"
                        hint = "build the model on the cpu, or under `devplan export --weights none`"
                        raise UsageError(f"buffer `{full}` has no values", why=why, hint=hint)
                    yield buffers, name, buffer


def weight_names(method: MethodSource, state_dict: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """By storage, every name that a saved model would have the tensor under; tied tensors have several."""
    tensors = state_dict if method.exported is not None else method.module.state_dict(keep_vars=True)
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            key = storage_key(tensor)
            found[key] = (*found.get(key, ()), name)
    return found


def refuse_meta(methods: Sequence[MethodSource]) -> None:
    """UsageError when a model without values is to be exported with them."""
    for _, name, _ in _meta_tensors(methods):
        hint = "export with `--weights none`, or build the model on the cpu"
        raise UsageError(f"`{name}` is on the meta device", why="it has no values to export", hint=hint)

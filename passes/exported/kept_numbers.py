"""Tensors of one element that tracing would change, the position that a cache object counts say.

`torch.export` computes with numbers that it knows, in place, too: a counter that is reached as a plain Python
attribute is another number after the export than before it, and the artifact would start there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def kept_numbers() -> Generator[None]:
    """Give back to every tensor of one element that code reached meanwhile what it held before."""
    watch = _Watch()
    try:
        with watch:
            yield
    finally:
        watch.restore()


class _Watch(TorchFunctionMode):
    """Notes the bytes of small tensors before an operator is called with them for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[torch.Tensor, int, bytes]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Bodies of conditions and loops are traced with this mode in them, by Dynamo, which reads no memory.
        values = () if torch.compiler.is_dynamo_compiling() else (*args, *(kwargs or {}).values())
        for value in values:
            if type(value) in (torch.Tensor, torch.nn.Parameter) and id(value) not in self._held:
                self._note(value)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: torch.Tensor) -> None:
        """Bytes are read where they lie: an operator would be traced."""
        extent: int | torch.SymInt = tensor.numel()  # of what data decides nobody can ask whether it is one
        is_one = isinstance(extent, int) and extent == 1
        if is_one and tensor.device.type == "cpu" and tensor.layout == torch.strided:
            try:
                place = tensor.data_ptr()
            except RuntimeError:  # what `torch.func.vmap` stands in has no storage
                return
            held = ctypes.string_at(place, tensor.element_size()) if place else b""
            self._held[id(tensor)] = (tensor, place, held)

    def restore(self) -> None:
        """Bytes are written back where they differ, and where the tensor still lies where it lay."""
        for tensor, place, held in self._held.values():
            if held and tensor.data_ptr() == place and ctypes.string_at(place, len(held)) != held:
                ctypes.memmove(place, held, len(held))

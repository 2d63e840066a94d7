"""Steps of kernels written here, run on an emulated device over named buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devplan.passes.exported.sizes import to_dtype
from devplan.passes.lowered.compile_kernels import canonical
from devplan.passes.size_arithmetic import substitute
from devplan.passes.tape import Allocate, OwnLaunch, Window
from devplan.runtime.backend import Operand
from devplan.runtime.emulator import EmulatorBackend
from devplan.runtime.program import Device, Kernel, KernelParameter, Launch, Ref

CUDA = Device("cuda", 0)


def window(name: str, tensor: torch.Tensor) -> Window:
    """The whole tensor."""
    return Window(name, to_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


class Emulated:
    """An emulated device that runs steps over named buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.backend = EmulatorBackend(CUDA)
        self.operands: dict[str, Operand] = {}
        for name, tensor in tensors.items():
            whole = tensor if tensor.is_contiguous() else tensor._base
            assert whole is not None
            raw = whole.contiguous().reshape(-1).view(torch.uint8).numpy()
            address = self.backend.allocate(raw.nbytes)
            self.backend.upload(address, memoryview(raw.tobytes()))
            self.operands[name] = Operand(
                address, to_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), CUDA
            )

    def run(self, steps: Sequence[Allocate | OwnLaunch]) -> None:
        """Allocate and launch in order."""
        for step in steps:
            if isinstance(step, Allocate):
                sizes = tuple(int(str(n)) for n in step.window.sizes)
                strides = tuple(int(str(n)) for n in step.window.strides)
                address = self.backend.allocate(int(str(step.nbytes)))
                self.operands[step.window.buffer] = Operand(address, step.window.dtype, sizes, strides, CUDA)
            else:
                self._launch(step)

    def _launch(self, step: OwnLaunch) -> None:
        spec = canonical(step.kernel)
        kernel = Kernel(
            spec.name, tuple(KernelParameter(*p) for p in spec.parameters), (), spec.source, spec.constants
        )
        self.backend.load([kernel])
        named = dict(zip(spec.call_names, step.arguments, strict=True))
        sizes: dict[str, Any] = {n: v for n, v in (*spec.constants, *named.items()) if isinstance(v, int)}
        grid: Any = tuple(substitute(text, sizes) for text in spec.grid)
        arguments = tuple(Ref(a.buffer) if isinstance(a, Window) else a for a in step.arguments)
        names = tuple(a.name for a in arguments if isinstance(a, Ref))
        self.backend.bind(Launch(spec.name, arguments, grid, names, names), self.operands, {})()

    def output(self, like: torch.Tensor) -> torch.Tensor:
        """What is in the output now."""
        raw = bytearray(like.numel() * like.element_size())
        self.backend.download(self.operands["output"].address, memoryview(raw))
        return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).reshape(like.shape)

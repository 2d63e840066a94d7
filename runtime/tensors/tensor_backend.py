"""What a tensor needs of the GPU that holds it, and which GPU serves a device's name."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from ..backend import Operand, Step
from ..device_names import as_device
from ..errors import UsageError
from ..program import Device


class TensorBackend(Protocol):
    """What a tensor needs of its GPU; `CudaBackend` has it."""

    @property
    def device(self) -> Device:
        """The program's device slot."""
        ...

    @property
    def ordinal(self) -> int:
        """Which GPU of the machine."""
        ...

    @property
    def stream(self) -> int:
        """Handle of the stream that work is enqueued on."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Reserve device memory."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def upload(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device, now."""
        ...

    def download(self, address: int, out: memoryview) -> None:
        """Copy device bytes to the host, now."""
        ...

    def copy(self, source: Operand, destination: Operand) -> None:
        """Copy within this GPU, strides free, now."""
        ...

    def send(self, source: Operand, receiver: Any, destination: Operand) -> None:
        """Copy to another backend's GPU, now."""
        ...

    def follow(self, stream: int) -> None:
        """Let this backend's coming work wait for what a stream holds."""
        ...

    def lead(self, stream: int) -> None:
        """Let a stream's coming work wait for what this backend has enqueued."""
        ...


class Memory:
    """Device memory with one release, called when the last tensor over it is dropped.

    ``check`` raises once the memory may not be used any more; a read-only one is not written.
    """

    def __init__(self, release: Step, check: Step | None = None, *, is_read_only: bool = False) -> None:
        self.close = weakref.finalize(self, release)
        self.check, self.is_read_only = check, is_read_only


def backend_of(device: Device | str | TensorBackend) -> TensorBackend:
    """The GPU for a device, shared by all tensors of the process that belong to no program."""
    if isinstance(device, str):
        device = as_device(device)
    if not isinstance(device, Device):
        if not hasattr(device, "ordinal"):
            raise UsageError(f"`{device!r}` is no device", hint="a device has a name, such as `cuda:0`")
        return device
    if device.kind != "cuda":
        raise UsageError(
            "a device tensor lives on a GPU", why=f"asked for `{device}`", hint="use NumPy there"
        )
    from ..cuda.backend import shared_backend

    return shared_backend(device.index)

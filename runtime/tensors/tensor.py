"""Tensors in device memory, shared in place with torch, CuPy, JAX and others, without importing any."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..backend import Operand, Step
from ..calls.inputs import as_host_tensor
from ..dtypes import DType
from ..errors import ScatteredCopyError, UsageError
from ..program import Device
from . import dlpack
from .foreign import TYPESTR, from_dlpack, from_interface, verify_ordinal
from .host import Array, HostTensor, HostValue, contiguous_strides, dtype_of, host_value, numpy_dtype
from .indexing import Index, expanded, extents_of, is_sequence, whole_numbers
from .tensor_backend import Memory, TensorBackend, backend_of

_MOST_GAPS = 8
"""A strided tensor is downloaded with its gaps where these are at most so many times its elements."""


class DeviceTensor:
    """A strided tensor on a GPU. Views share its memory; `numpy`, `clone` and `contiguous` copy.

    Args:
        operand: address, element type, shape, strides (in elements) and device slot.
        backend: the GPU that holds it.
        release: called once when this tensor and all its views are gone.
    """

    __slots__ = ("__weakref__", "_backend", "_memory", "_operand")

    def __init__(self, operand: Operand, backend: TensorBackend, release: Step | Memory) -> None:
        self._operand, self._backend = operand, backend
        self._memory = release if isinstance(release, Memory) else Memory(release)

    # --- making -----------------------------------------------------------------------------------

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: DType | str, device: Device | str | TensorBackend = "cuda:0"
    ) -> DeviceTensor:
        """A dense tensor of undefined contents."""
        kind = dtype_of(dtype)
        backend, extents = backend_of(device), extents_of(shape)
        address = backend.allocate(prod(extents) * kind.itemsize)
        operand = Operand(address, kind, extents, contiguous_strides(extents), backend.device)
        return cls(operand, backend, lambda: backend.free(address))

    @classmethod
    def from_host(cls, value: object, device: Device | str | TensorBackend = "cuda:0") -> DeviceTensor:
        """A copy of a host tensor: a NumPy array, a `HostTensor`, lists of numbers, or what has DLPack."""
        raw, kind = _host_bits(value)
        made = cls.empty(raw.shape, kind, device)
        made.write(value)
        return made

    @classmethod
    def of(cls, value: object, backend: TensorBackend | None = None) -> DeviceTensor:
        """Another library's GPU tensor (or one of ours) in place, its pending writes ordered before our work.

        Takes ``__dlpack__`` first, since it says on which stream the producer works, then
        ``__cuda_array_interface__``. Without ``backend`` the tensor's own GPU is used.

        Raises:
            UsageError: it is no GPU tensor, or lives on another GPU than the backend's.
        """
        if isinstance(value, DeviceTensor):
            return value._on(backend or value._backend)
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            return cls(*from_dlpack(value, backend))
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            raise UsageError(
                f"`{type(value).__name__}` is no GPU tensor",
                why="it has neither `__dlpack__` nor `__cuda_array_interface__`",
                hint="copy it to the GPU first: `DeviceTensor.from_host`",
            )
        return cls(*from_interface(interface, value, backend))

    from_dlpack = of

    # --- what it is ---------------------------------------------------------------------------------

    @property
    def operand(self) -> Operand:
        """Address, element type, shape, strides and device slot; raises when memory was only lent."""
        if self._memory.check is not None:
            self._memory.check()
        return self._operand

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self._operand.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._operand.strides

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._operand.dtype

    @property
    def device(self) -> Device:
        """The GPU, by its number on this machine."""
        return Device("cuda", self._backend.ordinal)

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return self.operand.address

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._operand.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row by row without gaps."""
        wanted = contiguous_strides(self.shape)
        pairs = zip(self.shape, self.strides, wanted, strict=True)
        return self.numel == 0 or all(extent == 1 or has == want for extent, has, want in pairs)

    def __repr__(self) -> str:
        at = f"{self._operand.address:#x}"
        return f"DeviceTensor({self.dtype}{list(self.shape)} on {self.device} at {at})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    # --- copies -------------------------------------------------------------------------------------

    def numpy(self) -> HostValue:
        """A copy on the host: a NumPy array, or a `HostTensor` for types that NumPy lacks."""
        low, high = self._reach()
        if not self.is_contiguous and high - low <= _MOST_GAPS * self.numel:
            return self._with_gaps()
        dense = self.contiguous()
        out: Array = np.empty(self.shape, numpy_dtype(self.dtype))
        if out.nbytes:
            self._backend.download(dense.pointer, out.reshape(-1).data.cast("B"))
        return host_value(out, self.dtype)

    to_host = numpy

    def _with_gaps(self) -> HostValue:
        """A copy on the host by way of all memory between the first and the last element."""
        kind, (low, high) = numpy_dtype(self.dtype), self._reach()
        held = self._view(self.pointer + low * kind.itemsize, (high - low,), (1,)).numpy()
        raw: Array = held.raw if isinstance(held, HostTensor) else held
        steps = tuple(stride * kind.itemsize for stride in self.strides)
        view: Array = np.ndarray(self.shape, kind, raw.data, -low * kind.itemsize, steps)
        return host_value(view.copy(), self.dtype)

    def _reach(self) -> tuple[int, int]:
        """First and one past the last element that it has, counted from its address; (0, 0) without any."""
        if not self.numel:
            return 0, 0
        ends = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(end, 0) for end in ends), 1 + sum(max(end, 0) for end in ends)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise UsageError(
            "a GPU tensor does not turn into a NumPy array by itself",
            why="it would copy and wait unnoticed",
            hint="call `.numpy()`",
        )

    def write(self, value: object) -> None:
        """Overwrite all elements with a host tensor of the same shape and element type."""
        raw, kind = _host_bits(value)
        if raw.shape != self.shape or kind is not self.dtype:
            wanted, got = f"{self.dtype}{list(self.shape)}", f"{kind}{list(raw.shape)}"
            raise UsageError(
                "a tensor is written with one of its own type", why=f"wanted {wanted}, got {got}"
            )
        if self._memory.is_read_only:
            raise UsageError("this tensor is read-only, as its owner says", hint="write into a `clone`")
        if not raw.nbytes:
            return
        target = self if self.is_contiguous else DeviceTensor.empty(self.shape, kind, self._backend)
        data = np.ascontiguousarray(raw).reshape(-1)
        self._backend.upload(target.pointer, data.data.cast("B"))
        if target is not self:
            self._backend.copy(target.operand, self.operand)

    def clone(self, device: Device | str | TensorBackend | None = None) -> DeviceTensor:
        """A dense copy with memory of its own, on this GPU or another."""
        backend = self._backend if device is None else backend_of(device)
        made = DeviceTensor.empty(self.shape, self.dtype, backend)
        if not self.nbytes:
            return made
        if backend.ordinal == self._backend.ordinal:
            backend.follow(self._backend.stream)
            source = self._on(backend)
            try:
                backend.copy(source.operand, made.operand)
            except ScatteredCopyError:
                made.write(self._with_gaps())
        else:
            self._backend.send(self.contiguous().operand, backend, made.operand)
        return made

    def contiguous(self) -> DeviceTensor:
        """This tensor when its elements lie row by row without gaps, else a copy whose do."""
        return self if self.is_contiguous else self.clone()

    # --- views --------------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> DeviceTensor:
        """A view of another shape; one extent may be -1. UsageError when it does not fit or has gaps."""
        return self._reshaped(whole_numbers(shape))

    def _reshaped(self, shape: tuple[int, ...]) -> DeviceTensor:
        known = prod(extent for extent in shape if extent != -1)
        if shape.count(-1) == 1 and known and self.numel % known == 0:
            shape = tuple(self.numel // known if extent == -1 else extent for extent in shape)
        if prod(shape) != self.numel or any(extent < 0 for extent in shape):
            raise UsageError(f"a tensor of shape {list(self.shape)} cannot be seen as {list(shape)}")
        if not self.is_contiguous:
            raise UsageError(
                "only a contiguous tensor can be reshaped in place", hint="call `contiguous` first"
            )
        return self._view(self.pointer, shape, contiguous_strides(shape))

    def permute(self, *order: int | Sequence[int]) -> DeviceTensor:
        """A view with its dimensions in another order; negative numbers count from the last."""
        rank, given = len(self.shape), whole_numbers(order)
        wanted = [number + rank if -rank <= number < 0 else number for number in given]
        if sorted(wanted) != list(range(rank)):
            raise UsageError(f"{list(given)} is no order of {rank} dimensions")
        return self._view(
            self.pointer, tuple(self.shape[i] for i in wanted), tuple(self.strides[i] for i in wanted)
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> DeviceTensor:
        """A view: integers drop a dimension, slices with a positive step narrow it, None adds one.

        ``...`` stands for all dimensions that are not named. IndexError for anything else.
        """
        parts = expanded(index if isinstance(index, tuple) else (index,), len(self.shape))
        offset, dimension = 0, 0
        shape: list[int] = []
        strides: list[int] = []
        for part in parts:
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            extent, stride = self.shape[dimension], self.strides[dimension]
            dimension += 1
            if isinstance(part, slice):
                start, stop, step = part.indices(extent)
                if step < 1:
                    raise IndexError("a step must be positive")
                shape.append(len(range(start, stop, step)))
                strides.append(stride * step)
                offset += start * stride if shape[-1] else 0
            else:
                if not -extent <= part < extent:
                    raise IndexError(f"index {part} is out of bounds for extent {extent}")
                offset += (part % extent) * stride
        return self._view(self.pointer + offset * self.dtype.itemsize, tuple(shape), tuple(strides))

    def _view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceTensor:
        operand = Operand(address, self.dtype, shape, strides, self._operand.device)
        return DeviceTensor(operand, self._backend, self._memory)

    def _on(self, backend: TensorBackend) -> DeviceTensor:
        """The same memory through another backend of the same GPU, ordered after this one's work."""
        if backend is self._backend:
            return self
        verify_ordinal(self._backend.ordinal, backend)
        backend.follow(self._backend.stream)
        o = self.operand
        return DeviceTensor(
            Operand(o.address, o.dtype, o.shape, o.strides, backend.device), backend, self._memory
        )

    # --- other libraries ----------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (device type, ordinal)."""
        return dlpack.CUDA, self._backend.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; the consumer's stream waits for our work. BufferError for what it cannot be."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                "a GPU tensor is not exported to another device; copy it with `numpy` or `clone`"
            )
        tensor = self.clone() if copy else self
        if stream != -1:
            # None means the legacy default stream, whose handle is 1.
            self._backend.lead(1 if stream is None else stream)
        o = tensor.operand
        is_read_only = tensor._memory.is_read_only
        if is_read_only and (max_version is None or max_version[0] < 1):
            raise BufferError("a read-only tensor needs a consumer of DLPack 1.0; copy it with `clone`")
        described = dlpack.Description(
            o.address, o.dtype, o.shape, o.strides, self.__dlpack_device__(), is_read_only
        )
        return dlpack.export(described, tensor._memory, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface; bfloat16 is ``<V2``, as `ml_dtypes` and torch have it."""
        typestr = TYPESTR.get(self.dtype)
        if typestr is None:
            raise AttributeError(f"`__cuda_array_interface__` has no name for {self.dtype}; use `__dlpack__`")
        itemsize = self.dtype.itemsize
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.pointer if self.numel else 0, self._memory.is_read_only),
            "strides": None if self.is_contiguous else tuple(stride * itemsize for stride in self.strides),
            "stream": self._backend.stream,
            "version": 3,
        }


def _host_bits(value: object) -> tuple[Array, DType]:
    """A host tensor as raw bits and element type; UsageError for what no program has."""
    if isinstance(value, DeviceTensor):
        raise UsageError("this tensor is on a GPU already", hint="call `.clone()`")
    if is_sequence(value):
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise UsageError("the tensor's rows are of different lengths", why=str(error)) from error
    return as_host_tensor(value, "the tensor")

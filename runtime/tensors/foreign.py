"""Other libraries' GPU tensors, taken in place: DLPack and the CUDA array interface.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

from typing import Any

from ..backend import Operand
from ..dtypes import DType
from ..errors import DevplanError, UsageError
from ..program import Device
from . import dlpack
from .host import contiguous_strides, is_native, numpy_dtype
from .tensor_backend import Memory, TensorBackend, backend_of

TYPESTR = {dtype: numpy_dtype(dtype).str for dtype in DType if is_native(dtype)} | {DType.BFLOAT16: "<V2"}
BY_TYPESTR = {text: dtype for dtype, text in TYPESTR.items()}


def verify_ordinal(ordinal: int, backend: TensorBackend) -> None:
    if ordinal != backend.ordinal:
        raise UsageError(
            f"the tensor is on GPU {ordinal}",
            why=f"it is needed on GPU {backend.ordinal}",
            hint="call `.clone(...)`",
        )


Taken = tuple[Operand, TensorBackend, Memory]
"""Another library's tensor: where it is, on which GPU, and what is kept of it."""


def from_dlpack(value: Any, backend: TensorBackend | None) -> Taken:
    try:
        kind, ordinal = (int(part) for part in value.__dlpack_device__())
    except Exception as error:  # whatever the producer raises: torch's meta tensors are nowhere
        raise _unusable(value, error) from error
    if kind != dlpack.CUDA:
        raise UsageError(
            f"`{type(value).__name__}` is not in the memory of an NVIDIA GPU",
            why=f"its DLPack device is {kind}",
            hint="copy it to the GPU first: `DeviceTensor.from_host`",
        )
    here = backend or backend_of(Device("cuda", ordinal))
    verify_ordinal(ordinal, here)
    try:
        try:
            capsule = value.__dlpack__(stream=here.stream, max_version=(1, 1))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = value.__dlpack__(stream=here.stream)
        described, release = dlpack.consume(capsule)
    except DevplanError:
        raise
    except Exception as error:
        raise _unusable(value, error) from error
    operand = Operand(described.address, described.dtype, described.shape, described.strides, here.device)
    return operand, here, Memory(release, is_read_only=described.is_read_only)


def _unusable(value: object, error: Exception) -> UsageError:
    why = str(error) or type(error).__name__
    return UsageError(f"`{type(value).__name__}` cannot be used in place", why=why)


def from_interface(interface: Any, owner: object, backend: TensorBackend | None) -> Taken:
    try:
        return _from_interface(interface, owner, backend)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = f"its `__cuda_array_interface__` is malformed: {error!r}"
        raise UsageError(f"`{type(owner).__name__}` cannot be used in place", why=why) from error


def _from_interface(interface: Any, owner: object, backend: TensorBackend | None) -> Taken:
    typestr, shape = str(interface["typestr"]), tuple(int(extent) for extent in interface["shape"])
    dtype = BY_TYPESTR.get(typestr)
    if dtype is None:
        raise UsageError(f"`__cuda_array_interface__` names a type that has no equal here, `{typestr}`")
    if interface.get("mask") is not None:
        raise UsageError("a masked tensor cannot be used in place", hint="fill in what is masked out first")
    given = interface.get("strides")
    if given is None:
        strides = contiguous_strides(shape)
    elif any(step % dtype.itemsize for step in given):
        raise UsageError("the tensor's strides are no multiples of its element size", why=str(given))
    else:
        strides = tuple(step // dtype.itemsize for step in given)
    if len(strides) != len(shape) or min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}, strides {strides}")
    address = int(interface["data"][0])
    here = backend or backend_of(Device("cuda", _ordinal_of(address) if address else 0))
    if address:
        verify_ordinal(_ordinal_of(address), here)
    # Absent or None: nothing is known, so the default stream, where most libraries work, is waited for.
    here.follow(interface.get("stream") or 1)
    keep = [owner]
    operand = Operand(address, dtype, shape, strides, here.device)
    return operand, here, Memory(keep.clear, is_read_only=bool(interface["data"][1]))


def _ordinal_of(address: int) -> int:
    """The GPU that an address belongs to: the array interface does not say."""
    from ..cuda.driver import pointer_ordinal

    return pointer_ordinal(address)

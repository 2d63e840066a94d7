"""Copies and fills as bound steps."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import ExecutionError
from ..program import CPU, Argument
from .blocks import Block, blocks_of
from .driver import check

if TYPE_CHECKING:
    from ..calls.host_io import HostEnd
    from .backend import CudaBackend


def bind_copy(backend: CudaBackend, source: Operand, destination: Operand) -> Step:
    """A step that copies between the host and this GPU, within it, or to or from a connected GPU.

    Host memory should be pinned (`CudaBackend.allocate_host`), otherwise the copy is not asynchronous.
    """
    blocks = blocks_of(source, destination)
    if source.device == CPU and destination.device == CPU:
        raise ExecutionError("a copy within the host was bound to a GPU")
    if CPU not in (source.device, destination.device) and source.device != destination.device:
        return _peer_copy(backend, source, destination, blocks)
    parts = [_block_copy(backend, source, destination, block) for block in blocks]
    if len(parts) == 1:
        return parts[0]

    def step() -> None:
        for part in parts:
            part()

    return step


def _block_copy(backend: CudaBackend, source: Operand, destination: Operand, block: Block) -> Step:
    cu, enter = backend.driver, backend.enter
    at, to = source.address + block.source, destination.address + block.destination
    nbytes = block.width * block.rows
    arguments: tuple[Any, ...]
    if block.rows > 1 and not block.width == block.source_pitch == block.destination_pitch:
        copy, arguments = cu.cuMemcpy2DAsync, (_rectangle(cu, at, to, source, destination, block),)
    elif source.device == CPU:
        copy, arguments = cu.cuMemcpyHtoDAsync, (to, at, nbytes)
    elif destination.device == CPU:
        copy, arguments = cu.cuMemcpyDtoHAsync, (to, at, nbytes)
    else:
        copy, arguments = cu.cuMemcpyDtoDAsync, (to, at, nbytes)

    def step() -> None:
        enter()
        result = copy(*arguments, backend.stream_object)
        if result[0]:
            check(result, f"copy {nbytes} bytes from {source.device} to {destination.device}")

    return step


def bind_moving_copy(backend: CudaBackend, source: Operand, destination: Operand, end: HostEnd) -> Step:
    """A step that copies one dense block from or to wherever ``end`` is by then.

    While a graph is recorded, the graph is told to follow the end: see `graph.Follower`.
    """
    cu, enter, nbytes = backend.driver, backend.enter, source.span_nbytes
    uploads = source.device == CPU

    def step() -> None:
        enter()
        if uploads:
            result = cu.cuMemcpyHtoDAsync(destination.address, end.address, nbytes, backend.stream_object)
        else:
            result = cu.cuMemcpyDtoHAsync(end.address, source.address, nbytes, backend.stream_object)
        if result[0]:
            check(result, f"copy {nbytes} bytes from {source.device} to {destination.device}")
        backend.note_moving(end, uploads)

    return step


def _rectangle(cu: Any, at: int, to: int, source: Operand, destination: Operand, block: Block) -> Any:
    host, device = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    made = cu.CUDA_MEMCPY2D()
    made.WidthInBytes, made.Height = block.width, block.rows
    made.srcPitch, made.dstPitch = block.source_pitch, block.destination_pitch
    if source.device == CPU:
        made.srcMemoryType, made.srcHost = host, at
    else:
        made.srcMemoryType, made.srcDevice = device, at
    if destination.device == CPU:
        made.dstMemoryType, made.dstHost = host, to
    else:
        made.dstMemoryType, made.dstDevice = device, to
    return made


def _peer_copy(
    backend: CudaBackend, source: Operand, destination: Operand, blocks: tuple[Block, ...]
) -> Step:
    """Enqueued on the source's stream, after the destination's work so far and before its work to come."""
    if any(block.rows > 1 for block in blocks):
        raise ExecutionError("a strided copy between GPUs is not served", hint="make the tensor contiguous")
    sender, receiver = backend.peer(source.device), backend.peer(destination.device)
    cu = backend.driver

    def step() -> None:
        sender.wait_for(receiver)
        sender.enter()
        for block in blocks:
            at, to = source.address + block.source, destination.address + block.destination
            result = cu.cuMemcpyPeerAsync(
                to, receiver.context, at, sender.context, block.width, sender.stream_object
            )
            check(result, f"copy {block.width} bytes from {source.device} to {destination.device}")
        receiver.wait_for(sender)
        backend.enter()

    return step


_PACK = {
    DType.FLOAT16: "<e",
    DType.FLOAT32: "<f",
    DType.FLOAT64: "<d",
    DType.BOOL: "<?",
    DType.INT8: "<b",
    DType.UINT8: "<B",
    DType.INT16: "<h",
    DType.UINT16: "<H",
    DType.INT32: "<i",
    DType.UINT32: "<I",
    DType.INT64: "<q",
    DType.UINT64: "<Q",
}


def pattern(dtype: DType, value: Argument) -> bytes:
    """The bytes of one element; ExecutionError for a value or type that cannot be packed."""
    if not isinstance(value, int | float):
        raise ExecutionError(f"`fill` needs a number, not {value!r}")
    if dtype is DType.BFLOAT16:
        from .launch import c_value

        return int(c_value("bf16", value).value).to_bytes(2, "little")
    if dtype not in _PACK:
        raise ExecutionError(f"`fill` does not serve {dtype}")
    number = float(value) if dtype.is_floating else bool(value) if dtype is DType.BOOL else int(value)
    try:
        return struct.pack(_PACK[dtype], number)
    except (struct.error, OverflowError) as error:
        raise ExecutionError(f"{value} does not fit {dtype}", why=str(error)) from error


def bind_fill(backend: CudaBackend, out: Operand, value: Argument) -> Step:
    """A step that writes one value to every element of a dense operand."""
    cu, enter, element = backend.driver, backend.enter, pattern(out.dtype, value)
    if out.numel * out.dtype.itemsize != out.span_nbytes:
        raise ExecutionError("`fill` needs a dense tensor", why=f"strides {list(out.strides)} leave gaps")
    numel = out.numel
    calls: list[tuple[Any, tuple[Any, ...]]]
    if len(set(element)) == 1:
        calls = [(cu.cuMemsetD8Async, (out.address, element[0], numel * len(element)))]
    elif len(element) == 2:
        calls = [(cu.cuMemsetD16Async, (out.address, int.from_bytes(element, "little"), numel))]
    elif len(element) == 4 or element[:4] == element[4:]:
        calls = [
            (
                cu.cuMemsetD32Async,
                (out.address, int.from_bytes(element[:4], "little"), numel * len(element) // 4),
            )
        ]
    else:  # eight bytes of two different halves: a column each
        halves = (int.from_bytes(element[:4], "little"), int.from_bytes(element[4:], "little"))
        calls = [
            (cu.cuMemsetD2D32Async, (out.address + 4 * i, 8, half, 1, numel)) for i, half in enumerate(halves)
        ]

    def step() -> None:
        enter()
        for call, arguments in calls if numel else ():
            result = call(*arguments, backend.stream_object)
            if result[0]:
                check(result, f"fill {out.span_nbytes} bytes")

    return step

"""Host memory to the device near the bus limit: pinned buffers filled while others are sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensors.host import bytes_at
from .driver import check

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_SMALL = 1 << 20
"""Up to here the driver's own staging is as fast."""
_CHUNK = 16 << 20
_LITTLE_CHUNK = 4 << 20
_LARGE = 64 << 20
"""From here on threads fill the buffers: to import and to start them takes longer than a small model does."""
_BUFFERS = 4
_THREADS = 8
_PADDING = 256
"""Pieces of one block may lie this far apart, and are sent with what is between them."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class _Chunk:
    """A pinned buffer that is being filled, for device addresses from ``begin`` on."""

    slot: int
    begin: int
    filled: int = 0


class Staging:
    """A ring of pinned buffers on one stream; made by the first large upload, larger by one that needs it."""

    def __init__(self, cu: Any, stream: Any) -> None:
        self._cu, self._stream = cu, stream
        self._buffers: list[int] = []
        self._events: list[Any] = []
        self._chunk = 0

    def upload_all(self, pieces: Iterable[tuple[int, memoryview]], total: int) -> None:
        """Copy pieces of ``total`` bytes to where they belong, and wait.

        Pieces of one block come in the order of their addresses; fewer than 256 bytes between two are padding
        and may be overwritten. Each is contiguous (it may be a read-only mapping), and taken when the one
        before it has been read.
        """
        doing, alive = f"upload {total} bytes", list[_Bytes]()
        if total <= _SMALL:
            alive = self._send_each(pieces, doing)
        else:
            self._stream_chunks(pieces, total)
        check(self._cu.cuStreamSynchronize(self._stream), doing)
        del alive

    def _send_each(self, pieces: Iterable[tuple[int, memoryview]], doing: str) -> list[_Bytes]:
        """Through the driver's own staging; gives what has to live until the stream is done."""
        sent: list[_Bytes] = []
        for address, data in pieces:
            flat = np.frombuffer(data, np.uint8)
            if flat.nbytes:
                copy = self._cu.cuMemcpyHtoDAsync(address, flat.ctypes.data, flat.nbytes, self._stream)
                check(copy, doing)
                sent.append(flat)
        return sent

    def _stream_chunks(self, pieces: Iterable[tuple[int, memoryview]], total: int) -> None:
        pool: ThreadPoolExecutor | None = None
        if total >= _LARGE:
            from concurrent.futures import ThreadPoolExecutor

            pool = ThreadPoolExecutor(_THREADS)
        self._prepare(total)
        try:
            self._fill_and_send(pieces, pool)
        finally:
            if pool is not None:
                pool.shutdown()

    def _fill_and_send(
        self, pieces: Iterable[tuple[int, memoryview]], pool: ThreadPoolExecutor | None
    ) -> None:
        chunk, count = _Chunk(0, 0), 0
        for address, data in pieces:
            flat, at = np.frombuffer(data, np.uint8), 0
            while at < flat.nbytes:
                offset = address + at - chunk.begin
                is_next = chunk.filled and 0 <= offset - chunk.filled < _PADDING and offset < self._chunk
                if not is_next:
                    self._send(chunk)
                    chunk, offset = self._open(count, address + at), 0
                    count += 1
                nbytes = min(flat.nbytes - at, self._chunk - offset)
                pinned = np.frombuffer(bytes_at(self._buffers[chunk.slot] + offset, nbytes), np.uint8)
                _copy(pinned, flat[at : at + nbytes], pool)
                chunk.filled, at = offset + nbytes, at + nbytes
        self._send(chunk)

    def _open(self, count: int, begin: int) -> _Chunk:
        """The chunk number ``count``, once its buffer has been sent."""
        slot = count % len(self._buffers)
        if count >= len(self._buffers):
            check(self._cu.cuEventSynchronize(self._events[slot]), "wait for an upload")
        return _Chunk(slot, begin)

    def _send(self, chunk: _Chunk) -> None:
        if chunk.filled:
            cu, buffer = self._cu, self._buffers[chunk.slot]
            copy = cu.cuMemcpyHtoDAsync(chunk.begin, buffer, chunk.filled, self._stream)
            check(copy, f"upload {chunk.filled} bytes")
            check(cu.cuEventRecord(self._events[chunk.slot], self._stream), "record an upload")

    def _prepare(self, total: int) -> None:
        """Buffers for so many bytes, at most four."""
        cu, chunk = self._cu, _CHUNK if total >= _LARGE else _LITTLE_CHUNK
        if chunk > self._chunk:
            self.release()
            self._chunk = chunk
        while len(self._buffers) < min(_BUFFERS, -(-total // self._chunk)):
            flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._events.append(check(cu.cuEventCreate(flags), "make an event"))
            doing = f"pin {self._chunk} bytes of host memory"
            self._buffers.append(int(check(cu.cuMemHostAlloc(self._chunk, 0), doing)))

    def release(self) -> None:
        """Give the pinned buffers back; the next large upload makes them again."""
        for buffer in self._buffers:
            self._cu.cuMemFreeHost(buffer)
        for event in self._events:
            self._cu.cuEventDestroy(event)
        self._buffers, self._events, self._chunk = [], [], 0

    close = release


def _copy(to: _Bytes, source: _Bytes, pool: ThreadPoolExecutor | None) -> None:
    """Copy on all threads; NumPy lets the others run while it copies, `ctypes.memmove` does not."""
    piece = max(to.nbytes // _THREADS, _SMALL)
    if pool is None or to.nbytes <= piece:
        np.copyto(to, source)
        return
    begins = range(0, to.nbytes, piece)
    done = [pool.submit(np.copyto, to[at : at + piece], source[at : at + piece]) for at in begins]
    for future in done:
        future.result()

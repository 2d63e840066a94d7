"""Where constants' bytes go: into the artifact, into a data file beside it, or nowhere since a file has them.

The data file is an FT01 container (`.ptd`) with every constant under its name. Its own name carries a digest
of its contents, so that writing a new one never touches the one that an older artifact needs.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import flatbuffers

from ..errors import ArtifactError
from ..program import Constant, Program
from .generated import data_generated as fb
from .layout import DATA_HEADER, DATA_HEADER_MAGIC, Blob, DataFile, Segment, align, contents, place_segments
from .views import dim_order

Weights = Literal["embed", "external", "reference"]
EMBEDDED, EXTERNAL, REFERENCE = range(3)


@dataclass(frozen=True)
class Placement:
    """All unique constants, and the files that some of them are in."""

    blobs: tuple[Blob, ...]
    files: tuple[DataFile, ...] = ()
    head: bytes = b""
    """What the data file begins with, when one must be written."""


def place(program: Program, weights: Weights, path: Path, files: Sequence[Path] = ()) -> Placement:
    """Decide for every unique constant where its bytes are.

    Initial values of state and empty constants are always embedded; with ``reference`` so is what no
    safetensors file of ``files`` holds byte by byte. ArtifactError when such a file is not one.
    """
    if weights == "embed":
        return Placement(_in_order(program, {}))
    initial = {state.initial for state in program.state}
    wanted = {item.digest: item.nbytes for item in program.constants if item.nbytes}
    wanted = {digest: nbytes for digest, nbytes in wanted.items() if digest not in initial}
    if weights == "external":
        return _external(program, wanted, path) if wanted else Placement(_in_order(program, {}))
    return _reference(program, wanted, path, files)


def _in_order(program: Program, outside: Mapping[str, Blob]) -> tuple[Blob, ...]:
    """Every unique constant in order of first appearance; those not outside get offsets in the segment."""
    blobs: dict[str, Blob] = {}
    end = 0
    for digest, nbytes in contents(program):
        if digest in blobs:
            continue
        blobs[digest] = outside.get(digest) or Blob(digest, nbytes, align(end))
        if digest not in outside:
            end = blobs[digest].offset + nbytes
    return tuple(blobs.values())


def _external(program: Program, wanted: Mapping[str, int], path: Path) -> Placement:
    segments = dict(zip(wanted, place_segments(list(wanted.values())), strict=True))
    head = _data_head([item for item in program.constants if item.digest in wanted], segments)
    digest = head_digest(head, wanted)
    name = f"{path.stem}.{digest[:8]}.ptd"
    keys = {item.digest: item.name for item in reversed(program.constants)}
    outside = {
        key: Blob(key, segment.nbytes, len(head) + segment.offset, EXTERNAL, name, keys[key])
        for key, segment in segments.items()
    }
    nbytes = len(head) + max(segment.end for segment in segments.values())
    return Placement(_in_order(program, outside), (DataFile(name, nbytes, len(head), digest),), head)


def head_digest(head: bytes | memoryview, digests: Iterator[str] | Mapping[str, int]) -> str:
    """What ties a data file to an artifact without reading all of it: its head and what should be in it."""
    found = hashlib.sha256(head)
    for digest in digests:
        found.update(bytes.fromhex(digest))
    return found.hexdigest()


def _data_head(constants: Sequence[Constant], segments: Mapping[str, Segment]) -> bytes:
    """The FT01 table with its header, up to the first segment."""
    numbers = {digest: index for index, digest in enumerate(segments)}
    table = fb.FlatTensorT()
    table.segments, table.namedData = [], []
    for segment in segments.values():
        entry = fb.DataSegmentT()
        entry.offset, entry.size = segment.offset, segment.nbytes
        table.segments.append(entry)
    for constant in constants:
        named = fb.NamedDataT()
        named.key, named.segment = constant.name, numbers[constant.digest]
        named.layout = fb.TensorLayoutT()
        named.layout.scalarType, named.layout.sizes = constant.dtype.scalar_type, list(constant.shape)
        named.layout.dimOrder = list(dim_order(constant.shape, constant.strides))
        table.namedData.append(named)
    builder = flatbuffers.Builder(1 << 12)
    builder.Finish(table.Pack(builder), b"FT01")
    data = bytes(builder.Output())
    size = align(DATA_HEADER.size, 16)
    base = align(size + len(data))
    total = max(segment.end for segment in segments.values())
    header = DATA_HEADER.pack(DATA_HEADER_MAGIC, DATA_HEADER.size, size, len(data), base, total)
    root = int.from_bytes(data[:4], "little") + size
    head = root.to_bytes(4, "little") + data[4:8] + header.ljust(size, b"\0") + data[8:]
    return head.ljust(base, b"\0")


def _reference(program: Program, wanted: Mapping[str, int], path: Path, files: Sequence[Path]) -> Placement:
    outside: dict[str, Blob] = {}
    heads: dict[str, tuple[int, bytes]] = {}
    for file in files:
        name = _stored_name(file, path.parent)
        if name in heads:
            raise ArtifactError(f"two weight files are called `{name}`", hint="put them beside the artifact")
        with _Safetensors(file) as tensors:
            heads[name] = (tensors.nbytes, tensors.head)
            for key, offset, data in tensors:
                if data.nbytes in wanted.values():
                    digest = hashlib.sha256(data).hexdigest()
                    if digest in wanted and digest not in outside:
                        outside[digest] = Blob(digest, data.nbytes, offset, REFERENCE, name, key)
    blobs = _in_order(program, outside)
    held = {name: [blob.digest for blob in blobs if blob.file == name] for name in heads}
    data_files = tuple(
        DataFile(name, nbytes, len(head), head_digest(head, iter(held[name])))
        for name, (nbytes, head) in heads.items()
        if held[name]
    )
    return Placement(blobs, data_files)


def _stored_name(file: Path, folder: Path) -> str:
    """Relative to the artifact's folder if it is below that, else the bare name: no machine's own paths."""
    try:
        return file.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return file.name


class _Safetensors:
    """The tensors of a safetensors file: eight bytes of length, a JSON header, the bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Safetensors:
        try:
            with self._path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"weight file `{self._path}` cannot be read", why=str(error)) from None
        self.nbytes = len(self._data)
        self._begin = 8 + int.from_bytes(self._data[:8], "little")
        self.head = bytes(self._data[: min(self._begin, self.nbytes)])
        try:
            header: Any = json.loads(self.head[8:])
            self._entries = [
                (str(key), *cast("tuple[int, int]", tuple(entry["data_offsets"])))
                for key, entry in header.items()
                if key != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"weight file `{self._path}` is no safetensors file", why=str(error)
            ) from None
        return self

    def __iter__(self) -> Iterator[tuple[str, int, memoryview]]:
        """(name, offset in the file, bytes), in the header's order."""
        for key, begin, end in self._entries:
            if not 0 <= begin <= end <= self.nbytes - self._begin:
                raise ArtifactError(f"weight file `{self._path}` is damaged", why=f"`{key}` lies outside")
            yield key, self._begin + begin, self._data[self._begin + begin : self._begin + end]

    def __exit__(self, *rest: object) -> None:
        self._data.release()


def embedded(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """Those in the artifact itself."""
    return tuple(blob for blob in blobs if blob.location == EMBEDDED)


def external(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """Those that a data file of ours must get."""
    return tuple(blob for blob in blobs if blob.location == EXTERNAL)

"""Safetensors files as they lie on disk: eight bytes of length, a JSON header, the tensors' bytes.

Nothing but the header is read before it is asked for; files of many GiB cost no memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..dtypes import DType
from ..errors import ArtifactError, UsageError

DTYPES = {
    "BOOL": DType.BOOL, "U8": DType.UINT8, "I8": DType.INT8, "I16": DType.INT16, "U16": DType.UINT16,
    "I32": DType.INT32, "U32": DType.UINT32, "I64": DType.INT64, "U64": DType.UINT64, "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16, "F32": DType.FLOAT32, "F64": DType.FLOAT64, "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
}  # fmt: skip
"""The format's words for element types. Those that devplan has no type for are passed over."""
_CHUNK = 16 << 20
_LARGEST_HEADER = 100_000_000
"""As the format's own library has it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major, ``offset`` bytes from the file's start."""

    path: Path
    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def digest(self) -> str:
        """SHA-256 of its bytes, read piece by piece: a map of the file would count as memory in use."""
        found = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left and (piece := file.read(min(_CHUNK, left))):
                found.update(piece)
                left -= len(piece)
        return found.hexdigest()

    def read(self) -> memoryview:
        """Its bytes, copied."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return memoryview(bytearray(file.read(self.nbytes)))

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file that was looked into: its size, its header's bytes, and what is in it by name."""

    path: Path
    nbytes: int
    head: bytes
    tensors: Mapping[str, StoredTensor]

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names of tensors whose type devplan lacks."""
        return tuple(set(_header(self.head)) - {"__metadata__", *self.tensors})

    def map(self) -> memoryview:
        """All of its bytes, read as they are touched."""
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read a file's header; ArtifactError when there is no such file or it is not one."""
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            head = file.read(begin if begin <= min(nbytes, _LARGEST_HEADER) else 0)
    except OSError as error:
        why = error.strerror or str(error)
        raise ArtifactError(f"weight file `{path}` cannot be read", why=why) from None
    if not head:
        raise ArtifactError(f"weight file `{path}` is no safetensors file", why="its header is cut off")
    try:
        header = _header(head)
        found = {
            name: stored
            for name, entry in header.items()
            if name != "__metadata__" and (stored := _stored(path, name, entry, begin)) is not None
        }
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"weight file `{path}` is no safetensors file", why=str(error)) from None
    for stored in found.values():
        if not begin <= stored.offset <= stored.offset + stored.nbytes <= nbytes:
            raise ArtifactError(f"weight file `{path}` is damaged", why=f"`{stored.name}` lies outside")
    return SafetensorsFile(path, nbytes, head, found)


def _header(head: bytes) -> dict[str, Any]:
    header: Any = json.loads(head[8:])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return cast("dict[str, Any]", header)


def _stored(path: Path, name: str, entry: Any, begin: int) -> StoredTensor | None:
    """The tensor of a header's entry; None for one of a type that devplan lacks."""
    match entry:
        case {"dtype": str(word), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            extents = tuple(extent for extent in shape if isinstance(extent, int) and extent >= 0)
        case _:
            raise ValueError(f"the header's entry `{name}` is not as the format has it")
    if len(extents) != len(shape):
        raise ValueError(f"`{name}` has the shape {shape}")
    if (dtype := DTYPES.get(word)) is None:
        return None
    if last - first != math.prod(extents) * dtype.itemsize:
        raise ValueError(f"`{name}` has {last - first} bytes")
    return StoredTensor(path, name, dtype, extents, begin + first, last - first)


def weight_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The files that are meant: folders stand for all ``.safetensors`` files in them, in order of name."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not path.exists():
            raise UsageError(f"cannot read weights from `{path}`", why="there is no such file")
        if not inside:
            raise UsageError(f"cannot read weights from `{path}`", why="it holds no `.safetensors` file")
        found += inside
    return tuple(found)


def all_tensors(files: Sequence[SafetensorsFile]) -> Mapping[str, StoredTensor]:
    """What is in any of the files; UsageError when two have the same name for different tensors."""
    found: dict[str, StoredTensor] = {}
    for stored in _each(files):
        held = found.setdefault(stored.name, stored)
        if held is not stored:
            raise UsageError(f"`{stored.name}` is in `{held.path}` and in `{stored.path}`", hint="give one")
    return found


def _each(files: Sequence[SafetensorsFile]) -> Iterator[StoredTensor]:
    for file in files:
        yield from file.tensors.values()

"""Where constants' bytes go: into the artifact, a data file beside it, or nowhere since a file has them.

The data file is an FT01 container (`.ptd`) with every constant under its name. Its own name carries a digest
of its contents, so that writing a new one never touches the one that an older artifact needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import flatbuffers

from ..errors import ArtifactError
from ..program import Constant, Program
from ..weights.recipes import Recipe
from ..weights.safetensors import SafetensorsFile, all_tensors, open_safetensors
from ..weights.supply import Supply
from .generated import data_generated as fb
from .layout import (
    DATA_HEADER,
    DATA_HEADER_MAGIC,
    EMBEDDED,
    EXTERNAL,
    GIVEN,
    REFERENCE,
    Blob,
    DataFile,
    Segment,
    align,
    contents,
    place_segments,
)
from .views import dim_order

Weights = Literal["embed", "external", "reference", "none"]

NO_RECIPES: Mapping[str, Recipe] = {}


@dataclass(frozen=True)
class Placement:
    """All unique constants, and the files that some of them are in."""

    blobs: tuple[Blob, ...]
    files: tuple[DataFile, ...] = ()
    head: bytes = b""
    """What the data file begins with, when one must be written."""


def place(
    program: Program,
    weights: Weights,
    path: Path,
    files: Sequence[Path] = (),
    recipes: Mapping[str, Recipe] = NO_RECIPES,
) -> Placement:
    """Decide for every unique constant where its bytes are.

    Initial values of state and empty constants are always embedded; with ``reference`` so is what no
    safetensors file of ``files`` holds byte by byte, and no recipe makes of what they hold. With ``none``
    all but what recipes make is embedded. ArtifactError when a file is no safetensors file.
    """
    if weights == "none":
        return _given(program, recipes)
    if weights == "embed":
        return Placement(_in_order(program, {}))
    initial = {state.initial for state in program.state}
    wanted = {item.digest: item.nbytes for item in program.constants if item.nbytes}
    wanted = {digest: nbytes for digest, nbytes in wanted.items() if digest not in initial}
    if weights == "external":
        return _external(program, wanted, path) if wanted else Placement(_in_order(program, {}))
    return _reference(program, wanted, path, files, recipes)


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


def _reference(
    program: Program,
    wanted: Mapping[str, int],
    path: Path,
    files: Sequence[Path],
    recipes: Mapping[str, Recipe],
) -> Placement:
    outside: dict[str, Blob] = {}
    opened: dict[str, SafetensorsFile] = {}
    sizes = set(wanted.values())
    for file in files:
        name = _stored_name(file, path.parent)
        if name in opened:
            raise ArtifactError(f"two weight files are called `{name}`", hint="put them beside the artifact")
        opened[name] = open_safetensors(file)
        for stored in opened[name].tensors.values():
            digest = stored.digest() if stored.nbytes in sizes else ""
            if digest in wanted and digest not in outside:
                outside[digest] = Blob(digest, stored.nbytes, stored.offset, REFERENCE, name, stored.name)
    made = {
        digest: recipe for digest, recipe in recipes.items() if digest in wanted and digest not in outside
    }
    supply = Supply.fitted("the weight files", all_tensors(list(opened.values())), list(made.values()))
    for digest, recipe in made.items():
        first = next(supply.find(part) for part in recipe.parts if part.names)
        home = next(name for name, file in opened.items() if first in file.tensors.values())
        outside[digest] = Blob(digest, recipe.nbytes, 0, REFERENCE, home, recipe=recipe)
    blobs = _in_order(program, outside)
    held = {name: [blob.digest for blob in blobs if blob.file == name] for name in opened}
    needed = {name for name in opened if held[name] or made}
    return Placement(
        blobs,
        tuple(
            DataFile(name, file.nbytes, len(file.head), head_digest(file.head, iter(held[name])))
            for name, file in opened.items()
            if name in needed
        ),
    )


def _given(program: Program, recipes: Mapping[str, Recipe]) -> Placement:
    constants = {constant.digest for constant in program.constants}
    outside = {
        digest: Blob(digest, recipe.nbytes, 0, GIVEN, key=recipe.names[0], recipe=recipe)
        for digest, recipe in recipes.items()
        if digest in constants
    }
    return Placement(_in_order(program, outside))


def _stored_name(file: Path, folder: Path) -> str:
    """Relative to the artifact's folder if it is below that, else the bare name: no machine's own paths."""
    try:
        return file.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return file.name


def embedded(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """Those in the artifact itself."""
    return tuple(blob for blob in blobs if blob.location == EMBEDDED)


def external(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """Those that a data file of ours must get."""
    return tuple(blob for blob in blobs if blob.location == EXTERNAL)

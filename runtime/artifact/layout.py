"""Where things lie in the file: unique constants and their offsets, segments, and the seal at the end.

A file is, in this order: the ET12 program table with its extended header; the constants' segment; one segment
per delegate; kernels' code; the manifest; the seal. Every segment begins at a multiple of `ALIGNMENT`, and so
does every constant within its segment, so that a runtime can upload the segment as one block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..program import Program
from ..weights.recipes import Recipe

FORMAT_VERSION = 2
"""Of the manifest and the delegates' blobs, in the order of their making:

1. The first.
2. Sizes that depend on data (`Count`): a reader that knows of none would hand out more than is real. Programs
   without them are written as version 1, which they are.
"""
ALIGNMENT = 256
MAGIC = b"ET12"
HEADER_MAGIC = b"eh00"
HEADER = struct.Struct("<4sIQQQ")
"""At byte 8: magic, its own length, bytes of the program table, segments' base, segments' bytes."""
DATA_HEADER_MAGIC = b"FH01"
DATA_HEADER = struct.Struct("<4sIQQQQ")
"""At byte 8 of a data file: magic, its own length, what was inserted, bytes of the table, base, bytes."""
SEAL = struct.Struct("<8sQQ32s")
"""Magic; begin and end of the constants' segment in the file; SHA-256 of all other bytes but itself."""
SEAL_MAGIC = b"DEVPLAN1"
MANIFEST_KEY = "devplan.manifest"
SEAL_KEY = "devplan.seal"
CODE_KEY = "devplan.code."
BACKEND_ID = "DevplanBackend"
EMBEDDED, EXTERNAL, REFERENCE, GIVEN = range(4)
"""Where constants' bytes are: `Blob.location`."""


def version_of(program: Program) -> int:
    """The oldest version that says all there is to say of a program."""
    return FORMAT_VERSION if any(method.counts for method in program.methods) else 1


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Blob:
    """Unique constant bytes. ``offset`` counts from the constants' segment, or the start of ``file``."""

    digest: str
    nbytes: int
    offset: int
    location: int = 0
    """Embedded, in a data file of ours beside the artifact, in a file that was there before, or in files that
    whoever loads the artifact gives."""
    file: str = ""
    key: str = ""
    recipe: Recipe | None = None
    """How the bytes are made of what files hold, where they are not there as they are."""


def contents(program: Program) -> Iterator[tuple[str, int]]:
    """(digest, bytes) of every constant and initial state, in program order, repeats included."""
    for constant in program.constants:
        yield constant.digest, constant.nbytes
    for state in program.state:
        if state.initial:
            yield state.initial, state.nbytes


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file besides the artifact that constants are in: its name, or path from the artifact's folder.

    ``digest`` is of the first ``head_nbytes`` bytes, followed by the digests of the constants in it.
    """

    name: str
    nbytes: int
    head_nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes of the file; ``offset`` counts from the segments' base."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.nbytes


def place_segments(sizes: list[int]) -> tuple[Segment, ...]:
    """Segments one after the other, each aligned, nothing after the last."""
    placed: list[Segment] = []
    end = 0
    for nbytes in sizes:
        placed.append(Segment(align(end), nbytes))
        end = placed[-1].end
    return tuple(placed)

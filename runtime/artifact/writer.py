"""Write an artifact: atomically, the same bytes for the same program, constants streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArtifactError
from ..program import PlannedProgram
from ..weights.recipes import Recipe
from .atomic import AtomicFile, BytesLike
from .encode import packed, region
from .encode_manifest import code_digest, manifest
from .et12 import program_table
from .layout import (
    CODE_KEY,
    HEADER,
    HEADER_MAGIC,
    MANIFEST_KEY,
    REFERENCE,
    SEAL,
    SEAL_KEY,
    SEAL_MAGIC,
    Blob,
    align,
    place_segments,
)
from .runs import steps
from .verify import verify
from .views import constant_table
from .weights import NO_RECIPES, Placement, Weights, embedded, external, place

ConstantSource = Mapping[str, Callable[[], BytesLike]]
"""By digest, a function that gives the constant's bytes. Called once per digest, while it is written."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What was written: the file's size and its SHA-256, hexadecimal."""

    path: Path
    nbytes: int
    sha256: str
    data: Path | None = None
    """The data file beside it, for external weights."""
    data_nbytes: int = 0


def write(
    path: Path,
    planned: PlannedProgram,
    constants: ConstantSource,
    *,
    producer: str = "",
    weights: Weights = "embed",
    files: Sequence[Path] = (),
    recipes: Mapping[str, Recipe] = NO_RECIPES,
    check: Callable[[Path], None] | None = None,
) -> WrittenFile:
    """Write to a nameless file beside ``path``, then name it so: the old file, or the whole new one.

    Args:
        path: the artifact; its folder must exist.
        planned: a program whose plan is complete; it is verified first.
        constants: the bytes by digest; each is hashed while it is written.
        producer: devplan's version; by default the installed one.
        weights: ``embed``; or ``external``, into `STEM.DIGEST.ptd` beside it, which is there first; or
            ``reference``, where constants that a file of ``files`` holds, or can be made of what it holds,
            stay there; or ``none``, where recipes make them of files that are given at load.
        files: safetensors files, for ``reference``.
        recipes: how constants are made of such files, by digest.
        check: called with the finished file before it takes its name; if it raises, nothing is written.

    Raises:
        ArtifactError: the program breaks an invariant, a constant is missing or not what its digest says, or
            a weight file is not one.
        OSError: the folder is missing, not writable or full.
    """
    verify(planned)
    placed = place(planned.program, weights, path, files, recipes)
    missing = [
        blob.digest for blob in placed.blobs if blob.location < REFERENCE and blob.digest not in constants
    ]
    if missing:
        raise ArtifactError(f"the bytes of {len(missing)} constants are missing", why=f"first: {missing[0]}")
    parts = _parts(planned, placed, producer or _version())
    with AtomicFile(path) as file:
        for part in _stream(parts, embedded(placed.blobs), constants):
            file.write(part)
        with _data_file(path.parent, placed, constants) as data:
            if check is not None:
                check(file.preview())
    data_nbytes = placed.files[0].nbytes if data else 0
    return WrittenFile(path, file.nbytes, file.digest.hexdigest(), data, data_nbytes)


@contextmanager
def _data_file(folder: Path, placed: Placement, constants: ConstantSource) -> Generator[Path | None]:
    """The data file of external weights, if there is to be one; gone again when the artifact is refused."""
    if not placed.head:
        yield None
        return
    path = folder / placed.files[0].name
    was_there = path.exists()
    with AtomicFile(path) as file:
        file.write(placed.head)
        for blob in external(placed.blobs):
            file.write(bytes(blob.offset - file.nbytes))
            file.write(_checked(constants[blob.digest](), blob))
    try:
        yield path
    except BaseException:
        if not was_there:
            path.unlink(missing_ok=True)
        raise


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("devplan")
    except PackageNotFoundError:
        return "0"


@dataclass(frozen=True)
class _Parts:
    head: bytes
    """Program table with its header, up to the segments' base."""
    constant_nbytes: int
    tail: bytes
    """From the end of the constants to the seal, without it."""


def _parts(planned: PlannedProgram, placed: Placement, producer: str) -> _Parts:
    """All bytes but the constants' own and the seal."""
    program = planned.program
    kernels = {kernel.name: index for index, kernel in enumerate(program.kernels)}
    plans = {plan.method: plan for plan in planned.plan.methods}
    datas: list[bytes] = []
    delegates: list[list[int]] = []
    for method in program.methods:
        values = {value.name: index for index, value in enumerate(method.values)}
        runs = [step for step in steps(method) if step.device is not None]
        delegates.append([1 + len(datas) + index for index in range(len(runs))])
        datas += [packed(region(method, step, values, kernels, plans.get(method.name))) for step in runs]
    codes = {code_digest(code.data).hex(): code.data for kernel in program.kernels for code in kernel.codes}
    keys = [*(CODE_KEY + digest for digest in codes), MANIFEST_KEY, SEAL_KEY]
    named = [(key, 1 + len(datas) + index) for index, key in enumerate(keys)]
    datas += [*codes.values(), packed(manifest(planned, placed.blobs, placed.files, producer))]
    constant_nbytes = max((blob.offset + blob.nbytes for blob in embedded(placed.blobs)), default=0)
    segments = place_segments([constant_nbytes, *map(len, datas), SEAL.size])
    table = program_table(planned, constant_table(program, placed.blobs), segments, delegates, named)
    tail = bytearray()
    for data, segment in zip(datas, segments[1:], strict=False):
        tail += bytes(segment.offset - constant_nbytes - len(tail)) + data
    tail += bytes(segments[-1].offset - constant_nbytes - len(tail))
    return _Parts(_with_header(table, segments[-1].end), constant_nbytes, bytes(tail))


def _with_header(table: bytes, segments_nbytes: int) -> bytes:
    """Put the extended header between the file identifier and the rest; offsets in the table are relative."""
    size = align(HEADER.size, 16)
    nbytes = len(table) + size
    base = align(nbytes)
    header = HEADER.pack(HEADER_MAGIC, HEADER.size, nbytes, base, segments_nbytes)
    root = int.from_bytes(table[:4], "little") + size
    start = root.to_bytes(4, "little") + table[4:8]
    return start + header.ljust(size, b"\0") + table[8:] + bytes(base - nbytes)


def _stream(parts: _Parts, blobs: Sequence[Blob], constants: ConstantSource) -> Iterator[BytesLike]:
    """The file from its first byte to its last."""
    begin = len(parts.head)
    start = SEAL.pack(SEAL_MAGIC, begin, begin + parts.constant_nbytes, b"")[:-32]
    yield parts.head
    end = 0
    for blob in blobs:
        yield bytes(blob.offset - end)
        yield _checked(constants[blob.digest](), blob)
        end = blob.offset + blob.nbytes
    yield parts.tail
    yield start
    yield hashlib.sha256(parts.head + parts.tail + start).digest()


def _checked(data: BytesLike, blob: Blob) -> memoryview:
    """The constant's bytes; ArtifactError when they are not those that were promised."""
    view = memoryview(data).cast("B")
    if view.nbytes != blob.nbytes:
        raise ArtifactError(
            f"constant {blob.digest} has {view.nbytes} bytes", why=f"{blob.nbytes} were announced"
        )
    if hashlib.sha256(view).hexdigest() != blob.digest:
        raise ArtifactError(
            f"the bytes of constant {blob.digest} have another digest", why="they changed since"
        )
    return view

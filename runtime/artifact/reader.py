"""Read an artifact: map the file, check all of it but the constants' bytes, then rebuild the program.

Order of the checks: is it an ET12 file at all; does the header fit the file; does the seal at its end match
(so that accidental damage is told as such, before any offset is believed); then every table (`unpack.py`,
`decode.py`), what the program means (`verify.py`), and that the ET12 view says the same (`agreement.py`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArtifactError
from ..program import PlannedProgram
from . import decode_manifest
from .agreement import verify_agreement
from .data_files import made_constants, open_data_file
from .generated.devplan_layout import LAYOUT as DEVPLAN
from .generated.program_layout import LAYOUT as ET12
from .layout import (
    ALIGNMENT,
    BACKEND_ID,
    CODE_KEY,
    FORMAT_VERSION,
    GIVEN,
    HEADER,
    HEADER_MAGIC,
    MAGIC,
    MANIFEST_KEY,
    SEAL,
    SEAL_MAGIC,
    Blob,
    Segment,
)
from .unpack import unpack
from .verify import verify
from .verify_contents import DIGEST

if TYPE_CHECKING:
    from .generated import devplan_generated as blobs_fb
    from .generated import program_generated as fb

EXPORT_AGAIN = "export the model again"
LOCATIONS = range(4)
_WORTH_THREADS = 1 << 24


@dataclass(frozen=True)
class Artifact:
    """A file that was read and checked. Its constants are windows into the mapped file.

    ``producer`` is the version of the devplan that wrote it.
    """

    path: Path
    planned: PlannedProgram
    constants: Mapping[str, memoryview]
    """By digest. Nothing is read from the disk before it is used."""
    constant_segment: memoryview
    """The embedded constants in one block; `blobs` tells where each is."""
    blobs: tuple[Blob, ...]
    nbytes: int
    producer: str
    format: str = "ET12"

    @cached_property
    def sha256(self) -> str:
        """Of the whole file, hexadecimal; read when first asked for."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def verify_constants(self, *, made: bool = True) -> None:
        """Read every constant and compare it with its digest; ArtifactError for one that differs.

        Without ``made`` those are left out that recipes make, which takes as long as loading them.
        """
        known = [blob for blob in self.blobs if blob.location != GIVEN and (made or blob.recipe is None)]
        digests = [blob.digest for blob in known]
        whole = _each(self._is_whole, digests, sum(blob.nbytes for blob in known))
        if not all(whole):
            damaged = digests[whole.index(False)]
            raise ArtifactError(f"constant {damaged} of `{self.path}` is damaged", hint=EXPORT_AGAIN)

    def _is_whole(self, digest: str) -> bool:
        return hashlib.sha256(self.constants[digest]).hexdigest() == digest


def _each(function: Callable[[str], bool], items: Sequence[str], nbytes: int) -> list[bool]:
    """Of each item, in threads where there is much to read: hashing leaves Python to others."""
    if nbytes < _WORTH_THREADS:
        return list(map(function, items))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def read(path: Path, *, folders: Sequence[Path] = (), weights: Sequence[Path] = ()) -> Artifact:
    """Map and check an artifact, and the files that constants of it are in.

    Args:
        path: the artifact.
        folders: where to look for those files, after the artifact's own folder.
        weights: safetensors files, or folders of them, for an artifact without its weights. Without them it
            can be looked into, but not loaded.

    Raises:
        UsageError: the weights are not those of the program, or it has its own.
        ArtifactError: the file is missing, damaged, truncated, of another version, or not an artifact. The
            bytes of constants are not looked at; see `Artifact.verify_constants`.
    """
    try:
        data = _mapped(path)
        return _read(path, data, [path.parent, *folders], weights)
    except ArtifactError as error:
        raise ArtifactError(f"`{path.name}`: {error.what}", why=error.why, hint=error.hint) from None


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ArtifactError("is empty", hint=EXPORT_AGAIN)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ArtifactError("cannot be read", why=error.strerror or str(error)) from None


def _read(path: Path, data: memoryview, folders: Sequence[Path], weights: Sequence[Path]) -> Artifact:
    table_nbytes, base = _header(data)
    begin, end = _seal(data, base)
    root = int.from_bytes(data[:4], "little")
    program: fb.ProgramT = unpack(data[:table_nbytes], ET12, "Program", what="the program table", root=root)
    segments = _segments(program, data, base)
    named = {entry.key or "": _segment(segments, entry.segment) for entry in program.namedData or ()}
    if MANIFEST_KEY not in named:
        raise ArtifactError("holds no program of devplan", why=f"there is no `{MANIFEST_KEY}`")
    manifest: blobs_fb.ManifestT = unpack(named[MANIFEST_KEY], DEVPLAN, "Manifest", what="the manifest")
    if not 1 <= manifest.version <= FORMAT_VERSION:
        raise ArtifactError(
            f"is of format version {manifest.version}",
            why=f"this devplan reads versions 1 to {FORMAT_VERSION}",
            hint=f"it was written by devplan {manifest.producer}",
        )
    constants = _constant_segment(program, segments, data[begin:end])
    blobs = decode_manifest.decode_blobs(manifest)
    _verify_digests(blobs)
    files = {
        file.name: open_data_file(file, blobs, folders) for file in decode_manifest.decode_files(manifest)
    }
    windows = {blob.digest: _window(blob, constants, files) for blob in blobs if blob.recipe is None}
    delegates = _Delegates(program, segments)
    planned = decode_manifest.program(manifest, delegates.region, _codes(named))
    verify(planned)
    verify_agreement(planned, blobs, program, delegates.regions)
    made = made_constants(planned.program, blobs, windows, [path for path, _ in files.values()], weights)
    return Artifact(path, planned, made, constants, blobs, len(data), manifest.producer or "")


def _header(data: memoryview) -> tuple[int, int]:
    """Bytes of the program table, and the segments' base."""
    if len(data) < 64:
        raise ArtifactError("is not an artifact", why=f"it has {len(data)} bytes")
    magic = bytes(data[4:8])
    if magic != MAGIC:
        if magic[:2] == MAGIC[:2] and magic[2:].isdigit():
            raise ArtifactError(f"is of container version {magic.decode()}", why="this devplan reads ET12")
        raise ArtifactError("is not an artifact", why="it does not carry the identifier ET12")
    found, length, table_nbytes, base, segments_nbytes = HEADER.unpack_from(data, 8)
    if found != HEADER_MAGIC or length < HEADER.size:
        raise ArtifactError("holds no program of devplan", why="it has no extended header")
    if base + segments_nbytes > len(data) or table_nbytes > len(data):
        raise ArtifactError(
            "is truncated", why=f"it has {len(data)} bytes of {base + segments_nbytes}", hint=EXPORT_AGAIN
        )
    if base + segments_nbytes < len(data):
        raise ArtifactError("is damaged", why=f"{len(data) - base - segments_nbytes} bytes follow its end")
    if not 64 <= table_nbytes <= base or base % ALIGNMENT or segments_nbytes < SEAL.size:
        raise ArtifactError("is damaged", why="its header contradicts itself")
    return table_nbytes, base


def _seal(data: memoryview, base: int) -> tuple[int, int]:
    """Where the constants are; everything else is compared with the digest at the file's end."""
    place = len(data) - SEAL.size
    magic, begin, end, digest = SEAL.unpack_from(data, place)
    if magic != SEAL_MAGIC:
        raise ArtifactError("was not written by devplan, or is damaged", why="it does not end with a seal")
    if not base <= begin <= end <= place:
        raise ArtifactError("is damaged", why="its seal contradicts its header", hint=EXPORT_AGAIN)
    actual = hashlib.sha256(data[:begin])
    actual.update(data[end:-32])
    if actual.digest() != digest:
        raise ArtifactError(
            "is damaged", why="its bytes differ from those that were written", hint=EXPORT_AGAIN
        )
    return begin, end


def _segments(program: fb.ProgramT, data: memoryview, base: int) -> list[memoryview]:
    found: list[memoryview] = []
    place = Segment(0, 0)
    for entry in program.segments or ():
        if entry.offset < place.end or base + entry.offset + entry.size > len(data):
            raise ArtifactError(
                "is damaged", why=f"segment {len(found)} lies outside the file or over another"
            )
        place = Segment(entry.offset, entry.size)
        found.append(data[base + place.offset : base + place.end])
    return found


def _segment(segments: Sequence[memoryview], number: int) -> memoryview:
    if number >= len(segments):
        raise ArtifactError("is damaged", why=f"it refers to segment {number} of {len(segments)}")
    return segments[number]


def _constant_segment(program: fb.ProgramT, segments: Sequence[memoryview], sealed: memoryview) -> memoryview:
    """The constants; the seal must mean the same bytes, since nothing else vouches for them."""
    if program.constants is None or program.constants.segment != 0:
        raise ArtifactError("is damaged", why="its constants are not in the first segment")
    constants = _segment(segments, 0)
    if len(constants) != len(sealed) or (len(sealed) and constants.obj is not sealed.obj):
        raise ArtifactError("is damaged", why="its seal and its segments disagree on the constants")
    return constants


def _verify_digests(blobs: Sequence[Blob]) -> None:
    if not all(DIGEST.fullmatch(blob.digest) for blob in blobs):
        raise ArtifactError("the manifest is damaged", why="a constant has no SHA-256")


def _window(blob: Blob, constants: memoryview, files: Mapping[str, tuple[Path, memoryview]]) -> memoryview:
    """The constant's bytes; embedded ones are aligned."""
    if blob.location not in LOCATIONS or (blob.location != 0 and blob.file not in files):
        raise ArtifactError("the manifest is damaged", why=f"constant {blob.digest} is nowhere")
    home = constants if blob.location == 0 else files[blob.file][1]
    is_aligned = blob.location != 0 or blob.offset % ALIGNMENT == 0
    if not is_aligned or blob.offset + blob.nbytes > len(home):
        raise ArtifactError("the manifest is damaged", why=f"constant {blob.digest} lies outside its place")
    return home[blob.offset : blob.offset + blob.nbytes]


def _codes(named: Mapping[str, memoryview]) -> dict[str, memoryview]:
    """Kernels' code by digest, compared with it."""
    codes = {key.removeprefix(CODE_KEY): data for key, data in named.items() if key.startswith(CODE_KEY)}
    for digest, data in codes.items():
        if hashlib.sha256(data).hexdigest() != digest:
            raise ArtifactError("is damaged", why=f"kernel code {digest} has another digest")
    return codes


class _Delegates:
    """The blobs of all delegates, read once each."""

    def __init__(self, program: fb.ProgramT, segments: Sequence[memoryview]) -> None:
        self._plans = {plan.name or "": plan for plan in program.plans or ()}
        self._segments = segments
        self.regions: dict[tuple[str, int], blobs_fb.RegionT] = {}

    def region(self, method: str, number: int) -> blobs_fb.RegionT:
        """The n-th delegate's blob of a method."""
        plan = self._plans.get(method)
        delegates = plan.delegates or [] if plan else []
        if number >= len(delegates) or (method, number) in self.regions:
            raise ArtifactError(
                "is damaged", why=f"method `{method}` has no delegate {number}, or calls it twice"
            )
        delegate = delegates[number]
        data = delegate.processed
        if delegate.id != BACKEND_ID or data is None or data.location != 1:
            raise ArtifactError(
                "holds a delegate of another backend", why=f"`{delegate.id}` in method `{method}`"
            )
        what = f"delegate {number} of method `{method}`"
        region: blobs_fb.RegionT = unpack(_segment(self._segments, data.index), DEVPLAN, "Region", what=what)
        self.regions[method, number] = region
        return region

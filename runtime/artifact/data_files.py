"""The other files that an artifact's constants are in: found, mapped and compared with what it expects."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ..errors import ArtifactError
from .layout import Blob, DataFile


def open_data_file(file: DataFile, blobs: Sequence[Blob], folders: Sequence[Path]) -> memoryview:
    """Map the file; ArtifactError when it is missing, or not the one that the artifact was written with.

    Compared are its size and its head; the constants' bytes are compared on request only, like embedded ones.
    """
    name = PurePosixPath(file.name)
    if name.is_absolute() or ".." in name.parts or not name.name:
        raise ArtifactError("the manifest is damaged", why=f"`{file.name}` is no name of a data file")
    path = _find(name, folders)
    try:
        with path.open("rb") as handle:
            data = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"its data file `{file.name}` cannot be read", why=str(error)) from None
    digest = hashlib.sha256(data[: file.head_nbytes])
    for blob in blobs:
        if blob.file == file.name:
            digest.update(bytes.fromhex(blob.digest))
    if len(data) != file.nbytes or digest.hexdigest() != file.digest:
        raise ArtifactError(
            f"its data file `{file.name}` is not the one that it was exported with",
            why=f"it has {len(data)} bytes, {file.nbytes} are expected"
            if len(data) != file.nbytes
            else "it differs",
            hint="export the model again",
        )
    return data


def _find(name: PurePosixPath, folders: Sequence[Path]) -> Path:
    """Beside the artifact under its stored path, or under its bare name in a further folder."""
    places = [folder / name for folder in folders[:1]] + [folder / name.name for folder in folders[1:]]
    for place in places:
        if place.is_file():
            return place
    raise ArtifactError(
        f"its data file `{name}` is missing",
        why="it was looked for in " + ", ".join(f"`{folder}`" for folder in folders),
        hint="keep the file beside the artifact",
    )

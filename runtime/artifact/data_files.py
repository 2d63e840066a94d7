"""The other files that an artifact's constants are in: found, mapped and compared with what it expects."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from ..errors import ArtifactError, UsageError
from ..program import CPU, Program
from ..weights.safetensors import all_tensors, open_safetensors, weight_files
from .layout import GIVEN, Blob, DataFile


def open_data_file(file: DataFile, blobs: Sequence[Blob], folders: Sequence[Path]) -> tuple[Path, memoryview]:
    """Find and map the file; ArtifactError when it is missing, or not the one that it was exported with.

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
    return path, data


def made_constants(
    program: Program,
    blobs: Sequence[Blob],
    windows: Mapping[str, memoryview],
    listed: Sequence[Path],
    given: Sequence[Path],
) -> Mapping[str, memoryview]:
    """All constants: windows into files, and what recipes make of the files listed or given.

    Raises:
        UsageError: weights are given to an artifact that has its own, or they are not those it needs.
        ArtifactError: a file is no safetensors file.
    """
    wanted = [blob for blob in blobs if blob.recipe is not None and blob.location == GIVEN]
    if given and not wanted:
        raise UsageError("the artifact has its weights", hint="leave `--weights` away")
    recipes = {blob.digest: blob.recipe for blob in blobs if blob.recipe is not None}
    if not recipes:
        return windows
    from ..weights.supply import Constants, Supply  # NumPy, which reading an artifact does without

    paths = weight_files(given) if wanted else listed
    fitted: Supply | None = None
    if paths:
        label = ", ".join(path.name for path in (given if wanted else listed))
        tensors = all_tensors([open_safetensors(path) for path in paths])
        fitted = Supply.fitted(label, tensors, list(recipes.values()))
    on_host = frozenset(constant.digest for constant in program.constants if constant.device == CPU)
    return Constants(windows, recipes, fitted, on_host)


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

"""Tensors in files: ``.npy``, ``.npz`` and ``.safetensors``, read and written without torch."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.artifact.atomic import AtomicFile
from ..runtime.dtypes import DType
from ..runtime.errors import ArtifactError, UsageError
from ..runtime.tensors.host import HostTensor, is_native, numpy_dtype
from ..runtime.weights.safetensors import DTYPES, StoredTensor, open_safetensors

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


def read_one(path: Path) -> Any:
    """The tensor of a ``.npy`` file; `UsageError` when it is none."""
    if path.suffix != ".npy":
        raise _bad(path, "one tensor comes in a `.npy` file", "use `--inputs` for `.npz` and `.safetensors`")
    array = _load(path)
    if not hasattr(array, "dtype"):
        raise _bad(path, "it is an archive of NumPy files", "rename it to `.npz` and use `--inputs`")
    return array


def read_many(path: Path) -> dict[str, Any]:
    """The tensors of a ``.npz`` or ``.safetensors`` file by name; `UsageError` when it is none."""
    if path.suffix == ".npz":
        archive = _load(path)
        if hasattr(archive, "dtype"):
            raise _bad(path, "it is a single NumPy file", "rename it to `.npy` and use `--input NAME=FILE`")
        with _damage(path, "it is damaged"), archive:
            return {name: archive[name] for name in archive.files}
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    raise _bad(path, f"`{path.suffix or path.name}` is no known format", "use `.npz` or `.safetensors`")


def write_many(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors by name, in one step. ``.npz`` has no bfloat16 and 8-bit floats: they become float32."""
    with AtomicFile(path) as file:
        if path.suffix == ".safetensors":
            file.write(_safetensors(tensors))
        else:
            _write_npz(file, tensors)


def check_output_name(path: Path) -> None:
    """`UsageError` when outputs cannot be written under that name."""
    if path.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"cannot write `{path}`", why="outputs go to a `.npz` or `.safetensors` file")


def _load(path: Path) -> Any:
    _require(path)
    with _damage(path, "it is no NumPy file"):
        return np.load(path, allow_pickle=False)


@contextmanager
def _damage(path: Path, what: str) -> Generator[None]:
    """Whatever NumPy and the zip module make of a file that is none: they raise errors of all kinds."""
    try:
        yield
    except Exception as error:
        if "pickle" in str(error):  # its text advises to load it all the same
            why = "what it holds could only be read as pickled objects, which are never loaded"
            raise _bad(path, f"{what}: {why}") from error
        raise _bad(path, f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _require(path: Path) -> None:
    if not path.is_file():
        why = "it is no ordinary file" if path.exists() else "there is no such file"
        raise _bad(path, why, "check the path")


def _read_safetensors(path: Path) -> dict[str, Any]:
    _require(path)
    try:
        file = open_safetensors(path)
    except ArtifactError as error:
        raise _bad(path, f"it is no safetensors file: {error.why}") from error
    if file.foreign:
        raise _bad(path, f"`{file.foreign[0]}` is of a type that no program has")
    return {name: _tensor(stored) for name, stored in file.tensors.items()}


def _tensor(stored: StoredTensor) -> Any:
    array = np.frombuffer(stored.read(), numpy_dtype(stored.dtype)).reshape(stored.shape)
    return array if is_native(stored.dtype) else HostTensor(array, stored.dtype)


def _write_npz(stream: Any, tensors: Mapping[str, Any]) -> None:
    """An uncompressed ``.npz`` whose members have fixed dates: equal tensors give equal bytes."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, tensor in tensors.items():
            array = tensor.float32() if isinstance(tensor, HostTensor) else np.asarray(tensor)
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor.raw if isinstance(tensor, HostTensor) else tensor)
        dtype = tensor.dtype if isinstance(tensor, HostTensor) else DType.from_name(str(raw.dtype))
        parts.append(raw.tobytes())
        end = offset + raw.nbytes
        header[name] = {"dtype": _WORDS[dtype], "shape": list(raw.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _bad(path: Path, why: str, hint: str = "") -> UsageError:
    return UsageError(f"cannot read `{path}`", why=why, hint=hint)

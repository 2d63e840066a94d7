"""Tensors in files: ``.npy``, ``.npz`` and ``.safetensors``, read and written without torch."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.artifact.atomic import AtomicFile
from ..runtime.dtypes import DType
from ..runtime.errors import UsageError
from ..runtime.host import HostTensor, is_native, numpy_dtype
from ..runtime.safetensors import DTYPES

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000


def read_one(path: Path) -> Any:
    """The tensor of a ``.npy`` file; `UsageError` when it is none."""
    if path.suffix != ".npy":
        raise _bad(path, "one tensor comes in a `.npy` file", "use `--inputs` for `.npz` and `.safetensors`")
    return _load(path)


def read_many(path: Path) -> dict[str, Any]:
    """The tensors of a ``.npz`` or ``.safetensors`` file by name; `UsageError` when it is none."""
    if path.suffix == ".npz":
        archive = _load(path)
        try:
            return {name: archive[name] for name in archive.files}
        except Exception as error:
            raise _bad(path, f"it is damaged: {error}") from error
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
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"cannot read `{path}`", why="there is no such file", hint="check the path"
        ) from error
    except (ValueError, OSError, EOFError) as error:
        raise _bad(path, f"it is no NumPy file: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read `{path}`", why=str(error.strerror), hint="check the path") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_LARGEST_HEADER, len(data) - 8):
        raise _bad(path, "it is no safetensors file: its header is cut off")
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        body = memoryview(data)[8 + length :]
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(entry, body) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(path, f"it is no safetensors file: {error}") from error


def _tensor(entry: dict[str, Any], body: memoryview) -> Any:
    dtype = DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(body):
        raise ValueError("a tensor lies outside the file")
    array = np.frombuffer(body[begin:end], numpy_dtype(dtype)).reshape(entry["shape"])
    return array if is_native(dtype) else HostTensor(array, dtype)


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

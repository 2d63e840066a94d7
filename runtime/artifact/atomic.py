"""Files that are there whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

BytesLike = bytes | bytearray | memoryview


class AtomicFile:
    """A file that takes the name ``path`` when all went well, and vanishes otherwise.

    Where the system has nameless files (Linux), even a killed process leaves nothing behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.digest = hashlib.sha256()
        self.nbytes = 0

    def __enter__(self) -> AtomicFile:
        if self._path.exists() and not self._path.is_file():  # a device would be replaced by a file
            raise FileExistsError(errno.EEXIST, "it is no ordinary file", str(self._path))
        # In the same folder, since a rename is atomic only within one file system.
        self._name = self._path.parent / f".{self._path.name}.{secrets.token_hex(4)}.part"
        self._descriptor, self._is_named = _open_nameless(self._path.parent), False
        if self._descriptor < 0:
            self._descriptor = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._is_named = True
        return self

    def write(self, data: BytesLike) -> int:
        """Append all of it; gives how many bytes that were."""
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.nbytes += view.nbytes
        with self._named():
            while view.nbytes:
                view = view[os.write(self._descriptor, view) :]
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back: what writes to files may ask all the same."""

    def preview(self) -> Path:
        """The file as it is now, under a passing name in the same folder."""
        with self._named():
            os.fsync(self._descriptor)
            if not self._is_named:
                # With a folder given, which an absolute path ignores, Python follows the link.
                source = f"/proc/self/fd/{self._descriptor}"
                os.link(source, self._name, src_dir_fd=self._descriptor, follow_symlinks=True)
                self._is_named = True
        return self._name

    @contextmanager
    def _named(self) -> Generator[None]:
        """Let the system's refusals name the file that is wanted, not a descriptor or a passing name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.preview().replace(self._path)
        finally:
            os.close(self._descriptor)
            self._name.unlink(missing_ok=True)


def write_whole(path: Path, data: str | BytesLike) -> None:
    """Write a file in one step: it is the old one, or none, where that fails."""
    with AtomicFile(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _open_nameless(folder: Path) -> int:
    """A descriptor of a new file without a name; -1 where there is no such thing."""
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag or not Path("/proc/self/fd").is_dir():
        return -1
    try:
        return os.open(folder, os.O_WRONLY | flag, 0o666)
    except OSError as error:
        if error.errno in (
            errno.EOPNOTSUPP,
            errno.EISDIR,
            errno.EINVAL,
        ):  # the file system knows no such file
            return -1
        raise

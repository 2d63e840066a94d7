"""The file: an ET12 container (`.pte`) with devplan's own blobs in it. `write` makes one, `read` checks one.

Reading imports neither flatbuffers nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .reader import Artifact, read

if TYPE_CHECKING:
    from .atomic import BytesLike
    from .writer import ConstantSource, WrittenFile, write

__all__ = ["Artifact", "BytesLike", "ConstantSource", "WrittenFile", "read", "write"]


def __getattr__(name: str) -> Any:
    """Load the writer, and flatbuffers with it, only for those who write."""
    if name in ("BytesLike", "ConstantSource", "WrittenFile", "write"):
        from . import writer

        return getattr(writer, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")

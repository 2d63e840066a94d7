"""Read a flatbuffer of ours with every offset checked.

flatc's Python accessors trust the buffer: a damaged offset ends in a `struct.error`, an endless loop or a
read elsewhere. This walks a `Layout` (made from the schema) instead. Every table, string and vector must lie
within the buffer, and together they must not take more bytes than it has: a buffer whose parts overlap, which
could be made to expand without end, is refused after linear time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..errors import ArtifactError

Slot = tuple[str, str, str, int | bool | float]
"""(attribute, what it is, struct code or table or union, default)."""

MAX_DEPTH = 64
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_VTABLE = struct.Struct("<HH")
_SCALARS = {code: struct.Struct("<" + code) for code in "bB?iIqQd"}


@dataclass(frozen=True)
class Layout:
    """The tables of one schema, each with its slots in order, and the members of its unions."""

    unions: dict[str, tuple[str, ...]]
    tables: dict[str, tuple[Slot, ...]]


def unpack(buffer: memoryview, layout: Layout, table: str, *, what: str, root: int = -1) -> Any:
    """The root table as nested namespaces: strings are `str`, absent ones and vectors `None`.

    Args:
        buffer: the whole flatbuffer; bytes vectors (``[ubyte]``) in the result are copies.
        layout: from the schema's generated module.
        table: the root's type.
        what: what the buffer is called in messages.
        root: where the root table is; by default the buffer's first four bytes tell.

    Raises:
        ArtifactError: a part lies outside, parts overlap, text is not UTF-8, or a union's type is unknown.
    """
    reader = _Reader(buffer, layout)
    try:
        position = _U32.unpack_from(buffer, 0)[0] if root < 0 else root
        return reader.table(table, position, 0)
    except _Broken as broken:
        raise ArtifactError(f"{what} is damaged", why=str(broken)) from None
    except struct.error:
        raise ArtifactError(f"{what} is damaged", why="an offset points past its end") from None
    except UnicodeDecodeError:
        raise ArtifactError(f"{what} is damaged", why="a name is not valid UTF-8") from None


class _Broken(Exception):
    """A broken invariant; `unpack` says of which buffer."""


class _Shape(NamedTuple):
    """The fields of tables of one kind that have one vtable, with their offsets in the table."""

    size: int
    absent: dict[str, int | bool | float | None]
    scalars: list[tuple[str, Callable[[memoryview, int], tuple[Any, ...]], int]]
    others: list[tuple[str, str, str, int]]


class _Reader:
    def __init__(self, buffer: memoryview, layout: Layout) -> None:
        self._buffer, self._layout = buffer, layout
        self._left = len(buffer)
        self._shapes: dict[tuple[str, int], _Shape] = {}
        self._read: dict[str, Callable[[str, int, int], Any]] = {
            "string": self._string, "table": self.table, "scalars": self._scalars,
            "strings": self._strings, "tables": self._tables,
        }  # fmt: skip

    def table(self, name: str, position: int, depth: int) -> SimpleNamespace:
        if depth > MAX_DEPTH:
            raise _Broken(f"tables are nested more than {MAX_DEPTH} deep")
        vtable = position - _I32.unpack_from(self._buffer, position)[0]
        shape = self._shapes.get((name, vtable))
        if shape is None:
            shape = self._shapes[name, vtable] = self._shape(name, vtable)
        size, absent, scalars, others = shape
        self._take(position, size)
        result = SimpleNamespace()
        fields = result.__dict__
        fields.update(absent)
        for attribute, scalar, entry in scalars:
            fields[attribute] = scalar(self._buffer, position + entry)[0]
        for attribute, what, detail, entry in others:
            if what == "union":
                fields[attribute] = self._union(detail, fields[f"{attribute}Type"], position + entry, depth)
            else:
                fields[attribute] = self._read[what](detail, self._follow(position + entry), depth + 1)
        return result

    def _shape(self, name: str, vtable: int) -> _Shape:
        """What tables with this vtable hold and where; many tables share one."""
        if not 0 <= vtable <= len(self._buffer) - 4:
            raise _Broken("an offset points past its end")
        length, size = _VTABLE.unpack_from(self._buffer, vtable)
        if length < 4 or length % 2 or size < 4 or vtable + length > len(self._buffer):
            raise _Broken(f"table `{name}` has impossible fields")
        entries = struct.unpack_from(f"<{length // 2 - 2}H", self._buffer, vtable + 4)
        shape = _Shape(size, {}, [], [])
        for index, (attribute, what, detail, default) in enumerate(self._layout.tables[name]):
            entry = entries[index] if index < len(entries) else 0
            nbytes = _SCALARS[detail].size if what == "scalar" else 4
            if entry == 0:
                shape.absent[attribute] = default if what == "scalar" else None
            elif not 4 <= entry <= size - nbytes:
                raise _Broken(f"field `{attribute}` lies outside its table `{name}`")
            elif what == "scalar":
                shape.scalars.append((attribute, _SCALARS[detail].unpack_from, entry))
            else:
                shape.others.append((attribute, what, detail, entry))
        return shape

    def _take(self, position: int, nbytes: int) -> None:
        self._left -= nbytes
        if position + nbytes > len(self._buffer):
            raise _Broken("an offset points past its end")
        if self._left < 0:
            raise _Broken("its parts overlap")

    def _follow(self, position: int) -> int:
        return position + int(_U32.unpack_from(self._buffer, position)[0])

    def _vector(self, position: int, item_nbytes: int) -> int:
        count: int = _U32.unpack_from(self._buffer, position)[0]
        self._take(position, 4 + count * item_nbytes)
        return count

    def _string(self, detail: str, position: int, depth: int) -> str:
        count = self._vector(position, 1)
        return str(self._buffer[position + 4 : position + 4 + count], "utf-8")

    def _scalars(self, code: str, position: int, depth: int) -> list[Any] | bytes:
        count = self._vector(position, _SCALARS[code].size)
        if code == "B":
            return bytes(self._buffer[position + 4 : position + 4 + count])
        return list(struct.unpack_from(f"<{count}{code}", self._buffer, position + 4))

    def _strings(self, detail: str, position: int, depth: int) -> list[str]:
        starts = range(position + 4, position + 4 + 4 * self._vector(position, 4), 4)
        return [self._string(detail, self._follow(start), depth) for start in starts]

    def _tables(self, name: str, position: int, depth: int) -> list[SimpleNamespace]:
        starts = range(position + 4, position + 4 + 4 * self._vector(position, 4), 4)
        return [self.table(name, self._follow(start), depth) for start in starts]

    def _union(self, name: str, tag: int, position: int, depth: int) -> SimpleNamespace | None:
        members = self._layout.unions[name]
        if tag == 0:
            return None
        if tag > len(members):
            raise _Broken(f"`{name}` is of unknown kind {tag}")
        return self.table(members[tag - 1], self._follow(position), depth + 1)

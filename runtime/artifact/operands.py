"""The values that an instruction names, wherever it names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..program import Argument, HostCall, Instruction, Launch, LibraryCall, Ref


def operands(item: Instruction) -> Iterator[str]:
    """Reads, writes, references in arguments, the workspace; repeats are possible."""
    yield from item.reads
    yield from item.writes
    match item:
        case Launch() | HostCall():
            yield from references(item.arguments)
        case LibraryCall():
            if item.workspace:
                yield item.workspace
        case _:
            pass


def references(items: Sequence[Argument]) -> Iterator[str]:
    """The values that arguments refer to, through tuples."""
    for item in items:
        if isinstance(item, Ref):
            yield item.name
        elif isinstance(item, tuple):
            yield from references(item)

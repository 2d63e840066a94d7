"""What a pass is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class Stage(IntEnum):
    """What a pass rewrites. A pipeline's passes come in this order."""

    EXPORTED = 1
    """`ExportedMethod`: torch's exported program of one method."""
    PLACED = 2
    """`PlacedGraph`: operators with devices and copies, free of torch."""
    PROGRAM = 3
    """`Program`: instructions, before planning."""


@dataclass(frozen=True)
class PassResult(Generic[T]):
    """What a pass returns: its subject, rewritten or not, and the truth about whether it changed."""

    subject: T
    changed: bool


@dataclass(frozen=True)
class Pass(ABC, Generic[T]):
    """A named rewrite. The fields of a subclass are the pass's options, set from TOML by name."""

    name: ClassVar[str]
    stage: ClassVar[Stage]

    @abstractmethod
    def run(self, subject: T) -> PassResult[T]:
        """Rewrite the subject and say whether it changed."""

    def prepared(self, subjects: Sequence[T]) -> Pass[T]:
        """This pass, told of all methods of the program before it runs on each; most need not know."""
        return self

    def __str__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{self.name}({options})" if options else self.name


AnyPass = Pass[Any]

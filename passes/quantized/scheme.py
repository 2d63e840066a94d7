"""What ``--quantize`` can ask for, and the sentence that says what became of it.

The sentence is a note of the method, which goes into the artifact; `Selection.parse` reads it back, so that
`verify` can round the eager model's weights in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_GROUPS = (32, 64, 128, 256)
PATTERN = r"^int8-weight-only$|^int4-weight-only(:(32|64|128|256))?$"
"""What the text of a scheme matches, for editors."""
_NOTE = re.compile(
    r"(int[48]-weight-only(?::\d+)?): (\d+) of (\d+) linear layers quantised"
    r"(?:; experts packed: ([^;]*))?(?:; with embeddings in 8 bits: ([^;]*))?"
    r"(?:; in floating point: ([^;]*))?(?:; left: (.*))?"
)
_EXPERTS = re.compile(r"`([^`]*)`( transposed)?")
_KEPT = re.compile(r"(\d+) weights? \((\d+) bytes\) for `([^`]*)`")
_LEFT = re.compile(r"`([^`]*)` \(((?:[^()]|\([^()]*\))*)\)")


@dataclass(frozen=True)
class Scheme:
    """How weights are rounded: bits, and columns that share a scale (0: a whole row)."""

    bits: int
    group: int

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read ``int8-weight-only`` or ``int4-weight-only[:GROUP]``; ValueError says what was expected."""
        name, colon, group = text.partition(":")
        if name == "int8-weight-only" and not colon:
            return cls(8, 0)
        if name == "int4-weight-only" and not colon:
            return cls(4, 128)
        if name == "int4-weight-only" and group in map(str, _GROUPS):
            return cls(4, int(group))
        if name == "int4-weight-only":
            raise ValueError(f"a group has {', '.join(map(str, _GROUPS[:-1]))} or {_GROUPS[-1]} columns")
        if name == "int8-weight-only":
            raise ValueError("int8 has one scale for each row and takes no group")
        raise ValueError("expected `int8-weight-only`, `int4-weight-only` or `int4-weight-only:GROUP`")

    def __str__(self) -> str:
        return "int8-weight-only" if self.bits == 8 else f"int4-weight-only:{self.group}"


@dataclass(frozen=True)
class Selection:
    """How many linear layers of a method were quantised, and why the others were left."""

    scheme: Scheme
    done: int
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    """Module -> reason."""
    embeddings: tuple[str, ...] = ()
    """Modules whose tables are rounded to 8 bits; so are the layers that are tied to them."""
    experts: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Patterns of 3-D weights that were rounded -> whether they are stored with their outputs last."""
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """What reads weights (of two and more dimensions) in floating point -> how many, and their bytes."""

    def __str__(self) -> str:
        told = f"{self.scheme}: {self.done} of {self.done + len(self.left)} linear layers quantised"
        experts = [f"`{name}`" + " transposed" * is_flipped for name, is_flipped in self.experts.items()]
        kept = [
            f"{count} weight{'s' * (count != 1)} ({nbytes} bytes) for `{reader}`"
            for reader, (count, nbytes) in self.kept.items()
        ]
        parts = {
            "experts packed": experts,
            "with embeddings in 8 bits": [f"`{name}`" for name in self.embeddings],
            "in floating point": kept,
            "left": [f"`{name}` ({why})" for name, why in self.left.items()],
        }
        return told + "".join(f"; {what}: {', '.join(words)}" for what, words in parts.items() if words)

    @classmethod
    def parse(cls, note: str) -> Selection | None:
        """The selection that a note tells of; None for other notes."""
        match = _NOTE.fullmatch(note)
        if match is None:
            return None
        experts = {name: bool(flipped) for name, flipped in _EXPERTS.findall(match[4] or "")}
        embeddings = tuple(re.findall(r"`([^`]*)`", match[5] or ""))
        kept = {reader: (int(n), int(nbytes)) for n, nbytes, reader in _KEPT.findall(match[6] or "")}
        left = dict(_LEFT.findall(match[7] or ""))
        return cls(Scheme.parse(match[1]), int(match[2]), left, embeddings, experts, kept)


def shortened(experts: Mapping[str, bool], left: Iterable[str]) -> dict[str, bool]:
    """Names that differ in numbers alone as one pattern, unless that would name a weight that was left."""
    made: dict[str, bool] = {}
    for name, is_flipped in experts.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        same = {f for other, f in experts.items() if fnmatchcase(other, pattern)}
        is_apt = len(same) == 1 and not any(fnmatchcase(other, pattern) for other in left)
        made[pattern if is_apt else name] = is_flipped
    return made

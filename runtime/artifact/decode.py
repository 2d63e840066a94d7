"""From the tables of `devplan.fbs` to the program's instructions; `encode.py` is the mirror image.

Indices and enums are checked here, by `pick`; what the instructions mean is checked by `verify.py`.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..dtypes import DType
from ..errors import ArtifactError
from ..expr import Expr, Size
from ..program import (
    NOWHERE,
    Argument,
    Attributes,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Launch,
    LibraryCall,
    Ref,
    Role,
    SourceLocation,
)

if TYPE_CHECKING:
    from .generated import devplan_generated as fb

T = TypeVar("T")
COPY_KINDS = tuple(CopyKind)
ROLES = tuple(Role)
DEVICE_KINDS = ("cpu", "cuda")
ALIAS_KINDS = ("", "input", "output", "state")
ARENA_KINDS = ("arena", "state")
CODE_FORMS = ("cubin", "ptx")


def pick(items: Sequence[T], index: int, what: str) -> T:
    """``items[index]``; ArtifactError when there is no such item."""
    if not 0 <= index < len(items):
        raise ArtifactError("the manifest is damaged", why=f"it refers to {what} {index} of {len(items)}")
    return items[index]


def required(item: T | None, what: str) -> T:
    """The table; ArtifactError when it is absent."""
    if item is None:
        raise ArtifactError("the manifest is damaged", why=f"{what} is missing")
    return item


def dtype(number: int) -> DType:
    """The element type of an ET12 number."""
    try:
        return DType.from_scalar_type(number)
    except KeyError:
        raise ArtifactError("the manifest is damaged", why=f"{number} is no element type") from None


def device(table: fb.DeviceT | None) -> Device:
    """A device; absent stands for the cpu."""
    if table is None:
        return Device("cpu")
    kind = pick(DEVICE_KINDS, table.kind, "device kind")
    if table.index > (127 if kind == "cuda" else 0):
        raise ArtifactError("the manifest is damaged", why=f"there is no device `{kind}:{table.index}`")
    return Device(kind, table.index)


@dataclass(frozen=True)
class Names:
    """What the indices of one method or region blob stand for."""

    values: Sequence[str]
    kernels: Sequence[str]
    expressions: Sequence[Expr]
    origins: Sequence[SourceLocation]

    def value(self, index: int) -> str:
        """A value's name."""
        return pick(self.values, index, "value")

    def some(self, indices: Sequence[int] | None) -> tuple[str, ...]:
        """Several values' names."""
        return tuple(pick(self.values, index, "value") for index in indices or ())

    def size(self, number: int) -> Size:
        """A size from its one number."""
        return number if number >= 0 else pick(self.expressions, ~number, "expression")

    def sizes(self, numbers: Sequence[int] | None) -> tuple[Size, ...]:
        """Several sizes."""
        return tuple(
            number if number >= 0 else pick(self.expressions, ~number, "expression")
            for number in numbers or ()
        )

    def origin(self, index: int) -> SourceLocation:
        """A source location from its index + 1."""
        return pick(self.origins, index - 1, "source location") if index else NOWHERE


def expressions(texts: Sequence[str] | None) -> list[Expr]:
    """Size expressions; ArtifactError for one that is not integer arithmetic, or could grow without end."""
    found: list[Expr] = []
    for text in texts or ():
        found.append(Expr(text))
        try:
            _ = found[-1].symbols
            _bounded_growth(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise ArtifactError(f"`{text[:80]}` is not a size expression", why=str(error)[:200]) from None
    return found


def _bounded_growth(text: str) -> None:
    """Powers and shifts by literals only, 64 in all: `9 ** 9 ** 9` would keep a reader busy for ever."""
    growth = 1
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
            if not isinstance(node.right, ast.Constant) or not isinstance(node.right.value, int):
                raise ValueError("a power or shift is not by a literal")
            growth = growth * node.right.value if isinstance(node.op, ast.Pow) else growth + node.right.value
            if not 0 <= growth <= 64:
                raise ValueError("it grows too fast")


def origins(tables: Sequence[fb.OriginT] | None) -> list[SourceLocation]:
    """The side table of source locations."""
    return [
        SourceLocation(table.module or "", table.operators or "", table.file or "", table.line)
        for table in tables or ()
    ]


def argument(table: fb.ArgumentT, names: Names) -> Argument:
    """An argument."""
    match pick(
        ("none", "ref", "dtype", "device", "expr", "int", "float", "bool", "str", "tuple"), table.kind, "kind"
    ):
        case "ref":
            return Ref(names.value(table.integer))
        case "dtype":
            return dtype(table.integer)
        case "device":
            return device(table.device)
        case "expr":
            return pick(names.expressions, table.integer, "expression")
        case "int":
            return table.integer
        case "float":
            return float(struct.unpack("<d", struct.pack("<Q", table.numberBits))[0])
        case "bool":
            return bool(table.integer)
        case "str":
            return table.text or ""
        case "tuple":
            return tuple(argument(item, names) for item in table.items or ())
        case _:
            return None


def attributes(tables: Sequence[fb.AttributeT] | None, names: Names) -> Attributes:
    """Named arguments, in order."""
    return tuple(
        (table.name or "", argument(required(table.value, f"attribute `{table.name}`"), names))
        for table in tables or ()
    )


def instruction(table: fb.InstructionT, names: Names) -> Instruction:
    """One instruction; ``bodyType`` was checked to be one of them."""
    region, origin = table.region, names.origin(table.origin)
    body: Any = required(table.body, "an instruction's body")  # of the type that its tag tells
    kind = pick(("", "launch", "library", "host", "copy", "jump"), table.bodyType, "instruction kind")
    match kind:
        case "launch":
            return _launch(body, names, region, origin)
        case "library":
            return _library_call(body, names, region, origin)
        case "host":
            return _host_call(body, names, region, origin)
        case "copy":
            return _copy(body, names, region, origin)
        case _:
            return _jump(body, names, region, origin)


def _launch(body: fb.LaunchT, names: Names, region: int, origin: SourceLocation) -> Launch:
    grid = names.sizes(body.grid)
    if len(grid) != 3:
        raise ArtifactError("the manifest is damaged", why=f"a grid has {len(grid)} dimensions")
    return Launch(
        pick(names.kernels, body.kernel, "kernel"),
        tuple(argument(item, names) for item in body.arguments or ()),
        grid,
        names.some(body.reads),
        names.some(body.writes),
        region,
        origin,
    )


def _library_call(body: fb.LibraryCallT, names: Names, region: int, origin: SourceLocation) -> LibraryCall:
    return LibraryCall(
        body.function or "",
        names.some(body.reads),
        names.some(body.writes),
        attributes(body.attributes, names),
        names.value(body.workspace - 1) if body.workspace else "",
        region,
        origin,
    )


def _host_call(body: fb.HostCallT, names: Names, region: int, origin: SourceLocation) -> HostCall:
    return HostCall(
        body.target or "",
        tuple(argument(item, names) for item in body.arguments or ()),
        names.some(body.reads),
        names.some(body.writes),
        region,
        origin,
    )


def _copy(body: fb.CopyT, names: Names, region: int, origin: SourceLocation) -> Copy:
    kind = pick(COPY_KINDS, body.kind, "copy kind")
    return Copy(
        kind, names.value(body.source), names.value(body.destination), body.reason or "", region, origin
    )


def _jump(body: fb.JumpT, names: Names, region: int, origin: SourceLocation) -> Jump:
    return Jump(body.target, names.value(body.condition - 1) if body.condition else "", region, origin)

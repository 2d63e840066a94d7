"""Collects the storages, values and instructions of one method as it is lowered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...runtime.dtypes import DType
from ...runtime.errors import PassError
from ...runtime.expr import Expr, Size, evaluate
from ...runtime.program import (
    CPU,
    NOWHERE,
    Count,
    Device,
    Instruction,
    LibraryCall,
    Method,
    Port,
    Region,
    Role,
    SourceLocation,
    Storage,
    Symbol,
    Value,
)

HOST_ALIGNMENT = 64
DEVICE_ALIGNMENT = 256


@dataclass
class MethodBuilder:
    """A method under construction; `finish` makes it immutable."""

    name: str
    symbols: tuple[Symbol, ...] = ()
    storages: dict[str, Storage] = field(default_factory=dict[str, Storage])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    regions: list[Region] = field(default_factory=list[Region])
    inputs: list[Port] = field(default_factory=list[Port])
    outputs: list[Port] = field(default_factory=list[Port])
    notes: list[str] = field(default_factory=list[str])
    counts: list[Count] = field(default_factory=list[Count])

    def bound(self, size: Size) -> int:
        """The size at the declared maximum of every symbol."""
        return evaluate(size, {s.name: s.upper for s in self.symbols})

    def add_storage(
        self,
        name: str,
        device: Device,
        nbytes: Size,
        role: Role = Role.TEMPORARY,
        *,
        content: str = "",
        external: bool = False,
        origin: SourceLocation = NOWHERE,
    ) -> Storage:
        """A fresh storage; the name is made unique."""
        storage = Storage(
            name=self._unique(name, self.storages),
            device=device,
            nbytes=nbytes,
            role=role,
            alignment=HOST_ALIGNMENT if device == CPU else DEVICE_ALIGNMENT,
            max_nbytes=-1 if isinstance(nbytes, int) else self.bound(nbytes),
            external=external,
            content=content,
            origin=origin,
        )
        self.storages[storage.name] = storage
        return storage

    def add_value(
        self,
        name: str,
        storage: str,
        dtype: DType,
        shape: tuple[Size, ...],
        strides: tuple[Size, ...],
        offset: Size = 0,
    ) -> Value:
        """A window onto a storage; the name is made unique."""
        value = Value(self._unique(name, self.values), storage, dtype, shape, strides, offset)
        self.values[value.name] = value
        return value

    def _unique(self, wish: str, taken: Mapping[str, object]) -> str:
        name, number = wish, 1
        while name in taken:
            number += 1
            name = f"{wish}.{number}"
        return name

    def update_storage(self, name: str, **changes: object) -> None:
        """Change fields of a storage that was added before."""
        self.storages[name] = replace(self.storages[name], **changes)  # type: ignore[arg-type]

    def storage_of(self, value: str) -> Storage:
        """The storage under a value."""
        return self.storages[self.values[value].storage]

    def finish(self, input_tree: str, output_tree: str) -> Method:
        """The method, without storages and values that nothing refers to."""
        used = {n for i in self.instructions for n in (*i.reads, *i.writes)}
        used |= {i.workspace for i in self.instructions if isinstance(i, LibraryCall)}
        used |= {p.value for p in (*self.inputs, *self.outputs) if p.value} | {c.value for c in self.counts}
        values = tuple(v for v in self.values.values() if v.name in used)
        held = {v.storage for v in values}
        return Method(
            name=self.name,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            storages=tuple(s for s in self.storages.values() if s.name in held),
            values=values,
            instructions=tuple(self.instructions),
            regions=tuple(self.regions),
            symbols=self.symbols,
            input_tree=input_tree,
            output_tree=output_tree,
            notes=tuple(self.notes),
            counts=tuple(self.counts),
        )


def scaled(size: Size, factor: int) -> Size:
    """``size * factor``."""
    return size * factor if isinstance(size, int) else Expr(f"({size}) * {factor}")


def plus(left: Size, right: Size) -> Size:
    """``left + right``."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if left == 0:
        return right
    return left if right == 0 else Expr(f"({left}) + ({right})")


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of all sizes; 1 for none."""
    known, texts = 1, list[str]()
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            texts.append(f"({size})")
    if not texts or known == 0:
        return known
    return Expr(" * ".join(texts if known == 1 else [*texts, str(known)]))


def is_dense(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether the elements fill one run without gaps or overlaps, in any order of dimensions."""
    expected: Size = 1
    pairs = [(st, sh) for st, sh in zip(strides, shape, strict=True) if sh != 1]
    if all(isinstance(n, int) for pair in pairs for n in pair):
        pairs.sort(key=lambda pair: (int(str(pair[0])), int(str(pair[1]))))
    else:
        pairs.reverse()
    for stride, extent in pairs:
        if str(stride) != str(expected) and not _same(stride, expected):
            return False
        expected = product((expected, extent))
    return True


def _same(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for a few values of their symbols (they are polynomials here)."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    names = {n for size in (left, right) if isinstance(size, Expr) for n in size.symbols}
    probes = ({n: base + 7 * i for i, n in enumerate(sorted(names))} for base in (3, 10, 101))
    return all(evaluate(left, probe) == evaluate(right, probe) for probe in probes)


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements."""
    strides: list[Size] = []
    for index in range(len(shape)):
        rest = tuple(extent if isinstance(extent, Expr) else max(extent, 1) for extent in shape[index + 1 :])
        strides.append(product(rest))
    return tuple(strides)


def substitute(expression: str, arguments: Mapping[str, Size]) -> Size:
    """A Python size expression over names, with the names replaced by sizes and folded if all are known."""

    def named(match: re.Match[str]) -> str:
        name = match.group(0)
        return f"({arguments[name]})" if name in arguments else name

    result = Expr(re.sub(r"[A-Za-z_]\w*", named, expression))
    try:
        return result if result.symbols else result.evaluate({})
    except (ValueError, SyntaxError) as error:
        raise PassError(f"launch grid `{expression}` is no size expression", why=str(error)) from error

"""Collects the storages, values and instructions of one method as it is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...runtime.dtypes import DType
from ...runtime.expr import Size, evaluate
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

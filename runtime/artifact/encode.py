"""From the program's dataclasses to the tables of `devplan.fbs`; `decode.py` is the mirror image."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import flatbuffers

from ..dtypes import DType
from ..errors import ArtifactError
from ..expr import Expr, Size
from ..program import (
    NOWHERE,
    Allocation,
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
    Method,
    MethodPlan,
    Ref,
    Role,
    SourceLocation,
)
from .generated import devplan_generated as fb
from .runs import Step

COPY_KINDS = tuple(CopyKind)
ROLES = tuple(Role)
DEVICE_KINDS = ("cpu", "cuda")
ALIAS_KINDS = ("", "input", "output", "state")
ARENA_KINDS = ("arena", "state")
CODE_FORMS = ("cubin", "ptx")


@dataclass
class Scope:
    """How one method or region blob refers to things: by index, collecting what its side tables must hold."""

    value: Callable[[str], int]
    kernel: Callable[[str], int]
    expressions: dict[str, int] = field(default_factory=dict[str, int])
    origins: dict[SourceLocation, int] = field(default_factory=dict[SourceLocation, int])

    def size(self, size: Size) -> int:
        """A size as one number: itself, or ~index of its expression."""
        if isinstance(size, Expr):
            return ~self.expressions.setdefault(size.text, len(self.expressions))
        return size

    def sizes(self, sizes: Sequence[Size]) -> list[int]:
        """Several sizes."""
        return [self.size(size) for size in sizes]

    def origin(self, origin: SourceLocation) -> int:
        """Index + 1 of the source location, 0 for none."""
        return 0 if origin == NOWHERE else 1 + self.origins.setdefault(origin, len(self.origins))

    def origin_tables(self) -> list[fb.OriginT]:
        """The side table of source locations."""
        return [_origin(origin) for origin in self.origins]


def device_table(device: Device) -> fb.DeviceT:
    """A device as a table."""
    table = fb.DeviceT()
    table.kind, table.index = DEVICE_KINDS.index(device.kind), device.index
    return table


def _origin(origin: SourceLocation) -> fb.OriginT:
    table = fb.OriginT()
    table.module, table.operators = origin.module, origin.operator
    table.file, table.line = origin.file, origin.line
    return table


def argument(value: Argument, scope: Scope) -> fb.ArgumentT:
    """An argument; ArtifactError for an integer beyond 64 bits or a type that has no place in a program."""
    table = fb.ArgumentT()
    kinds = fb.ArgumentKind
    match value:
        case None:
            table.kind = kinds.NONE
        case bool():
            table.kind, table.integer = kinds.BOOLEAN, int(value)
        case int():
            if not -(2**63) <= value < 2**63:
                raise ArtifactError(f"argument {value} does not fit in 64 bits")
            table.kind, table.integer = kinds.INTEGER, value
        case float():
            table.kind, table.numberBits = kinds.NUMBER, struct.unpack("<Q", struct.pack("<d", value))[0]
        case str():
            table.kind, table.text = kinds.TEXT, value
        case Ref():
            table.kind, table.integer = kinds.VALUE, scope.value(value.name)
        case DType():
            table.kind, table.integer = kinds.DTYPE, value.scalar_type
        case Device():
            table.kind, table.device = kinds.DEVICE, device_table(value)
        case Expr():
            table.kind, table.integer = kinds.EXPRESSION, ~scope.size(value)
        case tuple():
            table.kind, table.items = kinds.TUPLE, [argument(item, scope) for item in value]
    return table


def attributes(pairs: Attributes, scope: Scope) -> list[fb.AttributeT]:
    """Named arguments, in order."""
    tables: list[fb.AttributeT] = []
    for name, value in pairs:
        table = fb.AttributeT()
        table.name, table.value = name, argument(value, scope)
        tables.append(table)
    return tables


def instruction(item: Instruction, scope: Scope) -> fb.InstructionT:
    """One instruction; values and kernels become indices of the scope."""
    table = fb.InstructionT()
    match item:
        case Launch():
            table.bodyType, table.body = fb.Body.Launch, _launch(item, scope)
        case LibraryCall():
            table.bodyType, table.body = fb.Body.LibraryCall, _library_call(item, scope)
        case HostCall():
            table.bodyType, table.body = fb.Body.HostCall, _host_call(item, scope)
        case Copy():
            table.bodyType, table.body = fb.Body.Copy, _copy(item, scope)
        case Jump():
            table.bodyType, table.body = fb.Body.Jump, _jump(item, scope)
    table.region, table.origin = item.region, scope.origin(item.origin)
    return table


def _launch(item: Launch, scope: Scope) -> fb.LaunchT:
    body = fb.LaunchT()
    body.kernel = scope.kernel(item.kernel)
    body.arguments = [argument(value, scope) for value in item.arguments]
    body.grid = scope.sizes(item.grid)
    body.reads, body.writes = _values(item.reads, scope), _values(item.writes, scope)
    return body


def _library_call(item: LibraryCall, scope: Scope) -> fb.LibraryCallT:
    body = fb.LibraryCallT()
    body.function = item.function
    body.reads, body.writes = _values(item.reads, scope), _values(item.writes, scope)
    body.attributes = attributes(item.attributes, scope)
    body.workspace = scope.value(item.workspace) + 1 if item.workspace else 0
    return body


def _host_call(item: HostCall, scope: Scope) -> fb.HostCallT:
    body = fb.HostCallT()
    body.target = item.target
    body.arguments = [argument(value, scope) for value in item.arguments]
    body.reads, body.writes = _values(item.reads, scope), _values(item.writes, scope)
    return body


def _copy(item: Copy, scope: Scope) -> fb.CopyT:
    body = fb.CopyT()
    body.kind, body.reason = COPY_KINDS.index(item.kind), item.reason
    body.source, body.destination = scope.value(item.source), scope.value(item.destination)
    return body


def _jump(item: Jump, scope: Scope) -> fb.JumpT:
    body = fb.JumpT()
    body.target = item.target
    body.condition = scope.value(item.condition) + 1 if item.condition else 0
    return body


def _values(names: Sequence[str], scope: Scope) -> list[int]:
    return [scope.value(name) for name in names]


def region(
    method: Method, step: Step, values: Mapping[str, int], kernels: Mapping[str, int], plan: MethodPlan | None
) -> fb.RegionT:
    """The blob of one run of device instructions."""
    places = {item.storage: item for item in plan.allocations} if plan else {}
    storages = {value.name: value.storage for value in method.values}
    operands: dict[str, int] = {}
    scope = Scope(lambda name: operands.setdefault(name, len(operands)), kernels.__getitem__)
    assert step.device is not None
    table = fb.RegionT()
    table.method, table.device, table.first = method.name, device_table(step.device), step.first
    table.instructions = [
        instruction(item, scope) for item in method.instructions[step.first : step.first + step.count]
    ]
    table.operands = [_operand(values[name], places.get(storages[name])) for name in operands]
    table.expressions, table.origins = list(scope.expressions), scope.origin_tables()
    return table


def _operand(index: int, place: Allocation | None) -> fb.OperandT:
    table = fb.OperandT()
    table.value = index
    if place is not None:
        table.memoryId, table.offset = place.memory_id, place.offset
    return table


def packed(table: fb.RegionT | fb.ManifestT) -> bytes:
    """The flatbuffer's bytes."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(table.Pack(builder))
    return bytes(builder.Output())

"""Programs and plans as text, for goldens and for readers, and back again (`parse_program`).

One line an item. ``%h`` is a value, ``@s1`` a storage, ``$w`` a constant or state variable, ``!float32`` a
type, ``#cuda:0`` a device, text in backticks a size expression; names that are no identifiers are quoted.
What is the default is left out: contiguous strides, offset 0, 256-byte alignment. Kernels are signatures:
their code and source do not travel, and neither do planning times. In a planned program each storage's line
ends with its place ``in MEMORY_ID BEGIN:END live [FIRST,END)``; a bucket's plan is a ``bucket [SIZES]`` line
with lines of its arenas and places below it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from ..runtime.dtypes import DType
from ..runtime.expr import Expr, Size
from ..runtime.program import (
    Allocation,
    Arena,
    Argument,
    BucketPlan,
    Constant,
    Copy,
    Count,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    Launch,
    LibraryCall,
    LibraryTuning,
    LiveRange,
    Method,
    MethodPlan,
    PlannedProgram,
    Port,
    Program,
    Ref,
    SourceLocation,
    StateVariable,
    Storage,
    Value,
)
from .parse import contiguous_strides, parse_planned, parse_program

__all__ = ["format_method", "format_planned", "format_program", "parse_planned", "parse_program"]

_PLAIN = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)\w+)*\Z", re.ASCII)
_WORDS = {"None", "True", "False", "inf", "nan", "cpu"}


def format_program(program: Program) -> str:
    """The program as text, which `parse_program` reads back (without kernels' code)."""
    return "\n".join(_program(program, {})) + "\n"


def format_planned(planned: PlannedProgram) -> str:
    """The program and its plan as text, which `parse_planned` reads back (without code and times)."""
    head = f"plan {'static' if planned.plan.is_static else 'dynamic'}"
    plans = {plan.method: plan for plan in planned.plan.methods}
    return "\n".join([head, *_program(planned.program, plans)]) + "\n"


def format_method(method: Method, plan: MethodPlan | None = None) -> str:
    """One method as text, with its plan if given."""
    return "\n".join(_method(method, plan)) + "\n"


def _program(program: Program, plans: dict[str, MethodPlan]) -> Iterator[str]:
    yield f"program {' '.join(name(arch) for arch in program.architectures)}".rstrip()
    yield from map(_constant, program.constants)
    yield from map(_state, program.state)
    for kernel in program.kernels:
        yield from _kernel(kernel)
    for tuning in program.tunings:
        yield from _tuning(tuning)
    for method in program.methods:
        yield from _method(method, plans.get(method.name))


def _constant(constant: Constant) -> str:
    window = _window(constant.dtype, constant.shape, constant.strides)
    where = f"on {constant.device} {constant.nbytes} B"
    return f"constant ${name(constant.name)}: {window} {where} {quoted(constant.digest)}"


def _state(state: StateVariable) -> str:
    initial = f" initial {quoted(state.initial)}" if state.initial else ""
    shape = _bracketed(state.shape)
    return f"state ${name(state.name)}: {state.dtype}{shape} on {state.device} {state.nbytes} B{initial}"


def _kernel(kernel: Kernel) -> Iterator[str]:
    parameters = ", ".join(f"{name(p.name)}: {quoted(p.type)}" for p in kernel.parameters)
    constants = ", ".join(f"{name(key)}={literal(value)}" for key, value in kernel.constants)
    tail = f" {{{constants}}}" if constants else ""
    counts = f"warps {kernel.num_warps} stages {kernel.num_stages}"
    yield f"kernel {name(kernel.name)}({parameters}){tail} {counts}"
    for code in kernel.codes:
        where = f"{name(code.architecture)} {name(code.form)} {name(code.symbol)}"
        waits = " waits" if code.waits else ""
        yield f"  code {where} warps {code.num_warps} shared {code.shared_nbytes}{waits}"


def _tuning(tuning: LibraryTuning) -> Iterator[str]:
    versions = "".join(f" {name(library)} {version}" for library, version in tuning.versions)
    yield f"tuning {quoted(tuning.gpu)} {quoted(tuning.architecture)}{versions}"
    for key, number in tuning.algorithms:
        yield f"  algorithm {quoted(key)} = {number}"


def _method(method: Method, plan: MethodPlan | None) -> Iterator[str]:
    inputs = ", ".join(map(_port, method.inputs))
    outputs = ", ".join(map(_port, method.outputs))
    yield f"method {name(method.name)}({inputs}) -> ({outputs})"
    for symbol in method.symbols:
        where = f"{name(symbol.input)}[{symbol.dimension}]"
        named = f" named {quoted(symbol.label)}" if symbol.label else ""
        yield f"  symbol {name(symbol.name)} = {where} in [{symbol.lower},{symbol.upper}]{named}"
    yield from map(_count, method.counts)
    for region in method.regions:
        yield f"  region {region.device} {name(region.backend)} {region.operators} operators"
    if method.input_tree or method.output_tree:
        yield f"  trees {quoted(method.input_tree)} {quoted(method.output_tree)}"
    for note in method.notes:
        yield f"  note {quoted(note)}"
    yield from map(_arena, plan.arenas if plan else ())
    for bucket in plan.buckets if plan else ():
        yield from _bucket(bucket)
    places = {each.storage: each for each in plan.allocations} if plan else {}
    ranges = {each.storage: each for each in plan.live_ranges} if plan else {}
    for storage in method.storages:
        yield _storage(storage, places.get(storage.name), ranges.get(storage.name))
    yield from map(_value, method.values)
    for index, instruction in enumerate(method.instructions):
        yield f"  {index}  {_instruction(instruction)}"


def _arena(arena: Arena) -> str:
    bound = f"(lower bound {arena.lower_bound}, sum {arena.sum_nbytes})"
    head = f"  {name(arena.kind)} {arena.memory_id} {arena.device} {arena.nbytes} B"
    return f"{head} {bound} by {quoted(arena.algorithm)}"


def _bucket(bucket: BucketPlan) -> Iterator[str]:
    yield f"  bucket {_bracketed(bucket.sizes)}"
    for arena in bucket.arenas:
        yield f"  {_arena(arena)}"
    for place in bucket.allocations:
        yield f"    place @{name(place.storage)} {_place(place)}"


def _place(place: Allocation) -> str:
    return f"in {place.memory_id} {place.offset}:{place.offset + place.nbytes}"


def _storage(storage: Storage, place: Allocation | None, live: LiveRange | None) -> str:
    parts = [f"  @{name(storage.name)} {storage.role.name} {storage.device} {literal(storage.nbytes)} B"]
    if storage.max_nbytes >= 0:
        parts.append(f"max {storage.max_nbytes}")
    if storage.alignment != 256:
        parts.append(f"align {storage.alignment}")
    if storage.external:
        parts.append("external")
    if storage.content:
        parts.append(f"content ${name(storage.content)}")
    parts += _origin(storage.origin)
    if place:
        parts.append(_place(place))
    if live:
        parts.append(f"live [{live.begin},{live.end})")
    return " ".join(parts)


def _value(value: Value) -> str:
    offset = f" + {literal(value.offset)}" if value.offset != 0 else ""
    window = _window(value.dtype, value.shape, value.strides)
    return f"  %{name(value.name)}: {window} at @{name(value.storage)}{offset}"


def _window(dtype: DType, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> str:
    text = f"{dtype}{_bracketed(shape)}"
    return text if strides == contiguous_strides(shape) else f"{text} strides{_bracketed(strides)}"


def _instruction(instruction: Instruction) -> str:
    parts = [_body(instruction)]
    if instruction.region >= 0:
        parts.append(f"region {instruction.region}")
    return " ".join(parts + _origin(instruction.origin))


def _body(instruction: Instruction) -> str:
    match instruction:
        case Launch():
            head = f"launch {name(instruction.kernel)}({_arguments(instruction.arguments)})"
            grid = _arguments(instruction.grid)
            return (
                f"{head} grid({grid}) reads({_names(instruction.reads)}) writes({_names(instruction.writes)})"
            )
        case LibraryCall():
            ends = f"({_names(instruction.reads)}) -> ({_names(instruction.writes)})"
            head = f"call {name(instruction.function)}{ends}"
            attributes = ", ".join(f"{name(key)}={literal(value)}" for key, value in instruction.attributes)
            tail = f" {{{attributes}}}" if attributes else ""
            return (
                head + tail + (f" workspace %{name(instruction.workspace)}" if instruction.workspace else "")
            )
        case HostCall():
            head = f"host {name(instruction.target)}({_arguments(instruction.arguments)})"
            return f"{head} reads({_names(instruction.reads)}) writes({_names(instruction.writes)})"
        case Copy():
            reason = f" reason {quoted(instruction.reason)}" if instruction.reason else ""
            ends = f"%{name(instruction.source)} -> %{name(instruction.destination)}"
            return f"copy {instruction.kind.value} {ends}{reason}"
        case Jump():
            unless = f" unless %{name(instruction.condition)}" if instruction.condition else ""
            return f"jump {instruction.target}{unless}"


def _port(port: Port) -> str:
    text = f"{name(port.name)} = " + (f"%{name(port.value)}" if port.value else literal(port.literal))
    text += f" aliases {port.aliases[0]} {name(port.aliases[1])}" if port.aliases else ""
    return text + (f" counts {name(port.count)} along {port.axis}" if port.count else "")


def _count(count: Count) -> str:
    bounds = f"[{count.lower},{count.upper}]" + (" difference" if count.is_difference else "")
    return " ".join(
        [f"  count {name(count.name)} = %{name(count.value)} in {bounds}", *_origin(count.origin)]
    )


def _origin(origin: SourceLocation) -> list[str]:
    parts = [f"from {quoted(origin.operator)}"] if origin.operator else []
    if origin.module:
        parts.append(f"module {quoted(origin.module)}")
    if origin.file or origin.line:
        parts.append(f"line {quoted(origin.file)}:{origin.line}")
    return parts


def _bracketed(sizes: tuple[Size, ...]) -> str:
    return f"[{','.join(map(literal, sizes))}]"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"%{name(each)}" for each in names)


def _arguments(arguments: Iterable[Argument]) -> str:
    return ", ".join(map(literal, arguments))


def name(text: str) -> str:
    """A name as it is printed: bare where it is an identifier (dots and ``::`` allowed), else quoted."""
    return text if _PLAIN.match(text) and text not in _WORDS else quoted(text)


def quoted(text: str) -> str:
    """A string as it is printed."""
    return json.dumps(text, ensure_ascii=False)


def literal(argument: Argument) -> str:
    """An argument as it is printed; `parse` reads the same back."""
    match argument:
        case Ref(name=value):
            return f"%{name(value)}"
        case DType():
            return f"!{argument}"
        case Device():
            return f"#{argument}"
        case Expr():
            return f"`{argument}`"
        case str():
            return quoted(argument)
        case tuple():
            return f"({', '.join(map(literal, argument))}{',' if len(argument) == 1 else ''})"
        case _:
            return repr(argument)

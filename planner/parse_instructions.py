"""Instructions in their textual form, and where they come from."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.program import (
    NOWHERE,
    Argument,
    Copy,
    CopyKind,
    HostCall,
    Instruction,
    Jump,
    Launch,
    LibraryCall,
    SourceLocation,
)
from .parse_line import Line


def instruction(line: Line) -> Instruction:
    """One numbered instruction; UsageError for what is none."""
    line.integer()
    kind = line.take("word")
    if kind not in _BODIES:
        raise line.error(f"unknown instruction `{kind}`")
    return _BODIES[kind](line)


def _end(line: Line) -> tuple[int, SourceLocation]:
    region = line.integer() if line.skip("region") else -1
    return region, origin(line)


def origin(line: Line) -> SourceLocation:
    """Where in the model something comes from, as far as the line says it."""
    operator = line.string() if line.skip("from") else ""
    module = line.string() if line.skip("module") else ""
    file, number = "", 0
    if line.skip("line"):
        file = line.string()
        line.expect(":")
        number = line.integer()
    found = SourceLocation(module, operator, file, number)
    return NOWHERE if found == NOWHERE else found


def _names(line: Line, word: str = "") -> tuple[str, ...]:
    if word:
        line.expect(word)
    return line.items("(", ")", lambda: line.name("%"))


def _launch(line: Line) -> Launch:
    kernel = line.name()
    arguments = line.items("(", ")", line.argument)
    line.expect("grid")
    x, y, z = line.items("(", ")", line.size)
    return Launch(kernel, arguments, (x, y, z), _names(line, "reads"), _names(line, "writes"), *_end(line))


def _call(line: Line) -> LibraryCall:
    function, reads = line.name(), _names(line)
    writes = _names(line, "->")
    attributes = line.items("{", "}", lambda: attribute(line)) if line.peek == "{" else ()
    workspace = line.name("%") if line.skip("workspace") else ""
    return LibraryCall(function, reads, writes, attributes, workspace, *_end(line))


def _host(line: Line) -> HostCall:
    target = line.name()
    arguments = line.items("(", ")", line.argument)
    return HostCall(target, arguments, _names(line, "reads"), _names(line, "writes"), *_end(line))


def _copy(line: Line) -> Copy:
    kind = CopyKind(line.take("word"))
    source = line.name("%")
    line.expect("->")
    destination = line.name("%")
    reason = line.string() if line.skip("reason") else ""
    return Copy(kind, source, destination, reason, *_end(line))


def _jump(line: Line) -> Jump:
    target = line.integer()
    return Jump(target, line.name("%") if line.skip("unless") else "", *_end(line))


def attribute(line: Line) -> tuple[str, Argument]:
    """``name = argument``."""
    name = line.name()
    line.expect("=")
    return name, line.argument()


_BODIES: dict[str, Callable[[Line], Instruction]] = {
    "launch": _launch,
    "call": _call,
    "host": _host,
    "copy": _copy,
    "jump": _jump,
}

"""Read the textual form of programs and plans (see `text`). Errors name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..runtime.dtypes import DType
from ..runtime.errors import UsageError
from ..runtime.expr import Expr, Size
from ..runtime.program import (
    NOWHERE,
    Allocation,
    Arena,
    Argument,
    BucketPlan,
    Constant,
    Copy,
    CopyKind,
    Count,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
    LibraryCall,
    LibraryTuning,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Ref,
    Region,
    Role,
    SourceLocation,
    StateVariable,
    Storage,
    Symbol,
    Value,
)

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:\\.|[^"\\])*")
  | (?P<expr>`[^`]*`)
  | (?P<device>\#?(?:cpu|cuda:\d+)(?![\w.:]))
  | (?P<number>-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf(?![\w.:]))|nan(?![\w.:]))
  | (?P<word>[A-Za-z_]\w*(?:(?:::|\.)\w+)*)
  | (?P<sign>->|[%@$!(){}\[\],=:+])
    )""",
    re.ASCII | re.VERBOSE,
)
_T = TypeVar("_T")


def parse_program(text: str) -> Program:
    """Read what `format_program` wrote; UsageError names the line that cannot be read."""
    return _Reader(text).read().program


def parse_planned(text: str) -> PlannedProgram:
    """Read what `format_planned` wrote; UsageError names the line that cannot be read."""
    return _Reader(text).read()


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """Row-major strides of a static shape in elements; None when a dimension is dynamic."""
    strides: list[Size] = []
    step = 1
    for extent in reversed(shape):
        if not isinstance(extent, int):
            return None
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class _Line:
    """The tokens of one line, taken from the left."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number
        self.tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise self.error(f"cannot read `{text[at:].strip()}`")
            self.tokens.append((match.lastgroup, match.group(match.lastgroup)))
            at = match.end()
        self.at = 0

    def error(self, why: str) -> UsageError:
        return UsageError(f"line {self.number} of the program's text", why=f"{why} in `{self.text.strip()}`")

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.tokens)

    @property
    def peek(self) -> str:
        return "" if self.is_done else self.tokens[self.at][1]

    def take(self, kind: str = "") -> str:
        if self.is_done or (kind and self.tokens[self.at][0] != kind):
            raise self.error(f"expected {kind or 'more'}, found `{self.peek or 'the end'}`")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def skip(self, text: str) -> bool:
        """Take the token if it is this one (a string never is)."""
        if self.peek == text and self.tokens[self.at][0] != "string":
            self.at += 1
            return True
        return False

    def expect(self, *texts: str) -> None:
        for text in texts:
            if not self.skip(text):
                raise self.error(f"expected `{text}`, found `{self.peek or 'the end'}`")

    def number_(self) -> int:
        return int(self.take("number"))

    def string(self) -> str:
        return str(json.loads(self.take("string")))

    def name(self, sigil: str = "") -> str:
        if sigil:
            self.expect(sigil)
        return self.string() if self.peek.startswith('"') else self.take("word")

    def device(self) -> Device:
        return Device.parse(self.take("device").lstrip("#"))

    def dtype(self) -> DType:
        word = self.take("word")
        try:
            return DType.from_name(word)
        except KeyError:
            raise self.error(f"unknown type `{word}`") from None

    def size(self) -> Size:
        if self.peek.startswith("`"):
            return Expr(self.take("expr")[1:-1])
        return self.number_()

    def items(self, opening: str, closing: str, item: Callable[[], _T]) -> tuple[_T, ...]:
        """``( a, b )``: zero or more items between brackets, commas between them."""
        self.expect(opening)
        found: list[_T] = []
        while not self.skip(closing):
            if found:
                self.expect(",")
                if self.skip(closing):
                    break
            found.append(item())
        return tuple(found)

    def argument(self) -> Argument:
        kind, token = self.tokens[self.at] if not self.is_done else ("", "")
        if token == "%":
            return Ref(self.name("%"))
        if token == "(":
            return self.items("(", ")", self.argument)
        if self.skip("!"):
            return self.dtype()
        if kind == "device":
            return self.device()
        if kind == "string":
            return self.string()
        if kind == "expr":
            return self.size()
        if kind == "number":
            text = self.take()
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        words: dict[str, Argument] = {"None": None, "True": True, "False": False}
        if token not in words:
            raise self.error(f"expected an argument, found `{token or 'the end'}`")
        self.take()
        return words[token]


class _Reader:
    """Collects lines into a program, its plan on the side."""

    def __init__(self, text: str) -> None:
        numbered = enumerate(text.split("\n"), 1)
        self.lines = [_Line(line, number) for number, line in numbered if line.strip()]
        self.at = 0

    def read(self) -> PlannedProgram:
        is_static = True
        if self._here("plan"):
            line = self._take()
            line.expect("plan")
            is_static = line.take("word") == "static"
        line = self._take()
        line.expect("program")
        architectures = tuple(self._rest(line))
        constants = tuple(_constant(line) for line in self._while("constant"))
        state = tuple(_state(line) for line in self._while("state"))
        kernels = tuple(self._kernel(line) for line in self._while("kernel"))
        tunings = tuple(self._tuning(line) for line in self._while("tuning"))
        methods = [self._method(line) for line in self._while("method")]
        if self.at < len(self.lines):
            raise self.lines[self.at].error("expected a method")
        made = tuple(method for method, _ in methods)
        program = Program(made, constants, state, kernels, architectures, tunings)
        return PlannedProgram(program, Plan(tuple(plan for _, plan in methods), is_static))

    def _here(self, *words: str) -> bool:
        return self.at < len(self.lines) and self.lines[self.at].peek in words

    def _take(self) -> _Line:
        if self.at >= len(self.lines):
            raise UsageError("the program's text ends too early", why="expected another line")
        self.at += 1
        return self.lines[self.at - 1]

    def _while(self, *words: str) -> Iterator[_Line]:
        while self._here(*words):
            yield self._take()

    @staticmethod
    def _rest(line: _Line) -> Iterator[str]:
        while not line.is_done:
            yield line.name()

    def _kernel(self, line: _Line) -> Kernel:
        line.expect("kernel")
        name = line.name()
        parameters = line.items("(", ")", lambda: _parameter(line))
        constants = line.items("{", "}", lambda: _constant_argument(line)) if line.peek == "{" else ()
        line.expect("warps")
        warps = line.number_()
        line.expect("stages")
        stages = line.number_()
        codes = tuple(_code(each) for each in self._while("code"))
        return Kernel(name, parameters, codes, "", constants, warps, stages)

    def _tuning(self, line: _Line) -> LibraryTuning:
        line.expect("tuning")
        gpu, architecture = line.string(), line.string()
        versions: list[tuple[str, int]] = []
        while not line.is_done:
            versions.append((line.name(), line.number_()))
        algorithms = tuple(_algorithm(each) for each in self._while("algorithm"))
        return LibraryTuning(gpu, architecture, tuple(versions), algorithms)

    def _method(self, line: _Line) -> tuple[Method, MethodPlan]:
        line.expect("method")
        name = line.name()
        inputs = line.items("(", ")", lambda: _port(line))
        line.expect("->")
        outputs = line.items("(", ")", lambda: _port(line))
        symbols = tuple(_symbol(each) for each in self._while("symbol"))
        counts = tuple(_count(each) for each in self._while("count"))
        regions = tuple(_region(each) for each in self._while("region"))
        trees = [(each.take(), each.string(), each.string()) for each in self._while("trees")] or [
            ("", "", "")
        ]
        notes = tuple((each.take(), each.string())[1] for each in self._while("note"))
        arenas = tuple(_arena(each) for each in self._while("arena", "state"))
        buckets = tuple(self._bucket(each) for each in self._while("bucket"))
        placed = [_storage(each) for each in self._while("@")]
        values = tuple(_value(each) for each in self._while("%"))
        instructions = tuple(_instruction(each) for each in self._numbered())
        storages = tuple(storage for storage, _, _ in placed)
        method = Method(
            name, inputs, outputs, storages, values, instructions, regions, symbols, *trees[0][1:], notes,
            counts,
        )  # fmt: skip
        allocations = tuple(place for _, place, _ in placed if place)
        ranges = tuple(live for _, _, live in placed if live)
        return method, MethodPlan(name, arenas, allocations, ranges, buckets)

    def _bucket(self, line: _Line) -> BucketPlan:
        line.expect("bucket")
        sizes = line.items("[", "]", line.number_)
        arenas = tuple(_arena(each) for each in self._while("arena"))
        return BucketPlan(sizes, arenas, tuple(_bucket_place(each) for each in self._while("place")))

    def _numbered(self) -> Iterator[_Line]:
        while self.at < len(self.lines) and self.lines[self.at].tokens[0][0] == "number":
            yield self._take()


def _algorithm(line: _Line) -> tuple[str, int]:
    line.expect("algorithm")
    key = line.string()
    line.expect("=")
    return key, line.number_()


def _constant(line: _Line) -> Constant:
    line.expect("constant")
    name = line.name("$")
    line.expect(":")
    dtype, shape, strides = _window(line)
    line.expect("on")
    device, nbytes = line.device(), line.number_()
    line.expect("B")
    integers = [tuple(int(str(each)) for each in sizes) for sizes in (shape, strides)]
    return Constant(name, line.string(), nbytes, dtype, integers[0], integers[1], device)


def _state(line: _Line) -> StateVariable:
    line.expect("state")
    name = line.name("$")
    line.expect(":")
    dtype = line.dtype()
    shape = line.items("[", "]", line.number_)
    line.expect("on")
    device, nbytes = line.device(), line.number_()
    line.expect("B")
    return StateVariable(name, dtype, shape, device, nbytes, line.string() if line.skip("initial") else "")


def _parameter(line: _Line) -> KernelParameter:
    name = line.name()
    line.expect(":")
    return KernelParameter(name, line.string())


def _attribute(line: _Line) -> tuple[str, Argument]:
    name = line.name()
    line.expect("=")
    return name, line.argument()


def _constant_argument(line: _Line) -> tuple[str, int | float | bool | str | None]:
    name, value = _attribute(line)
    if value is not None and not isinstance(value, (int, float, bool, str)):
        raise line.error(f"`{name}` is no plain literal")
    return name, value


def _code(line: _Line) -> KernelCode:
    line.expect("code")
    architecture, form, symbol = line.name(), line.name(), line.name()
    line.expect("warps")
    warps = line.number_()
    line.expect("shared")
    shared = line.number_()
    return KernelCode(architecture, form, symbol, b"", warps, shared, line.skip("waits"))


def _port(line: _Line) -> Port:
    name = line.name()
    line.expect("=")
    value, literal = (line.name("%"), None) if line.peek == "%" else ("", line.argument())
    aliases = (line.take("word"), line.name()) if line.skip("aliases") else None
    count, axis = "", 0
    if line.skip("counts"):
        count = line.name()
        line.expect("along")
        axis = line.number_()
    return Port(name, value, aliases, literal, count, axis)


def _count(line: _Line) -> Count:
    line.expect("count")
    name = line.name()
    line.expect("=")
    value = line.name("%")
    line.expect("in")
    lower, upper = line.items("[", "]", line.number_)
    is_difference = line.skip("difference")
    return Count(name, value, lower, upper, _origin(line), is_difference)


def _symbol(line: _Line) -> Symbol:
    line.expect("symbol")
    name = line.name()
    line.expect("=")
    source = line.name()
    (dimension,) = line.items("[", "]", line.number_)
    line.expect("in")
    lower, upper = line.items("[", "]", line.number_)
    label = line.string() if line.skip("named") else ""
    return Symbol(name, lower, upper, source, dimension, label)


def _region(line: _Line) -> Region:
    line.expect("region")
    return Region(line.device(), line.name(), line.number_())


def _arena(line: _Line) -> Arena:
    kind = line.take("word")
    memory_id, device, nbytes = line.number_(), line.device(), line.number_()
    line.expect("B", "(", "lower", "bound")
    bound = line.number_()
    line.expect(",", "sum")
    total = line.number_()
    line.expect(")", "by")
    return Arena(memory_id, device, nbytes, bound, total, line.string(), kind=kind)


def _storage(line: _Line) -> tuple[Storage, Allocation | None, LiveRange | None]:
    name = line.name("@")
    role = _role(line)
    device, nbytes = line.device(), line.size()
    line.expect("B")
    bound = line.number_() if line.skip("max") else -1
    alignment = line.number_() if line.skip("align") else 256
    external = line.skip("external")
    content = line.name("$") if line.skip("content") else ""
    storage = Storage(name, device, nbytes, role, alignment, bound, external, content, _origin(line))
    place = live = None
    if line.peek == "in":
        place = _place(line, name)
    if line.skip("live"):
        line.expect("[")
        first = line.number_()
        line.expect(",")
        live = LiveRange(name, first, line.number_())
        line.expect(")")
    return storage, place, live


def _place(line: _Line, storage: str) -> Allocation:
    line.expect("in")
    memory_id, begin = line.number_(), line.number_()
    line.expect(":")
    return Allocation(storage, memory_id, begin, line.number_() - begin)


def _bucket_place(line: _Line) -> Allocation:
    line.expect("place")
    return _place(line, line.name("@"))


def _role(line: _Line) -> Role:
    word = line.take("word")
    if word not in Role.__members__:
        raise line.error(f"unknown role `{word}`")
    return Role[word]


def _window(line: _Line) -> tuple[DType, tuple[Size, ...], tuple[Size, ...]]:
    dtype = line.dtype()
    shape = line.items("[", "]", line.size)
    if line.skip("strides"):
        return dtype, shape, line.items("[", "]", line.size)
    strides = contiguous_strides(shape)
    if strides is None:
        raise line.error("a dynamic shape needs strides")
    return dtype, shape, strides


def _value(line: _Line) -> Value:
    name = line.name("%")
    line.expect(":")
    dtype, shape, strides = _window(line)
    line.expect("at")
    return Value(name, line.name("@"), dtype, shape, strides, line.size() if line.skip("+") else 0)


def _instruction(line: _Line) -> Instruction:
    line.number_()
    kind = line.take("word")
    if kind not in _BODIES:
        raise line.error(f"unknown instruction `{kind}`")
    return _BODIES[kind](line)


def _end(line: _Line) -> tuple[int, SourceLocation]:
    region = line.number_() if line.skip("region") else -1
    return region, _origin(line)


def _origin(line: _Line) -> SourceLocation:
    operator = line.string() if line.skip("from") else ""
    module = line.string() if line.skip("module") else ""
    file, number = "", 0
    if line.skip("line"):
        file = line.string()
        line.expect(":")
        number = line.number_()
    found = SourceLocation(module, operator, file, number)
    return NOWHERE if found == NOWHERE else found


def _names(line: _Line, word: str = "") -> tuple[str, ...]:
    if word:
        line.expect(word)
    return line.items("(", ")", lambda: line.name("%"))


def _launch(line: _Line) -> Launch:
    kernel = line.name()
    arguments = line.items("(", ")", line.argument)
    line.expect("grid")
    x, y, z = line.items("(", ")", line.size)
    return Launch(kernel, arguments, (x, y, z), _names(line, "reads"), _names(line, "writes"), *_end(line))


def _call(line: _Line) -> LibraryCall:
    function, reads = line.name(), _names(line)
    writes = _names(line, "->")
    attributes = line.items("{", "}", lambda: _attribute(line)) if line.peek == "{" else ()
    workspace = line.name("%") if line.skip("workspace") else ""
    return LibraryCall(function, reads, writes, attributes, workspace, *_end(line))


def _host(line: _Line) -> HostCall:
    target = line.name()
    arguments = line.items("(", ")", line.argument)
    return HostCall(target, arguments, _names(line, "reads"), _names(line, "writes"), *_end(line))


def _copy(line: _Line) -> Copy:
    kind = CopyKind(line.take("word"))
    source = line.name("%")
    line.expect("->")
    destination = line.name("%")
    reason = line.string() if line.skip("reason") else ""
    return Copy(kind, source, destination, reason, *_end(line))


def _jump(line: _Line) -> Jump:
    target = line.number_()
    return Jump(target, line.name("%") if line.skip("unless") else "", *_end(line))


_BODIES: dict[str, Callable[[_Line], Instruction]] = {
    "launch": _launch,
    "call": _call,
    "host": _host,
    "copy": _copy,
    "jump": _jump,
}

"""Read the textual form of programs and plans (see `text`). Errors name the line."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.dtypes import DType
from ..runtime.errors import UsageError
from ..runtime.expr import Size
from ..runtime.program import (
    Allocation,
    Arena,
    BucketPlan,
    Constant,
    Count,
    Kernel,
    KernelCode,
    KernelParameter,
    LibraryTuning,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Region,
    Role,
    StateVariable,
    Storage,
    Symbol,
    Value,
)
from .parse_instructions import attribute, instruction, origin
from .parse_line import Line


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


class _Reader:
    """Collects lines into a program, its plan on the side."""

    def __init__(self, text: str) -> None:
        numbered = enumerate(text.split("\n"), 1)
        self.lines = [Line(line, number) for number, line in numbered if line.strip()]
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

    def _take(self) -> Line:
        if self.at >= len(self.lines):
            raise UsageError("the program's text ends too early", why="expected another line")
        self.at += 1
        return self.lines[self.at - 1]

    def _while(self, *words: str) -> Iterator[Line]:
        while self._here(*words):
            yield self._take()

    @staticmethod
    def _rest(line: Line) -> Iterator[str]:
        while not line.is_done:
            yield line.name()

    def _kernel(self, line: Line) -> Kernel:
        line.expect("kernel")
        name = line.name()
        parameters = line.items("(", ")", lambda: _parameter(line))
        constants = line.items("{", "}", lambda: _constant_argument(line)) if line.peek == "{" else ()
        line.expect("warps")
        warps = line.integer()
        line.expect("stages")
        stages = line.integer()
        codes = tuple(_code(each) for each in self._while("code"))
        return Kernel(name, parameters, codes, "", constants, warps, stages)

    def _tuning(self, line: Line) -> LibraryTuning:
        line.expect("tuning")
        gpu, architecture = line.string(), line.string()
        versions: list[tuple[str, int]] = []
        while not line.is_done:
            versions.append((line.name(), line.integer()))
        algorithms = tuple(_algorithm(each) for each in self._while("algorithm"))
        return LibraryTuning(gpu, architecture, tuple(versions), algorithms)

    def _method(self, line: Line) -> tuple[Method, MethodPlan]:
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
        instructions = tuple(instruction(each) for each in self._numbered())
        storages = tuple(storage for storage, _, _ in placed)
        method = Method(
            name, inputs, outputs, storages, values, instructions, regions, symbols, *trees[0][1:], notes,
            counts,
        )  # fmt: skip
        allocations = tuple(place for _, place, _ in placed if place)
        ranges = tuple(live for _, _, live in placed if live)
        return method, MethodPlan(name, arenas, allocations, ranges, buckets)

    def _bucket(self, line: Line) -> BucketPlan:
        line.expect("bucket")
        sizes = line.items("[", "]", line.integer)
        arenas = tuple(_arena(each) for each in self._while("arena"))
        return BucketPlan(sizes, arenas, tuple(_bucket_place(each) for each in self._while("place")))

    def _numbered(self) -> Iterator[Line]:
        while self.at < len(self.lines) and self.lines[self.at].tokens[0][0] == "number":
            yield self._take()


def _algorithm(line: Line) -> tuple[str, int]:
    line.expect("algorithm")
    key = line.string()
    line.expect("=")
    return key, line.integer()


def _constant(line: Line) -> Constant:
    line.expect("constant")
    name = line.name("$")
    line.expect(":")
    dtype, shape, strides = _window(line)
    line.expect("on")
    device, nbytes = line.device(), line.integer()
    line.expect("B")
    integers = [tuple(int(str(each)) for each in sizes) for sizes in (shape, strides)]
    return Constant(name, line.string(), nbytes, dtype, integers[0], integers[1], device)


def _state(line: Line) -> StateVariable:
    line.expect("state")
    name = line.name("$")
    line.expect(":")
    dtype = line.dtype()
    shape = line.items("[", "]", line.integer)
    line.expect("on")
    device, nbytes = line.device(), line.integer()
    line.expect("B")
    return StateVariable(name, dtype, shape, device, nbytes, line.string() if line.skip("initial") else "")


def _parameter(line: Line) -> KernelParameter:
    name = line.name()
    line.expect(":")
    return KernelParameter(name, line.string())


def _constant_argument(line: Line) -> tuple[str, int | float | bool | str | None]:
    name, value = attribute(line)
    if value is not None and not isinstance(value, (int, float, bool, str)):
        raise line.error(f"`{name}` is no plain literal")
    return name, value


def _code(line: Line) -> KernelCode:
    line.expect("code")
    architecture, form, symbol = line.name(), line.name(), line.name()
    line.expect("warps")
    warps = line.integer()
    line.expect("shared")
    shared = line.integer()
    return KernelCode(architecture, form, symbol, b"", warps, shared, line.skip("waits"))


def _port(line: Line) -> Port:
    name = line.name()
    line.expect("=")
    value, literal = (line.name("%"), None) if line.peek == "%" else ("", line.argument())
    aliases = (line.take("word"), line.name()) if line.skip("aliases") else None
    count, axis = "", 0
    if line.skip("counts"):
        count = line.name()
        line.expect("along")
        axis = line.integer()
    return Port(name, value, aliases, literal, count, axis)


def _count(line: Line) -> Count:
    line.expect("count")
    name = line.name()
    line.expect("=")
    value = line.name("%")
    line.expect("in")
    lower, upper = line.items("[", "]", line.integer)
    is_difference = line.skip("difference")
    return Count(name, value, lower, upper, origin(line), is_difference)


def _symbol(line: Line) -> Symbol:
    line.expect("symbol")
    name = line.name()
    line.expect("=")
    source = line.name()
    (dimension,) = line.items("[", "]", line.integer)
    line.expect("in")
    lower, upper = line.items("[", "]", line.integer)
    label = line.string() if line.skip("named") else ""
    return Symbol(name, lower, upper, source, dimension, label)


def _region(line: Line) -> Region:
    line.expect("region")
    return Region(line.device(), line.name(), line.integer())


def _arena(line: Line) -> Arena:
    kind = line.take("word")
    memory_id, device, nbytes = line.integer(), line.device(), line.integer()
    line.expect("B", "(", "lower", "bound")
    bound = line.integer()
    line.expect(",", "sum")
    total = line.integer()
    line.expect(")", "by")
    return Arena(memory_id, device, nbytes, bound, total, line.string(), kind=kind)


def _storage(line: Line) -> tuple[Storage, Allocation | None, LiveRange | None]:
    name = line.name("@")
    role = _role(line)
    device, nbytes = line.device(), line.size()
    line.expect("B")
    bound = line.integer() if line.skip("max") else -1
    alignment = line.integer() if line.skip("align") else 256
    external = line.skip("external")
    content = line.name("$") if line.skip("content") else ""
    storage = Storage(
        name=name,
        device=device,
        nbytes=nbytes,
        role=role,
        alignment=alignment,
        max_nbytes=bound,
        external=external,
        content=content,
        origin=origin(line),
    )
    place = live = None
    if line.peek == "in":
        place = _place(line, name)
    if line.skip("live"):
        line.expect("[")
        first = line.integer()
        line.expect(",")
        live = LiveRange(name, first, line.integer())
        line.expect(")")
    return storage, place, live


def _place(line: Line, storage: str) -> Allocation:
    line.expect("in")
    memory_id, begin = line.integer(), line.integer()
    line.expect(":")
    return Allocation(storage, memory_id, begin, line.integer() - begin)


def _bucket_place(line: Line) -> Allocation:
    line.expect("place")
    return _place(line, line.name("@"))


def _role(line: Line) -> Role:
    word = line.take("word")
    if word not in Role.__members__:
        raise line.error(f"unknown role `{word}`")
    return Role[word]


def _window(line: Line) -> tuple[DType, tuple[Size, ...], tuple[Size, ...]]:
    dtype = line.dtype()
    shape = line.items("[", "]", line.size)
    if line.skip("strides"):
        return dtype, shape, line.items("[", "]", line.size)
    strides = contiguous_strides(shape)
    if strides is None:
        raise line.error("a dynamic shape needs strides")
    return dtype, shape, strides


def _value(line: Line) -> Value:
    name = line.name("%")
    line.expect(":")
    dtype, shape, strides = _window(line)
    line.expect("at")
    return Value(name, line.name("@"), dtype, shape, strides, line.size() if line.skip("+") else 0)

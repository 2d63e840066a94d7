"""What must hold of a planned program in a file, beyond the bytes: names, references, sizes, devices.

Both the writer and the reader check it, so that a file is never written that would be refused. The rules of
the plan itself are in `verify_plan.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..dtypes import DType
from ..errors import ArtifactError
from ..expr import Expr, Size, evaluate
from ..library import FUNCTIONS
from ..program import (
    CPU,
    Copy,
    CopyKind,
    Count,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    Launch,
    LibraryCall,
    Method,
    PlannedProgram,
    Port,
    Role,
    Storage,
    Value,
)
from .operands import operands, references
from .verify_contents import span, verify_contents, verify_kernel, verify_tunings, verify_unique
from .verify_plan import verify_plan


def verify(planned: PlannedProgram) -> None:
    """Check everything; ArtifactError names the first broken invariant."""
    program = planned.program
    verify_unique("method", (method.name for method in program.methods))
    verify_unique("kernel", (kernel.name for kernel in program.kernels))
    verify_unique("constant", (constant.name for constant in program.constants))
    verify_unique("state", (state.name for state in program.state))
    verify_contents(program)
    verify_tunings(program)
    for kernel in program.kernels:
        verify_kernel(kernel, program.architectures)
    kernels = {kernel.name: kernel for kernel in program.kernels}
    contents = {constant.name: constant.nbytes for constant in program.constants}
    states = {state.name: state.nbytes for state in program.state}
    for method in program.methods:
        MethodChecker(method, kernels, contents, states).run()
    verify_plan(planned)


class MethodChecker:
    """One method: every name resolves, every window is inside its storage, every operand on its device."""

    def __init__(
        self,
        method: Method,
        kernels: Mapping[str, Kernel],
        constants: Mapping[str, int],
        states: Mapping[str, int],
    ) -> None:
        self.method, self.kernels, self.constants, self.states = method, kernels, constants, states
        self.storages = {storage.name: storage for storage in method.storages}
        self.values = {value.name: value for value in method.values}
        self.bounds = {symbol.name: symbol.upper for symbol in method.symbols}

    def fail(self, what: str, why: str = "") -> ArtifactError:
        return ArtifactError(f"method `{self.method.name}`: {what}", why=why)

    def run(self) -> None:
        method = self.method
        try:
            verify_unique("storage", (storage.name for storage in method.storages))
            verify_unique("value", (value.name for value in method.values))
            verify_unique("symbol", (symbol.name for symbol in method.symbols))
            verify_unique("input", (port.name for port in method.inputs))
            verify_unique("output", (port.name for port in method.outputs))
            verify_unique("count", (count.name for count in method.counts))
        except ArtifactError as error:
            raise self.fail(error.what) from None
        self._symbols()
        for storage in method.storages:
            self._storage(storage)
        for value in method.values:
            self._value(value)
        for port in (*method.inputs, *method.outputs):
            self._port(port)
        for count in method.counts:
            self._count(count)
        for index, instruction in enumerate(method.instructions):
            self._instruction(index, instruction)

    def _symbols(self) -> None:
        inputs = {port.name: port for port in self.method.inputs}
        for symbol in self.method.symbols:
            port = inputs.get(symbol.input)
            if not 0 <= symbol.lower <= symbol.upper:
                raise self.fail(f"symbol `{symbol.name}` runs from {symbol.lower} to {symbol.upper}")
            if port is None or port.value not in self.values:
                raise self.fail(
                    f"symbol `{symbol.name}` is read from `{symbol.input}`", "there is no such input"
                )
            if symbol.dimension >= len(self.values[port.value].shape):
                raise self.fail(f"symbol `{symbol.name}` is dimension {symbol.dimension} of `{symbol.input}`")

    def size(self, size: Size, what: str) -> int:
        """The size at its bound; refuses negative sizes and unknown symbols."""
        if isinstance(size, Expr):
            unknown = size.symbols - self.bounds.keys()
            if unknown:
                raise self.fail(f"{what} is `{size}`", f"`{min(unknown)}` is no symbol of the method")
        try:
            number = evaluate(size, self.bounds)
        except (ArithmeticError, ValueError, TypeError, MemoryError) as error:
            raise self.fail(f"{what} is `{size}`", str(error)) from None
        if number < 0 or number >= 2**63:
            raise self.fail(f"{what} is {number}")
        return number

    def _storage(self, item: Storage) -> None:
        nbytes = self.size(item.nbytes, f"the size of storage `{item.name}`")
        if item.max_nbytes < 0 and isinstance(item.nbytes, Expr):
            raise self.fail(f"storage `{item.name}` is dynamic and has no bound")
        if item.max_nbytes >= 0 and nbytes > item.max_nbytes:
            raise self.fail(f"storage `{item.name}` takes {nbytes} bytes", f"its bound is {item.max_nbytes}")
        if item.alignment < 1 or item.alignment & (item.alignment - 1):
            raise self.fail(
                f"storage `{item.name}` is aligned to {item.alignment}", "it must be a power of two"
            )
        known = {Role.CONSTANT: self.constants, Role.STATE: self.states}.get(item.role)
        if known is not None and item.content not in known:
            raise self.fail(
                f"storage `{item.name}` holds `{item.content}`", f"there is no such {item.role.value}"
            )
        if known is not None and item.reserved_nbytes > known[item.content]:
            raise self.fail(
                f"storage `{item.name}` has {item.reserved_nbytes} bytes",
                f"`{item.content}` has {known[item.content]}",
            )

    def _value(self, item: Value) -> None:
        if item.storage not in self.storages:
            raise self.fail(f"value `{item.name}` lies in `{item.storage}`", "there is no such storage")
        if len(item.shape) != len(item.strides):
            raise self.fail(
                f"value `{item.name}` has {len(item.shape)} dimensions and {len(item.strides)} strides"
            )
        shape = tuple(self.size(size, f"a dimension of `{item.name}`") for size in item.shape)
        strides = tuple(self.size(size, f"a stride of `{item.name}`") for size in item.strides)
        offset = self.size(item.offset, f"the offset of `{item.name}`")
        end = offset + span(shape, strides, item.dtype.itemsize)
        if end > self.storages[item.storage].reserved_nbytes:
            room = self.storages[item.storage].reserved_nbytes
            raise self.fail(f"value `{item.name}` ends at byte {end}", f"`{item.storage}` has {room}")

    def _port(self, port: Port) -> None:
        if port.value and port.value not in self.values:
            raise self.fail(f"`{port.name}` is value `{port.value}`", "there is no such value")
        if port.count:
            self._counted(port)
        if port.aliases is not None:
            kind, name = port.aliases
            ports = {"input": self.method.inputs, "output": self.method.outputs}
            names = self.states if kind == "state" else {item.name for item in ports.get(kind, ())}
            if name not in names:
                raise self.fail(f"`{port.name}` aliases {kind} `{name}`", "there is no such thing")

    def _counted(self, port: Port) -> None:
        if port not in self.method.outputs or not port.value:
            raise self.fail(f"`{port.name}` counts `{port.count}`", "it is no output with a value")
        count = next((count for count in self.method.counts if count.name == port.count), None)
        if count is None:
            raise self.fail(f"`{port.name}` counts `{port.count}`", "there is no such count")
        shape = self.values[port.value].shape
        if port.axis >= len(shape):
            raise self.fail(f"`{port.name}` counts along dimension {port.axis}")
        extent = self.size(shape[port.axis], f"a dimension of `{port.value}`")
        if count.upper > extent:
            what = f"`{port.name}` counts up to {count.upper} along dimension {port.axis}, which has {extent}"
            raise self.fail(what)

    def _count(self, count: Count) -> None:
        if count.value not in self.values:
            raise self.fail(f"count `{count.name}` is value `{count.value}`", "there is no such value")
        value = self.values[count.value]
        extents = [self.size(size, f"a dimension of `{value.name}`") for size in value.shape]
        if value.dtype is not DType.INT64 or extents not in ([], [1]) or self.device(value.name) != CPU:
            raise self.fail(f"count `{count.name}` is value `{count.value}`", "it is no integer on the host")
        if not 0 <= count.lower <= count.upper:
            raise self.fail(f"count `{count.name}` runs from {count.lower} to {count.upper}")
        if count.is_difference and (
            count.upper or any(port.count == count.name for port in self.method.outputs)
        ):
            raise self.fail(f"count `{count.name}` is a difference", "it must be 0, and no output's size")

    def _instruction(self, index: int, item: Instruction) -> None:
        at = f"instruction {index}"
        for name in operands(item):
            if name not in self.values:
                raise self.fail(f"{at} uses `{name}`", "there is no such value")
        if not -1 <= item.region < len(self.method.regions):
            raise self.fail(f"{at} is of region {item.region}", f"there are {len(self.method.regions)}")
        match item:
            case Launch():
                self._launch(at, item)
            case LibraryCall():
                if item.function not in FUNCTIONS:
                    raise self.fail(
                        f"{at} calls `{item.function}`", "this devplan has no such library function"
                    )
                if list(references([attribute for _, attribute in item.attributes])):
                    raise self.fail(f"{at} refers to a value in an attribute", "attributes are literals")
                self._one_device(at, item)
            case HostCall():
                self._host_call(at, item)
            case Copy():
                self._copy(at, item)
            case Jump():
                if not 0 <= item.target <= len(self.method.instructions):
                    raise self.fail(f"{at} jumps to {item.target}", "there is no such instruction")

    def _launch(self, at: str, item: Launch) -> None:
        kernel = self.kernels.get(item.kernel)
        if kernel is None:
            raise self.fail(f"{at} launches `{item.kernel}`", "there is no such kernel")
        if len(item.arguments) != len(kernel.parameters):
            raise self.fail(
                f"{at} gives `{item.kernel}` {len(item.arguments)} arguments",
                f"it takes {len(kernel.parameters)}",
            )
        for extent in item.grid:
            self.size(extent, f"a grid dimension of {at}")
        self._one_device(at, item)

    def device(self, value: str) -> Device:
        return self.storages[self.values[value].storage].device

    def _one_device(self, at: str, item: Launch | LibraryCall) -> None:
        if not item.writes:
            raise self.fail(f"{at} writes nothing")
        home = self.device(item.writes[0])
        for name in operands(item):
            if self.device(name) != home:
                raise self.fail(f"{at} runs on {home}", f"`{name}` is on {self.device(name)}")

    def _host_call(self, at: str, item: HostCall) -> None:
        if not re.fullmatch(r"\w+::\w+(\.\w+)?", item.target, re.ASCII):
            raise self.fail(f"{at} calls `{item.target}`", "an operator is written `aten::add.out`")
        for name in (*item.reads, *item.writes):
            if self.device(name) != CPU:
                raise self.fail(f"{at} runs on the host", f"`{name}` is on {self.device(name)}")

    def _copy(self, at: str, item: Copy) -> None:
        source, destination = self.device(item.source), self.device(item.destination)
        expected = {
            CopyKind.H2D: source == CPU != destination,
            CopyKind.D2H: source != CPU == destination,
            CopyKind.D2D: CPU != source != destination != CPU,
            CopyKind.LOCAL: source == destination,
        }
        if not expected[item.kind]:
            raise self.fail(f"{at} is called {item.kind.value}", f"it goes from {source} to {destination}")
        first, second = self.values[item.source], self.values[item.destination]
        if first.dtype != second.dtype or len(first.shape) != len(second.shape):
            raise self.fail(f"{at} copies `{first.name}` to `{second.name}`", "their types differ")

"""Hand-made programs for the runtime's tests: the planner and the passes stay out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from devplan.runtime.calls.buckets import method_at
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import EngineOptions, LoadedProgram
from devplan.runtime.expr import Expr, Size, evaluate
from devplan.runtime.program import (
    CPU,
    Allocation,
    Arena,
    BucketPlan,
    Constant,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    KernelParameter,
    Launch,
    LibraryCall,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Ref,
    Role,
    StateVariable,
    Storage,
    Symbol,
    Value,
)
from devplan.runtime.recording import RecordingBackend, Work, elementwise
from devplan.runtime.tensors.host import contiguous_strides, numpy_dtype

CUDA = Device("cuda", 0)
DOUBLE = {"double": elementwise(lambda x: x + x, "x_device", "y")}


@dataclass
class MethodBuilder:
    """Collects one method; every tensor gets a storage of its own unless it is a view."""

    name: str = "forward"
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    symbols: list[Symbol] = field(default_factory=list)

    def tensor(
        self,
        name: str,
        shape: tuple[Size, ...] = (4,),
        dtype: DType = DType.FLOAT32,
        device: Device = CUDA,
        role: Role = Role.TEMPORARY,
        **storage: Any,
    ) -> str:
        """A contiguous tensor over a storage of the same name."""
        upper = {symbol.name: symbol.upper for symbol in self.symbols}
        text = " * ".join([str(dtype.itemsize), *(f"({extent})" for extent in shape)])
        nbytes: Size = Expr(text) if any(isinstance(e, Expr) for e in shape) else evaluate(Expr(text), {})
        self.storages.append(
            Storage(name, device, nbytes, role, max_nbytes=evaluate(nbytes, upper), **storage)
        )
        strides: tuple[Size, ...] = tuple(
            Expr(" * ".join(["1", *(f"({e})" for e in shape[i + 1 :])])) for i in range(len(shape))
        )
        if not any(isinstance(extent, Expr) for extent in shape):
            strides = contiguous_strides([evaluate(extent, {}) for extent in shape])
        self.values.append(Value(name, name, dtype, shape, strides))
        return name

    def view(
        self, name: str, of: str, shape: tuple[Size, ...], strides: tuple[Size, ...], offset: int = 0
    ) -> str:
        """Another value on the storage of a value."""
        base = next(value for value in self.values if value.name == of)
        self.values.append(Value(name, base.storage, base.dtype, shape, strides, offset))
        return name

    def input(
        self, name: str, shape: tuple[Size, ...] = (4,), dtype: DType = DType.FLOAT32, to: Device = CUDA
    ) -> str:
        """A host input and its copy on the device; returns the device value."""
        at = self.tensor(f"{name}_host", shape, dtype, CPU, Role.INPUT)
        self.inputs.append(Port(name, at))
        if to == CPU:
            return at
        self.tensor(f"{name}_device", shape, dtype, to)
        return self.copy(at, f"{name}_device", CopyKind.H2D)

    def output(self, name: str, value: str) -> None:
        """A host output copied from a device value."""
        of = next(v for v in self.values if v.name == value)
        self.tensor(f"{name}_host", of.shape, of.dtype, CPU, Role.OUTPUT)
        self.copy(value, f"{name}_host", CopyKind.D2H)
        self.outputs.append(Port(name, f"{name}_host"))

    def copy(self, source: str, destination: str, kind: CopyKind) -> str:
        """A copy; returns the destination."""
        self.instructions.append(Copy(kind, source, destination))
        return destination

    def launch(
        self, kernel: str, reads: list[str], writes: list[str], *literals: Any, grid: Any = (1, 1, 1)
    ) -> None:
        """A launch with pointers in the order reads, writes (once each), then literals."""
        names = list(dict.fromkeys([*reads, *writes]))
        arguments = (*(Ref(name) for name in names), *literals)
        self.instructions.append(Launch(kernel, arguments, grid, tuple(reads), tuple(writes)))

    def call(self, function: str, reads: list[str], writes: list[str], **attributes: Any) -> None:
        """A library call."""
        self.instructions.append(
            LibraryCall(function, tuple(reads), tuple(writes), tuple(attributes.items()))
        )

    def host(self, target: str, reads: list[str], writes: list[str], *literals: Any) -> None:
        """A host operator."""
        arguments = (*(Ref(name) for name in reads), *literals)
        self.instructions.append(HostCall(target, arguments, tuple(reads), tuple(writes)))

    def jump(self, target: int, condition: str = "") -> None:
        """A jump."""
        self.instructions.append(Jump(target, condition))

    def method(self) -> Method:
        """What was collected."""
        return Method(
            self.name, tuple(self.inputs), tuple(self.outputs), tuple(self.storages), tuple(self.values),
            tuple(self.instructions), (), tuple(self.symbols),
        )  # fmt: skip


def bump_plan(method: Method, packed: bool = False) -> MethodPlan:
    """A plan by first fit over live ranges (``packed``), or with no byte used twice."""
    storage_of = {value.name: value.storage for value in method.values}
    last = len(method.instructions)
    spans: dict[str, tuple[int, int]] = {}
    for index, instruction in enumerate(method.instructions):
        for name in (*instruction.reads, *instruction.writes):
            begin, _ = spans.get(storage_of[name], (index, 0))
            spans[storage_of[name]] = (begin, index + 1)
    for port in method.inputs:
        if port.value:
            spans[storage_of[port.value]] = (0, spans.get(storage_of[port.value], (0, last))[1])
    for port in method.outputs:
        if port.value:
            spans[storage_of[port.value]] = (spans.get(storage_of[port.value], (0, 0))[0], last)
    allocations: list[Allocation] = []
    sizes: dict[Device, int] = {}
    ids = {CPU: 1, CUDA: 2, Device("cuda", 1): 3}
    for storage in method.storages:
        if not storage.is_planned:
            continue
        size = -(-storage.reserved_nbytes // 256) * 256
        at = 0 if packed else sizes.get(storage.device, 0)
        begin, end = spans.get(storage.name, (0, last))
        for other in sorted(allocations, key=lambda a: a.offset):
            held_begin, held_end = spans.get(other.storage, (0, last))
            clash = held_begin < end and begin < held_end and other.memory_id == ids[storage.device]
            if clash and other.offset < at + size and at < other.offset + other.nbytes:
                at = other.offset + other.nbytes
        allocations.append(Allocation(storage.name, ids[storage.device], at, size))
        sizes[storage.device] = max(sizes.get(storage.device, 0), at + size)
    arenas = tuple(Arena(ids[d], d, n, n, n, "bump") for d, n in sizes.items())
    ranges = tuple(LiveRange(name, *span) for name, span in spans.items())
    return MethodPlan(method.name, arenas, tuple(allocations), ranges)


def bump_bucket(method: Method, sizes: tuple[int, ...], packed: bool = False) -> BucketPlan:
    """The same for exact sizes."""
    plan = bump_plan(method_at(method, sizes), packed)
    return BucketPlan(sizes, plan.arenas, plan.allocations)


@dataclass
class ProgramBuilder:
    """Collects methods, kernels, constants (as arrays) and state."""

    methods: list[MethodBuilder] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    state: list[StateVariable] = field(default_factory=list)
    bytes: dict[str, memoryview] = field(default_factory=dict)

    def method(self, name: str = "forward") -> MethodBuilder:
        """A new method."""
        self.methods.append(MethodBuilder(name))
        return self.methods[-1]

    def kernel(
        self, name: str, source: str = "", parameters: tuple[tuple[str, str], ...] = (), **constants: Any
    ) -> None:
        """A kernel, by name and (for the emulator) source."""
        given = tuple(KernelParameter(*pair) for pair in parameters)
        self.kernels.append(Kernel(name, given, (), source, tuple(constants.items())))

    def digest(self, array: np.ndarray) -> str:
        """Keep an array's bytes; returns their digest."""
        data = array.tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.bytes[digest] = memoryview(data)
        return digest

    def constant(self, method: MethodBuilder, name: str, array: np.ndarray, device: Device = CUDA) -> str:
        """A constant, and a value of it in a method."""
        dtype = DType.from_name(str(array.dtype))
        strides = contiguous_strides(array.shape)
        if name not in {constant.name for constant in self.constants}:
            digest = self.digest(array)
            self.constants.append(Constant(name, digest, array.nbytes, dtype, array.shape, strides, device))
        return method.tensor(name, array.shape, dtype, device, Role.CONSTANT, content=name)

    def variable(
        self, method: MethodBuilder, name: str, shape: tuple[int, ...], dtype: DType = DType.FLOAT32,
        device: Device = CUDA, initial: np.ndarray | None = None,
    ) -> str:  # fmt: skip
        """A state variable, and a value of it in a method."""
        if name not in {variable.name for variable in self.state}:
            nbytes = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
            digest = "" if initial is None else self.digest(initial)
            self.state.append(StateVariable(name, dtype, shape, device, nbytes, digest))
        return method.tensor(name, shape, dtype, device, Role.STATE, content=name)

    def planned(
        self, *, packed: bool = False, static: bool = True, buckets: Sequence[tuple[int, ...]] = ()
    ) -> PlannedProgram:
        """The program with a plan; ``buckets`` are sizes of every method's symbols with plans of their own."""
        methods = tuple(method.method() for method in self.methods)
        program = Program(methods, tuple(self.constants), tuple(self.state), tuple(self.kernels))
        plans = tuple(
            replace(bump_plan(m, packed), buckets=tuple(bump_bucket(m, sizes, packed) for sizes in buckets))
            for m in methods
        )
        return PlannedProgram(program, Plan(plans if static else (), static))

    def load(
        self,
        work: Mapping[str, Work] | None = None,
        *,
        scrub: bool = False,
        poison: bool = False,
        fail: Callable[[str], bool] = lambda line: False,
        **plan: Any,
    ) -> tuple[LoadedProgram, RecordingBackend]:
        """The program loaded on a recording device, and that device."""
        fake = RecordingBackend(CUDA, work, fail=fail)
        backends = {CUDA: fake, CPU: CpuBackend()}
        return LoadedProgram(self.planned(**plan), self.bytes, backends, EngineOptions(scrub, poison)), fake


@pytest.fixture
def program() -> ProgramBuilder:
    return ProgramBuilder()


@pytest.fixture
def symbolic() -> Any:
    """Adds a symbol to a method before its tensors are made."""

    def add(method: MethodBuilder, name: str, lower: int, upper: int, port: str, dimension: int) -> Expr:
        method.symbols.append(Symbol(name, lower, upper, port, dimension))
        return Expr(name)

    return add


@pytest.fixture
def doubler(program: ProgramBuilder) -> ProgramBuilder:
    """y = x + x on the device."""
    method = program.method()
    x = method.input("x")
    y = method.tensor("y")
    method.launch("double", [x], [y], 4)
    method.output("y", y)
    program.kernel("double")
    return program


@pytest.fixture
def double() -> Mapping[str, Work]:
    """What the kernel of `doubler` does."""
    return DOUBLE

"""The waist of the house: a program as plain data, between the compiler above and the runtime below.

`passes` builds a `Program`, `planner` gives every storage an address (`Plan`), `artifact` writes and reads
both, the engine executes them. Nothing here knows torch, triton or CUDA. A method is one flat list of
instructions over values; a value is a typed window onto a storage, so that views, in-place results and
tied outputs are data ("two values, one storage"), never a later patch. Storages are what is planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .dtypes import DType
from .expr import Expr, Size


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """Where memory lives: ``cpu`` or ``cuda:N``. N is a slot of the program, mapped to a GPU at load."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read ``cpu``, ``cuda`` or ``cuda:N`` (any case, blanks around); ValueError names what is wrong."""
        kind, _, index = text.strip().lower().partition(":")
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"unknown device `{text}`; devices are `cpu`, `cuda` and `cuda:N`")
        if index and not (index.isascii() and index.isdigit() and int(index) < 128):
            raise ValueError(f"`{text}` has no valid index; it must be a number from 0 to 127")
        if kind == "cpu" and index not in ("", "0"):
            raise ValueError(f"`{text}`: there is one `cpu`")
        return cls(kind, int(index or 0))


CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where in the user's model something comes from; any field may be empty."""

    module: str = ""
    """Dotted module path, such as ``encoder.layer.0.attention``."""
    operator: str = ""
    """The torch operator or operators, such as ``aten.addmm.default``."""
    file: str = ""
    """File name without folders: artifacts hold no paths of the machine that made them."""
    line: int = 0

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.file else ""
        parts = (self.operator, f"in {self.module}" if self.module else "", at)
        return " ".join(part for part in parts if part)


NOWHERE = SourceLocation()


class Role(Enum):
    """What a storage is for."""

    INPUT = "input"
    OUTPUT = "output"
    CONSTANT = "constant"
    STATE = "state"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes on one device. Planned unless it is a constant, state or the caller's memory."""

    name: str
    device: Device
    nbytes: Size
    role: Role = Role.TEMPORARY
    alignment: int = 256
    max_nbytes: int = -1
    """Bytes at the declared bound of every symbol; what is reserved. -1 stands for ``nbytes`` (static)."""
    external: bool = False
    """The caller's memory (a skipped copy): nothing is reserved for it."""
    content: str = ""
    """Name of the `Constant` or `StateVariable` whose bytes these are."""
    origin: SourceLocation = NOWHERE

    @property
    def reserved_nbytes(self) -> int:
        """Bytes that a plan reserves."""
        if self.max_nbytes >= 0:
            return self.max_nbytes
        assert isinstance(self.nbytes, int), f"storage `{self.name}` is dynamic and has no bound"
        return self.nbytes

    @property
    def is_planned(self) -> bool:
        """Whether a plan must give this storage an address in an arena."""
        return not self.external and self.role not in (Role.CONSTANT, Role.STATE)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: a typed, strided window onto a storage. Strides count elements, ``offset`` counts bytes."""

    name: str
    storage: str
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value, by name; anything else in an argument list is a literal."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


Argument = Ref | DType | Device | Expr | int | float | bool | str | None | tuple["Argument", ...]
"""A literal (strings stand for themselves: memory formats, rounding modes) or a reference to a value."""

Attributes = tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a generated kernel. ``arguments`` follow the kernel's parameters one to one."""

    kernel: str
    arguments: tuple[Argument, ...]
    grid: tuple[Size, Size, Size]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    region: int = -1
    origin: SourceLocation = NOWHERE


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of a device library (cuBLASLt, cuDNN), or of NumPy on the emulator. See `runtime.library`."""

    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    attributes: Attributes = ()
    workspace: str = ""
    """Name of a value over a WORKSPACE storage, or empty. It is not among ``writes``."""
    region: int = -1
    origin: SourceLocation = NOWHERE

    def attribute(self, name: str, default: Argument = None) -> Argument:
        """The attribute's value, or the default."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True)
class HostCall:
    """One ATen operator on the host, out variant. ``arguments`` follow the schema without ``out``.

    ``target`` is ``aten::add.out``; results are written into ``writes`` in the schema's order.
    """

    target: str
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    region: int = -1
    origin: SourceLocation = NOWHERE


class CopyKind(Enum):
    """The direction of a copy. LOCAL stays on one device and is no transfer."""

    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a whole value onto another of equal shape, dtype and strides (LOCAL may change strides)."""

    kind: CopyKind
    source: str
    destination: str
    reason: str = ""
    region: int = -1
    origin: SourceLocation = NOWHERE

    @property
    def reads(self) -> tuple[str, ...]:
        """The source."""
        return (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        """The destination."""
        return (self.destination,)


@dataclass(frozen=True, slots=True)
class Jump:
    """Go on at instruction ``target`` (an index into the method's list; its length is the end).

    With a ``condition`` (a bool value of one element on the host) only when it is false.
    """

    target: int
    condition: str = ""
    region: int = -1
    origin: SourceLocation = NOWHERE

    @property
    def reads(self) -> tuple[str, ...]:
        """The condition."""
        return (self.condition,) if self.condition else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


Instruction = Launch | LibraryCall | HostCall | Copy | Jump


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic dimension: its name in expressions, its inclusive bounds, and where it is read from."""

    name: str
    lower: int
    upper: int
    input: str
    dimension: int
    label: str = ""
    """The user's own name for it, that of a `torch.export.Dim`; empty when there is none."""

    @property
    def title(self) -> str:
        """What a person calls it: the user's name, or ``INPUT:DIMENSION``."""
        return self.label or f"{self.input}:{self.dimension}"


@dataclass(frozen=True, slots=True)
class Region:
    """Instructions that were lowered together; ``Instruction.region`` indexes the method's regions."""

    device: Device
    backend: str
    """``triton``, ``aten``."""
    operators: int
    """How many torch operators went in."""


@dataclass(frozen=True, slots=True)
class Port:
    """A named input or output of a method. ``value`` is where its bytes are for the caller.

    ``aliases`` of an output: ``("input"|"output"|"state", name)`` when it returns that very memory.
    A port without a value is a Python scalar or None that was burnt in: ``literal``.
    """

    name: str
    value: str
    aliases: tuple[str, str] | None = None
    literal: Argument = None
    count: str = ""
    """Of an output whose size depends on data: the `Count` that says how much of ``axis`` is real."""
    axis: int = 0
    """The dimension that has a count."""


@dataclass(frozen=True, slots=True)
class Count:
    """A size that depends on data: ``value``, one int64 on the host, holds it when a call ends.

    Memory is planned for ``upper``. A call whose count is not within both bounds has failed: elements beyond
    the bound were left out, so that its results are wrong.
    """

    name: str
    value: str
    lower: int
    upper: int
    origin: SourceLocation = NOWHERE
    is_difference: bool = False
    """Whether it is how far two such sizes differ that must be equal: both bounds are 0, no output has it."""


@dataclass(frozen=True, slots=True)
class Method:
    """One callable: ports, storages, values, and the instructions in execution order."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    instructions: tuple[Instruction, ...]
    regions: tuple[Region, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    input_tree: str = ""
    """JSON of torch's pytree spec for the inputs, and below for the outputs; empty means a flat list."""
    output_tree: str = ""
    notes: tuple[str, ...] = ()
    """What a person should know of how this method was made: what was not done in place, and why."""
    counts: tuple[Count, ...] = ()
    """Sizes that depend on data and are read, or checked against their bounds, after each call."""

    @property
    def results(self) -> tuple[str, ...]:
        """The values that a call leaves: those of the outputs, and of the counts."""
        returned = (port.value for port in self.outputs if port.value)
        return (*returned, *(count.value for count in self.counts))

    def storage(self, name: str) -> Storage:
        """The storage of that name; StopIteration if there is none."""
        return next(storage for storage in self.storages if storage.name == name)

    def value(self, name: str) -> Value:
        """The value of that name; StopIteration if there is none."""
        return next(value for value in self.values if value.name == name)


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A run-time parameter of a kernel: ``type`` in Triton's words (``*fp16``, ``i32``, ``fp32``)."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel compiled for one architecture: ``form`` is ``cubin`` or ``ptx``, architecture ``sm_90``."""

    architecture: str
    form: str
    symbol: str
    data: bytes = field(repr=False)
    num_warps: int
    shared_nbytes: int
    """Dynamic shared memory in bytes."""
    waits: bool = False
    """Whether it waits for the launches before by itself, so that it may begin while they end."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel. The driver gets ``parameters`` in order, then two null scratch pointers."""

    name: str
    parameters: tuple[KernelParameter, ...]
    codes: tuple[KernelCode, ...]
    source: str = field(repr=False, default="")
    """Triton source, self-contained but for `triton.language`, for the emulator and for readers."""
    constants: tuple[tuple[str, int | float | bool | str | None], ...] = ()
    """Compile-time arguments (block sizes and the like) by parameter name."""
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that never change. Two constants with one digest are stored, uploaded and kept once."""

    name: str
    digest: str
    """SHA-256 of the bytes, hexadecimal."""
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device = CPU


@dataclass(frozen=True, slots=True)
class StateVariable:
    """Memory that outlives a call. ``initial`` is a digest as in `Constant`, or empty for zeros."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    device: Device
    nbytes: int
    initial: str = ""


@dataclass(frozen=True, slots=True)
class LibraryTuning:
    """Algorithms of libraries that were the fastest on one model of GPU, with these versions of libraries.

    Hints for speed alone: on other GPUs, with other versions, and for calls that are not among the keys,
    libraries choose by themselves. `runtime.measure.tune` makes and uses them.
    """

    gpu: str
    """The model's name, as the driver gives it."""
    architecture: str
    """Of that GPU, such as ``sm_90``, or empty."""
    versions: tuple[tuple[str, int], ...]
    """By library: ``cublaslt``, ``cudnn``."""
    algorithms: tuple[tuple[str, int], ...]
    """Index in the library's own list, by the call's key, whose first word is the library function."""


@dataclass(frozen=True, slots=True)
class Program:
    """All methods with what they share. ``architectures`` lists what the kernels were compiled for."""

    methods: tuple[Method, ...]
    constants: tuple[Constant, ...] = ()
    state: tuple[StateVariable, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    architectures: tuple[str, ...] = ()
    tunings: tuple[LibraryTuning, ...] = ()
    """At most one for each model of GPU."""

    def method(self, name: str) -> Method:
        """The method of that name; StopIteration if there is none."""
        return next(method for method in self.methods if method.name == name)


# --- the plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveRange:
    """When a storage must keep its bytes: instruction indices, half-open. [0, 0) never holds any."""

    storage: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage's place: ``offset`` and ``nbytes`` in bytes within the arena ``memory_id``."""

    storage: str
    memory_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory on one device, as one method needs it.

    ``memory_id`` is 1-based, as in ET12, and means the same block in every method of a program: the
    runtime allocates the largest. ``kind`` is ``arena`` (contents die with the call) or ``state``.
    """

    memory_id: int
    device: Device
    nbytes: int
    lower_bound: int
    """Largest sum of live bytes at any instruction, in the order that was planned."""
    sum_nbytes: int
    """What it would take if every storage had bytes of its own."""
    algorithm: str
    seconds: float = 0.0
    """Planning time; never written into an artifact, which must be the same for the same input."""
    kind: str = "arena"


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where everything lives when the symbols have exactly these sizes, which were declared at export.

    Live ranges, instruction order and state are those of the method's plan, whose arenas also hold this one.
    """

    sizes: tuple[int, ...]
    """Of the method's symbols, in their order."""
    arenas: tuple[Arena, ...]
    """What these sizes take of each of the method's arenas; blocks of state are left out."""
    allocations: tuple[Allocation, ...]
    """Of all planned storages, in the method's order."""


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The plan of one method, at the bound of every symbol.

    Its instruction order is the method's, which the planner may have changed.
    """

    method: str
    arenas: tuple[Arena, ...]
    allocations: tuple[Allocation, ...]
    live_ranges: tuple[LiveRange, ...]
    buckets: tuple[BucketPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lives. ``is_static`` is false for ``--no-device-planning``: allocated at run time."""

    methods: tuple[MethodPlan, ...]
    is_static: bool = True

    def method(self, name: str) -> MethodPlan:
        """The plan of the method of that name; StopIteration if there is none."""
        return next(plan for plan in self.methods if plan.method == name)


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """What an artifact holds, but for the constants' bytes."""

    program: Program
    plan: Plan

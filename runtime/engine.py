"""A program in memory, ready to call: `LoadedProgram` and its methods."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .backend import Backend, DeviceArray, Operand, Step
from .binding import CopyTally
from .calls import Bound, Caller, Context, written_state
from .errors import DevplanError, ExecutionError, PlanError, UsageError
from .host import contiguous_strides
from .inputs import arrange, as_host_tensor
from .memory import (
    Allocator,
    Constants,
    Releases,
    allocate_arenas,
    constants_nbytes,
    state_addresses,
    storage_addresses,
)
from .outputs import output_block
from .poison import poisoner
from .program import CPU, Device, Method, MethodPlan, PlannedProgram
from .shared import Shared
from .state import State
from .unplanned import UnplannedCaller


@dataclass(frozen=True)
class EngineOptions:
    """How a program runs. ``scrub`` fills the arenas with 0xFF before each call; ``poison`` fills each
    storage with 0xFF when its live range ends (both find plans that are wrong)."""

    scrub: bool = False
    poison: bool = False


@dataclass(frozen=True)
class MemoryReport:
    """Bytes in use by one program: arenas and state of its own, constants shared with its clones."""

    arena: int
    constants: int
    state: int


class LoadedProgram:
    """A planned program on its devices: arenas, constants, state and methods.

    One thread at a time: a call while another runs raises `ExecutionError`; `clone` gives each thread a
    program of its own on the same constants. Closing gives all memory back; use it as a context manager.

    Args:
        planned: the program and its plan.
        constants: bytes by digest, of all constants and initial values.
        backends: one per device slot of the program; the host's too. The program closes them.
        options: see `EngineOptions`.

    Raises:
        PlanError: the plan does not hold together.
        DeviceError: a device has no code for a kernel, or no memory left.
        ArtifactError: bytes of a constant are missing.
    """

    def __init__(
        self,
        planned: PlannedProgram,
        constants: Constants,
        backends: Mapping[Device, Backend],
        options: EngineOptions = EngineOptions(),
    ) -> None:
        self._start(Shared(planned, constants, backends), backends, options, Releases())

    def _start(
        self, shared: Shared, backends: Mapping[Device, Backend], options: EngineOptions, releases: Releases
    ) -> None:
        self._shared, self._backends, self._options, self._releases = shared, backends, options, releases
        self.planned = shared.planned
        self._lock = threading.Lock()
        self._blocked, self._generation, self._closed = "", 0, True
        program = self.planned.program
        try:
            allocator = Allocator(backends, releases)
            self._arenas = allocate_arenas(self.planned, allocator) if self.planned.plan.is_static else {}
            self._state_addresses = state_addresses(program.state, allocator)
            variables = {variable.name: variable for variable in program.state}
            self.state = State(
                variables, self._state_addresses, backends, shared.constants, self._exclusive, self._unblock
            )
            self.state.write_all_initial()
            self._methods = {method.name: LoadedMethod(self, method) for method in program.methods}
        except BaseException:
            releases.close()
            shared.release()
            raise
        self._closed = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    @property
    def devices(self) -> dict[Device, str]:
        """What serves each device slot, in a person's words."""
        return {device: backend.label for device, backend in self._backends.items()}

    @property
    def backends(self) -> Mapping[Device, Backend]:
        """What serves each device slot, for those who measure."""
        return self._backends

    @property
    def memory(self) -> MemoryReport:
        """Bytes reserved."""
        return MemoryReport(
            sum(arena.nbytes for arena in self._arenas.values()),
            constants_nbytes(self.planned),
            sum(variable.nbytes for variable in self.planned.program.state),
        )

    @property
    def copies(self) -> CopyTally:
        """Copies executed by all methods so far, by kind."""
        total = CopyTally()
        for method in self._methods.values():
            total.merge(method.copies)
        return total

    def method(self, name: str = "forward") -> LoadedMethod:
        """The method of that name; UsageError with the valid names if there is none."""
        if name not in self._methods:
            raise UsageError(f"there is no method `{name}`", hint=f"methods are {list(self._methods)}")
        return self._methods[name]

    def to_device(self, value: object, device: Device | str = "cuda:0") -> DeviceArray:
        """A copy of a host tensor in a device's memory, for inputs that are used in place."""
        slot = Device.parse(device) if isinstance(device, str) else device
        if slot == CPU or slot not in self._backends:
            raise UsageError(
                f"the program has no device `{slot}`", hint=f"it has {list(map(str, self._backends))}"
            )
        array, dtype = as_host_tensor(value, "the tensor")
        block = output_block(slot, array.nbytes, self._shared)
        try:
            if array.nbytes:
                self._shared.backends[slot].upload(block.address, memoryview(array.tobytes()))
            strides = contiguous_strides(array.shape)
            tensor: DeviceArray = block.tensor(Operand(block.address, dtype, array.shape, strides, slot))
            return tensor
        finally:
            block.drop()

    def clone(self, *, copy_state: bool = False) -> LoadedProgram:
        """Another session: the same constants, an arena and state of its own (initial values, or a copy)."""
        self._check_open()
        self._shared.retain()
        releases, backends = Releases(), dict[Device, Backend]()
        try:
            for device, backend in self._shared.backends.items():
                backends[device] = fork = backend.fork()
                releases.add(fork.close)
        except BaseException:
            releases.close()
            self._shared.release()
            raise
        twin = LoadedProgram.__new__(LoadedProgram)
        twin._start(self._shared, backends, self._options, releases)
        if copy_state:
            twin.state.copy_from(self.state)
        return twin

    def close(self) -> None:
        """Give all memory back. Idempotent. Device outputs of the caller's own stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._generation = True, self._generation + 1
            self._blocked = "the program is closed"
            for method in self._methods.values():
                method.forget()
            try:
                self._releases.close()
            finally:
                self._shared.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # --- what methods and state need ---------------------------------------------------------------

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One user at a time; ExecutionError for the second, and after `close`."""
        if not self._lock.acquire(blocking=False):
            raise busy()
        try:
            self._check_open()
            yield
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutionError("the program is closed")

    def _unblock(self) -> None:
        if self._blocked.startswith("state"):
            self._blocked = ""

    def _failed(self, method: Method, error: BaseException) -> DevplanError | None:
        """After a failed call: usable, waiting for its state to be set, or dead. The error to raise."""
        written = written_state(method)
        try:
            for backend in self._backends.values():
                backend.synchronize()
        except Exception as broken:
            self._blocked = f"the device failed in an earlier call ({broken}); load the program again"
        else:
            if written:
                self.state.mark_unknown(written)
                names = ", ".join(f"`{name}`" for name in sorted(written))
                self._blocked = f"state {names} is undefined since a call failed; `reset`, `set` or `load` it"
        if isinstance(error, DevplanError):
            return error
        if not isinstance(error, Exception):
            return None
        return ExecutionError(f"method `{method.name}` failed", why=f"{type(error).__name__}: {error}")

    def _scrub(self) -> Step | None:
        """Fills all arenas with 0xFF, when the options ask for it."""
        if not self._options.scrub:
            return None
        arenas = [(self._backends[arena.device], arena) for arena in self._arenas.values() if arena.nbytes]

        def scrub() -> None:
            for backend, arena in arenas:
                backend.fill(arena.address, arena.nbytes, 0xFF)

        return scrub

    def _context(self, method: Method) -> Context:
        digests = {constant.name: constant.digest for constant in self.planned.program.constants}
        plan = self._plan(method)
        addresses = storage_addresses(
            method, plan, self._arenas, self._shared.addresses, self._state_addresses, digests
        )
        decorate = poisoner(plan, self._arenas, self._backends) if self._options.poison else None
        return Context(self._shared, self._backends, addresses, self._current, decorate, self._scrub())

    def _plan(self, method: Method) -> MethodPlan:
        if not self.planned.plan.is_static:
            return MethodPlan(method.name, (), (), ())
        plans = {plan.method: plan for plan in self.planned.plan.methods}
        if method.name not in plans:
            raise PlanError(f"method `{method.name}` has no plan")
        return plans[method.name]

    def _current(self) -> int:
        return self._generation

    def _caller(self, method: Method) -> Caller:
        context = self._context(method)
        if self.planned.plan.is_static:
            return Caller(method, context)
        return UnplannedCaller(method, context, Allocator(self._backends, self._releases))


def busy() -> ExecutionError:
    """The refusal of a second user."""
    return ExecutionError(
        "the program is in use by another thread",
        why="one call runs at a time",
        hint="give each thread a `clone()`",
    )


class LoadedMethod:
    """A method that can be called: ``method(tokens, mask)`` or ``method(tokens=..., mask=...)``.

    Inputs are NumPy arrays, `HostTensor`, or objects with ``__array_interface__`` or ``__dlpack__``; inputs
    that the program takes in device memory are device tensors. The result maps output names to NumPy arrays
    (`HostTensor` for bfloat16 and 8-bit floats, device tensors for outputs left on a device). They are the
    caller's own; with ``borrow=True`` they are `BorrowedTensor` views of the program's memory.

    Raises:
        UsageError: an input's name, rank, a dimension, dtype or place does not fit.
        ExecutionError: a step failed, the program is closed, or another thread uses it.
    """

    def __init__(self, program: LoadedProgram, method: Method) -> None:
        self._program, self._arity = program, len(method.inputs)
        self._names = [port.name for port in method.inputs]
        self.description = method
        self._caller = program._caller(method)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.description.name

    @property
    def bound(self) -> Bound | None:
        """Operands and execution of the last binding; None before the first call, and without a plan."""
        return self._caller.last

    @property
    def no_graph_reason(self) -> str:
        """Why the last binding does not run as one device graph; empty when it does."""
        last = self._caller.last
        return last.no_graph_reason if last is not None else "the method was not prepared or called yet"

    @property
    def copies(self) -> CopyTally:
        """Copies executed so far, by kind."""
        return self._caller.copies()

    def prepare(self) -> None:
        """Bind and capture now rather than at the first call (static methods only)."""
        with self._program._exclusive():
            self._caller.prepare()

    def __call__(self, *inputs: Any, borrow: bool = False, **named: Any) -> dict[str, Any]:
        program = self._program
        args: Sequence[Any] = inputs
        if named or len(inputs) != self._arity:
            args = self._arranged(inputs, named)
        if not program._lock.acquire(False):
            raise busy()
        try:
            if program._blocked:
                raise ExecutionError(f"method `{self.name}` cannot run", why=program._blocked)
            program._generation += 1
            return self._caller.call(args, borrow)
        except UsageError:
            raise
        except BaseException as error:
            if program._blocked:
                raise
            known = program._failed(self.description, error)
            if known is None or known is error:
                raise
            raise known from error
        finally:
            program._lock.release()

    def _arranged(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        if not inputs and len(named) == self._arity:  # the usual call; `arrange` explains any other
            try:
                return [named[name] for name in self._names]
            except KeyError:
                pass
        return arrange(self.description, inputs, named)

    def run(self, inputs: Mapping[str, Any], *, borrow: bool = False) -> dict[str, Any]:
        """Like a call, for input names that are no Python names."""
        return self(*self._arranged((), inputs), borrow=borrow)

    def forget(self) -> None:
        """Drop what was bound (at close)."""
        self._caller.forget()

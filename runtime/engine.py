"""A program in memory, ready to call: `LoadedProgram` and its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .backend import Backend, DeviceArray, Operand, Step
from .calls.binding import CopyTally
from .calls.buckets import method_at, plan_at
from .calls.caller import Caller, Context, Layout
from .calls.host_io import owned_array
from .calls.inputs import as_host_tensor
from .calls.outputs import output_block
from .calls.poison import poisoner
from .calls.unplanned import UnplannedCaller
from .device_names import as_device
from .dtypes import DType
from .errors import PlanError, UsageError
from .memory.allocator import (
    Allocator,
    Constants,
    Releases,
    allocate_arenas,
    constants_nbytes,
    state_addresses,
    storage_addresses,
)
from .memory.peers import introduce
from .memory.session import Session
from .memory.shared import Shared
from .memory.state import State
from .method import LoadedMethod
from .program import CPU, Device, Method, MethodPlan, PlannedProgram
from .tensors.host import HostTensor, HostValue, contiguous_strides, dtype_of, host_value
from .tensors.indexing import extents_of


@dataclass(frozen=True)
class EngineOptions:
    """How a program runs. ``scrub`` fills the arenas with 0xFF before each call; ``poison`` fills each
    storage with 0xFF when its live range ends (both find plans that are wrong)."""

    scrub: bool = False
    poison: bool = False


@dataclass(frozen=True)
class MemoryReport:
    """Bytes in use by one program: arenas and state of its own, constants shared with its clones.

    These are in the memory of the devices (of the host for a program of the host); ``staging`` is what a
    program for a device holds on the host.
    """

    arena: int
    constants: int
    state: int
    staging: int = 0


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
        self._session = session = Session(backends)
        self.tuning_note = ""
        """What became of tuned library algorithms, for those who ask; empty where there are none."""
        program = self.planned.program
        try:
            allocator = Allocator(backends, releases)
            self._arenas = allocate_arenas(self.planned, allocator) if self.planned.plan.is_static else {}
            self._state_addresses = state_addresses(program.state, allocator)
            variables = {variable.name: variable for variable in program.state}
            self.state = State(variables, self._state_addresses, backends, shared.constants, session)
            self.state.write_all_initial()
            self._callers = {method.name: self._caller(method) for method in program.methods}
        except BaseException:
            session.close()
            releases.close()
            shared.release()
            raise

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._callers)

    @property
    def devices(self) -> dict[Device, str]:
        """What serves each device slot, in a person's words."""
        return {device: backend.label for device, backend in self._backends.items()}

    @property
    def compiled_from_ptx(self) -> dict[str, tuple[str, ...]]:
        """By architecture, kernels that the driver compiles: the artifact has no code for it, but PTX."""
        found: dict[str, tuple[str, ...]] = {}
        for backend in self._backends.values():
            gpu: Any = backend
            if names := getattr(gpu, "uses_ptx", ()):
                found[gpu.info.architecture] = names
        return found

    @property
    def backends(self) -> Mapping[Device, Backend]:
        """What serves each device slot, for those who measure."""
        return self._backends

    @property
    def memory(self) -> MemoryReport:
        """Bytes reserved."""
        devices = {device for device in self._backends if device != CPU} or {CPU}
        arenas, variables = self._arenas.values(), self.planned.program.state
        return MemoryReport(
            sum(arena.nbytes for arena in arenas if arena.device in devices),
            constants_nbytes(self.planned, devices),
            sum(variable.nbytes for variable in variables if variable.device in devices),
            sum(arena.nbytes for arena in arenas if arena.device not in devices),
        )

    @property
    def copies(self) -> CopyTally:
        """Copies executed by all methods so far, by kind."""
        total = CopyTally()
        for caller in self._callers.values():
            total.merge(caller.copies())
        return total

    def method(self, name: str = "forward") -> LoadedMethod:
        """The method of that name, which keeps the program alive; UsageError with the valid names if none."""
        if name not in self._callers:
            raise UsageError(f"there is no method `{name}`", hint=f"methods are {list(self._callers)}")
        return LoadedMethod(self._callers[name], self._session, self)

    def prepare(self) -> None:
        """Bind and capture all static methods and buckets now, rather than at their first call."""
        for name in self.methods:
            self.method(name).prepare()

    def use_stream(self, stream: object | None) -> None:
        """Enqueue on the caller's CUDA stream from now on; None goes back to the program's own.

        ``stream`` is a handle or an object with ``__cuda_stream__``. Calls still wait for their results.

        Raises:
            UsageError: the program has no CUDA device, or several: a stream belongs to one.
        """
        takers = [use for b in self._backends.values() if (use := getattr(b, "use_stream", None)) is not None]
        if len(takers) != 1:
            raise UsageError(f"a stream is for one CUDA device, the program runs on {len(takers)}")
        with self._session.exclusive():
            takers[0](stream)

    def to_device(self, value: object, device: Device | str = "cuda:0") -> DeviceArray:
        """A copy of a host tensor in a device's memory, for inputs that are used in place."""
        self._session.check_open()
        slot = as_device(device)
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

    def pinned_empty(self, shape: Sequence[int], dtype: DType | str) -> HostValue:
        """Uninitialised host memory that the GPU copies from at full speed; given back when dropped.

        An input in such memory (or in any that was pinned through CUDA) is not copied on the host first.
        """
        self._session.check_open()
        kind, extents = dtype_of(dtype), extents_of(shape)
        operand = Operand(0, kind, extents, contiguous_strides(extents), CPU)
        address, release = self._shared.take(CPU, max(operand.span_nbytes, 1))
        return host_value(owned_array(address, operand, release), kind)

    def pin(self, value: object) -> HostValue:
        """A copy of a host tensor in pinned memory, see `pinned_empty`."""
        array, dtype = as_host_tensor(value, "the tensor")
        made = self.pinned_empty(array.shape, dtype)
        raw = made.raw if isinstance(made, HostTensor) else made
        raw[...] = array
        return made

    def clone(self, *, copy_state: bool = False) -> LoadedProgram:
        """Another session: the same constants, an arena and state of its own (initial values, or a copy)."""
        self._session.check_open()
        self._shared.retain()
        releases, backends = Releases(), dict[Device, Backend]()
        try:
            for device, backend in self._shared.backends.items():
                backends[device] = fork = backend.fork()
                releases.add(fork.close)
            introduce(backends.values())
        except BaseException:
            releases.close()
            self._shared.release()
            raise
        twin = LoadedProgram.__new__(LoadedProgram)
        twin._start(self._shared, backends, self._options, releases)  # gives all back if it fails
        if copy_state:
            twin.state.copy_from(self.state)
        return twin

    def close(self) -> None:
        """Give all memory back. Idempotent. Device outputs of the caller's own stay valid."""
        with self._session.lock:
            if self._session.is_closed:
                return
            self._session.close()
            for caller in self._callers.values():
                caller.forget()
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
        session = getattr(self, "_session", None)  # none when the program could not even start
        if session is not None and not session.is_closed:
            self.close()

    # --- making methods ----------------------------------------------------------------------------

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
        plan = self._plan(method)
        return Context(
            shared=self._shared,
            backends=self._backends,
            layout=self._layout(method, plan),
            generation=self._session.current,
            state_generation=self._session.current_state,
            buckets={
                bucket.sizes: self._layout(method_at(method, bucket.sizes), plan_at(plan, bucket))
                for bucket in plan.buckets
            },
            before=self._scrub(),
            host_arenas=[(a.address, a.address + a.nbytes) for a in self._arenas.values() if a.device == CPU],
        )

    def _layout(self, method: Method, plan: MethodPlan) -> Layout:
        digests = {constant.name: constant.digest for constant in self.planned.program.constants}
        addresses = storage_addresses(
            method, plan, self._arenas, self._shared.addresses, self._state_addresses, digests
        )
        return Layout(
            addresses, poisoner(plan, self._arenas, self._backends) if self._options.poison else None
        )

    def _plan(self, method: Method) -> MethodPlan:
        if not self.planned.plan.is_static:
            return MethodPlan(method.name, (), (), ())
        plans = {plan.method: plan for plan in self.planned.plan.methods}
        if method.name not in plans:
            raise PlanError(f"method `{method.name}` has no plan")
        return plans[method.name]

    def _caller(self, method: Method) -> Caller:
        context = self._context(method)
        if self.planned.plan.is_static:
            return Caller(method, context)
        return UnplannedCaller(method, context, Allocator(self._backends, self._releases))


__all__ = ["EngineOptions", "LoadedMethod", "LoadedProgram", "MemoryReport"]

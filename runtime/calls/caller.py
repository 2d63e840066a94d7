"""One method, ready to be called: picks or makes the binding that fits the inputs, stores, runs, fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend import Backend, Operand
from ..errors import UsageError
from ..expr import evaluate
from ..memory.shared import Shared
from ..program import CPU, Copy, Device, Method, Port, Role, Storage
from ..tensors.host import address_of
from .binding import Binder, CopyTally, Decorate, Execution, device_of, refuse_larger, resolve
from .bound import Bound, BoundCache, BucketUse, Quick, Sizes, graphs_nbytes
from .buckets import bucket_title, symbol_places
from .counted import Counts
from .direct import Direct, use_host_ends
from .host_io import HostEnd, MovesHostEnds, MovingOutput, host_ends, mover_of, moving_store
from .inputs import (
    Store,
    SymbolReader,
    as_host_tensor,
    check_device_input,
    check_literal,
    concrete,
    host_array,
    host_store,
)
from .outputs import Fetch, OutputBlock, borrow_fetch, copy_fetch, output_block


@dataclass(frozen=True)
class Layout:
    """Where one plan puts a method's storages, and what is done around its instructions."""

    addresses: Mapping[str, int]
    """Of all storages but the caller's own."""
    decorate: Decorate | None = None


@dataclass(frozen=True)
class Context:
    """What a method needs of its program."""

    shared: Shared
    backends: Mapping[Device, Backend]
    layout: Layout
    """Addresses at the bound of every symbol, which serve all sizes below it."""
    generation: Callable[[], int]
    state_generation: Callable[[], int]
    """The same for what is borrowed of state."""
    buckets: Mapping[Sizes, Layout] = field(default_factory=dict[Sizes, "Layout"])
    """Addresses for declared sizes."""
    before: Callable[[], None] | None = None
    """Runs before the inputs are stored (the emulator scrubs its arenas)."""
    host_arenas: Sequence[tuple[int, int]] = ()
    """First and one past the last address of each arena in host memory."""

    def is_lent(self, address: int) -> bool:
        """Whether a host address is in the program's own memory, which calls overwrite."""
        return any(begin <= address < end for begin, end in self.host_arenas)


@dataclass(frozen=True)
class Given:
    """One call's inputs in port order, the shapes they have, and the addresses of those used in place."""

    values: list[Any]
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]


class Caller:
    """Runs one planned method. Not thread-safe: the program guards it."""

    def __init__(self, method: Method, context: Context) -> None:
        self.method, self._context = method, context
        self._storages = {storage.name: storage for storage in method.storages}
        self._values = {value.name: value for value in method.values}
        self._symbols = SymbolReader(method)
        self._inputs = {self._storage(port).name: i for i, port in enumerate(method.inputs) if port.value}
        self._external_outputs = [
            storage for storage in method.storages if storage.external and storage.name not in self._inputs
        ]
        titles = {sizes: bucket_title(method, sizes) for sizes in context.buckets}
        self._cache = BoundCache(self._bind, titles)
        self._sized_by = symbol_places(method) if context.buckets else []
        self._names = [port.name for port in method.outputs]
        self.is_static = not method.symbols and not any(storage.external for storage in method.storages)
        self.last: Bound | None = None
        self.quick: Quick | None = None
        """`call` of a static method that is bound and has nothing left to look up."""
        self.is_running = False
        """Set once the instructions of a call begin: a failure before that has changed nothing."""

    def prepare(self) -> None:
        """Bind (and capture) ahead of the first call, where nothing depends on the call."""
        if self.is_static and self.last is None:
            self.last = self._bind({}, {})
            self.last.execution.capture()
        if not any(storage.external for storage in self.method.storages):
            names = [symbol.name for symbol in self.method.symbols]
            for sizes in self._context.buckets:
                self._cache.keep(dict(zip(names, sizes, strict=True)))

    @property
    def no_graph_reason(self) -> str:
        """Why the last binding does not run as one device graph; empty when it does."""
        return "the method was not prepared or called yet" if self.last is None else self.last.no_graph_reason

    def call(self, args: Sequence[Any], borrow: bool) -> dict[str, Any]:
        """Check and store the inputs, run, fetch the outputs by name."""
        if not self.is_static:
            bucket = self._bucket_of(args) if self._sized_by else None
            if bucket is None:
                return self._call_dynamic(args, borrow)
            self.last = bucket
        elif self.last is None:
            self.prepare()
        bound = self.last
        assert bound is not None
        if bound.quick is None:
            bound.quick = self._quick(bound)
            self.quick = bound.quick if self.is_static else None
        return bound.quick(args, borrow)

    def _quick(self, bound: Bound) -> Quick:
        """A call of one binding, captured before, in one function: a small program's time is Python's."""
        store, run, fetch, lend = bound.store_all, bound.execution.run, bound.fetch_all, bound.borrow_all

        def call(args: Sequence[Any], borrow: bool) -> dict[str, Any]:
            store(args)
            self.is_running = True
            run()
            return lend() if borrow else fetch()

        def careful(args: Sequence[Any], borrow: bool) -> dict[str, Any]:
            self._run(bound, args, borrow)
            return lend() if borrow else fetch()

        return careful if self._context.before is not None or bound.moving else call

    def _bucket_of(self, args: Sequence[Any]) -> Bound | None:
        """The binding of a bucket that was called before, by shapes alone: inputs are checked when stored."""
        try:
            sizes = tuple([args[index].shape[dimension] for index, dimension in self._sized_by])
        except (AttributeError, IndexError, TypeError):
            return None
        return self._cache.hit(sizes)

    def forget(self) -> None:
        """Drop all bindings; the counts stay."""
        self._cache.retired = self.copies()
        if self.is_static and self.last is not None:
            self.last.retire()
        self._cache.clear()
        self.last = self.quick = None

    def copies(self) -> CopyTally:
        """Copies executed so far."""
        return self._cache.copies([self.last] if self.is_static and self.last else [])

    @property
    def buckets(self) -> tuple[BucketUse, ...]:
        """What became of each declared bucket so far, in their order."""
        return self._cache.uses(self.method)

    @property
    def other_calls(self) -> int:
        """Calls whose sizes were none of the buckets'."""
        return self._cache.other_calls

    @property
    def graph_nbytes(self) -> int | None:
        """Device bytes that all graphs of the method took, by the driver's word; None without graphs."""
        return graphs_nbytes([*self._cache, *([self.last] if self.is_static and self.last else [])])

    def _run(self, bound: Bound, args: Sequence[Any], borrow: bool) -> None:
        if self._context.before is not None:
            self._context.before()
        bound.store_all(args)
        for output in bound.moving:
            output.drop() if borrow else output.prepare()
        self.is_running = True
        bound.execution.run()

    def _storage(self, port: Port) -> Storage:
        return self._storages[self._values[port.value].storage]

    # --- binding ----------------------------------------------------------------------------------

    def _bind(self, bindings: Mapping[str, int], external: Mapping[str, int]) -> Bound:
        context, method = self._context, self.method
        bucket = context.buckets.get(tuple(bindings.values()))
        layout = bucket or context.layout
        refuse_larger(method, bindings)
        operands = resolve(method, {**layout.addresses, **external}, bindings)
        is_for_life = self.is_static or (bucket is not None and not external)
        direct = self._direct(operands, bindings) if is_for_life else Direct(operands, operands)
        try:
            return self._bound(direct, bindings, layout.decorate)
        except BaseException:
            direct.close()
            raise

    def _bound(self, direct: Direct, bindings: Mapping[str, int], decorate: Decorate | None) -> Bound:
        context, method, operands = self._context, self.method, direct.planned
        saved = [method.instructions[index] for index in direct.saved]

        def mover(copy: Copy) -> MovesHostEnds | None:
            if any(copy is one for one in saved):
                return None
            return mover_of(context.backends[device_of(copy, operands)])

        ends = host_ends(method, operands, mover)
        binder = Binder(method, context.backends, direct.used, bindings, decorate, ends, direct.saved)
        execution = Execution(binder.segments(), operands, context.backends)
        counts = Counts(method, operands) if method.counts else None
        moving, fetches = self._fetches(operands, ends, counts)
        return Bound(
            operands=operands,
            bindings=bindings,
            stores=[self._store(port, operands, ends) for port in method.inputs],
            execution=execution,
            fetches=fetches,
            borrows=[self._borrow(port, operands, counts) for port in method.outputs],
            moving=moving,
            direct=direct,
            names=self._names,
            counts=counts,
        )

    def _direct(self, operands: dict[str, Operand], bindings: Mapping[str, int]) -> Direct:
        """The operands with small copies saved; not where each instruction is watched on the plan's memory.

        Nor where bindings come and go: what was borrowed of an output would lose its memory with them.
        """
        if self._context.layout.decorate is not None:
            return Direct(operands, operands)
        backends, take = self._context.backends, self._context.shared.take
        return use_host_ends(self.method, operands, bindings, backends, take)

    def refill(self, bound: Bound, args: Sequence[Any]) -> None:
        """Store a call's inputs where the plan has them, for steps that were bound one by one."""
        for port, value in zip(self.method.inputs, args, strict=True):
            if port.value and not self._storage(port).external:
                self._plain_store(port, bound.operands[port.value])(value)

    def _store(self, port: Port, operands: Mapping[str, Operand], ends: Mapping[str, HostEnd]) -> Store:
        if not port.value:
            return lambda value: check_literal(f"input `{port.name}`", port.literal, value)
        operand = operands[port.value]
        if self._storage(port).external:
            return _nothing  # checked before anything was bound to it
        plain = self._plain_store(port, operand)
        if port.value not in ends:
            return plain
        return moving_store(port, operand, ends[port.value], plain, self._context.is_lent)

    def _plain_store(self, port: Port, operand: Operand) -> Store:
        if operand.device != CPU:
            return self._upload(port, operand)
        return host_store(port, operand, self._context.is_lent)

    def _upload(self, port: Port, operand: Operand) -> Store:
        """An input that the plan keeps in an arena of the device (and state that is passed in)."""
        backend = self._context.backends[operand.device]

        def store(value: Any) -> None:
            array = host_array(value, f"input `{port.name}`", operand.dtype, operand.shape)
            if operand.numel:
                backend.upload(operand.address, memoryview(array.tobytes()))

        return store

    def _fetches(
        self, operands: Mapping[str, Operand], ends: Mapping[str, HostEnd], counts: Counts | None
    ) -> tuple[list[MovingOutput], list[Fetch]]:
        """What fetches each output. Of outputs that share memory which moves, one takes it, others copies."""
        homes: dict[str, MovingOutput] = {}
        takers: dict[int, MovingOutput] = {}
        for index, port in enumerate(self.method.outputs):
            if port.value in ends and self._storage(port).name not in homes:
                moving = MovingOutput(operands[port.value], ends[port.value], self._context.shared)
                homes[self._storage(port).name] = takers[index] = moving
        fetches: list[Fetch] = []
        for index, port in enumerate(self.method.outputs):
            if index in takers:
                fetches.append(_cut(port, takers[index].fetch, counts))
            elif port.value and self._storage(port).name in homes:
                fetches.append(_cut(port, homes[self._storage(port).name].part(operands[port.value]), counts))
            else:
                fetches.append(self._fetch(port, operands, counts))
        return list(takers.values()), fetches

    def _fetch(self, port: Port, operands: Mapping[str, Operand], counts: Counts | None) -> Fetch:
        if not port.value:
            return lambda: port.literal
        operand, backends, shared = operands[port.value], self._context.backends, self._context.shared
        if counts is None or not port.count:
            return copy_fetch(operand, backends, shared)
        if operand.device == CPU:
            return counts.host_fetch(port, operand)
        return lambda: copy_fetch(counts.cut(port, operand), backends, shared)()

    def _borrow(self, port: Port, operands: Mapping[str, Operand], counts: Counts | None) -> Fetch:
        if not port.value:
            return lambda: port.literal
        operand, backends, generation = operands[port.value], self._context.backends, self._context.generation
        if self._storage(port).role is Role.STATE:
            generation = self._context.state_generation
        if counts is None or not port.count:
            return borrow_fetch(operand, backends, generation)
        return lambda: borrow_fetch(counts.cut(port, operand), backends, generation)()

    # --- shapes and addresses that change from call to call ---------------------------------------

    def _call_dynamic(self, args: Sequence[Any], borrow: bool) -> dict[str, Any]:
        given = self._look_at(args)
        bindings = self._symbols.bindings(given.shapes)
        self._check_in_place(given, bindings)
        blocks: dict[str, OutputBlock] = {}
        try:
            for storage in self._external_outputs:
                nbytes = evaluate(storage.nbytes, bindings)
                blocks[storage.name] = output_block(storage.device, nbytes, self._context.shared)
            bound = self._bound_for(bindings, given, blocks)
            self._run(bound, given.values, borrow)
            return self._fetch_dynamic(bound, args, blocks, borrow)
        finally:
            for block in blocks.values():
                block.drop()

    def _look_at(self, args: Sequence[Any]) -> Given:
        values: list[Any] = []
        shapes: dict[str, tuple[int, ...]] = {}
        addresses: dict[str, int] = {}
        for port, value in zip(self.method.inputs, args, strict=True):
            looked = value
            if port.value and self._storage(port).external:
                looked = self._in_place(port, value)
                addresses[self._storage(port).name] = looked.address
                shapes[port.name] = looked.shape
            elif port.value:
                shapes[port.name] = as_host_tensor(value, f"input `{port.name}`")[0].shape
            values.append(looked)
        return Given(values, shapes, addresses)

    def _check_in_place(self, given: Given, bindings: Mapping[str, int]) -> None:
        """UsageError for the caller's memory that is not as the program has it, before anything is bound."""
        for port, operand in zip(self.method.inputs, given.values, strict=True):
            if port.value and self._storage(port).external:
                value = self._values[port.value]
                shape, strides = concrete(value.shape, bindings), concrete(value.strides, bindings)
                wanted = Operand(operand.address, value.dtype, shape, strides, operand.device)
                check_device_input(port, operand, wanted)

    def _in_place(self, port: Port, value: Any) -> Operand:
        """The caller's memory behind an input that is not copied."""
        device = self._storage(port).device
        if device == CPU:
            array, dtype = as_host_tensor(value, f"input `{port.name}`")
            if any(step % array.itemsize for step in array.strides):
                why = f"its strides of {array.strides} bytes are no multiples of its element size"
                raise UsageError(f"input `{port.name}` cannot be used in place", why=why, hint="pass a copy")
            strides = tuple(step // array.itemsize for step in array.strides)
            return Operand(address_of(array), dtype, array.shape, strides, CPU)
        try:
            return self._context.backends[device].describe(value)
        except UsageError as error:
            raise UsageError(
                f"input `{port.name}` must be in the memory of `{device}`",
                why=str(error),
                hint="make such a tensor with `to_device`, or export with `--io host`",
            ) from error

    def _bound_for(
        self, bindings: Mapping[str, int], given: Given, blocks: Mapping[str, OutputBlock]
    ) -> Bound:
        external = given.addresses | {name: block.address for name, block in blocks.items()}
        self.last = self._cache.take(bindings, external)
        return self.last

    def _fetch_dynamic(
        self, bound: Bound, args: Sequence[Any], blocks: Mapping[str, OutputBlock], borrow: bool
    ) -> dict[str, Any]:
        counts = bound.counts
        if counts is not None:
            counts.check()
        fetches = bound.borrows if borrow else bound.fetches
        results: dict[str, Any] = {}
        for port, fetch in zip(self.method.outputs, fetches, strict=True):
            if not port.value or not self._storage(port).external:
                results[port.name] = fetch()
            elif (name := self._storage(port).name) in blocks:
                operand = bound.operands[port.value]
                if counts is not None and port.count:
                    operand = counts.cut(port, operand)
                results[port.name] = blocks[name].tensor(operand)
            else:
                results[port.name] = self._returned_input(port, bound.operands, args[self._inputs[name]])
        return results

    def _returned_input(self, port: Port, operands: Mapping[str, Operand], tensor: Any) -> Any:
        """An output that is the caller's own memory again: the very tensor, or another view of it."""
        operand = operands[port.value]
        passed = self.method.inputs[self._inputs[self._storage(port).name]]
        if operand == operands.get(passed.value):
            return tensor
        return self._context.shared.backends[operand.device].wrap(operand, lambda: _keep(tensor))


def _cut(port: Port, fetch: Fetch, counts: Counts | None) -> Fetch:
    """Fetches what is real of an output on the host whose size depends on data; others as they are."""
    return fetch if counts is None or not port.count else lambda: counts.cut_host(port, fetch())


def _nothing(given: Any) -> None:
    """An input that is used where it is."""


def _keep(tensor: Any) -> None:
    """Holds the tensor until the closure that calls this is dropped."""


def written_state(method: Method) -> set[str]:
    """Names of the state that a method writes."""
    storages = {storage.name: storage for storage in method.storages if storage.role is Role.STATE}
    held = {
        value.name: storages[value.storage].content for value in method.values if value.storage in storages
    }
    return {held[name] for instruction in method.instructions for name in instruction.writes if name in held}

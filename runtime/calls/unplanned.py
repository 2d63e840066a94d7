"""Runs a method without a plan: each storage is allocated at its first use and freed after its last.

For bisecting: if a program is right this way and wrong with its plan, the plan is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..backend import Operand
from ..errors import PlanError, UsageError
from ..expr import evaluate
from ..memory.allocator import Allocator
from ..program import Copy, Instruction, Jump, Launch, LibraryCall, Method, Ref
from .binding import CopyTally, device_of, is_empty, jump_condition, resolve
from .caller import Caller, Context
from .counted import Counts
from .outputs import OutputBlock, copy_fetch, output_block


class UnplannedCaller(Caller):
    """A `Caller` that binds at every call, to memory that it allocates as it goes."""

    def __init__(self, method: Method, context: Context, allocator: Allocator) -> None:
        super().__init__(method, context)
        self.is_static = False
        self._allocator, self._last_use = allocator, last_uses(method)

    def call(self, args: Sequence[Any], borrow: bool) -> dict[str, Any]:
        """Check and store the inputs, run instruction by instruction, fetch the outputs."""
        if borrow:
            raise UsageError(
                "an unplanned program has nothing to borrow", why="its memory is freed after each call"
            )
        given = self._look_at(args)
        bindings = self._symbols.bindings(given.shapes)
        self._check_in_place(given, bindings)
        memory = CallMemory(self.method, self._allocator, bindings)
        blocks: dict[str, OutputBlock] = {}
        try:
            for storage in self._external_outputs:
                nbytes = evaluate(storage.nbytes, bindings)
                blocks[storage.name] = output_block(storage.device, nbytes, self._context.shared)
            held = {name: block.address for name, block in blocks.items()}
            memory.addresses |= {**self._context.layout.addresses, **given.addresses, **held}
            self._store_inputs(given.values, memory)
            self.is_running = True
            self._execute(memory)
            return self._collect(args, memory, blocks)
        finally:
            memory.free_all()
            for block in blocks.values():
                block.drop()

    def _store_inputs(self, values: Sequence[Any], memory: CallMemory) -> None:
        for port, value in zip(self.method.inputs, values, strict=True):
            self._store(port, memory.operands([port.value] if port.value else []), {})(value)

    def _collect(
        self, args: Sequence[Any], memory: CallMemory, blocks: Mapping[str, OutputBlock]
    ) -> dict[str, Any]:
        results: dict[str, Any] = {}
        counts = Counts(self.method, memory.operands(count.value for count in self.method.counts))
        counts.check()
        for port in self.method.outputs:
            if not port.value:
                results[port.name] = port.literal
                continue
            operands = memory.operands([port.value])
            if port.count:
                operands[port.value] = counts.cut(port, operands[port.value])
            if not self._storage(port).external:
                operand = operands[port.value]
                results[port.name] = copy_fetch(operand, self._context.backends, self._context.shared)()
            elif (name := self._storage(port).name) in blocks:
                results[port.name] = blocks[name].tensor(operands[port.value])
            else:
                results[port.name] = self._returned_input(port, operands, args[self._inputs[name]])
        return results

    def _execute(self, memory: CallMemory) -> None:
        index = 0
        while index < len(self.method.instructions):
            instruction = self.method.instructions[index]
            operands = memory.operands(names_in(instruction))
            if isinstance(instruction, Jump):
                go_on = jump_condition(instruction, operands)()
                index = index + 1 if go_on else instruction.target
                continue
            self._run_one(instruction, operands, memory.bindings)
            memory.free_dead(index, self._last_use)
            index += 1

    def _run_one(
        self, instruction: Instruction, operands: Mapping[str, Operand], bindings: Mapping[str, int]
    ) -> None:
        if isinstance(instruction, Jump) or is_empty(instruction, operands, bindings):
            return
        backend = self._context.backends[device_of(instruction, operands)]
        backend.bind(instruction, operands, bindings)()
        backend.synchronize()
        if isinstance(instruction, Copy):
            source = operands[instruction.source]
            self._cache.retired.add(instruction.kind, source.numel * source.dtype.itemsize)

    @property
    def no_graph_reason(self) -> str:
        """Always the same."""
        return "the program is not planned: its memory is another one in every call"

    def copies(self) -> CopyTally:
        """Copies executed so far."""
        return self._cache.retired


class CallMemory:
    """The memory of one call: storages by name, allocated when they are first asked for."""

    def __init__(self, method: Method, allocator: Allocator, bindings: Mapping[str, int]) -> None:
        self._method, self._allocator, self.bindings = method, allocator, bindings
        self._storages = {storage.name: storage for storage in method.storages}
        self._storage_of = {value.name: value.storage for value in method.values}
        self._frees: dict[str, Callable[[], None]] = {}
        self.addresses: dict[str, int] = {}

    def operands(self, names: Iterable[str]) -> dict[str, Operand]:
        """Operands of these values; their storages are allocated."""
        wanted = {name for name in names if name}
        for name in wanted:
            self._allocate(self._storage_of[name])
        return resolve(self._method, self.addresses, self.bindings, wanted)

    def _allocate(self, name: str) -> None:
        if name in self.addresses:
            return
        storage = self._storages[name]
        if not storage.is_planned:
            raise PlanError(f"storage `{name}` of role {storage.role.value} has no memory")
        nbytes = evaluate(storage.nbytes, self.bindings)
        self.addresses[name], self._frees[name] = self._allocator.allocate_single(storage.device, nbytes)

    def free_dead(self, index: int, last_use: Mapping[str, int]) -> None:
        """Free what no instruction after ``index`` uses."""
        for name in [name for name in self._frees if last_use[name] <= index]:
            del self.addresses[name]
            self._frees.pop(name)()

    def free_all(self) -> None:
        """Free the rest."""
        while self._frees:
            name, free = self._frees.popitem()
            self.addresses.pop(name, None)
            free()


def names_in(instruction: Instruction) -> list[str]:
    """Names of all values that an instruction touches."""
    names = [*instruction.reads, *instruction.writes]
    if isinstance(instruction, LibraryCall) and instruction.workspace:
        names.append(instruction.workspace)
    if isinstance(instruction, Launch):
        names += [argument.name for argument in instruction.arguments if isinstance(argument, Ref)]
    return names


def last_uses(method: Method) -> dict[str, int]:
    """Index of the last instruction that uses each storage; outputs live on; loops are counted whole."""
    storage_of = {value.name: value.storage for value in method.values}
    spans: dict[str, tuple[int, int]] = {}
    for index, instruction in enumerate(method.instructions):
        for name in names_in(instruction):
            first, _ = spans.get(storage_of[name], (index, index))
            spans[storage_of[name]] = (first, index)
    loops = [
        (j.target, i) for i, j in enumerate(method.instructions) if isinstance(j, Jump) and j.target <= i
    ]
    for _ in loops:  # enough rounds for loops within loops
        for begin, end in loops:
            for name, (first, last) in spans.items():
                if first <= end and last >= begin:
                    spans[name] = (first, max(last, end))
    forever = len(method.instructions)
    last_use = {storage.name: spans.get(storage.name, (0, forever))[1] for storage in method.storages}
    return last_use | {storage_of[name]: forever for name in method.results}

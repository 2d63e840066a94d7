"""Reorder instructions, within their dependences, so that less is alive at once.

Only instructions of one region change places, and never across a jump or a jump's target, so copies, host
calls and regions keep their sequence. Candidates: the order as given, least peak first (after Inductor's
`reorder_for_peak_memory`), depth first, and a beam over sets of finished instructions (a compact stand-in
for the dynamic programme of SERENITY, MLSys 2020). The given order stays unless another has a lower peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..runtime.program import Device, HostCall, Instruction, Jump, Method, Role, Storage
from .liveness import live_ranges, value_accesses
from .options import Effort
from .problem import align, lower_bound

_EXPANSIONS = {"fast": 10_000, "default": 120_000, "max": 3_000_000}
_WIDTH = {"fast": 10, "default": 100, "max": 1000}
_RANDOM = ("rand", "bernoulli", "dropout", "normal", "multinomial", "uniform", "poisson")


def reorder(method: Method, effort: Effort = "default") -> Method:
    """The method with its instructions in the best order found; the same method when none is better."""
    best, best_peaks = method, peaks(method)
    for begin, end in blocks(method):
        for order in _orders(_Block(best, begin, end), effort):
            code = best.instructions
            inner = tuple(code[begin + index] for index in order)
            candidate = replace(best, instructions=(*code[:begin], *inner, *code[end:]))
            found = peaks(candidate)
            if _is_better(found, best_peaks):
                best, best_peaks = candidate, found
                break
    return best


def peaks(method: Method) -> dict[Device, int]:
    """The largest sum of live planned bytes on each device, in the method's order."""
    spans: dict[Device, list[tuple[int, int, int]]] = {}
    storages = {storage.name: storage for storage in method.storages}
    for live in live_ranges(method):
        storage = storages[live.storage]
        if storage.is_planned:
            spans.setdefault(storage.device, []).append((live.begin, live.end, _nbytes(storage)))
    return {device: lower_bound(each) for device, each in spans.items()}


def _is_better(new: dict[Device, int], old: dict[Device, int]) -> bool:
    """Lower on some device and higher on none."""
    return new != old and all(new[device] <= old[device] for device in old)


def _nbytes(storage: Storage) -> int:
    return align(storage.reserved_nbytes, storage.alignment)


def blocks(method: Method) -> Iterator[tuple[int, int]]:
    """Half-open runs of instructions, of one region and free of jumps and their targets."""
    code = method.instructions
    targets = {each.target for each in code if isinstance(each, Jump)}
    begin = 0
    for index in range(len(code) + 1):
        at_end = index == len(code)
        if (
            at_end
            or index in targets
            or isinstance(code[index], Jump)
            or code[index].region != code[begin].region
        ):
            if index - begin > 2:
                yield begin, index
            begin = index
            while begin < len(code) and isinstance(code[begin], Jump):
                begin += 1


@dataclass(frozen=True, slots=True)
class _Link:
    """An order as a linked list, from the last instruction back."""

    index: int
    before: _Link | None


@dataclass(frozen=True, slots=True)
class _State:
    """A set of finished instructions (as bits) with the memory it has led to."""

    peak: int
    live: int
    done: int
    order: _Link | None
    """The instructions so far."""


class _Block:
    """One run of instructions as a graph: who must come before whom, and who touches which bytes."""

    def __init__(self, method: Method, begin: int, end: int) -> None:
        storage_of = {value.name: value.storage for value in method.values}
        storages = {storage.name: storage for storage in method.storages}
        code = method.instructions[begin:end]
        self.count = len(code)
        touched = [self._storages(each, storage_of) for each in code]
        self.before = _dependences(code, touched, storages)
        self.after: list[list[int]] = [[] for _ in code]
        for index, mask in enumerate(self.before):
            for each in _bits(mask):
                self.after[each].append(index)
        self.sizes: list[int] = []
        self.users: list[int] = []
        """Per storage that the order has a say in: bytes, and the instructions that touch it, as bits."""
        self.dies: list[bool] = []
        self.touches: list[list[int]] = [[] for _ in code]
        self.live = 0
        """Bytes alive as the block begins, on the device that matters."""
        self._add_storages(method, begin, end, touched)

    @staticmethod
    def _storages(instruction: Instruction, storage_of: dict[str, str]) -> tuple[set[str], set[str]]:
        reads, writes = value_accesses(instruction)
        return {storage_of[name] for name in reads}, {storage_of[name] for name in writes}

    def _add_storages(
        self, method: Method, begin: int, end: int, touched: list[tuple[set[str], set[str]]]
    ) -> None:
        lives = {live.storage: live for live in live_ranges(method)}
        device = _main_device(method)
        given, returned = _ends(method)
        users: dict[str, int] = {}
        for index, (reads, writes) in enumerate(touched):
            for name in reads | writes:
                users[name] = users.get(name, 0) | 1 << index
        for storage in method.storages:
            live = lives.get(storage.name)
            if not storage.is_planned or storage.device != device or live is None or live.begin >= live.end:
                continue
            is_born_before = live.begin < begin or storage.name in given
            is_needed_after = live.end > end or storage.name in returned
            if is_born_before and live.end > begin:
                self.live += _nbytes(storage)
            if storage.name not in users or (is_born_before and is_needed_after):
                continue
            number = len(self.sizes)
            self.sizes.append(_nbytes(storage))
            self.users.append(users[storage.name] | (1 << self.count if is_born_before else 0))
            self.dies.append(not is_needed_after)
            for index in _bits(users[storage.name]):
                self.touches[index].append(number)
        # The bit past the last instruction stands for "before the block" and is always done.
        self.start = 1 << self.count
        self.full = (1 << self.count + 1) - 1

    def step(self, index: int, state: _State) -> tuple[int, int]:
        """Bytes alive while the instruction runs after this state, and once it has run."""
        bit = 1 << index
        missing = ~(state.done | bit)
        during = after = state.live
        for number in self.touches[index]:
            users, size = self.users[number], self.sizes[number]
            if not users & state.done:
                during += size
                after += size
            if self.dies[number] and not users & missing:
                after -= size
        return during, after


def _ends(method: Method) -> tuple[set[str], set[str]]:
    """The storages that hold bytes before the first instruction, and those that must after the last."""
    storage_of = {value.name: value.storage for value in method.values}
    given = {storage_of[port.value] for port in method.inputs if port.value}
    returned = {storage_of[name] for name in method.results}
    given |= {storage.name for storage in method.storages if storage.role is Role.INPUT}
    returned |= {storage.name for storage in method.storages if storage.role is Role.OUTPUT}
    return given, returned


def _main_device(method: Method) -> Device:
    """The device whose peak is lowered: the accelerator with the most live bytes, else the host."""
    found = peaks(method)
    return max(found, key=lambda device: (device.kind != "cpu", found[device])) if found else Device("cpu")


def _dependences(
    code: tuple[Instruction, ...], touched: list[tuple[set[str], set[str]]], storages: dict[str, Storage]
) -> list[int]:
    """For each instruction, as bits, those that must come before it (not closed under transitivity)."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    before = [0] * len(code)
    chain = -1
    for index, (instruction, (reads, writes)) in enumerate(zip(code, touched, strict=True)):
        for name in reads | writes:
            if name in writer:
                before[index] |= 1 << writer[name]
        for name in writes:
            for reader in readers.pop(name, ()):
                before[index] |= 1 << reader
            writer[name] = index
        for name in reads - writes:
            readers.setdefault(name, []).append(index)
        if _is_fixed(instruction, reads | writes, storages):
            if chain >= 0:
                before[index] |= 1 << chain
            chain = index
    return before


def _is_fixed(instruction: Instruction, names: set[str], storages: dict[str, Storage]) -> bool:
    """Whether the instruction keeps its place among its like: callers or later calls see what it does."""
    if isinstance(instruction, HostCall) and any(word in instruction.target for word in _RANDOM):
        return True
    return any(storages[name].external or storages[name].role is Role.STATE for name in names)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _orders(block: _Block, effort: Effort) -> Iterator[list[int]]:
    """Orders whose peak is below the given one's, the best first."""
    given = _replay(block, list(range(block.count)))
    if given.peak <= _floor(block):
        return
    found: list[tuple[int, list[int]]] = []
    for order in (_beam(block, 1, given.peak), _depth_first(block), _wide(block, effort, given.peak)):
        if order is not None:
            found.append((_replay(block, order).peak, order))
    for peak, order in sorted(found, key=lambda each: each[0]):
        if peak < given.peak:
            yield order


def _floor(block: _Block) -> int:
    """What any order needs: the operands of the largest instruction."""
    return max(sum(block.sizes[number] for number in each) for each in block.touches)


def _replay(block: _Block, order: list[int]) -> _State:
    state = _State(block.live, block.live, block.start, None)
    for index in order:
        during, after = block.step(index, state)
        state = _State(max(state.peak, during), after, state.done | 1 << index, None)
    return state


def _depth_first(block: _Block) -> list[int]:
    """From each result back through its operands, the larger ones first."""
    weight = [sum(block.sizes[number] for number in each) for each in block.touches]
    order: list[int] = []
    seen: set[int] = set()
    for root in [index for index in range(block.count) if not block.after[index]]:
        stack = [(root, False)]
        while stack:
            index, is_ready = stack.pop()
            if is_ready:
                order.append(index)
            elif index not in seen:
                seen.add(index)
                stack.append((index, True))
                operands = sorted(_bits(block.before[index]), key=lambda each: (weight[each], -each))
                stack += [(each, False) for each in operands if each not in seen]
    return order


def _wide(block: _Block, effort: Effort, ceiling: int) -> list[int] | None:
    """The beam, as wide as the effort's number of expansions allows."""
    breadth = max(1, _mean_ready(block))
    width = min(_WIDTH[effort], _EXPANSIONS[effort] // (block.count * breadth))
    return _beam(block, width, ceiling) if width > 1 else None


def _mean_ready(block: _Block) -> int:
    """How many instructions can go next, on average over the given order."""
    done, ready, total = block.start, {i for i in range(block.count) if not block.before[i]}, 0
    for index in range(block.count):
        total += len(ready)
        done |= 1 << index
        ready.discard(index)
        ready |= {each for each in block.after[index] if not block.before[each] & ~done}
    return total // block.count


def _beam(block: _Block, width: int, ceiling: int) -> list[int] | None:
    """Keep the best ``width`` sets of finished instructions of each size whose peak is below the ceiling."""
    ready = frozenset(index for index in range(block.count) if not block.before[index])
    layer = [(_State(block.live, block.live, block.start, None), ready)]
    for _ in range(block.count):
        grown: dict[int, tuple[_State, frozenset[int], int]] = {}
        for state, open_ in layer:
            for index, during, after in _moves(block, state, open_):
                peak, done = max(state.peak, during), state.done | 1 << index
                known = grown.get(done)
                if peak < ceiling and (known is None or (peak, after) < (known[0].peak, known[0].live)):
                    grown[done] = (_State(peak, after, done, _Link(index, state.order)), open_, index)
        best = sorted(grown.values(), key=lambda each: (each[0].peak, each[0].live, each[2]))[:width]
        layer = [(state, _opened(block, state.done, open_, index)) for state, open_, index in best]
        if not layer:
            return None
    return _unlinked(layer[0][0])


def _moves(block: _Block, state: _State, ready: frozenset[int]) -> list[tuple[int, int, int]]:
    """The next instructions worth trying: only one, if it costs nothing and may free something."""
    found: list[tuple[int, int, int]] = []
    for index in sorted(ready):
        during, after = block.step(index, state)
        if during <= state.peak and after <= state.live:
            return [(index, during, after)]
        found.append((index, during, after))
    return found


def _opened(block: _Block, done: int, ready: frozenset[int], index: int) -> frozenset[int]:
    freed = [each for each in block.after[index] if not block.before[each] & ~done]
    return (ready - {index}).union(freed)


def _unlinked(state: _State) -> list[int]:
    order: list[int] = []
    link = state.order
    while link is not None:
        order.append(link.index)
        link = link.before
    return order[::-1]

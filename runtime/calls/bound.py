"""Bindings of a method to sizes and addresses: which are kept, and when they become device graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend import Operand
from ..program import Method
from .binding import CopyTally, Execution
from .counted import Counts
from .direct import Direct
from .host_io import MovingOutput
from .inputs import Store
from .outputs import Fetch

BOUND_LIMIT = 16
"""Bindings (and captured graphs) kept per method for symbol values and addresses of the caller's memory."""
CAPTURED_AT_ONCE = 4
"""So many bindings are captured when they are made; any further one when it is used again."""

Sizes = tuple[int, ...]
"""Of a method's symbols, in their order."""


Quick = Callable[[Sequence[Any], bool], dict[str, Any]]
"""A call: inputs in port order, and whether the outputs are borrowed; gives the outputs by name."""


def storing(stores: Sequence[Store]) -> Callable[[Sequence[Any]], None]:
    """One function that stores all inputs. One and two are unrolled: `zip` would cost as much as they do."""
    if len(stores) == 1:
        (only,) = stores
        return lambda args: only(args[0])
    if len(stores) == 2:
        first, second = stores

        def store_both(args: Sequence[Any]) -> None:
            first(args[0])
            second(args[1])

        return store_both

    def store_all(args: Sequence[Any]) -> None:
        for store, value in zip(stores, args, strict=True):
            store(value)

    return store_all


def fetching(names: Sequence[str], fetches: Sequence[Fetch]) -> Callable[[], dict[str, Any]]:
    """One function that fetches all outputs by name."""
    pairs = tuple(zip(names, fetches, strict=True))
    if len(pairs) == 1:
        ((name, only),) = pairs
        return lambda: {name: only()}
    return lambda: {name: fetch() for name, fetch in pairs}


def after(counts: Counts | None, fetch_all: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The same function, after the check of sizes where there are any."""
    if counts is None:
        return fetch_all

    def checked() -> dict[str, Any]:
        counts.check()
        return fetch_all()

    return checked


@dataclass
class Bound:
    """A method bound for given symbol values and caller addresses."""

    operands: dict[str, Operand]
    bindings: Mapping[str, int]
    stores: list[Store]
    execution: Execution
    fetches: list[Fetch]
    borrows: list[Fetch]
    moving: list[MovingOutput]
    """Outputs that a call may write straight into memory of the caller's."""
    direct: Direct
    """Copies that are saved, and the blocks reserved for them."""
    names: Sequence[str]
    """Of the outputs."""
    store_all: Callable[[Sequence[Any]], None] = field(init=False)
    """Stores the inputs, in the order of the ports."""
    fetch_all: Callable[[], dict[str, Any]] = field(init=False)
    borrow_all: Callable[[], dict[str, Any]] = field(init=False)
    """The outputs by name, as the caller's own or borrowed."""
    counts: Counts | None = None
    """Sizes that depend on data, checked before outputs are fetched; None where there are none."""
    quick: Quick | None = None
    """A call of it, once it is captured for life."""
    uses: int = 0
    not_captured_reason: str = "these shapes and addresses are new; they are captured when they come again"

    def __post_init__(self) -> None:
        self.store_all = storing(self.stores)
        self.fetch_all = after(self.counts, fetching(self.names, self.fetches))
        self.borrow_all = after(self.counts, fetching(self.names, self.borrows))

    def retire(self) -> CopyTally:
        """Give back what a failed call left; the copies executed so far."""
        self.quick = None
        for output in self.moving:
            output.drop()
        self.direct.close()
        return self.execution.copies()

    @property
    def no_graph_reason(self) -> str:
        """Why this does not run as one device graph; empty when it does."""
        if self.execution.is_captured:
            return self.execution.no_graph_reason
        return self.execution.obstacle() or self.not_captured_reason

    @property
    def graph_nbytes(self) -> int | None:
        """Device bytes that its graphs took, by the driver's free memory; None where there are none."""
        steps = (segment.step for segment in self.execution.segments)
        taken = [nbytes for step in steps if (nbytes := getattr(step, "nbytes", None)) is not None]
        return sum(taken) if taken else None


def graphs_nbytes(bounds: Iterable[Bound]) -> int | None:
    """Device bytes that the graphs of all bindings took; None where there are none, or none that tell."""
    taken = [nbytes for bound in bounds if (nbytes := bound.graph_nbytes) is not None]
    return sum(taken) if taken else None


@dataclass(frozen=True)
class BucketUse:
    """What became of one declared bucket so far."""

    sizes: Mapping[str, int]
    """By the symbols' titles."""
    calls: int
    no_graph_reason: str
    """Why its last call did not run as one device graph; empty when it did."""
    graph_nbytes: int | None
    """Device bytes that its graphs took, by the driver's free memory; None where there are none."""

    def document(self) -> dict[str, Any]:
        """As the command line's contract has it."""
        return {
            "sizes": dict(self.sizes),
            "calls": self.calls,
            "cuda_graph": {"reason": self.no_graph_reason} if self.no_graph_reason else True,
            "graph_bytes": self.graph_nbytes,
        }


@dataclass
class BoundCache:
    """The bindings of a method whose sizes or addresses change from call to call.

    A bucket's binding is made once, captured at once and kept as long as the method. Anything else, and a
    bucket at addresses that the caller chooses, shares `BOUND_LIMIT` places, the least recently used one
    giving way. Where buckets are declared, other sizes are captured only when they come again: the user has
    said which sizes are worth a graph.
    """

    bind: Callable[[Mapping[str, int], Mapping[str, int]], Bound]
    """Makes a binding of symbol values and the addresses of external storages."""
    buckets: Mapping[Sizes, str]
    """The declared sizes, with their titles for messages."""
    calls: dict[Sizes, int] = field(init=False)
    """Calls so far, by bucket."""
    other_calls: int = 0
    """Calls of other sizes."""
    retired: CopyTally = field(default_factory=CopyTally)
    """What bindings that were given up had copied."""
    _kept: dict[Sizes, Bound] = field(default_factory=dict[Sizes, Bound])
    _recent: OrderedDict[tuple[Sizes, Sizes], Bound] = field(
        default_factory=OrderedDict[tuple[Sizes, Sizes], Bound]
    )

    def __post_init__(self) -> None:
        self.calls = dict.fromkeys(self.buckets, 0)

    def __len__(self) -> int:
        return len(self._kept) + len(self._recent)

    def __iter__(self) -> Iterator[Bound]:
        yield from self._kept.values()
        yield from self._recent.values()

    def take(self, bindings: Mapping[str, int], external: Mapping[str, int]) -> Bound:
        """The binding for a call, captured if it is time, and the call counted."""
        sizes = tuple(bindings.values())
        if sizes not in self.buckets:
            self.other_calls += 1
            return self._from_recent(sizes, bindings, external)
        self.calls[sizes] += 1
        return self._from_recent(sizes, bindings, external) if external else self.keep(bindings)

    def hit(self, sizes: Sizes) -> Bound | None:
        """A bucket's binding that was captured before, and the call counted; None where there is none."""
        bound = self._kept.get(sizes)
        if bound is not None:
            self.calls[sizes] += 1
        return bound

    def keep(self, bindings: Mapping[str, int]) -> Bound:
        """The binding of a bucket whose addresses are all the program's own, captured."""
        sizes = tuple(bindings.values())
        bound = self._kept.get(sizes)
        if bound is None:
            bound = self._kept[sizes] = self.bind(bindings, {})
        if not bound.execution.is_captured:
            bound.execution.capture()
        return bound

    def _from_recent(self, sizes: Sizes, bindings: Mapping[str, int], external: Mapping[str, int]) -> Bound:
        key = (sizes, tuple(external.values()))
        bound = self._recent.get(key)
        if bound is None:
            bound = self._recent[key] = self.bind(bindings, external)
            bound.not_captured_reason = self._explain(sizes) or bound.not_captured_reason
            if len(self._recent) > BOUND_LIMIT:
                self.retired.merge(self._recent.popitem(last=False)[1].retire())
        is_declared = not self.buckets or sizes in self.buckets
        at_once = is_declared and len(self._recent) <= CAPTURED_AT_ONCE
        if not bound.execution.is_captured and (bound.uses or at_once):
            bound.execution.capture()
        bound.uses += 1
        self._recent.move_to_end(key)
        return bound

    def _explain(self, sizes: Sizes) -> str:
        if not self.buckets or sizes in self.buckets:
            return ""
        listed = "; ".join(self.buckets.values())
        return (
            f"these sizes are none of the declared buckets ({listed}); they are captured when they come again"
        )

    def bounds(self, sizes: Sizes) -> list[Bound]:
        """The bindings of a bucket, the one used last at the end."""
        kept = [self._kept[sizes]] if sizes in self._kept else []
        return kept + [bound for (own, _), bound in self._recent.items() if own == sizes]

    def uses(self, method: Method) -> tuple[BucketUse, ...]:
        """What became of each bucket so far, in the order in which they are declared."""
        titles = [symbol.title for symbol in method.symbols]
        found: list[BucketUse] = []
        for sizes, calls in self.calls.items():
            bounds = self.bounds(sizes)
            reason = bounds[-1].no_graph_reason if bounds else "no call had these sizes yet"
            named = dict(zip(titles, sizes, strict=True))
            found.append(BucketUse(named, calls, reason, graphs_nbytes(bounds)))
        return tuple(found)

    def copies(self, others: Iterable[Bound] = ()) -> CopyTally:
        """Copies executed so far by these bindings, those given up and the others."""
        total = CopyTally()
        total.merge(self.retired)
        for bound in (*self, *others):
            total.merge(bound.execution.copies())
        return total

    def clear(self) -> None:
        """Drop all bindings."""
        for bound in self:
            bound.retire()
        self._kept.clear()
        self._recent.clear()

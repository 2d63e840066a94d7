"""A method with dynamic dimensions seen at one set of sizes: what its buckets are planned and checked as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..expr import Expr, evaluate
from ..program import BucketPlan, Method, MethodPlan, Storage


def method_at(method: Method, sizes: Sequence[int]) -> Method:
    """The method with its storages as large as they are for these sizes of its symbols, in their order.

    ValueError when there is not one size for each symbol. Values keep their expressions.
    """
    symbols = tuple(
        replace(symbol, lower=size, upper=size) for symbol, size in zip(method.symbols, sizes, strict=True)
    )
    bindings = {symbol.name: symbol.upper for symbol in symbols}

    def at(storage: Storage) -> Storage:
        if not isinstance(storage.nbytes, Expr):
            return storage
        return replace(storage, nbytes=evaluate(storage.nbytes, bindings), max_nbytes=-1)

    return replace(method, symbols=symbols, storages=tuple(map(at, method.storages)))


def plan_at(plan: MethodPlan, bucket: BucketPlan) -> MethodPlan:
    """The method's plan with a bucket's places and sizes in place of those at the bound; state stays."""
    state = tuple(arena for arena in plan.arenas if arena.kind == "state")
    blocks = {arena.memory_id for arena in state}
    kept = tuple(place for place in plan.allocations if place.memory_id in blocks)
    return MethodPlan(plan.method, (*bucket.arenas, *state), (*bucket.allocations, *kept), plan.live_ranges)


def bucket_title(method: Method, sizes: Sequence[int]) -> str:
    """``batch=8, length=128``."""
    return ", ".join(f"{symbol.title}={size}" for symbol, size in zip(method.symbols, sizes, strict=True))


def symbol_places(method: Method) -> list[tuple[int, int]]:
    """The input, by its number, and the dimension that is each symbol.

    None at all where a symbol must be solved for, or where memory is the caller's own.
    """
    if any(storage.external for storage in method.storages):
        return []
    indices = {port.name: index for index, port in enumerate(method.inputs)}
    places: list[tuple[int, int]] = []
    for symbol in method.symbols:
        index = indices[symbol.input]
        extent = method.value(method.inputs[index].value).shape[symbol.dimension]
        if str(extent) != symbol.name:
            return []
        places.append((index, symbol.dimension))
    return places

"""What ET12 can say of a tensor, computed from the program: the writer packs it, the reader compares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArtifactError
from ..expr import Expr, Size, evaluate
from ..program import Device, Method, MethodPlan, Program, Role, Storage, Value
from .layout import Blob


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in ET12's terms: sizes at their bounds, a dimension order in place of strides.

    ``dim_order`` is the identity where the strides are not a dense permutation; only delegates touch those.
    ``allocation`` is (memory id, offset in the arena), None for constants, the caller's memory and plans made
    at run time. ``data_index`` counts constants (or initial values, when allocated) from 1.
    """

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    is_dynamic: bool
    allocation: tuple[int, int] | None
    data_index: int
    device: Device
    external: str = ""
    """Key of a constant whose bytes are in another file."""


@dataclass(frozen=True)
class ConstantTable:
    """ET12's numbering of constant data: (digest, bytes into it) in file order; index 0 is reserved."""

    offsets: tuple[int, ...]
    """Offsets in the constants' segment; element 0 is the placeholder."""
    indices: Mapping[tuple[str, int], int]
    contents: Mapping[str, str]
    """Digest by name of constant or state; empty for a state that starts as zeros."""
    outside: frozenset[str] = frozenset()
    """Digests of constants in other files; they have no number."""


def constant_table(program: Program, blobs: Sequence[Blob]) -> ConstantTable:
    """Number every constant, and every window into one that a value begins at."""
    contents = {constant.name: constant.digest for constant in program.constants}
    contents |= {state.name: state.initial for state in program.state}
    outside = frozenset(blob.digest for blob in blobs if blob.location)
    starts = {(blob.digest, 0) for blob in blobs if blob.digest not in outside}
    for method in program.methods:
        storages = {storage.name: storage for storage in method.storages}
        for value in method.values:
            digest = contents.get(storages[value.storage].content, "")
            if digest and digest not in outside and isinstance(value.offset, int):
                starts.add((digest, value.offset))
    places = {blob.digest: blob.offset for blob in blobs}
    ordered = sorted(starts, key=lambda start: (places[start[0]] + start[1], start))
    offsets = (0, *(places[digest] + offset for digest, offset in ordered))
    indices = {start: index for index, start in enumerate(ordered, 1)}
    return ConstantTable(offsets, indices, contents, outside)


def tensor_views(method: Method, plan: MethodPlan | None, table: ConstantTable) -> tuple[TensorView, ...]:
    """The method's values, in order."""
    bounds = {symbol.name: symbol.upper for symbol in method.symbols}
    unused = {item.storage for item in plan.live_ranges if item.begin == item.end} if plan else set[str]()
    places = {
        item.storage: (item.memory_id, item.offset)
        for item in (plan.allocations if plan else ())
        if item.storage not in unused  # nothing is reserved for them
    }
    storages = {storage.name: storage for storage in method.storages}
    return tuple(
        _tensor(value, storages[value.storage], places.get(value.storage), bounds, table)
        for value in method.values
    )


def _tensor(
    value: Value,
    storage: Storage,
    place: tuple[int, int] | None,
    bounds: Mapping[str, int],
    table: ConstantTable,
) -> TensorView:
    sizes = tuple(evaluate(size, bounds) for size in value.shape)
    strides = tuple(evaluate(stride, bounds) for stride in value.strides)
    start = evaluate(value.offset, bounds) if isinstance(value.offset, int) else 0
    digest = table.contents.get(storage.content, "") if storage.role in (Role.CONSTANT, Role.STATE) else ""
    if any(size >= 2**31 for size in sizes):
        raise ArtifactError(f"value `{value.name}` has a dimension that ET12 cannot hold", why="2^31 or more")
    return TensorView(
        value.dtype.scalar_type,
        sizes,
        dim_order(sizes, strides),
        any(isinstance(size, Expr) for size in value.shape),
        (place[0], place[1] + start) if place else None,
        table.indices.get((digest, start), 0),
        storage.device,
        storage.content if digest in table.outside else "",
    )


def dim_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost; the identity when that cannot say it."""
    identity = tuple(range(len(sizes)))
    if is_dense(sizes, strides, identity):
        return identity
    order = tuple(sorted(identity, key=lambda dim: (-strides[dim], -sizes[dim], dim)))
    return order if is_dense(sizes, strides, order) else identity


def is_dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the strides lay the dimensions out without gaps in that order; extents of 1 do not matter."""
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return False
        expected *= max(sizes[dim], 1)
    return True


def buffers(planned_methods: Sequence[MethodPlan], plan: MethodPlan | None) -> list[tuple[int, Device]]:
    """ET12's buffer list of a method, the reserved element 0 included: (bytes, device) by memory id."""
    if plan is None or not plan.arenas:
        return [(0, Device("cpu"))] * (2 if plan is not None else 1)
    devices = {arena.memory_id: arena.device for item in planned_methods for arena in item.arenas}
    sizes = {arena.memory_id: arena.nbytes for arena in plan.arenas}
    last = max(sizes)
    return [
        (sizes.get(index, 0), devices.get(index, Device("cpu")) if index else Device("cpu"))
        for index in range(last + 1)
    ]


def upper_bound(size: Size, method: Method) -> int:
    """A size at the declared bound of every symbol."""
    return evaluate(size, {symbol.name: symbol.upper for symbol in method.symbols})

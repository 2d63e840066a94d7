"""What is inside an artifact, as the JSON document that `inspect --json` prints.

The shape of the document is a contract; `artifact/inspect.schema.json` states it for validators. Sizes are
bytes, at the declared bound of every dynamic dimension; instruction indices are inclusive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .artifact.reader import Artifact
from .calls.buckets import plan_at
from .expr import Size, evaluate
from .program import (
    Allocation,
    Arena,
    BucketPlan,
    Copy,
    CopyKind,
    Count,
    HostCall,
    Launch,
    LibraryCall,
    LiveRange,
    Method,
    MethodPlan,
    Port,
    Program,
    Role,
    Storage,
    Value,
)

SCHEMA = 1
Document = dict[str, Any]
LOCATIONS = ("embed", "external", "reference", "none")


def describe(artifact: Artifact, *, sha256: bool = True) -> Document:
    """The whole document.

    Args:
        artifact: a file that was read.
        sha256: whether to read all of the file for its digest (1 GB takes about half a second); else null.
    """
    program, plan = artifact.planned.program, artifact.planned.plan
    plans = {item.method: item for item in plan.methods}
    return {
        "schema": SCHEMA,
        "file": {
            "bytes": artifact.nbytes,
            "format": artifact.format,
            "sha256": artifact.sha256 if sha256 else None,
        },
        "devplan": artifact.producer,
        "architectures": list(program.architectures),
        "constants": _constants(program, max((blob.location for blob in artifact.blobs), default=0)),
        "state": _state(program),
        "library_tunings": [
            {
                "gpu": tuning.gpu,
                "architecture": tuning.architecture,
                "versions": dict(tuning.versions),
                "algorithms": dict(tuning.algorithms),
            }
            for tuning in program.tunings
        ],
        "methods": [describe_method(method, plans.get(method.name)) for method in program.methods],
    }


def _constants(program: Program, location: int) -> Document:
    """``location`` is where any of them are that is not the artifact itself."""
    unique = {constant.digest: constant.nbytes for constant in program.constants}
    return {
        "count": len(program.constants),
        "bytes": sum(constant.nbytes for constant in program.constants),
        "unique_bytes": sum(unique.values()),
        "location": LOCATIONS[location],
    }


def _state(program: Program) -> list[Document]:
    users: dict[str, list[str]] = {}
    for method in program.methods:
        for name in dict.fromkeys(item.content for item in method.storages if item.role is Role.STATE):
            users.setdefault(name, []).append(method.name)
    return [
        {
            "name": state.name,
            "dtype": str(state.dtype),
            "shape": list(state.shape),
            "bytes": state.nbytes,
            "device": str(state.device),
            "methods": users.get(state.name, []),
        }
        for state in program.state
    ]


def describe_method(method: Method, plan: MethodPlan | None) -> Document:
    """One element of ``methods``. Storages that nothing touches take no memory and are left out."""
    view = _View(method)
    return {
        "name": method.name,
        "inputs": [view.port(port) for port in method.inputs],
        "outputs": [
            view.port(port) | {"aliases": _aliases(port), "data_dependent": view.data_dependent(port)}
            for port in method.outputs
        ],
        "symbols": [
            {
                "name": symbol.name,
                "lower": symbol.lower,
                "upper": symbol.upper,
                "input": symbol.input,
                "dimension": symbol.dimension,
                "label": symbol.title,
            }
            for symbol in method.symbols
        ],
        "counts": [view.count(count) for count in method.counts],
        "buckets": [_bucket(bucket, method, plan, view.storages) for bucket in plan.buckets] if plan else [],
        "copies": view.copies(),
        "arenas": [_arena(arena, plan, view.storages) for arena in plan.arenas] if plan else [],
        "regions": _regions(method),
        "kernels": _kernels(method),
        "notes": list(method.notes),
    }


class _View:
    """A method with its names resolved."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.storages = {storage.name: storage for storage in method.storages}
        self.values = {value.name: value for value in method.values}
        self.bounds = {symbol.name: symbol.upper for symbol in method.symbols}

    def port(self, port: Port) -> Document:
        if not port.value:
            literal = (
                port.literal
                if isinstance(port.literal, int | float | bool | str | None)
                else str(port.literal)
            )
            return {
                "name": port.name, "dtype": type(literal).__name__, "shape": [], "max_shape": [],
                "device": "cpu", "bytes": 0, "literal": literal,
            }  # fmt: skip
        value = self.values[port.value]
        return {
            "name": port.name,
            "dtype": str(value.dtype),
            "shape": [
                port.count
                if port.count and axis == port.axis
                else (size if isinstance(size, int) else str(size))
                for axis, size in enumerate(value.shape)
            ],
            "max_shape": [evaluate(size, self.bounds) for size in value.shape],
            "device": str(self.storages[value.storage].device),
            "bytes": self.nbytes(value),
        }

    def data_dependent(self, port: Port) -> Document | None:
        """Which dimension of an output has a size that is known when a call ends, and its declared bounds."""
        if not port.count:
            return None
        (count,) = (count for count in self.method.counts if count.name == port.count)
        return {"dimension": port.axis, "count": count.name, "lower": count.lower, "upper": count.upper}

    def count(self, count: Count) -> Document:
        """A size that depends on data, and the outputs that have it; without any it is only checked.

        A difference is none of those: it is how far two of them differ that must be equal.
        """
        outputs = [port.name for port in self.method.outputs if port.count == count.name]
        return {
            "name": count.name,
            "lower": count.lower,
            "upper": count.upper,
            "difference": count.is_difference,
            "outputs": outputs,
            "origin": str(count.origin),
        }

    def nbytes(self, value: Value) -> int:
        """Bytes of the elements, without gaps between them."""
        return numel(value.shape, self.bounds) * value.dtype.itemsize

    def copies(self) -> list[Document]:
        """The ledger: every transfer between devices, in execution order."""
        names = {count.value: f"size {count.name}" for count in self.method.counts}
        names |= {port.value: port.name for port in (*self.method.outputs, *self.method.inputs) if port.value}
        ledger: list[Document] = []
        for index, item in enumerate(self.method.instructions):
            if not isinstance(item, Copy) or item.kind is CopyKind.LOCAL:
                continue
            source, destination = self.values[item.source], self.values[item.destination]
            ledger.append(
                {
                    "kind": item.kind.value,
                    "tensor": names.get(item.source) or names.get(item.destination) or item.source,
                    "bytes": self.nbytes(source),
                    "from": str(self.storages[source.storage].device),
                    "to": str(self.storages[destination.storage].device),
                    "reason": item.reason,
                    "instruction": index,
                }
            )
        return ledger


def numel(shape: Sequence[Size], bounds: Mapping[str, int]) -> int:
    """Elements of a shape, its symbols at the given values."""
    product = 1
    for size in shape:
        product *= evaluate(size, bounds)
    return product


def _aliases(port: Port) -> Document | None:
    return {port.aliases[0]: port.aliases[1]} if port.aliases else None


def _arena(arena: Arena, plan: MethodPlan, storages: Mapping[str, Storage]) -> Document:
    ranges = {item.storage: item for item in plan.live_ranges if item.begin < item.end}
    mine = [item for item in plan.allocations if item.memory_id == arena.memory_id and item.storage in ranges]
    return {
        "device": str(arena.device),
        "memory_id": arena.memory_id,
        "kind": arena.kind,
        "planned_bytes": arena.nbytes,
        "lower_bound_bytes": arena.lower_bound,
        "sum_bytes": arena.sum_nbytes,
        "algorithm": arena.algorithm,
        "allocations": [_allocation(item, ranges[item.storage], storages[item.storage]) for item in mine],
    }


def _bucket(
    bucket: BucketPlan, method: Method, plan: MethodPlan, storages: Mapping[str, Storage]
) -> Document:
    """A declared set of sizes with its own plan; the arenas' blocks are those of the method."""
    own = plan_at(plan, bucket)
    titles = (symbol.title for symbol in method.symbols)
    return {
        "sizes": dict(zip(titles, bucket.sizes, strict=True)),
        "arenas": [_arena(arena, own, storages) for arena in bucket.arenas],
    }


def _allocation(item: Allocation, live: LiveRange, storage: Storage) -> Document:
    return {
        "name": item.storage,
        "offset": item.offset,
        "bytes": item.nbytes,
        "first": live.begin,
        "last": live.end - 1,
        "role": storage.role.value,
    }


def _regions(method: Method) -> list[Document]:
    launches = Counter(
        item.region for item in method.instructions if isinstance(item, Launch | LibraryCall | HostCall)
    )
    return [
        {
            "device": str(region.device),
            "backend": region.backend,
            "operators": region.operators,
            "launches": launches[index],
        }
        for index, region in enumerate(method.regions)
    ]


def _kernels(method: Method) -> Document:
    """How many calls of each kind one execution lists. ``torch``: host calls that run through torch."""
    counts = {"generated": 0, "library": 0, "host": 0, "torch": 0}
    for item in method.instructions:
        match item:
            case Launch():
                counts["generated"] += 1
            case LibraryCall():
                counts["library"] += 1
            case HostCall():
                counts["torch" if item.target.startswith("aten::") else "host"] += 1
            case _:
                pass
    return counts

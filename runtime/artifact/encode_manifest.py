"""From a planned program to the manifest's tables; `decode_manifest.py` is the mirror image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ..errors import ArtifactError
from ..program import (
    Allocation,
    Arena,
    BucketPlan,
    Constant,
    Count,
    Kernel,
    KernelCode,
    LibraryTuning,
    LiveRange,
    Method,
    MethodPlan,
    PlannedProgram,
    Port,
    StateVariable,
    Storage,
    Value,
)
from ..weights.recipes import Part
from .encode import (
    ALIAS_KINDS,
    ARENA_KINDS,
    CODE_FORMS,
    ROLES,
    Scope,
    argument,
    attributes,
    device_table,
    instruction,
)
from .generated import devplan_generated as fb
from .layout import Blob, DataFile, version_of
from .runs import Step, steps


def manifest(
    planned: PlannedProgram, blobs: Sequence[Blob], files: Sequence[DataFile], producer: str
) -> fb.ManifestT:
    """The whole program but for constants' bytes, kernels' code and what is in the delegates' blobs."""
    program = planned.program
    kernels = {kernel.name: index for index, kernel in enumerate(program.kernels)}
    plans = {plan.method: plan for plan in planned.plan.methods}
    numbers = {blob.digest: index for index, blob in enumerate(blobs)}
    table = fb.ManifestT()
    table.version, table.producer = version_of(program), producer
    table.architectures = list(program.architectures)
    table.blobs = [_blob(blob) for blob in blobs]
    table.constants = [_constant(constant, numbers) for constant in program.constants]
    table.state = [_state(state, numbers) for state in program.state]
    table.kernels = [_kernel(kernel) for kernel in program.kernels]
    table.methods = [method(item, plans.get(item.name), kernels) for item in program.methods]
    table.isStatic = planned.plan.is_static
    table.files = [_file(item) for item in files]
    table.tunings = [_tuning(item) for item in program.tunings] or None
    return table


def _tuning(item: LibraryTuning) -> fb.LibraryTuningT:
    table = fb.LibraryTuningT()
    table.gpu, table.architecture = item.gpu, item.architecture
    table.versions, table.algorithms = [], []
    for library, version in item.versions:
        entry = fb.LibraryVersionT()
        entry.library, entry.version = library, version
        table.versions.append(entry)
    for key, number in item.algorithms:
        choice = fb.AlgorithmT()
        choice.key, choice.number = key, number
        table.algorithms.append(choice)
    return table


def _file(item: DataFile) -> fb.DataFileT:
    table = fb.DataFileT()
    table.name, table.nbytes, table.headNbytes = item.name, item.nbytes, item.head_nbytes
    table.digest = bytes.fromhex(item.digest)
    return table


def _blob(blob: Blob) -> fb.BlobT:
    table = fb.BlobT()
    table.digest, table.nbytes = bytes.fromhex(blob.digest), blob.nbytes
    table.location, table.offset, table.file, table.key = blob.location, blob.offset, blob.file, blob.key
    if blob.recipe is not None:
        table.parts = [_part(part) for part in blob.recipe.parts]
        table.scalarType = blob.recipe.dtype.scalar_type
        table.shape, table.strides = list(blob.recipe.shape), list(blob.recipe.strides)
    return table


def _part(part: Part) -> fb.PartT:
    table = fb.PartT()
    table.names, table.shape = list(part.names), list(part.shape)
    return table


def _constant(item: Constant, numbers: Mapping[str, int]) -> fb.ConstantT:
    table = fb.ConstantT()
    table.name, table.blob, table.scalarType = item.name, numbers[item.digest], item.dtype.scalar_type
    table.shape, table.strides, table.device = list(item.shape), list(item.strides), device_table(item.device)
    return table


def _state(item: StateVariable, numbers: Mapping[str, int]) -> fb.StateT:
    table = fb.StateT()
    table.name, table.scalarType, table.shape = item.name, item.dtype.scalar_type, list(item.shape)
    table.device, table.nbytes = device_table(item.device), item.nbytes
    table.initial = numbers[item.initial] + 1 if item.initial else 0
    return table


def _kernel(item: Kernel) -> fb.KernelT:
    table = fb.KernelT()
    table.name, table.source = item.name, item.source
    table.parameters = []
    for parameter in item.parameters:
        entry = fb.ParameterT()
        entry.name, entry.type = parameter.name, parameter.type
        table.parameters.append(entry)
    table.codes = [_code(code) for code in item.codes]
    table.constants = attributes(item.constants, Scope(_no_index, _no_index))
    table.numWarps, table.numStages = item.num_warps, item.num_stages
    return table


def _no_index(name: str) -> int:
    """A kernel's constants are literals; they refer to nothing."""
    raise ArtifactError(f"a kernel's constant refers to `{name}`")


def _code(item: KernelCode) -> fb.CodeT:
    table = fb.CodeT()
    table.architecture, table.form = item.architecture, CODE_FORMS.index(item.form)
    table.symbol, table.digest = item.symbol, code_digest(item.data)
    table.numWarps, table.sharedNbytes, table.waits = item.num_warps, item.shared_nbytes, item.waits
    return table


def code_digest(data: bytes) -> bytes:
    """SHA-256 of a kernel's code: its key in the file."""
    return hashlib.sha256(data).digest()


def method(item: Method, plan: MethodPlan | None, kernels: Mapping[str, int]) -> fb.MethodT:
    """All of a method but the instructions of its delegates, for the manifest."""
    storages = {storage.name: index for index, storage in enumerate(item.storages)}
    values = {value.name: index for index, value in enumerate(item.values)}
    scope = Scope(values.__getitem__, kernels.__getitem__)
    table = fb.MethodT()
    table.name = item.name
    counts = {count.name: index for index, count in enumerate(item.counts)}
    table.inputs = [_port(port, scope, counts) for port in item.inputs]
    table.outputs = [_port(port, scope, counts) for port in item.outputs]
    table.counts = [_count(count, scope) for count in item.counts] or None
    table.storages = [_storage(storage, scope) for storage in item.storages]
    table.values = [_value(value, storages, scope) for value in item.values]
    table.instructions = _step_tables(item, steps(item), scope)
    table.regions, table.symbols = _regions(item), _symbols(item)
    table.inputTree, table.outputTree, table.notes = item.input_tree, item.output_tree, list(item.notes)
    table.expressions, table.origins = list(scope.expressions), scope.origin_tables()
    table.plan = _plan(plan, storages) if plan else None
    return table


def _step_tables(item: Method, cut: Sequence[Step], scope: Scope) -> list[fb.InstructionT]:
    tables: list[fb.InstructionT] = []
    delegate = 0
    for step in cut:
        if step.device is None:
            tables.append(instruction(item.instructions[step.first], scope))
            continue
        table, body = fb.InstructionT(), fb.RegionCallT()
        body.delegate, body.count = delegate, step.count
        table.bodyType, table.body = fb.Body.RegionCall, body
        tables.append(table)
        delegate += 1
    return tables


def _port(port: Port, scope: Scope, counts: Mapping[str, int]) -> fb.PortT:
    table = fb.PortT()
    table.name = port.name
    table.value = scope.value(port.value) + 1 if port.value else 0
    if port.aliases is not None:
        table.aliasKind, table.aliasName = ALIAS_KINDS.index(port.aliases[0]), port.aliases[1]
    table.literal = argument(port.literal, scope) if port.literal is not None else None
    if port.count:
        table.count, table.axis = counts[port.count] + 1, port.axis
    return table


def _count(count: Count, scope: Scope) -> fb.CountT:
    table = fb.CountT()
    table.name, table.value = count.name, scope.value(count.value)
    table.lower, table.upper, table.origin = count.lower, count.upper, scope.origin(count.origin)
    table.isDifference = count.is_difference
    return table


def _storage(storage: Storage, scope: Scope) -> fb.StorageT:
    table = fb.StorageT()
    table.name, table.device, table.nbytes = (
        storage.name,
        device_table(storage.device),
        scope.size(storage.nbytes),
    )
    table.role, table.alignment = ROLES.index(storage.role), storage.alignment
    table.maxNbytes, table.external, table.content = storage.max_nbytes, storage.external, storage.content
    table.origin = scope.origin(storage.origin)
    return table


def _value(value: Value, storages: Mapping[str, int], scope: Scope) -> fb.ValueT:
    table = fb.ValueT()
    table.name, table.storage, table.scalarType = value.name, storages[value.storage], value.dtype.scalar_type
    table.shape, table.strides = scope.sizes(value.shape), scope.sizes(value.strides)
    table.offset = scope.size(value.offset)
    return table


def _regions(item: Method) -> list[fb.LoweredRegionT]:
    tables: list[fb.LoweredRegionT] = []
    for lowered in item.regions:
        table = fb.LoweredRegionT()
        table.device, table.backend = device_table(lowered.device), lowered.backend
        table.operators = lowered.operators
        tables.append(table)
    return tables


def _symbols(item: Method) -> list[fb.SymbolT]:
    tables: list[fb.SymbolT] = []
    for symbol in item.symbols:
        table = fb.SymbolT()
        table.name, table.lower, table.upper = symbol.name, symbol.lower, symbol.upper
        table.input, table.dimension, table.label = symbol.input, symbol.dimension, symbol.label or None
        tables.append(table)
    return tables


def _plan(plan: MethodPlan, storages: Mapping[str, int]) -> fb.PlanT:
    table = fb.PlanT()
    table.arenas = [_arena(item) for item in plan.arenas]
    table.placements = [_placement(item, storages) for item in plan.allocations]
    table.liveRanges = [_live_range(item, storages) for item in plan.live_ranges]
    table.buckets = [_bucket(item, storages) for item in plan.buckets] or None
    return table


def _bucket(item: BucketPlan, storages: Mapping[str, int]) -> fb.BucketT:
    table = fb.BucketT()
    table.sizes, table.arenas = list(item.sizes), [_arena(arena) for arena in item.arenas]
    table.placements = [_placement(place, storages) for place in item.allocations]
    return table


def _placement(item: Allocation, storages: Mapping[str, int]) -> fb.PlacementT:
    table = fb.PlacementT()
    table.storage, table.memoryId = storages[item.storage], item.memory_id
    table.offset, table.nbytes = item.offset, item.nbytes
    return table


def _live_range(item: LiveRange, storages: Mapping[str, int]) -> fb.LiveRangeT:
    table = fb.LiveRangeT()
    table.storage, table.begin, table.end = storages[item.storage], item.begin, item.end
    return table


def _arena(item: Arena) -> fb.ArenaT:
    table = fb.ArenaT()
    table.memoryId, table.device, table.nbytes = item.memory_id, device_table(item.device), item.nbytes
    table.lowerBound, table.sumNbytes = item.lower_bound, item.sum_nbytes
    table.algorithm, table.kind = item.algorithm, ARENA_KINDS.index(item.kind)
    return table

"""From the manifest and the delegates' blobs back to a planned program; mirrors `encode_manifest.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import ArtifactError
from ..program import (
    Allocation,
    Arena,
    BucketPlan,
    Constant,
    Count,
    Instruction,
    Kernel,
    KernelCode,
    KernelParameter,
    LibraryTuning,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Region,
    StateVariable,
    Storage,
    Symbol,
    Value,
)
from ..weights.recipes import Part, Recipe
from .decode import (
    ALIAS_KINDS,
    ARENA_KINDS,
    CODE_FORMS,
    ROLES,
    Names,
    argument,
    attributes,
    device,
    dtype,
    expressions,
    instruction,
    origins,
    pick,
    required,
)
from .layout import CODE_KEY, Blob, DataFile

if TYPE_CHECKING:
    from .generated import devplan_generated as fb

LoadRegion = Callable[[str, int], "fb.RegionT"]
"""The blob of a method's n-th delegate."""
REGION_CALL = 6
"""The tag of `RegionCall` in the union `Body`."""


def program(table: fb.ManifestT, load_region: LoadRegion, codes: Mapping[str, memoryview]) -> PlannedProgram:
    """The planned program; ``codes`` are the file's kernels by digest."""
    blobs = decode_blobs(table)
    kernels = tuple(_kernel(item, codes) for item in table.kernels or ())
    names = [kernel.name for kernel in kernels]
    methods: list[Method] = []
    plans: list[MethodPlan] = []
    for item in table.methods or ():
        methods.append(_method(item, names, load_region))
        if item.plan is not None:
            plans.append(_plan(item.plan, methods[-1]))
    return PlannedProgram(
        Program(
            tuple(methods),
            tuple(_constant(item, blobs) for item in table.constants or ()),
            tuple(_state(item, blobs) for item in table.state or ()),
            kernels,
            tuple(table.architectures or ()),
            tuple(_tuning(item) for item in table.tunings or ()),
        ),
        Plan(tuple(plans), table.isStatic),
    )


def _tuning(item: fb.LibraryTuningT) -> LibraryTuning:
    return LibraryTuning(
        item.gpu or "",
        item.architecture or "",
        tuple((entry.library or "", entry.version) for entry in item.versions or ()),
        tuple((entry.key or "", entry.number) for entry in item.algorithms or ()),
    )


def decode_blobs(table: fb.ManifestT) -> tuple[Blob, ...]:
    """Unique constants and where their bytes are."""
    return tuple(
        Blob(
            bytes(item.digest or b"").hex(),
            item.nbytes,
            item.offset,
            item.location,
            item.file or "",
            item.key or "",
            _recipe(item) if item.parts else None,
        )
        for item in table.blobs or ()
    )


def _recipe(item: fb.BlobT) -> Recipe:
    parts = tuple(
        Part(tuple(name or "" for name in part.names or ()), tuple(part.shape or ()))
        for part in item.parts or ()
    )
    made = Recipe(parts, dtype(item.scalarType), tuple(item.shape or ()), tuple(item.strides or ()))
    if len(made.shape) != len(made.strides) or made.nbytes != item.nbytes or not made.is_sound:
        raise ArtifactError(
            "the manifest is damaged", why=f"the recipe of `{parts[0].names}` contradicts itself"
        )
    return made


def decode_files(table: fb.ManifestT) -> tuple[DataFile, ...]:
    """The files that constants are in, besides the artifact."""
    return tuple(
        DataFile(item.name or "", item.nbytes, item.headNbytes, bytes(item.digest or b"").hex())
        for item in table.files or ()
    )


def _constant(item: fb.ConstantT, blobs: Sequence[Blob]) -> Constant:
    blob = pick(blobs, item.blob, "constant")
    return Constant(
        item.name or "",
        blob.digest,
        blob.nbytes,
        dtype(item.scalarType),
        tuple(item.shape or ()),
        tuple(item.strides or ()),
        device(item.device),
    )


def _state(item: fb.StateT, blobs: Sequence[Blob]) -> StateVariable:
    initial = pick(blobs, item.initial - 1, "constant").digest if item.initial else ""
    shape = tuple(item.shape or ())
    return StateVariable(
        item.name or "", dtype(item.scalarType), shape, device(item.device), item.nbytes, initial
    )


def _kernel(item: fb.KernelT, codes: Mapping[str, memoryview]) -> Kernel:
    constants = attributes(item.constants, Names((), (), (), ()))
    for name, value in constants:
        if value is not None and not isinstance(value, int | float | str):
            raise ArtifactError(
                "the manifest is damaged", why=f"constant `{name}` of `{item.name}` is no literal"
            )
    return Kernel(
        item.name or "",
        tuple(KernelParameter(entry.name or "", entry.type or "") for entry in item.parameters or ()),
        tuple(_code(entry, item.name or "", codes) for entry in item.codes or ()),
        item.source or "",
        constants,  # type: ignore[arg-type]  # checked above
        item.numWarps,
        item.numStages,
    )


def _code(item: fb.CodeT, kernel: str, codes: Mapping[str, memoryview]) -> KernelCode:
    digest = bytes(item.digest or b"").hex()
    if digest not in codes:
        raise ArtifactError(
            f"kernel `{kernel}` has no code for `{item.architecture}`", why=f"no `{CODE_KEY}{digest}`"
        )
    return KernelCode(
        item.architecture or "",
        pick(CODE_FORMS, item.form, "code form"),
        item.symbol or "",
        bytes(codes[digest]),
        item.numWarps,
        item.sharedNbytes,
        item.waits,
    )


def _method(item: fb.MethodT, kernels: Sequence[str], load_region: LoadRegion) -> Method:
    values = [value.name or "" for value in item.values or ()]
    names = Names(values, kernels, expressions(item.expressions), origins(item.origins))
    storages = tuple(_storage(entry, names) for entry in item.storages or ())
    counts = tuple(_count(entry, names) for entry in item.counts or ())
    return Method(
        name=item.name or "",
        inputs=tuple(_port(entry, names, counts) for entry in item.inputs or ()),
        outputs=tuple(_port(entry, names, counts) for entry in item.outputs or ()),
        storages=storages,
        values=tuple(_value(entry, storages, names) for entry in item.values or ()),
        instructions=_instructions(item, names, load_region),
        regions=tuple(
            Region(device(entry.device), entry.backend or "", entry.operators) for entry in item.regions or ()
        ),
        symbols=tuple(
            Symbol(
                entry.name or "",
                entry.lower,
                entry.upper,
                entry.input or "",
                entry.dimension,
                entry.label or "",
            )
            for entry in item.symbols or ()
        ),
        input_tree=item.inputTree or "",
        output_tree=item.outputTree or "",
        notes=tuple(item.notes or ()),
        counts=counts,
    )


def _instructions(item: fb.MethodT, names: Names, load_region: LoadRegion) -> tuple[Instruction, ...]:
    found: list[Instruction] = []
    for table in item.instructions or ():
        if table.bodyType == REGION_CALL:
            found += _region(item, table, names, load_region, len(found))
        else:
            found.append(instruction(table, names))
    return tuple(found)


def _region(
    item: fb.MethodT, table: fb.InstructionT, names: Names, load_region: LoadRegion, first: int
) -> list[Instruction]:
    call: fb.RegionCallT = required(table.body, "a region call")  # type: ignore[assignment]  # by its tag
    blob = load_region(item.name or "", call.delegate)
    count = len(blob.instructions or ())
    if (blob.method, blob.first, count) != (item.name, first, call.count):
        raise ArtifactError(
            f"delegate {call.delegate} of method `{item.name}` is not the one that the manifest means",
            why=f"it holds {count} of `{blob.method}` from {blob.first}, not {call.count} from {first}",
        )
    values = [pick(names.values, operand.value, "value") for operand in blob.operands or ()]
    inner = Names(values, names.kernels, expressions(blob.expressions), origins(blob.origins))
    return [instruction(entry, inner) for entry in blob.instructions or ()]


def _port(item: fb.PortT, names: Names, counts: Sequence[Count]) -> Port:
    kind = pick(ALIAS_KINDS, item.aliasKind, "alias kind")
    return Port(
        item.name or "",
        names.value(item.value - 1) if item.value else "",
        (kind, item.aliasName or "") if kind else None,
        argument(item.literal, names) if item.literal is not None else None,
        pick(counts, item.count - 1, "count").name if item.count else "",
        item.axis,
    )


def _count(item: fb.CountT, names: Names) -> Count:
    origin = names.origin(item.origin)
    value = names.value(item.value)
    return Count(item.name or "", value, item.lower, item.upper, origin, item.isDifference)


def _storage(item: fb.StorageT, names: Names) -> Storage:
    return Storage(
        name=item.name or "",
        device=device(item.device),
        nbytes=names.size(item.nbytes),
        role=pick(ROLES, item.role, "role"),
        alignment=item.alignment,
        max_nbytes=item.maxNbytes,
        external=item.external,
        content=item.content or "",
        origin=names.origin(item.origin),
    )


def _value(item: fb.ValueT, storages: Sequence[Storage], names: Names) -> Value:
    return Value(
        item.name or "",
        pick(storages, item.storage, "storage").name,
        dtype(item.scalarType),
        names.sizes(item.shape),
        names.sizes(item.strides),
        names.size(item.offset),
    )


def _plan(item: fb.PlanT, method: Method) -> MethodPlan:
    storages = [storage.name for storage in method.storages]
    return MethodPlan(
        method.name,
        tuple(_arena(entry) for entry in item.arenas or ()),
        tuple(_placement(entry, storages) for entry in item.placements or ()),
        tuple(
            LiveRange(pick(storages, entry.storage, "storage"), entry.begin, entry.end)
            for entry in item.liveRanges or ()
        ),
        tuple(
            BucketPlan(
                tuple(entry.sizes or ()),
                tuple(_arena(arena) for arena in entry.arenas or ()),
                tuple(_placement(place, storages) for place in entry.placements or ()),
            )
            for entry in item.buckets or ()
        ),
    )


def _placement(item: fb.PlacementT, storages: Sequence[str]) -> Allocation:
    return Allocation(pick(storages, item.storage, "storage"), item.memoryId, item.offset, item.nbytes)


def _arena(item: fb.ArenaT) -> Arena:
    return Arena(
        item.memoryId,
        device(item.device),
        item.nbytes,
        item.lowerBound,
        item.sumNbytes,
        item.algorithm or "",
        kind=pick(ARENA_KINDS, item.kind, "arena kind"),
    )

"""What is written is read back, exactly, for the sample and for generated programs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.planner import plan
from devplan.planner.options import PlanOptions
from devplan.runtime.artifact import read, write
from devplan.runtime.artifact.verify_contents import row_major, span
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ArtifactError
from devplan.runtime.expr import Expr, evaluate
from devplan.runtime.library import FUNCTIONS
from devplan.runtime.program import (
    CPU,
    NOWHERE,
    Argument,
    Constant,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
    LibraryCall,
    Method,
    PlannedProgram,
    Port,
    Program,
    Ref,
    Region,
    Role,
    SourceLocation,
    StateVariable,
    Storage,
    Symbol,
    Value,
)

DEVICES = (CPU, Device("cuda"), Device("cuda", 1))
WORDS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
LITERALS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    WORDS,
    st.sampled_from(DType),
    st.sampled_from(DEVICES),
    st.sampled_from([Expr("s0"), Expr("max(s0, 3) * 2")]),
)
ORIGINS = st.one_of(st.just(NOWHERE), st.builds(SourceLocation, WORDS, WORDS, WORDS, st.integers(0, 99999)))


def arguments(names: list[str]) -> st.SearchStrategy[Argument]:
    """Literals, references to the given values, and nested tuples of both."""
    leaves = st.one_of(LITERALS, st.sampled_from(names).map(Ref)) if names else LITERALS
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@st.composite
def values(draw: st.DrawFn, name: str, contents: Program) -> tuple[Storage, Value]:
    """A storage with one window onto it: static or dynamic, dense or strided, constant, state or planned."""
    dtype = draw(st.sampled_from(DType))
    device = draw(st.sampled_from(DEVICES))
    role = draw(st.sampled_from(Role))
    held: list[Any] = [
        item
        for item in {Role.CONSTANT: contents.constants, Role.STATE: contents.state}.get(role, ())
        if item.device == device
    ]
    if role in (Role.CONSTANT, Role.STATE) and not held:
        role = Role.TEMPORARY
    origin = draw(ORIGINS)
    if held:
        item = draw(st.sampled_from(held))
        storage = Storage(name, device, item.nbytes, role, content=item.name, origin=origin)
        return storage, Value(f"v{name}", name, item.dtype, item.shape, row_major(item.shape))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if draw(st.booleans()):
        sizes = (Expr("s0 * 2"), *shape)
        bound = span((16, *shape), row_major((16, *shape)), dtype.itemsize)
        storage = Storage(name, device, Expr(f"s0 * {bound // 8}"), role, max_nbytes=bound, origin=origin)
        return storage, Value(f"v{name}", name, dtype, sizes, row_major((16, *shape)))
    strides = tuple(stride * 2 for stride in row_major(shape)) if draw(st.booleans()) else row_major(shape)
    offset = draw(st.integers(0, 9)) * dtype.itemsize
    nbytes = offset + span(shape, strides, dtype.itemsize) + draw(st.integers(0, 3))
    alignment = draw(st.sampled_from((1, 64, 256, 512)))
    external = draw(st.booleans()) and role in (Role.INPUT, Role.OUTPUT)
    storage = Storage(name, device, nbytes, role, alignment, external=external, origin=origin)
    return storage, Value(f"v{name}", name, dtype, shape, strides, offset)


@st.composite
def instructions(draw: st.DrawFn, method: Method, kernels: tuple[Kernel, ...], count: int) -> Instruction:
    """Any instruction whose operands are on the devices that it needs."""
    homes = {value.name: method.storage(value.storage).device for value in method.values}
    region, origin = draw(st.integers(-1, len(method.regions) - 1)), draw(ORIGINS)
    name = draw(st.sampled_from(sorted(homes)))
    near = [other for other in homes if homes[other] == homes[name]]
    some = st.lists(st.sampled_from(near), max_size=3).map(tuple)
    kind = draw(st.sampled_from(("launch", "library", "host", "copy", "jump")))
    if kind == "launch" and kernels:
        kernel = draw(st.sampled_from(kernels))
        given_arguments = tuple(draw(arguments(near)) for _ in kernel.parameters)
        grid = draw(st.tuples(*[st.one_of(st.integers(1, 2**31), st.just(Expr("(s0 + 3) // 4")))] * 3))
        return Launch(kernel.name, given_arguments, grid, draw(some), (name,), region, origin)
    if kind == "library":
        pairs = draw(st.lists(st.tuples(WORDS, arguments([])), max_size=3).map(tuple))
        workspace = draw(st.sampled_from(("", *near)))
        function = draw(st.sampled_from(FUNCTIONS))
        return LibraryCall(function, draw(some), (name,), pairs, workspace, region, origin)
    if kind == "host" and homes[name] == CPU:
        return HostCall(
            "aten::add.out",
            tuple(draw(st.lists(arguments(near), max_size=3))),
            draw(some),
            (name,),
            region,
            origin,
        )
    if kind == "copy":
        first = method.value(name)
        twins = [
            value
            for value in method.values
            if (value.dtype, len(value.shape)) == (first.dtype, len(first.shape))
        ]
        return _copy(name, draw(st.sampled_from(twins)).name, homes, draw(WORDS), region, origin)
    flags = [value.name for value in method.values if homes[value.name] == CPU]
    return Jump(draw(st.integers(0, count)), draw(st.sampled_from(("", *flags))), region, origin)


def _copy(
    one: str, two: str, homes: dict[str, Device], reason: str, region: int, origin: SourceLocation
) -> Copy:
    ends = (homes[one], homes[two])
    if ends[0] == ends[1]:
        kind = CopyKind.LOCAL
    else:
        kind = CopyKind.H2D if ends[0] == CPU else CopyKind.D2H if ends[1] == CPU else CopyKind.D2D
    return Copy(kind, one, two, reason, region, origin)


@st.composite
def methods(draw: st.DrawFn, name: str, contents: Program) -> Method:
    """A method with a symbol, whatever its values and instructions are."""
    pairs = [draw(values(f"{index}{draw(WORDS)}", contents)) for index in range(draw(st.integers(1, 5)))]
    symbol = Symbol("s0", 1, 8, "first", 0, draw(WORDS))
    first = (
        Storage("first", CPU, Expr("s0 * 4"), Role.INPUT, max_nbytes=32),
        Value("first", "first", DType.FLOAT32, (Expr("s0"),), (1,)),
    )
    storages, windows = zip(first, *pairs, strict=True)
    names = [window.name for window in windows]
    ports = [
        Port("first", "first"),
        Port("burnt", "", literal=draw(LITERALS.filter(lambda item: not isinstance(item, Expr)))),
    ]
    outputs = tuple(
        Port(f"out{index}", output, draw(st.sampled_from((None, ("input", "first")))))
        for index, output in enumerate(draw(st.lists(st.sampled_from(names), max_size=3)))
    )
    regions = tuple(
        Region(draw(st.sampled_from(DEVICES)), draw(WORDS), draw(st.integers(0, 9))) for _ in range(2)
    )
    notes = tuple(draw(st.lists(WORDS, max_size=2)))
    method = Method(
        name,
        tuple(ports),
        outputs,
        storages,
        windows,
        (),
        regions,
        (symbol,),
        draw(WORDS),
        draw(WORDS),
        notes,
    )
    count = draw(st.integers(0, 6))
    body = tuple(draw(instructions(method, contents.kernels, count)) for _ in range(count))
    return replace(method, instructions=body)


@st.composite
def programs(draw: st.DrawFn) -> tuple[PlannedProgram, dict[str, bytes]]:
    """A planned program with the bytes of its constants."""
    datas = draw(st.lists(st.binary(max_size=64), max_size=4))
    sources = {hashlib.sha256(data).hexdigest(): data for data in datas}
    constants = tuple(
        Constant(
            f"c{index}",
            hashlib.sha256(data).hexdigest(),
            len(data),
            DType.UINT8,
            (len(data),),
            (1,),
            draw(st.sampled_from(DEVICES)),
        )
        for index, data in enumerate(datas)
    )
    state = tuple(
        StateVariable(
            f"t{index}",
            DType.UINT8,
            (len(data),),
            device,
            len(data),
            draw(st.sampled_from(("", hashlib.sha256(data).hexdigest()))),
        )
        for index, (data, device) in enumerate(zip(datas, DEVICES, strict=False))
    )
    kernels = tuple(
        Kernel(
            f"k{index}",
            tuple(KernelParameter(draw(WORDS), draw(WORDS)) for _ in range(draw(st.integers(0, 3)))),
            (
                KernelCode(
                    "sm_80",
                    draw(st.sampled_from(("cubin", "ptx"))),
                    "k",
                    draw(st.binary(min_size=1, max_size=9)),
                    draw(st.integers(1, 32)),
                    draw(st.integers(0, 2**20)),
                ),
            ),
            draw(WORDS),
            tuple(
                draw(
                    st.lists(
                        st.tuples(
                            WORDS,
                            st.one_of(
                                st.none(),
                                st.booleans(),
                                st.integers(-9, 9),
                                st.floats(allow_nan=False),
                                WORDS,
                            ),
                        ),
                        max_size=2,
                    )
                )
            ),
            draw(st.integers(1, 32)),
            draw(st.integers(0, 9)),
        )
        for index in range(draw(st.integers(0, 2)))
    )
    shared = Program((), constants, state, kernels, ("sm_80",))
    named = tuple(draw(methods(f"m{index}", shared)) for index in range(draw(st.integers(1, 2))))
    sizes = st.lists(st.tuples(st.integers(1, 8)), max_size=2, unique=True).map(tuple)
    options = PlanOptions(static=draw(st.booleans()), buckets={method.name: draw(sizes) for method in named})
    planned = plan(replace(shared, methods=named), options)
    return without_seconds(planned), sources


def without_seconds(planned: PlannedProgram) -> PlannedProgram:
    """Planning times are not written, so that the same input gives the same file."""

    def timeless_arenas(item: Any) -> Any:
        return replace(item, arenas=tuple(replace(arena, seconds=0.0) for arena in item.arenas))

    timeless = tuple(
        replace(timeless_arenas(item), buckets=tuple(map(timeless_arenas, item.buckets)))
        for item in planned.plan.methods
    )
    return replace(planned, plan=replace(planned.plan, methods=timeless))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(programs(), st.sampled_from(("embed", "external")))
def test_generated_programs_come_back_as_they_were(case: Any, weights: Any) -> None:
    planned, sources = case
    readers = {digest: (lambda data=data: data) for digest, data in sources.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "generated.pte"
        written = write(path, planned, readers, weights=weights)
        artifact = read(path)
        assert written.nbytes == path.stat().st_size
    assert repr(artifact.planned) == repr(planned)  # and not just equal: True is not 1, -0.0 is not 0.0
    assert artifact.planned == planned
    for constant in planned.program.constants:
        assert bytes(artifact.constants[constant.digest]) == sources[constant.digest]


def test_the_sample_comes_back_as_it_was(sample: Any, tmp_path: Path) -> None:
    written = write(tmp_path / "m.pte", sample.planned, sample.sources(), producer="1.2.3")
    artifact = read(tmp_path / "m.pte")
    assert repr(artifact.planned) == repr(sample.planned)
    assert (artifact.nbytes, artifact.sha256) == (written.nbytes, written.sha256)
    assert (artifact.format, artifact.producer) == ("ET12", "1.2.3")
    artifact.verify_constants()


def test_the_same_program_gives_the_same_bytes(sample: Any, tmp_path: Path) -> None:
    slow = replace(
        sample.planned,
        plan=replace(
            sample.planned.plan,
            methods=tuple(
                replace(item, arenas=tuple(replace(arena, seconds=9.9) for arena in item.arenas))
                for item in sample.planned.plan.methods
            ),
        ),
    )
    write(tmp_path / "a.pte", sample.planned, sample.sources())
    write(tmp_path / "b.pte", slow, sample.sources())
    assert (tmp_path / "a.pte").read_bytes() == (tmp_path / "b.pte").read_bytes()


def test_another_process_gives_the_same_bytes(sample: Any, tmp_path: Path) -> None:
    """Nothing depends on the order of a set, which differs from one hash seed to another."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from conftest import make_sample;"
        "from devplan.runtime.artifact import write; s = make_sample();"
        "print(write(Path(sys.argv[2]), s.planned, s.sources()).sha256)"
    )
    here, path = str(Path(__file__).parent), str(tmp_path / "m.pte")
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, here, path],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_offsets_beyond_four_gibibytes(sample: Any, tmp_path: Path) -> None:
    """ET12 splits an offset in two words."""
    (old,) = sample.planned.plan.methods
    far = 5 << 32
    allocations = tuple(
        replace(item, offset=far) if item.storage == "s_dy" else item for item in old.allocations
    )
    arenas = tuple(replace(arena, nbytes=far + 64) if arena.memory_id == 2 else arena for arena in old.arenas)
    planned = replace(
        sample.planned,
        plan=replace(sample.planned.plan, methods=(replace(old, allocations=allocations, arenas=arenas),)),
    )
    write(tmp_path / "m.pte", planned, sample.sources())
    assert repr(read(tmp_path / "m.pte").planned) == repr(planned)


def test_reading_needs_neither_flatbuffers_nor_numpy(sample: Any, tmp_path: Path) -> None:
    write(tmp_path / "m.pte", sample.planned, sample.sources())
    code = (
        "import sys; from pathlib import Path; from devplan.runtime.artifact import read;"
        "from devplan.runtime.describe import describe; describe(read(Path(sys.argv[1])));"
        "print([name for name in ('flatbuffers', 'numpy', 'torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.pte"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_integers_beyond_64_bits_are_refused(sample: Any, tmp_path: Path) -> None:
    (method,) = sample.planned.program.methods
    port = Port("huge", "", literal=2**63)
    broken = replace(sample.planned.program, methods=(replace(method, inputs=(port,)),))
    with pytest.raises(ArtifactError, match="does not fit in 64 bits"):
        write(tmp_path / "m.pte", replace(sample.planned, program=broken), sample.sources())
    assert evaluate(2**63, {}) == 2**63

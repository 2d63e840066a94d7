"""Copies in the finished program: moved to where they overlap, small uploads merged, arenas no larger."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devplan.passes.program.merge_uploads import MergeUploads
from devplan.passes.program.schedule_copies import ScheduleCopies, peaks
from devplan.planner import check, plan
from devplan.planner.text import format_program, parse_program
from devplan.runtime.dtypes import DType
from devplan.runtime.program import (
    CPU,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    Launch,
    Method,
    Port,
    Program,
    Ref,
    Region,
    Role,
    Storage,
    Value,
)

TWO_REGIONS = """\
program
kernel work(x: "*fp32", y: "*fp32") warps 4 stages 1
method forward(a = %a, b = %b, m = %m) -> (y = %y_host, z = %z_host)
  region cuda:0 triton 1 operators
  region cpu aten 1 operators
  region cuda:0 triton 1 operators
  @a INPUT cpu 1024 B
  @b INPUT cpu 512 B
  @m INPUT cpu 100 B
  @a_up TEMPORARY cuda:0 1024 B
  @b_up TEMPORARY cuda:0 512 B
  @m_up TEMPORARY cuda:0 100 B
  @t TEMPORARY cuda:0 1024 B
  @t_host OUTPUT cpu 1024 B
  @h TEMPORARY cpu 1024 B
  @h_up TEMPORARY cuda:0 1024 B
  @y TEMPORARY cuda:0 1024 B
  @y_host OUTPUT cpu 1024 B
  %a: float32[256] at @a
  %b: float32[128] at @b
  %m: uint8[100] at @m
  %a_up: float32[256] at @a_up
  %b_up: float32[128] at @b_up
  %m_up: uint8[100] at @m_up
  %t: float32[256] at @t
  %z_host: float32[256] at @t_host
  %h: float32[256] at @h
  %h_up: float32[256] at @h_up
  %y: float32[256] at @y
  %y_host: float32[256] at @y_host
  0  copy h2d %a -> %a_up
  1  launch work(%a_up, %t) grid(1, 1, 1) reads(%a_up) writes(%t) region 0
  2  copy d2h %t -> %z_host
  3  host aten::relu.out(%z_host) reads(%z_host) writes(%h) region 1
  4  copy h2d %h -> %h_up
  5  copy h2d %b -> %b_up
  6  copy h2d %m -> %m_up
  7  launch work(%h_up, %b_up, %m_up, %y) grid(1, 1, 1) reads(%h_up, %b_up, %m_up) writes(%y) region 2
  8  copy d2h %y -> %y_host
"""


def test_uploads_go_early_and_merge_as_text(golden: Callable[..., None]) -> None:
    before = parse_program(TWO_REGIONS)
    scheduled = ScheduleCopies().run(before)
    merged = MergeUploads(max_growth=0).run(scheduled.subject)
    assert scheduled.changed
    assert merged.changed
    for program in (before, scheduled.subject, merged.subject):
        check(plan(program))
    golden(
        "\n".join(format_program(p) for p in (before, scheduled.subject, merged.subject)),
        "copies/schedule_and_merge.txt",
    )


def transfers(program: Program) -> list[str]:
    return [
        f"{i.kind.value} {i.source}" for m in program.methods for i in m.instructions if isinstance(i, Copy)
    ]


def test_an_upload_stays_where_an_earlier_one_would_cost_memory() -> None:
    """`a` and `b` together are more than is ever alive: the upload of `b` waits for `a` to be done with."""
    text = TWO_REGIONS.replace("512 B", "4096 B").replace("float32[128]", "float32[1024]")
    for name in ("a", "a_up"):
        text = text.replace(f"%{name}: float32[256]", f"%{name}: float32[1024]")
    text = text.replace("@a INPUT cpu 1024", "@a INPUT cpu 4096").replace(
        "@a_up TEMPORARY cuda:0 1024", "@a_up TEMPORARY cuda:0 4096"
    )
    before = parse_program(text)
    after = ScheduleCopies().run(before).subject
    assert transfers(after) == ["h2d a", "h2d m", "d2h t", "h2d b", "h2d h", "d2h y"]
    assert peaks(after.methods[0]) == peaks(before.methods[0])


def test_large_inputs_keep_their_own_transfer() -> None:
    program = ScheduleCopies().run(parse_program(TWO_REGIONS)).subject
    assert not MergeUploads(max_nbytes=99).run(program).changed
    assert not MergeUploads(max_total_nbytes=512).run(program).changed
    assert transfers(MergeUploads().run(program).subject)[:2] == ["h2d uploads_cuda0", "d2h t"]
    only_small = MergeUploads(max_nbytes=512).run(program).subject
    assert transfers(only_small)[:2] == ["h2d a", "h2d uploads_cuda0"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@b INPUT cpu 512 B", "@b INPUT cpu 512 B external"),
        ("(y = %y_host,", "(y = %y_host, w = %b aliases input b,"),
        ("%b: float32[128] at @b", "%b: float32[128] at @b\n  %b2: float32[64] at @b"),
    ],
)
def test_what_the_caller_owns_or_gets_back_is_not_moved(old: str, new: str) -> None:
    text = TWO_REGIONS.replace(old, new)
    program = ScheduleCopies().run(parse_program(text)).subject
    merged = MergeUploads().run(program).subject
    storage = merged.methods[0].storage("b") if "b2" not in new else None
    if storage is not None:
        assert storage.external == ("external" in new)
        assert "h2d b" in transfers(merged)
    else:
        (moved,) = [v for v in merged.methods[0].values if v.name == "b2"]
        assert moved.storage == "uploads_cuda0"
        assert moved.offset == merged.methods[0].value("b").offset


def test_copies_do_not_cross_jumps_or_their_targets() -> None:
    lines = TWO_REGIONS.replace("7  launch", "8  launch").replace("  8  copy d2h %y", "  9  copy d2h %y")
    lines = lines.replace("  4  copy", "  4  jump 5\n  5  copy").replace("5  copy h2d %b", "6  copy h2d %b")
    lines = lines.replace("6  copy h2d %m", "7  copy h2d %m")
    program = parse_program(lines)
    assert not ScheduleCopies().run(program).changed


# --- random programs ------------------------------------------------------------------------------------

DEVICES = (CPU, Device("cuda"), Device("cuda", 1))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Work on three devices with explicit copies, in an order that executes."""
    storages: list[Storage] = []
    values: list[Value] = []
    instructions: list[Instruction] = []
    where: dict[str, Device] = {}

    def make(name: str, device: Device, length: int, role: Role = Role.TEMPORARY) -> str:
        storages.append(Storage(name, device, 4 * length, role))
        values.append(Value(name, name, DType.FLOAT32, (length,), (1,)))
        where[name] = device
        return name

    inputs = [
        make(f"x{i}", CPU, draw(st.sampled_from((1, 64, 300))), Role.INPUT)
        for i in range(draw(st.integers(1, 4)))
    ]
    lengths = {value.name: int(str(value.shape[0])) for value in values}

    def bring(name: str, device: Device) -> str:
        if where[name] == device:
            return name
        kind = CopyKind.H2D if where[name] == CPU else CopyKind.D2H if device == CPU else CopyKind.D2D
        copied = make(f"c{len(values)}", device, lengths[name])
        lengths[copied] = lengths[name]
        instructions.append(Copy(kind, name, copied))
        return copied

    regions: list[Region] = []
    for _ in range(draw(st.integers(1, 12))):
        device = draw(st.sampled_from(DEVICES))
        regions.append(Region(device, "aten" if device == CPU else "triton", 1))
        reads = [bring(draw(st.sampled_from(list(where))), device) for _ in range(draw(st.integers(1, 3)))]
        for _ in range(draw(st.integers(1, 2))):
            length = draw(st.sampled_from((1, 64, 300)))
            made = make(f"v{len(values)}", device, length)
            lengths[made] = length
            refs = tuple(Ref(name) for name in (*reads, made))
            if device == CPU:
                instructions.append(
                    HostCall("aten::relu.out", refs[:-1], tuple(reads), (made,), len(regions) - 1)
                )
            else:
                instructions.append(Launch("k", refs, (1, 1, 1), tuple(reads), (made,), len(regions) - 1))
            reads = [*reads, made]
    outputs = [
        bring(name, CPU)
        for name in draw(st.lists(st.sampled_from(list(where)), min_size=1, max_size=3, unique=True))
    ]
    ports = tuple(Port(name, name) for name in inputs)
    returned = tuple(
        Port(f"y{i}", name, aliases=("input", name) if name in inputs else _first(outputs, i))
        for i, name in enumerate(outputs)
    )
    method = Method(
        "forward", ports, returned, tuple(storages), tuple(values), tuple(instructions), tuple(regions)
    )
    return Program((method,), kernels=(Kernel("k", (), ()),))


def _first(outputs: list[str], index: int) -> tuple[str, str] | None:
    """The earlier output that has the same value, as an alias."""
    first = outputs.index(outputs[index])
    return None if first == index else ("output", f"y{first}")


def outcome(method: Method) -> list[object]:
    """What each output is, as a term over the inputs: pieces of storages hold terms, copies move pieces."""
    values = {value.name: value for value in method.values}
    pieces: dict[tuple[str, int], object] = {}

    def at(name: str) -> tuple[str, int]:
        return values[name].storage, int(str(values[name].offset))

    for port in method.inputs:
        pieces[at(port.value)] = port.name
    for instruction in method.instructions:
        assert not isinstance(instruction, Jump)
        if isinstance(instruction, Copy):
            (storage, begin), (target, to) = at(instruction.source), at(instruction.destination)
            value = values[instruction.source]
            end = begin + int(str(value.shape[0])) * value.dtype.itemsize
            moved = {
                (target, offset - begin + to): term
                for (name, offset), term in pieces.items()
                if name == storage and begin <= offset < end
            }
            assert moved, "a copy of nothing that was written"
            pieces |= moved
        else:
            term = (type(instruction).__name__, *(pieces[at(name)] for name in instruction.reads))
            pieces |= {at(name): (term, index) for index, name in enumerate(instruction.writes)}
    return [pieces[at(port.value)] for port in method.outputs]


def stretches(method: Method) -> int:
    """How often work goes over from one device to another: what a moved copy must not add to."""
    devices = {storage.name: storage.device for storage in method.storages}
    home = {value.name: devices[value.storage] for value in method.values}

    def device(instruction: Instruction) -> Device:
        if isinstance(instruction, Copy) and instruction.kind is CopyKind.D2H:
            return home[instruction.source]
        return home[instruction.writes[0]]

    order = [device(instruction) for instruction in method.instructions]
    return sum(a != b for a, b in itertools.pairwise(order))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(programs())
def test_a_random_program_means_the_same_and_takes_no_more(program: Program) -> None:
    before = program.methods[0]
    scheduled = ScheduleCopies().run(program)
    merged = MergeUploads(max_growth=0).run(scheduled.subject)
    for result in (scheduled, merged):
        method = result.subject.methods[0]
        check(plan(result.subject))
        assert outcome(method) == outcome(before)
        assert all(peak <= peaks(before)[device] for device, peak in peaks(method).items() if device != CPU)
        assert stretches(method) <= stretches(before)
    assert not ScheduleCopies().run(scheduled.subject).changed
    assert not MergeUploads(max_growth=0).run(merged.subject).changed
    generous = MergeUploads().run(scheduled.subject).subject
    check(plan(generous))
    assert outcome(generous.methods[0]) == outcome(before)
    assert len(transfers(generous)) <= len(transfers(merged.subject))

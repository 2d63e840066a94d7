"""A small planned program with every kind of thing in it, made by hand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import pytest

from devplan.runtime.dtypes import DType
from devplan.runtime.program import (
    CPU,
    Allocation,
    Arena,
    Constant,
    Copy,
    CopyKind,
    Count,
    Device,
    HostCall,
    Jump,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
    LibraryCall,
    LiveRange,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Ref,
    Region,
    Role,
    SourceLocation,
    StateVariable,
    Storage,
    Value,
)

GPU = Device("cuda")
WEIGHT = bytes(range(64))
DIGEST = hashlib.sha256(WEIGHT).hexdigest()
PLACES = {
    "x": CPU,
    "dx": GPU,
    "w": GPU,
    "cache": GPU,
    "dy": GPU,
    "scratch": GPU,
    "y": CPU,
    "z": CPU,
    "flag": CPU,
}
ROLES = {
    "x": Role.INPUT,
    "w": Role.CONSTANT,
    "cache": Role.STATE,
    "scratch": Role.WORKSPACE,
    "z": Role.OUTPUT,
}


@dataclass(frozen=True)
class Sample:
    """A program and the bytes of its constants."""

    planned: PlannedProgram
    constants: dict[str, bytes]

    def sources(self) -> dict[str, object]:
        """As `write` wants them."""
        return {digest: (lambda data=data: data) for digest, data in self.constants.items()}


def _kernel() -> Kernel:
    parameters = tuple(KernelParameter(name, "*fp32") for name in ("x", "w", "y"))
    codes = tuple(
        KernelCode(f"sm_{number}", "cubin", "add_0", b"\x7fELF" + bytes([number]) * 40, 4, 0)
        for number in (80, 90)
    )
    ptx = KernelCode("sm_80", "ptx", "add_0", b".version 8.0", 4, 0)
    source = "def add(x, w, y, n): ..."
    return Kernel("add", (*parameters, KernelParameter("n", "i32")), (*codes, ptx), source, (("BLOCK", 16),))


def _method() -> Method:
    at = SourceLocation("layer.0", "aten.add.Tensor", "model.py", 3)
    return Method(
        "forward",
        (Port("x", "x"), Port("scale", "", literal=-0.0)),
        (Port("z", "z"), Port("cache", "cache", aliases=("state", "kv"))),
        tuple(
            Storage(
                f"s_{name}",
                device,
                64 if name != "flag" else 1,
                ROLES.get(name, Role.TEMPORARY),
                content={"w": "w", "cache": "kv"}.get(name, ""),
            )
            for name, device in PLACES.items()
        ),
        tuple(
            Value(name, f"s_{name}", DType.FLOAT32, (4, 4), (4, 1))
            if name != "flag"
            else Value(name, "s_flag", DType.BOOL, (1,), (1,))
            for name in PLACES
        ),
        (
            Copy(CopyKind.H2D, "x", "dx", "`x` is kept on cpu, used on cuda:0"),
            Launch("add", (Ref("dx"), Ref("w"), Ref("dy"), 16), (1, 1, 1), ("dx", "w"), ("dy",), 0, at),
            LibraryCall(
                "matmul", ("dy", "cache"), ("dx",), (("epilogue", "relu"), ("alpha", 1.0)), "scratch", 0, at
            ),
            Copy(CopyKind.LOCAL, "dx", "cache", "state `kv` takes its new content", 0),
            Copy(CopyKind.D2H, "dx", "y", "`z` is made on cpu"),
            HostCall("aten::any.all_out", (Ref("y"),), ("y",), ("flag",), 1, at),
            HostCall("aten::relu.out", (Ref("y"),), ("y",), ("z",), 1, at),
            Jump(8, "flag"),
            HostCall("aten::relu.out", (Ref("z"),), ("z",), ("z",), 1, at),
        ),
        (Region(GPU, "triton", 2), Region(CPU, "aten", 2)),
        notes=("`kv` is copied, not written in place, because it is also returned",),
    )


def _plan() -> MethodPlan:
    ranges = {"x": (0, 1), "dx": (0, 5), "cache": (0, 9), "dy": (1, 3), "scratch": (2, 3), "y": (4, 7)}
    ranges |= {"z": (6, 9), "flag": (5, 8)}
    places = {"x": (1, 0), "y": (1, 0), "z": (1, 256), "flag": (1, 512), "dx": (2, 0), "dy": (2, 256)}
    places |= {"scratch": (2, 512), "cache": (3, 0)}
    return MethodPlan(
        "forward",
        (
            Arena(1, CPU, 768, 129, 193, "greedy"),
            Arena(2, GPU, 768, 192, 192, "greedy"),
            Arena(3, GPU, 256, 64, 64, "stacked", kind="state"),
        ),
        tuple(Allocation(f"s_{name}", *place, 64) for name, place in places.items()),
        tuple(LiveRange(f"s_{name}", *live) for name, live in ranges.items()),
    )


def make_sample() -> Sample:
    """One method on `cpu` and `cuda:0`: copies, a run of three device instructions, host calls, a jump, state."""
    constant = Constant("w", DIGEST, 64, DType.FLOAT32, (4, 4), (4, 1), GPU)
    state = StateVariable("kv", DType.FLOAT32, (4, 4), GPU, 64, DIGEST)
    program = Program((_method(),), (constant,), (state,), (_kernel(),), ("sm_80", "sm_90"))
    return Sample(PlannedProgram(program, Plan((_plan(),))), {DIGEST: WEIGHT})


def counted(sample: Sample) -> Sample:
    """The sample with a size that depends on data: how many rows of ``z`` are real is computed at the end."""
    (method,), (plan,) = sample.planned.program.methods, sample.planned.plan.methods
    end = len(method.instructions)
    z, cache = method.outputs
    count = HostCall("aten::sum.IntList_out", (Ref("flag"), (), False, None), ("flag",), ("n",), 1)
    lives = {"s_z": (6, end + 1), "s_cache": (0, end + 1), "s_flag": (5, end + 1)}
    method = replace(
        method,
        outputs=(replace(z, count="u0", axis=0), cache),
        storages=(*method.storages, Storage("s_n", CPU, 8, Role.OUTPUT, 64)),
        values=(*method.values, Value("n", "s_n", DType.INT64, (), ())),
        instructions=(*method.instructions, count),
        counts=(Count("u0", "n", 0, 3, SourceLocation("", "aten.nonzero.default", "model.py", 4)),),
    )
    plan = replace(
        plan,
        allocations=(*plan.allocations, Allocation("s_n", 1, 576, 64)),
        live_ranges=(
            *(LiveRange(each.storage, *lives.get(each.storage, (each.begin, each.end)))
              for each in plan.live_ranges),
            LiveRange("s_n", end, end + 1),
        ),
    )  # fmt: skip
    planned = PlannedProgram(replace(sample.planned.program, methods=(method,)), Plan((plan,)))
    return replace(sample, planned=planned)


@pytest.fixture
def counted_sample() -> Sample:
    """One with a size that depends on data."""
    return counted(make_sample())


@pytest.fixture
def sample() -> Sample:
    """A fresh one."""
    return make_sample()

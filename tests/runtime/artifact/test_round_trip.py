"""What is written is read back, exactly."""

from __future__ import annotations

import hashlib
from pathlib import Path

from devplan.runtime.artifact import read, write
from devplan.runtime.dtypes import DType
from devplan.runtime.program import (
    CPU,
    Allocation,
    Arena,
    Constant,
    Copy,
    CopyKind,
    Device,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
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
    Storage,
    Value,
)

GPU = Device("cuda")
WEIGHT = bytes(range(64))
DIGEST = hashlib.sha256(WEIGHT).hexdigest()


def add_on_gpu() -> PlannedProgram:
    """y = x + w on `cuda:0`, between an upload and a download."""
    places = [("x", CPU), ("dx", GPU), ("w", GPU), ("dy", GPU), ("y", CPU)]
    roles = {"x": Role.INPUT, "w": Role.CONSTANT, "y": Role.OUTPUT}
    method = Method(
        "forward",
        (Port("x", "x"),),
        (Port("y", "y"),),
        tuple(
            Storage(
                f"s_{name}", device, 64, roles.get(name, Role.TEMPORARY), content="w" if name == "w" else ""
            )
            for name, device in places
        ),
        tuple(Value(name, f"s_{name}", DType.FLOAT32, (4, 4), (4, 1)) for name, _ in places),
        (
            Copy(CopyKind.H2D, "x", "dx", "input used on cuda:0"),
            Launch(
                "add",
                (Ref("dx"), Ref("w"), Ref("dy"), 16),
                (1, 1, 1),
                ("dx", "w"),
                ("dy",),
                0,
                SourceLocation("", "aten.add.Tensor", "model.py", 3),
            ),
            Copy(CopyKind.D2H, "dy", "y", "output kept on cpu"),
        ),
        (Region(GPU, "triton", 1),),
    )
    parameters = tuple(KernelParameter(name, "*fp32") for name in ("x", "w", "y"))
    kernel = Kernel(
        "add",
        (*parameters, KernelParameter("n", "i32")),
        (
            KernelCode("sm_80", "cubin", "add_0", b"\x7fELF-80", 4, 0),
            KernelCode("sm_90", "cubin", "add_0", b"\x7fELF-90", 4, 0),
        ),
        "def add(x, w, y, n): ...",
        (("BLOCK", 16),),
    )
    plan = MethodPlan(
        "forward",
        (Arena(1, CPU, 512, 128, 128, "greedy"), Arena(2, GPU, 512, 128, 128, "greedy")),
        (
            Allocation("s_x", 1, 0, 64),
            Allocation("s_y", 1, 256, 64),
            Allocation("s_dx", 2, 0, 64),
            Allocation("s_dy", 2, 256, 64),
        ),
        (LiveRange("s_x", 0, 1), LiveRange("s_dx", 0, 2), LiveRange("s_dy", 1, 3), LiveRange("s_y", 2, 3)),
    )
    constant = Constant("w", DIGEST, 64, DType.FLOAT32, (4, 4), (4, 1), GPU)
    program = Program((method,), (constant,), (), (kernel,), ("sm_80", "sm_90"))
    return PlannedProgram(program, Plan((plan,)))


def test_a_device_program_comes_back_as_it_was(tmp_path: Path) -> None:
    planned = add_on_gpu()
    written = write(tmp_path / "add.pte", planned, {DIGEST: lambda: WEIGHT}, producer="1.2.3")
    artifact = read(tmp_path / "add.pte")
    assert artifact.planned == planned
    assert bytes(artifact.constants[DIGEST]) == WEIGHT
    assert (artifact.nbytes, artifact.sha256) == (written.nbytes, written.sha256)
    assert (artifact.format, artifact.producer) == ("ET12", "1.2.3")
    assert (tmp_path / "add.pte").stat().st_size == written.nbytes


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.pte", "b.pte"):
        write(tmp_path / name, add_on_gpu(), {DIGEST: lambda: bytearray(WEIGHT)})
    assert (tmp_path / "a.pte").read_bytes() == (tmp_path / "b.pte").read_bytes()

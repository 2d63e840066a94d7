"""Hand-made programs for the GPU checks: copies, a generated kernel, a product, a constant, state, buckets."""

from __future__ import annotations

import hashlib

import numpy as np

from devplan.planner import PlanOptions, check, plan
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.expr import Expr
from devplan.runtime.program import (
    CPU,
    Allocation,
    Arena,
    Constant,
    Copy,
    CopyKind,
    Device,
    Kernel,
    Launch,
    LibraryCall,
    Method,
    MethodPlan,
    Plan,
    PlannedProgram,
    Port,
    Program,
    Ref,
    Role,
    StateVariable,
    Storage,
    Symbol,
    Value,
)

GPU = Device("cuda", 0)
SIZE = 64
NBYTES = 4 * SIZE * SIZE
SPACE = 1 << 20


def _storage(name: str, device: Device, role: Role, nbytes: int = NBYTES, content: str = "") -> Storage:
    return Storage(name, device, nbytes, role, content=content)


def planned(
    kernel: Kernel, weight: np.ndarray, device_output: bool = False
) -> tuple[PlannedProgram, dict[str, memoryview]]:
    """``total += x; y = total @ weight``; y is copied to the host, or left on the GPU for the caller."""
    digest = hashlib.sha256(weight.tobytes()).hexdigest()
    home = (
        Storage("y", GPU, NBYTES, Role.OUTPUT, external=True)
        if device_output
        else _storage("y", GPU, Role.TEMPORARY)
    )
    storages = [
        _storage("x_host", CPU, Role.INPUT), _storage("x", GPU, Role.TEMPORARY), home,
        _storage("weight", GPU, Role.CONSTANT, content="weight"), _storage("total", GPU, Role.STATE, content="total"),
        _storage("space", GPU, Role.WORKSPACE, SPACE),
    ]  # fmt: skip
    instructions = [
        Copy(CopyKind.H2D, "x_host", "x"),
        Launch("add_scaled", (Ref("total"), Ref("x"), Ref("total"), SIZE * SIZE, 1.0), (SIZE * SIZE // 256, 1, 1),
               ("total", "x"), ("total",)),
        LibraryCall("matmul", ("total", "weight"), ("y", "space"), (), "space"),
    ]  # fmt: skip
    if not device_output:
        storages.append(_storage("y_host", CPU, Role.OUTPUT))
        instructions.append(Copy(CopyKind.D2H, "y", "y_host"))
    values = [
        Value(
            s.name,
            s.name,
            *(
                (DType.UINT8, (SPACE,), (1,))
                if s.name == "space"
                else (DType.FLOAT32, (SIZE, SIZE), (SIZE, 1))
            ),
        )
        for s in storages
    ]
    output = Port("y", "y" if device_output else "y_host")
    method = Method(
        "forward", (Port("x", "x_host"),), (output,), tuple(storages), tuple(values), tuple(instructions)
    )
    allocations: list[Allocation] = []
    ends = {CPU: 0, GPU: 0}
    for storage in storages:
        if storage.is_planned:
            place = Allocation(
                storage.name, 1 + (storage.device == GPU), ends[storage.device], storage.reserved_nbytes
            )
            allocations.append(place)
            ends[storage.device] += storage.reserved_nbytes
    arenas = tuple(Arena(1 + (d == GPU), d, n, n, n, "by hand") for d, n in ends.items())
    plan = Plan((MethodPlan("forward", arenas, tuple(allocations), ()),))
    constant = Constant("weight", digest, weight.nbytes, DType.FLOAT32, (SIZE, SIZE), (SIZE, 1), GPU)
    state = StateVariable("total", DType.FLOAT32, (SIZE, SIZE), GPU, NBYTES)
    program = Program((method,), (constant,), (state,), (kernel,))
    return PlannedProgram(program, plan), {digest: memoryview(weight.tobytes())}


def load(kernel: Kernel, weight: np.ndarray, device_output: bool = False) -> LoadedProgram:
    """The program on GPU 0."""
    program, constants = planned(kernel, weight, device_output)
    return LoadedProgram(program, constants, {CPU: CpuBackend(), GPU: CudaBackend(GPU, 0)})


ROWS = 256
"""The bound of the batched program's one dimension."""


def batched(kernel: Kernel, weight: np.ndarray, sizes: tuple[int, ...]) -> LoadedProgram:
    """``z = x @ weight + 2 x`` for 1 to `ROWS` rows, with a plan and a graph for each of the sizes."""
    digest = hashlib.sha256(weight.tobytes()).hexdigest()
    rows, most = Expr(f"s0 * {4 * SIZE}"), ROWS * 4 * SIZE

    def tensor(name: str, device: Device, role: Role) -> Storage:
        return Storage(name, device, rows, role, max_nbytes=most)

    storages = (
        tensor("x_host", CPU, Role.INPUT), tensor("x", GPU, Role.TEMPORARY), tensor("y", GPU, Role.TEMPORARY),
        tensor("z", GPU, Role.TEMPORARY), tensor("z_host", CPU, Role.OUTPUT),
        _storage("weight", GPU, Role.CONSTANT, content="weight"), _storage("space", GPU, Role.WORKSPACE, SPACE),
    )  # fmt: skip
    shapes = {"weight": (SIZE, SIZE), "space": (SPACE,)}
    values = tuple(
        Value(
            s.name,
            s.name,
            DType.UINT8 if s.name == "space" else DType.FLOAT32,
            shapes.get(s.name, (Expr("s0"), SIZE)),
            (1,) if s.name == "space" else (SIZE, 1),
        )
        for s in storages
    )
    count = Expr(f"s0 * {SIZE}")
    grid = (Expr(f"(s0 * {SIZE} + 255) // 256"), 1, 1)
    instructions = (
        Copy(CopyKind.H2D, "x_host", "x"),
        LibraryCall("matmul", ("x", "weight"), ("y",), (), "space"),
        Launch("add_scaled", (Ref("y"), Ref("x"), Ref("z"), count, 2.0), grid, ("y", "x"), ("z",)),
        Copy(CopyKind.D2H, "z", "z_host"),
    )
    symbols = (Symbol("s0", 1, ROWS, "x", 0, "rows"),)
    ports = (Port("x", "x_host"),), (Port("z", "z_host"),)
    method = Method("forward", *ports, storages, values, instructions, symbols=symbols)
    constant = Constant("weight", digest, weight.nbytes, DType.FLOAT32, (SIZE, SIZE), (SIZE, 1), GPU)
    options = PlanOptions(buckets={"forward": tuple((size,) for size in sizes)})
    program = plan(Program((method,), (constant,), (), (kernel,)), options)
    check(program)
    backends = {CPU: CpuBackend(), GPU: CudaBackend(GPU, 0)}
    return LoadedProgram(program, {digest: memoryview(weight.tobytes())}, backends)

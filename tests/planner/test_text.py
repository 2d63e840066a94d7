"""The textual form of programs and plans: what is written is read back, and errors name the line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devplan.planner import check, plan
from devplan.planner.text import format_planned, format_program, parse_planned, parse_program
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import UsageError
from devplan.runtime.expr import Expr
from devplan.runtime.program import (
    CPU,
    Arena,
    Constant,
    Copy,
    CopyKind,
    Count,
    Device,
    HostCall,
    Instruction,
    Jump,
    Kernel,
    KernelCode,
    KernelParameter,
    Launch,
    LibraryCall,
    LibraryTuning,
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

CUDA = Device("cuda")

MLP = """\
program sm_80 sm_90
constant $w1: float16[384,1536] strides[1,384] on cuda:0 1179648 B "ab12"
state $cache: float16[4,8] on cuda:0 64 B
kernel gelu(x: "*fp16", n: "i32") {BLOCK=1024} warps 4 stages 1
  code sm_90 cubin gelu_0 warps 4 shared 0 waits
method forward(x = %x, flag = True) -> (y = %y, c = %c aliases state cache)
  region cuda:0 triton 3 operators
  note "nothing was left out"
  @x INPUT cuda:0 98304 B external
  @w CONSTANT cuda:0 1179648 B content $w1
  @s0 TEMPORARY cuda:0 393216 B from "aten.addmm.default" module "mlp.fc1" line "model.py":14
  @y OUTPUT cuda:0 393216 B align 16
  @c STATE cuda:0 64 B content $cache
  %x: float16[128,384] at @x
  %w: float16[384,1536] strides[1,384] at @w
  %h: float16[128,1536] at @s0
  %y: float16[128,1536] at @y
  %c: float16[4,8] at @c
  0  call matmul(%x, %w) -> (%h) {epilogue="none", alpha=1.0} region 0 from "aten.mm" line "model.py":14
  1  launch gelu(%h, %y, 196608) grid(192, 1, 1) reads(%h) writes(%y) region 0 line "model.py":15
"""


def everything() -> Program:
    """A program with one of each thing, and names that are hard to read back."""
    origin = SourceLocation("a.b", 'aten."odd"\n', "model file.py", 3)
    rows = Expr("(s0 + 7) // 8 * 8")
    storages = (
        Storage("host:x", CPU, Expr("s0 * 4"), Role.INPUT, 64, 512),
        Storage("in", CUDA, Expr("s0 * 4"), Role.STAGING, 256, 512, origin=origin),
        Storage("nan.x", CUDA, 512, Role.WORKSPACE),
        Storage("cond", CPU, 1, Role.TEMPORARY, 1),
        Storage("out", CPU, 512, Role.OUTPUT, 64),
    )
    values = (
        Value("x", "host:x", DType.FLOAT32, (Expr("s0"),), (1,)),
        Value("cpu", "in", DType.FLOAT32, (rows, 2), (2, 1), Expr("s0 * 2")),
        Value("%odd", "nan.x", DType.BOOL, (), ()),
        Value("cond", "cond", DType.BOOL, (), ()),
        Value("y", "out", DType.INT64, (64,), (1,)),
        Value("empty", "out", DType.INT64, (0, 3), (3, 1), 8),
    )
    arguments = (Ref("x"), (1, (2.5,)), (), None, True, -3, 1e-7, float("inf"), "text", DType.INT8, CPU, rows)
    instructions: tuple[Instruction, ...] = (
        Copy(CopyKind.H2D, "x", "cpu", "the input `x`", 0, origin),
        LibraryCall(
            "matmul", ("cpu",), ("%odd",), (("stride", (1, 2)), ("x y", Ref("x"))), "%odd", 0, origin
        ),
        Jump(4, "cond", origin=origin),
        HostCall("aten::add.out", arguments, ("x",), ("y",), 1),
        Launch("k 1", (Ref("cpu"), rows), (rows, 1, 1), ("cpu",), ("%odd",)),
        Jump(0),
    )
    method = Method(
        "forward",
        (Port("x", "x"), Port("n", "", None, (1, None))),
        (Port("y", "y", ("output", "z z")), Port("z z", "y")),
        storages,
        values,
        instructions,
        (Region(CUDA, "triton", 2), Region(CPU, "aten", 1)),
        (Symbol("s0", 1, 128, "x", 0),),
        '[1, {"type": null}]',
        '"',
        ("first note", 'second "note"'),
        (Count("u0", "y", 0, 64), Count("a difference", "y", 0, 0, origin, is_difference=True)),
    )
    kernel = Kernel(
        "k 1",
        (KernelParameter("p", "*fp16"), KernelParameter("n", "i32")),
        (KernelCode("sm_90", "cubin", "k", b"", 8, 1024), KernelCode("sm_80", "ptx", "k", b"", 8, 0)),
        "",
        (("BLOCK", 128), ("name", "x"), ("flag", False), ("none", None), ("f", 0.5)),
        8,
        3,
    )
    return Program(
        (method, replace(method, name="prefill.2")),
        (Constant("w", "00ff", 24, DType.FLOAT32, (2, 3), (1, 2), CUDA),),
        (StateVariable("s", DType.BFLOAT16, (2,), CUDA, 4, "aa"), StateVariable("t", DType.INT8, (), CPU, 1)),
        (kernel,),
        ("sm_80", "sm_90"),
        (LibraryTuning("NVIDIA H200", "sm_90", (("cublaslt", 130100),), (("matmul 1x2 'n'", 3),)),),
    )


def without_times(planned: PlannedProgram) -> PlannedProgram:
    def still(arena: Arena) -> Arena:
        return replace(arena, seconds=0.0)

    methods = tuple(replace(m, arenas=tuple(map(still, m.arenas))) for m in planned.plan.methods)
    return replace(planned, plan=replace(planned.plan, methods=methods))


def test_a_program_reads_back_as_it_was() -> None:
    program = everything()
    assert parse_program(format_program(program)) == program


def test_text_reads_back_as_it_was() -> None:
    assert format_program(parse_program(MLP)) == MLP


def test_a_plan_reads_back_as_it_was() -> None:
    planned = without_times(plan(parse_program(MLP)))
    check(planned)
    text = format_planned(planned)
    assert "arena 1 cuda:0 786432 B (lower bound 786432, sum 786432)" in text
    assert parse_planned(text) == planned


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("float16[384,1536]", "float15[384,1536]", "line 2 .*unknown type `float15`"),
        ("@y OUTPUT", "@y RESULT", "line 12 .*unknown role `RESULT`"),
        ("launch gelu", "start gelu", "line 20 .*unknown instruction `start`"),
        ("alpha=1.0", "alpha=1.0 ?", r"line 19 .*cannot read `\? *}"),
        ("grid(192, 1, 1)", "grid 192", "line 20 .*expected `\\(`"),
        (" strides[1,384] at", " strides[1,384] at @w + ", "line 15"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_program(MLP.replace(old, new))

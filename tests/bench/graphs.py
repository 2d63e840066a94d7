"""Generated programs for the planner's benchmark and tests: irregular networks and experts in a row."""

from __future__ import annotations

import random
from collections.abc import Iterable

from devplan.runtime.dtypes import DType
from devplan.runtime.program import (
    Device,
    Instruction,
    LibraryCall,
    Method,
    Port,
    Program,
    Region,
    Role,
    Storage,
    Value,
)

CUDA = Device("cuda")
NODE = tuple[str, int, tuple[str, ...]]
"""Name, bytes of the result, and the names it is computed from (none: an input)."""


def program_of(nodes: Iterable[NODE], outputs: Iterable[str]) -> Program:
    """One method on one device that runs the nodes in the order given."""
    results = set(outputs)
    storages: list[Storage] = []
    values: list[Value] = []
    code: list[Instruction] = []
    inputs: list[Port] = []
    for name, nbytes, operands in nodes:
        role = Role.OUTPUT if name in results else Role.TEMPORARY if operands else Role.INPUT
        storages.append(Storage(name, CUDA, nbytes, role))
        values.append(Value(name, name, DType.UINT8, (nbytes,), (1,)))
        if operands:
            code.append(LibraryCall("fill", operands, (name,), region=0))
        else:
            inputs.append(Port(name, name))
    ports = tuple(Port(name, name) for name in results)
    region = Region(CUDA, "triton", len(code))
    return Program(
        (Method("forward", tuple(inputs), ports, tuple(storages), tuple(values), tuple(code), (region,)),)
    )


def random_wired(count: int, seed: int) -> Program:
    """A randomly wired network (as in architecture search): every node sums one to three of the last thirty."""
    chance = random.Random(seed)
    nodes: list[NODE] = [("x", 1 << 18, ())]
    used: set[str] = set()
    for index in range(count):
        near = [node[0] for node in nodes[-30:]]
        operands = tuple(chance.sample(near, min(len(near), chance.randint(1, 3))))
        used.update(operands)
        nodes.append((f"n{index}", 256 * chance.choice([64, 128, 256, 512, 1024, 2048]), operands))
    loose = [node[0] for node in nodes if node[0] not in used]
    for index, start in enumerate(range(0, len(loose), 8)):
        nodes.append((f"join{index}", 1 << 14, tuple(loose[start : start + 8])))
    joins = tuple(node[0] for node in nodes if node[0].startswith("join"))
    nodes.append(("y", 1 << 14, joins))
    return program_of(nodes, ["y"])


def mixture_of_experts(
    layers: int, experts: int, seed: int, tokens: int = 512, width: int = 1024, by_stage: bool = False
) -> Program:
    """Layers of routed experts: gather, two products, and all results weighted into a sum.

    The order given is expert by expert, as a loop in the model would run, or stage by stage.
    """
    chance = random.Random(seed)
    full = tokens * width * 2
    stages = (("in", "norm", 1), ("up", "in", 4), ("act", "up", 4), ("down", "act", 1))
    nodes: list[NODE] = [("x", full, ())]
    last = "x"
    for layer in range(layers):
        at = f"l{layer}"
        nodes += [(f"{at}.norm", full, (last,)), (f"{at}.route", tokens * experts * 2, (f"{at}.norm",))]
        shares = [chance.uniform(0.2, 1.8) for _ in range(experts)]
        rows = [max(1, int(2 * tokens * share / sum(shares))) for share in shares]
        steps = [(stage, expert) for expert in range(experts) for stage in stages]
        if by_stage:
            steps = [(stage, expert) for stage in stages for expert in range(experts)]
        for (stage, before, factor), expert in steps:
            operands = (f"{at}.norm", f"{at}.route") if stage == "in" else (f"{at}.{before}{expert}",)
            nodes.append((f"{at}.{stage}{expert}", rows[expert] * width * 2 * factor, operands))
        outs = tuple(f"{at}.down{expert}" for expert in range(experts))
        nodes += [(f"{at}.sum", full, (*outs, f"{at}.route")), (f"{at}.out", full, (f"{at}.sum", last))]
        last = f"{at}.out"
    return program_of(nodes, [last])


def residual(layers: int) -> Program:
    """A plain residual chain: nothing to gain by reordering."""
    nodes: list[NODE] = [("x", 1 << 20, ())]
    last = "x"
    for layer in range(layers):
        nodes += [(f"a{layer}", 1 << 21, (last,)), (f"b{layer}", 1 << 20, (f"a{layer}",))]
        nodes.append((f"c{layer}", 1 << 20, (f"b{layer}", last)))
        last = f"c{layer}"
    return program_of(nodes, [last])

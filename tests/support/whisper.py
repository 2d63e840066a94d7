"""Whisper spoken to as an application would: encode once, then one token a call."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from devplan.passes.source.load import resolve
from devplan.passes.source.model import ModelSource
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.program import CopyKind

MODEL = Path(__file__).parents[2] / "configs" / "models" / "whisper.py"
START = 3
TOKEN_BYTES = 8
DIRECTIONS = (CopyKind.H2D, CopyKind.D2H, CopyKind.D2D)


def source(size: str) -> ModelSource:
    """The model file at a size."""
    with mock.patch.dict(os.environ, {"DEVPLAN_MODEL_SIZE": size}):
        return resolve(str(MODEL))


@dataclass(frozen=True)
class Step:
    """One call of `decode`: the token that it gave, and the (count, bytes) of transfers by direction."""

    token: int
    copies: dict[CopyKind, tuple[int, int]]


def say(program: LoadedProgram, features: Any, steps: int) -> list[Step]:
    """Encode once, then feed every token back; what each step transferred, as the runtime counted it."""
    program.method("encode")(features)
    method, token, said = program.method("decode"), START, list[Step]()
    for _ in range(steps):
        before = _tally(program)
        (output,) = method(torch.tensor([[token]])).values()
        token, after = int(output[0, 0]), _tally(program)
        said.append(
            Step(token, {k: (after[k][0] - before[k][0], after[k][1] - before[k][1]) for k in DIRECTIONS})
        )
    return said


def _tally(program: LoadedProgram) -> dict[CopyKind, tuple[int, int]]:
    copies = program.copies
    return {kind: (copies.counts[kind], copies.nbytes[kind]) for kind in DIRECTIONS}


def say_eagerly(model: ModelSource, features: Any, steps: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What eager PyTorch says, and its buffers afterwards."""
    encode, decode = copy.deepcopy([method.module for method in model.methods])
    token, said = START, list[int]()
    with torch.no_grad():
        encode(features)
        for _ in range(steps):
            token = int(decode(torch.tensor([[token]]))[0, 0])
            said.append(token)
    return said, dict(decode.named_buffers())


ONE_TOKEN = {CopyKind.H2D: (1, TOKEN_BYTES), CopyKind.D2H: (1, TOKEN_BYTES), CopyKind.D2D: (0, 0)}
"""All that a step may transfer."""

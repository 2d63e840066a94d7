"""Whisper keeps its state on the device: one encoding, and no copy in a step but the token's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from devplan.passes.export import ExportResult, export
from devplan.passes.options import ExportOptions
from devplan.runtime.engine import LoadedProgram
from devplan.runtime.program import Copy, CopyKind, Method, Role

pytest.importorskip("transformers")
from devplan.tests.support import whisper
from devplan.tests.support.exporting import loaded

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STEPS = 8
FEATURES = torch.randn(1, 80, 100, generator=torch.Generator().manual_seed(5))


@cache
def exported() -> ExportResult:
    return export(whisper.source("small"), ExportOptions(architectures=("sm_90",)))


@pytest.fixture
def program() -> Iterator[LoadedProgram]:
    with loaded(exported()) as opened:
        yield opened


def copies(method: Method) -> list[tuple[CopyKind, str, Role]]:
    """The method's ledger, copies inside the device included."""
    values = {value.name: value for value in method.values}
    return [
        (i.kind, i.source, method.storage(values[i.destination].storage).role)
        for i in method.instructions
        if isinstance(i, Copy)
    ]


def test_the_ledger_of_a_step_holds_the_token_in_and_the_token_out() -> None:
    decode = exported().planned.program.method("decode")
    assert [(kind, role) for kind, _, role in copies(decode)] == [
        (CopyKind.H2D, Role.TEMPORARY),
        (CopyKind.D2H, Role.OUTPUT),
    ]
    assert copies(decode)[0][1] == "token"
    moved = [v for v in decode.values if v.name in ("token", "argmax")]
    assert all(value.shape == (1, 1) for value in moved)


def test_caches_are_written_in_place_and_shared_by_both_methods() -> None:
    state = {s.name: s for s in exported().planned.program.state}
    assert all(str(variable.device) == "cuda:0" for variable in state.values())
    used = {
        method.name: {s.content for s in method.storages if s.role is Role.STATE}
        for method in exported().planned.program.methods
    }
    heard = {f"heard_{part}_{layer}" for part in ("key", "value") for layer in range(2)}
    own = {f"{part}_{layer}" for part in ("key", "value") for layer in range(2)}
    assert used == {"encode": heard | {"position"}, "decode": heard | own | {"position"}}


def test_every_step_transfers_one_token_each_way(program: LoadedProgram) -> None:
    said = whisper.say(program, FEATURES, STEPS)
    assert [step.copies for step in said] == [whisper.ONE_TOKEN] * STEPS
    counts = program.method("encode").copies.counts
    assert (counts[CopyKind.H2D], counts[CopyKind.D2H]) == (1, 1)  # heard once


def test_tokens_and_caches_are_eagers(program: LoadedProgram) -> None:
    said = [step.token for step in whisper.say(program, FEATURES, STEPS)]
    wanted, buffers = whisper.say_eagerly(whisper.source("small"), FEATURES, STEPS)
    assert said == wanted
    for variable in exported().planned.program.state:
        held = np.asarray(program.state.get(variable.name))
        np.testing.assert_allclose(held, buffers[variable.name].numpy(), atol=2e-5, err_msg=variable.name)


def test_another_utterance_begins_at_the_start(program: LoadedProgram) -> None:
    whisper.say(program, -FEATURES, STEPS)
    again = [step.token for step in whisper.say(program, FEATURES, STEPS)]
    assert again == whisper.say_eagerly(whisper.source("small"), FEATURES, STEPS)[0]

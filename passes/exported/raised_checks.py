"""``assert (x > 0).all()``, ``if x.isnan().any(): raise``: checks of values, which an export takes to hold.

Whether they hold depends on data, so that `torch.export` cannot go on behind them. One of the two ways does
nothing but raise: the exported method is the other.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from unittest import mock

from torch import Tensor

from ..inductor.interfaces import known_value

_LONGEST = 64
"""Instructions that a raise may take, its message included."""


@contextlib.contextmanager
def passed_checks() -> Generator[None]:
    """While active, the truth of a tensor that nobody knows is what a check needs not to raise."""
    plain: Callable[[Tensor], bool] = Tensor.__bool__

    def truth(value: Tensor) -> bool:
        wanted = _passes(sys._getframe(1)) if known_value(value) is None else None
        return plain(value) if wanted is None else wanted

    truth.__name__ = plain.__name__  # torch goes by it
    with mock.patch.object(Tensor, "__bool__", truth):
        yield


def _passes(frame: FrameType) -> bool | None:
    """What lets the check at which the frame stands pass; None where it stands at no check."""
    steps = [s for s in dis.get_instructions(frame.f_code) if s.opname not in ("CACHE", "NOP", "NOT_TAKEN")]
    at = next((index for index, step in enumerate(steps) if step.offset == frame.f_lasti), len(steps))
    at += at < len(steps) and steps[at].opname == "TO_BOOL"
    if at + 1 >= len(steps) or "JUMP" not in steps[at].opname or "_IF_" not in steps[at].opname:
        return None
    jump = steps[at]
    jumps_if = jump.opname.endswith("TRUE")
    target = next((index for index, step in enumerate(steps) if step.offset == jump.argval), len(steps))
    falls_raise, jump_raises = _only_raises(steps[at + 1 :]), _only_raises(steps[target:])
    if falls_raise == jump_raises or "NONE" in jump.opname:
        return None
    return jumps_if if falls_raise else not jumps_if


def _only_raises(steps: Sequence[dis.Instruction]) -> bool:
    """Whether what comes first is a raise: nothing is stored or returned before it."""
    for step in steps[:_LONGEST]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(("STORE", "DELETE", "POP", "RETURN", "YIELD", "FOR_", "JUMP", "RERAISE")):
            return False
    return False

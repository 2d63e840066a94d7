"""Python loops over what a mask selects, ``for expert in mask.nonzero():``, unrolled over all it may select.

How often such a loop turns depends on data, so `torch.export` cannot run it. Here it turns once for each
element of the mask, and what a turn writes is kept only where its element is true: tensors written to in
place, and names that are bound anew (``total = total + ...``). Whatever else a turn might leave behind is
refused. Turns stand between two markers in the exported graph; `close_turns` makes them selections.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...runtime.errors import UnsupportedOperatorError
from ..inductor.interfaces import depends_on_data
from ..kernels.own_operators import define_marker
from ..source.frames import is_torchs
from .sizes import bound_of

MOST_TURNS = 512
"""Turns that a loop may have; each is a copy of its body."""

_WAYS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF)")

define_marker("turn_begin(Tensor listed, int at, int count, str line) -> ()")
define_marker("turn_end(Tensor[] before, Tensor[] after) -> ()")


@contextlib.contextmanager
def unrolled_loops() -> Generator[None]:
    """While active, a loop over a tensor whose length depends on data turns once for all it could hold."""
    plain: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__
    text: Callable[[Tensor, str], str] = Tensor.__format__

    def iterate(listed: Tensor) -> Iterator[Tensor]:
        extent: Any = listed.shape[0] if listed.dim() else 0
        frame = sys._getframe(1)
        torchs = is_torchs(frame.f_code.co_filename)
        if not isinstance(extent, torch.SymInt) or not depends_on_data(extent) or torchs:
            return plain(listed)
        return _Turns(listed, extent, frame)

    def show(value: Tensor, how: str) -> str:
        return text(value, how) if value.dim() else format(value.item(), how)  # names of experts hold numbers

    with mock.patch.object(Tensor, "__iter__", iterate), mock.patch.object(Tensor, "__format__", show):
        yield


class _Turns:
    """The iterator of one loop: for each element of the mask its index, and markers around each turn."""

    def __init__(self, listed: Tensor, extent: torch.SymInt, frame: FrameType) -> None:
        self._listed, self._frame = listed, frame
        self._line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if not _is_statement(frame):
            raise self._refusal("it is no plain `for` statement over it", "write one")
        if listed.dim() > 2 or (listed.dim() == 2 and listed.shape[1] != 1):
            raise self._refusal("a mask with several dimensions was searched", "flatten the mask")
        _, bound = bound_of(None, extent)
        if bound is None or bound > MOST_TURNS:
            most = "any number of" if bound is None else bound
            raise self._refusal(f"it could have {most} turns", f"{MOST_TURNS} at most are unrolled")
        self._count = bound
        self._at = -1
        self._held = self._names()

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> Tensor:
        markers: Any = torch.ops.devplan
        if self._at >= 0:
            before, after = self._bound_anew()
            markers.turn_end(before, after)
        self._at += 1
        if self._at == self._count:
            self._check_names_after()
            raise StopIteration
        markers.turn_begin(self._listed, self._at, self._count, self._line)
        index = [self._at] if self._listed.dim() == 2 else self._at
        return torch.tensor(index, dtype=self._listed.dtype)

    def _names(self) -> dict[str, Any]:
        """What the names in the loop's function stand for: tensors, numbers, text, lengths of containers."""
        return {name: _noted(value) for name, value in dict(self._frame.f_locals).items()}

    def _bound_anew(self) -> tuple[list[Tensor], list[Tensor]]:
        """What names from before the loop stood for, and what they stand for after this turn."""
        found = self._names()
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, old in self._held.items():
            new = found.get(name)
            if isinstance(new, Tensor) and isinstance(old, Tensor):
                pairs += [(old, new)] if new is not old else []
                self._held[name] = new
            elif isinstance(new, Tensor) or isinstance(old, Tensor) or new != old:
                raise self._refusal(f"the Python value `{name}` changes in it", "make it a tensor")
        return [old for old, _ in pairs], [new for _, new in pairs]

    def _check_names_after(self) -> None:
        """A number that a turn named is that of the last turn, which the loop might not have had."""
        names = self._names().items()
        made = {name for name, value in names if not isinstance(value, Tensor)} - self._held.keys()
        for name in made & _read_first(self._frame):
            raise self._refusal(f"the Python value `{name}` is used after it", "make it a tensor")

    def _refusal(self, why: str, hint: str) -> UnsupportedOperatorError:
        return loop_refusal(self._line, why, hint)


def _noted(value: Any) -> Any:
    if isinstance(value, list | dict | set):
        return len(value)  # pyright: ignore
    kinds = (Tensor, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)
    return value if isinstance(value, kinds) else None


def _is_statement(frame: FrameType) -> bool:
    """Whether the frame is at the head of a `for` statement: no comprehension or call takes the iterator."""
    steps = (step.opname for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti)
    names = (name for name in steps if name not in ("EXTENDED_ARG", "CACHE"))
    return [next(names), next(names)] == ["GET_ITER", "FOR_ITER"]


def _read_first(frame: FrameType) -> set[str]:
    """Names that are read behind the loop whose head the frame is at, in the order of the text."""
    steps = list(dis.get_instructions(frame.f_code))
    head = next(step for step in steps if step.offset >= frame.f_lasti and step.opname == "FOR_ITER")
    behind = [step for step in steps if step.offset >= int(head.argval)]
    first: dict[str, str] = {}
    for step in behind:
        ways = _WAYS.findall(step.opname)  # one instruction may concern two names
        names: tuple[Any, ...] = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        for way, name in zip(ways, names, strict=False):
            first.setdefault(str(name), way)
    return {name for name, way in first.items() if way == "LOAD"}


def loop_refusal(line: str, why: str, hint: str) -> UnsupportedOperatorError:
    """The error of a loop at ``net.py:12``."""
    return UnsupportedOperatorError(
        f"the loop at {line} has a number of turns that depends on data", why=why, hint=hint
    )

"""The methods of a loaded program, as a caller holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from .calls.binding import CopyTally
from .calls.bound import Bound, BucketUse
from .calls.caller import Caller, written_state
from .calls.inputs import arrange
from .errors import ExecutionError, UsageError
from .memory.session import Session, busy
from .program import Method


def in_order(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """A function that gives the values of these names, in their order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: [named[name] for name in names]


class LoadedMethod:
    """A method that can be called: ``method(tokens, mask)`` or ``method(tokens=..., mask=...)``.

    Inputs are NumPy arrays, `HostTensor`, or objects with ``__array_interface__`` or ``__dlpack__``; inputs
    that the program takes in device memory are device tensors. The result maps output names to NumPy arrays
    (`HostTensor` for bfloat16 and 8-bit floats, device tensors for outputs left on a device). They are the
    caller's own; with ``borrow=True`` they are `BorrowedTensor` views of the program's memory.

    Raises:
        UsageError: an input's name, rank, a dimension, dtype or place does not fit.
        ExecutionError: a step failed, the program is closed, or another thread uses it.
    """

    def __init__(self, caller: Caller, session: Session, program: object) -> None:
        self.description: Method = caller.method
        self._caller, self._session, self._program = caller, session, program
        self._names = [port.name for port in self.description.inputs]
        self._arity = len(self._names)
        self._in_order = in_order(self._names)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.description.name

    @property
    def bound(self) -> Bound | None:
        """Operands and execution of the last binding; None before the first call, and without a plan."""
        return self._caller.last

    @property
    def no_graph_reason(self) -> str:
        """Why the last binding does not run as one device graph; empty when it does."""
        return self._caller.no_graph_reason

    @property
    def copies(self) -> CopyTally:
        """Copies executed so far, by kind."""
        return self._caller.copies()

    @property
    def buckets(self) -> tuple[BucketUse, ...]:
        """The declared sizes with a plan and a graph of their own: calls so far, and the graph's state."""
        return self._caller.buckets

    @property
    def other_calls(self) -> int:
        """Calls whose sizes were none of the buckets'."""
        return self._caller.other_calls

    @property
    def graph_nbytes(self) -> int | None:
        """Device bytes that all its graphs took, as far as the driver tells; None where there are none."""
        return self._caller.graph_nbytes

    def prepare(self) -> None:
        """Bind and capture now rather than at the first call (static methods and buckets)."""
        with self._session.exclusive():
            self._caller.prepare()

    def __call__(self, *inputs: Any, borrow: bool = False, **named: Any) -> dict[str, Any]:
        session, caller = self._session, self._caller
        args: Sequence[Any] = inputs
        if named or len(inputs) != self._arity:
            args = self._arranged(inputs, named)
        if not session.lock.acquire(False):
            raise busy()
        caller.is_running = False
        try:
            if session.blocked:
                raise ExecutionError(f"method `{self.name}` cannot run", why=session.blocked)
            session.generation += 1
            return (caller.quick or caller.call)(args, borrow)
        except BaseException as error:
            if not caller.is_running:
                raise
            known = session.failed(self.name, written_state(self.description), error)
            if known is error:
                raise
            raise known from error
        finally:
            session.lock.release()

    def _arranged(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        if not inputs and len(named) == self._arity:  # the usual call; `arrange` explains any other
            try:
                return self._in_order(named)
            except KeyError:
                pass
        return arrange(self.description, inputs, named)

    def refill(self, inputs: Mapping[str, Any]) -> None:
        """Store inputs where the plan has them and run nothing: for steps that are timed one by one."""
        args = self._arranged((), inputs)
        with self._session.exclusive():
            if self._caller.last is not None:
                self._caller.refill(self._caller.last, args)

    def run(self, inputs: Mapping[str, Any], *, borrow: bool = False) -> dict[str, Any]:
        """Like a call, for input names that are no Python names."""
        if not isinstance(inputs, Mapping):
            hint = "call the method itself for inputs in order"
            raise UsageError(f"inputs are given by name, not as `{type(inputs).__name__}`", hint=hint)
        return self(*self._arranged((), inputs), borrow=borrow)

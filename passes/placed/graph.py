"""The placed graph: operators of one method with the device each runs on, free of torch.

Built from an exported program (`from_exported`), rewritten by the placement and copy passes, and lowered
region by region. Every tensor is a node; a node's ``operands`` are the nodes whose tensors it reads. The
exported graph is functional: nothing is mutated, and state changes are the pairs in ``updates``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ...runtime.program import NOWHERE, Device, SourceLocation, Symbol


class NodeKind(Enum):
    """What a node stands for."""

    INPUT = "input"
    CONSTANT = "constant"
    STATE = "state"
    CALL = "call"
    """An operator. One with several results has no type of its own; its ELEMENT nodes have."""
    ELEMENT = "element"
    """One result of a multi-result CALL, its only operand."""
    COPY = "copy"
    """The operand's tensor on another device. Made by the copy pass only."""


@dataclass(frozen=True)
class TensorType:
    """Element type, shape (symbols allowed) and the bytes at the declared bound."""

    dtype: DType
    shape: tuple[Size, ...]
    max_nbytes: int


@dataclass(frozen=True)
class Node:
    """One tensor, or one operator with several results."""

    name: str
    kind: NodeKind
    operator: str = ""
    """``aten.add.Tensor`` for a CALL, empty otherwise."""
    operands: tuple[str, ...] = ()
    type: TensorType | None = None
    device: Device | None = None
    """None until placed. Inputs: where the caller keeps them."""
    reason: str = ""
    """Why it is on that device; for a COPY why the copy exists (the ledger's words)."""
    is_view: bool = False
    """The result is a window onto its first operand: free, on whatever device that is."""
    content: str = ""
    """For CONSTANT, STATE and INPUT: its name in the program (an INPUT without one goes by ``name``)."""
    region: int = -1
    origin: SourceLocation = NOWHERE
    branches: tuple[PlacedGraph, ...] = ()
    """Of a control-flow operator: its bodies; their inputs follow the operator's own operands."""
    index: int = 0
    """Of an ELEMENT: which result of its CALL it is."""
    twin_of: str = ""
    """The node that this one computes again on another device (views and constants only)."""

    def on(self, device: Device, reason: str) -> Node:
        """This node, placed."""
        return replace(self, device=device, reason=reason)


@dataclass(frozen=True)
class GraphOutput:
    """A result of the method. ``node`` is empty for a literal. ``device``: where the caller wants it."""

    name: str
    node: str
    device: Device | None = None
    is_count: bool = False
    """A size that depends on data: no output by itself, and always wanted on the host."""


@dataclass(frozen=True)
class PlacedGraph:
    """One method: nodes in an order in which every operand comes before its reader."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    updates: tuple[tuple[str, str], ...] = ()
    """(state node or input node, node whose tensor becomes its new content when the call ends)."""
    symbols: tuple[Symbol, ...] = field(default=())

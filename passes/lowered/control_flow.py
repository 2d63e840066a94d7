"""Conditions and loops as jumps: bodies stand in the method's one list of instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...runtime.program import Copy, CopyKind, Jump, Value
from ..placed.graph import Node, NodeKind, PlacedGraph
from .builder import MethodBuilder


@dataclass(frozen=True)
class ControlFlowLowering:
    """Appends control flow to a method.

    ``values`` are the values of placed nodes by name, ``emit`` lowers a body's nodes in order, ``like`` makes
    a value with the layout of a node's tensor on the node's device.
    """

    builder: MethodBuilder
    values: dict[str, str]
    emit: Callable[[Sequence[Node]], None]
    like: Callable[[Node], Value]

    def lower(self, node: Node, elements: Mapping[int, Sequence[Node]]) -> None:
        """One `cond` or `while_loop`; ``elements`` are its results' nodes by index."""
        if "while_loop" in node.operator:
            self._loop(node, elements)
        else:
            self._condition(node, elements)

    def _condition(self, node: Node, elements: Mapping[int, Sequence[Node]]) -> None:
        made: dict[int, str] = {}
        for index, found in elements.items():
            made[index] = self.like(found[0]).name
            self.values.update(dict.fromkeys((element.name for element in found), made[index]))
        predicate = self.values[node.operands[0]]
        then, otherwise = node.branches
        to_else = self._jump(predicate)
        self._branch(node, then, made)
        to_end = self._jump()
        self._land(to_else)
        self._branch(node, otherwise, made)
        self._land(to_end)

    def _branch(self, node: Node, body: PlacedGraph, made: Mapping[int, str]) -> None:
        self._bind(body, [self.values[operand] for operand in node.operands[1:]])
        self.emit(body.nodes)
        for index, result in made.items():
            self._copy(self.values[body.outputs[index].node], result, f"result {index} of `{node.operator}`")

    def _loop(self, node: Node, elements: Mapping[int, Sequence[Node]]) -> None:
        test, body = node.branches
        templates = [n for n in body.nodes if n.kind is NodeKind.INPUT][: len(body.outputs)]
        carried = [self.like(template).name for template in templates]
        for operand, held in zip(node.operands, carried, strict=False):
            self._copy(self.values[operand], held, "carried into the loop")
        given = [*carried, *(self.values[operand] for operand in node.operands[len(carried) :])]
        head = len(self.builder.instructions)
        self._bind(test, given)
        self.emit(test.nodes)
        to_end = self._jump(self.values[test.outputs[0].node])
        self._bind(body, given)
        self.emit(body.nodes)
        self._carry([self.values[output.node] for output in body.outputs], carried)
        self.builder.instructions.append(Jump(head))
        self._land(to_end)
        for index, found in elements.items():
            self.values.update(dict.fromkeys((element.name for element in found), carried[index]))

    def _carry(self, results: Sequence[str], carried: Sequence[str]) -> None:
        """Results become the next round's values; those that show a carried tensor are saved first."""
        held = {self.builder.values[value].storage for value in carried}
        saved: list[str] = []
        for result in results:
            value = self.builder.values[result]
            if value.storage in held:
                origin = self.builder.storages[value.storage]
                storage = self.builder.add_storage(f"{result}_kept", origin.device, origin.nbytes)
                kept = self.builder.add_value(
                    storage.name, storage.name, value.dtype, value.shape, value.strides, value.offset
                )
                self._copy(result, kept.name, "kept while the loop's tensors change places")
                result = kept.name
            saved.append(result)
        for result, target in zip(saved, carried, strict=True):
            self._copy(result, target, "carried to the next round")

    def _bind(self, body: PlacedGraph, given: Sequence[str]) -> None:
        inputs = [node for node in body.nodes if node.kind is NodeKind.INPUT]
        self.values.update(zip((node.name for node in inputs), given, strict=True))

    def _copy(self, source: str, destination: str, reason: str) -> None:
        self.builder.instructions.append(Copy(CopyKind.LOCAL, source, destination, reason))

    def _jump(self, condition: str = "") -> int:
        self.builder.instructions.append(Jump(-1, condition))
        return len(self.builder.instructions) - 1

    def _land(self, index: int) -> None:
        """Let the jump at ``index`` go to what comes next."""
        jump = self.builder.instructions[index]
        assert isinstance(jump, Jump)
        self.builder.instructions[index] = Jump(len(self.builder.instructions), jump.condition)

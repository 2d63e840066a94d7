"""The program as an ET12 table: what any reader of `.pte` files can see of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import flatbuffers

from ..errors import ArtifactError
from ..program import (
    CPU,
    Copy,
    Device,
    HostCall,
    Instruction,
    Jump,
    Method,
    MethodPlan,
    PlannedProgram,
    Port,
)
from .et12_values import DEVICE_TYPES, Values, evalue
from .generated import program_generated as fb
from .layout import BACKEND_ID, Segment
from .portable import PortableForms
from .runs import Step, steps
from .views import ConstantTable, buffers, tensor_views


def program_table(
    planned: PlannedProgram,
    constants: ConstantTable,
    segments: Sequence[Segment],
    delegates: Sequence[Sequence[int]],
    named: Sequence[tuple[str, int]],
) -> bytes:
    """The root table's bytes, without the extended header.

    Args:
        planned: the program and its plan.
        constants: numbering of constant data; they are in segment 0.
        segments: all segments of the file.
        delegates: per method, the segment of each delegate.
        named: keys and segments of the named data.
    """
    table = fb.ProgramT()
    plans = {plan.method: plan for plan in planned.plan.methods}
    table.plans = [
        _Plan(method, plans.get(method.name), constants).table(planned.plan.methods, numbers)
        for method, numbers in zip(planned.program.methods, delegates, strict=True)
    ]
    table.constantBuffers, table.inlineData = [], []
    table.segments = [_segment(segment) for segment in segments]
    table.constants = fb.SubsegmentOffsetsT()
    table.constants.segment, table.constants.offsets = 0, list(constants.offsets)
    if any(state.initial for state in planned.program.state):
        table.mutableData = [table.constants]
    table.namedData = []
    for key, number in named:
        entry = fb.NamedDataT()
        entry.key, entry.segment = key, number
        table.namedData.append(entry)
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(table.Pack(builder), b"ET12")
    return bytes(builder.Output())


def _segment(segment: Segment) -> fb.DataSegmentT:
    table = fb.DataSegmentT()
    table.offset, table.size = segment.offset, segment.nbytes
    return table


@dataclass
class _Plan:
    """One execution plan under construction: values (the method's own first, then literals) and operators."""

    method: Method
    plan: MethodPlan | None
    constants: ConstantTable
    values: Values = field(init=False)
    forms: PortableForms = field(init=False)
    operators: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def table(self, plans: Sequence[MethodPlan], delegates: Sequence[int]) -> fb.ExecutionPlanT:
        views = tensor_views(self.method, self.plan, self.constants)
        named = {value.name: view for value, view in zip(self.method.values, views, strict=True)}
        self.values, self.forms = Values(self.method, named), PortableForms(self.method, named)
        cut = steps(self.method)
        table = fb.ExecutionPlanT()
        table.name, table.container = self.method.name, _container(self.method)
        table.inputs = [self._port(port) for port in self.method.inputs]
        table.outputs = [self._port(port) for port in self.method.outputs]
        table.outputs += [self.values.numbers[count.value] for count in self.method.counts]
        chain = fb.ChainT()
        chain.inputs, chain.outputs, chain.instructions = [], [], self._instructions(cut)
        table.chains, table.values = [chain], self.values.tables
        table.operators = [_operator(name, overload) for name, overload in self.operators]
        devices = [step.device for step in cut if step.device is not None]
        table.delegates = [
            _delegate(device, number) for device, number in zip(devices, delegates, strict=True)
        ]
        _set_buffers(table, buffers(plans, self.plan))
        return table

    def _port(self, port: Port) -> int:
        return self.values.numbers[port.value] if port.value else self.values.literal(port.literal)

    def _instructions(self, cut: Sequence[Step]) -> list[fb.InstructionT]:
        starts = {step.first: index for index, step in enumerate(cut)}
        starts[len(self.method.instructions)] = len(cut)
        tables: list[fb.InstructionT] = []
        delegate = 0
        for step in cut:
            items = self.method.instructions[step.first : step.first + step.count]
            if step.device is not None:
                tables.append(self._delegate_call(items, delegate))
                delegate += 1
                continue
            match items[0]:
                case Jump() as jump:
                    tables.append(self._jump(jump, starts[jump.target]))
                case Copy() | HostCall() as item:
                    tables.append(self._kernel_call(item))
                case _ as item:
                    raise AssertionError(f"{item} belongs to a delegate")
        return tables

    def _delegate_call(self, items: Sequence[Instruction], delegate: int) -> fb.InstructionT:
        reads: dict[str, None] = {}
        writes: dict[str, None] = {}
        for item in items:
            reads |= dict.fromkeys(name for name in item.reads if name not in writes)
            writes |= dict.fromkeys(item.writes)
        call = fb.DelegateCallT()
        call.delegate, call.arguments = delegate, [self.values.numbers[name] for name in (*reads, *writes)]
        return _instruction(fb.Call.DelegateCall, call)

    def _jump(self, item: Jump, destination: int) -> fb.InstructionT:
        call = fb.JumpFalseCallT()
        call.condition = self.values.numbers[item.condition] if item.condition else self.values.literal(False)
        call.destination = destination
        return _instruction(fb.Call.JumpFalseCall, call)

    def _kernel_call(self, item: Copy | HostCall) -> fb.InstructionT:
        form = self.forms.form(item)
        target, _, overload = form.operator.partition(".")
        outs = [self.values.numbers[result] for result in item.writes]
        call = fb.KernelCallT()
        call.operator = self.operators.setdefault((target, overload), len(self.operators))
        arguments = [self.values.argument(value) for value in form.arguments]
        call.arguments = arguments + outs + self._returned(outs)
        return _instruction(fb.Call.KernelCall, call)

    def _returned(self, outs: Sequence[int]) -> list[int]:
        """ET12 repeats what an operator returns: one result by itself, several as one list."""
        if len(outs) < 2:
            return list(outs)
        listed = fb.TensorListT()
        listed.items = list(outs)
        return [self.values.add("outs", repr(outs), evalue(fb.Content.TensorList, listed))]


def _instruction(tag: int, call: fb.KernelCallT | fb.DelegateCallT | fb.JumpFalseCallT) -> fb.InstructionT:
    table = fb.InstructionT()
    table.callType, table.call = tag, call
    return table


def _operator(name: str, overload: str) -> fb.OperatorT:
    table = fb.OperatorT()
    table.name, table.overload = name, overload
    return table


def _delegate(device: Device, segment: int) -> fb.DelegateT:
    table = fb.DelegateT()
    table.id = BACKEND_ID
    table.processed = fb.DelegateDataT()
    table.processed.location, table.processed.index = fb.DataLocation.SEGMENT, segment
    spec = fb.CompileSpecT()
    spec.key, spec.value = "target_device", list(str(device).encode())
    table.specs = [spec]
    return table


def _set_buffers(table: fb.ExecutionPlanT, sizes: Sequence[tuple[int, Device]]) -> None:
    table.bufferSizes = [nbytes for nbytes, _ in sizes]
    entries: list[fb.BufferDeviceT] = []
    for index, (_, device) in enumerate(sizes):
        if device != CPU:
            entry = fb.BufferDeviceT()
            entry.buffer, entry.deviceType, entry.deviceIndex = index, DEVICE_TYPES[device.kind], device.index
            entries.append(entry)
    table.bufferDevices = entries or None


def _container(method: Method) -> fb.ContainerMetadataT:
    table = fb.ContainerMetadataT()
    flat_inputs = [_tree("tuple", [_leaf()] * len(method.inputs)), _tree("dict", [])]
    table.inputs = method.input_tree or json.dumps([1, _tree("tuple", flat_inputs)])
    table.outputs = method.output_tree or json.dumps([1, _tree("tuple", [_leaf()] * len(method.outputs))])
    if any(port.name == "" for port in (*method.inputs, *method.outputs)):
        raise ArtifactError(f"method `{method.name}` has an input or output without a name")
    return table


def _leaf() -> dict[str, object]:
    return {"type": None, "context": None, "children_spec": []}


def _tree(kind: str, children: list[dict[str, object]]) -> dict[str, object]:
    context = "[]" if kind == "dict" else "null"
    return {"type": f"builtins.{kind}", "context": context, "children_spec": children}

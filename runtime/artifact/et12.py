"""The program as an ET12 table: what any reader of `.pte` files can see of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import flatbuffers

from ..errors import ArtifactError
from ..program import (
    CPU,
    Argument,
    Copy,
    CopyKind,
    Device,
    HostCall,
    Instruction,
    Jump,
    Method,
    MethodPlan,
    PlannedProgram,
    Port,
    Ref,
)
from .et12_values import Values, evalue
from .generated import program_generated as fb
from .layout import BACKEND_ID, Segment
from .runs import Step, steps
from .views import ConstantTable, TensorView, buffers, is_contiguous, tensor_views

COPY_OPERATORS = {
    CopyKind.H2D: ("et_copy::_h2d_copy", "out"),
    CopyKind.D2H: ("et_copy::_d2h_copy", "out"),
    CopyKind.D2D: ("devplan::_d2d_copy", "out"),
    CopyKind.LOCAL: ("devplan::_local_copy", "out"),
}
CLONE = ("aten::clone", "out")
DEVICE_TYPES = {"cpu": fb.DeviceType.CPU, "cuda": fb.DeviceType.CUDA}


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
    operators: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def table(self, plans: Sequence[MethodPlan], delegates: Sequence[int]) -> fb.ExecutionPlanT:
        views = tensor_views(self.method, self.plan, self.constants)
        self.values = Values(self.method, [evalue(fb.Content.Tensor, _tensor(view)) for view in views])
        cut = steps(self.method)
        table = fb.ExecutionPlanT()
        table.name, table.container = self.method.name, _container(self.method)
        table.inputs = [self._port(port) for port in self.method.inputs]
        table.outputs = [self._port(port) for port in self.method.outputs]
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
            elif isinstance(items[0], Jump):
                tables.append(self._jump(items[0], starts[items[0].target]))
            else:
                tables.append(self._kernel_call(items[0]))
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

    def _kernel_call(self, item: Instruction) -> fb.InstructionT:
        match item:
            case Copy():
                name = self._copy_operator(item)
                literals: tuple[Argument, ...] = (None,) if name == CLONE else ()
                arguments, results = (Ref(item.source), *literals), item.writes
            case HostCall():
                target, _, overload = item.target.partition(".")
                name = (target, overload)
                arguments, results = item.arguments, item.writes
            case _:
                raise AssertionError(f"{item} belongs to a delegate")
        outs = [self.values.numbers[result] for result in results]
        call = fb.KernelCallT()
        call.operator = self.operators.setdefault(name, len(self.operators))
        call.arguments = [self.values.argument(value) for value in arguments] + outs + self._returned(outs)
        return _instruction(fb.Call.KernelCall, call)

    def _copy_operator(self, item: Copy) -> tuple[str, str]:
        """Portable runtimes know `aten::clone.out`, which wants one layout; a change of strides is ours."""
        if item.kind is CopyKind.LOCAL:
            bounds = {symbol.name: symbol.upper for symbol in self.method.symbols}
            ends = (self.method.value(item.source), self.method.value(item.destination))
            if all(is_contiguous(value, bounds) for value in ends):
                return CLONE
        return COPY_OPERATORS[item.kind]

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


def _tensor(view: TensorView) -> fb.TensorT:
    table = fb.TensorT()
    table.scalarType, table.sizes, table.dimOrder = view.scalar_type, list(view.sizes), list(view.dim_order)
    table.dataIndex = view.data_index
    table.dynamism = fb.ShapeDynamism.BOUNDED if view.is_dynamic else fb.ShapeDynamism.STATIC
    if view.allocation is not None:
        table.allocation = fb.AllocationT()
        table.allocation.memoryId, offset = view.allocation
        table.allocation.offsetLow, table.allocation.offsetHigh = offset & 0xFFFFFFFF, offset >> 32
    if view.device != CPU or view.external:
        table.extra = fb.ExtraTensorInfoT()
        table.extra.name = view.external or None
        table.extra.location = fb.TensorLocation.EXTERNAL if view.external else fb.TensorLocation.SEGMENT
        table.extra.deviceType, table.extra.deviceIndex = DEVICE_TYPES[view.device.kind], view.device.index
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

"""Check that a file's two tellings agree: the ET12 table, which any reader sees, and devplan's own blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import ArtifactError
from ..program import CPU, Copy, Device, HostCall, Jump, Method, MethodPlan, PlannedProgram, Port
from .layout import Blob
from .portable import COPIES, PortableForms
from .runs import Step, steps
from .views import ConstantTable, TensorView, buffers, constant_table, tensor_views

if TYPE_CHECKING:
    from .generated import devplan_generated as blobs_fb
    from .generated import program_generated as fb

TENSOR, KERNEL_CALL, DELEGATE_CALL, JUMP_FALSE = 5, 1, 2, 4
"""Tags of the ET12 unions."""
EXTERNAL = 1
"""Of a tensor's data: in another file."""
DEVICE_KINDS = ("cpu", "cuda")

Regions = Mapping[tuple[str, int], "blobs_fb.RegionT"]


def verify_agreement(
    planned: PlannedProgram, blobs: Sequence[Blob], program: fb.ProgramT, regions: Regions
) -> None:
    """Compare methods, values, places, devices, buffers, calls; ArtifactError names the first difference."""
    methods = [method.name for method in planned.program.methods]
    found = [plan.name for plan in program.plans or ()]
    if methods != found:
        raise ArtifactError(
            "the program table does not match the manifest", why=f"methods {found}, not {methods}"
        )
    constants = constant_table(planned.program, blobs)
    offsets = program.constants.offsets if program.constants else None
    if list(offsets or ()) != list(constants.offsets):
        raise ArtifactError(
            "the program table does not match the manifest", why="its constants lie elsewhere"
        )
    plans = {plan.method: plan for plan in planned.plan.methods}
    for method, table in zip(planned.program.methods, program.plans or (), strict=True):
        _Comparison(method, plans.get(method.name), table).run(planned.plan.methods, constants)
        _verify_regions(method, plans.get(method.name), regions)


class _Comparison:
    """One method against its execution plan."""

    def __init__(self, method: Method, plan: MethodPlan | None, table: fb.ExecutionPlanT) -> None:
        self.method, self.plan, self.table = method, plan, table

    def same(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise ArtifactError(
                f"the program table of method `{self.method.name}` does not match the manifest",
                why=f"{what} {found!r}, not {expected!r}"[:300],
            )

    def run(self, plans: Sequence[MethodPlan], constants: ConstantTable) -> None:
        views = tensor_views(self.method, self.plan, constants)
        values = self.table.values or []
        if len(values) < len(views):
            self.same("number of values", len(values), len(views))
        for value, view, entry in zip(self.method.values, views, values, strict=False):
            tensor = entry.content if entry.contentType == TENSOR else None
            self.same(f"value `{value.name}` is", _view(tensor), view)  # type: ignore[arg-type]  # by its tag
        self._ports("inputs", self.method.inputs, self.table.inputs or ())
        counts = tuple(Port(count.name, count.value) for count in self.method.counts)
        self._ports("outputs", (*self.method.outputs, *counts), self.table.outputs or ())
        self._buffers(plans)
        named = {value.name: view for value, view in zip(self.method.values, views, strict=True)}
        self._calls(PortableForms(self.method, named))

    def _ports(self, what: str, ports: Sequence[Port], numbers: Sequence[int]) -> None:
        names = [value.name for value in self.method.values]
        self.same(f"number of {what}", len(numbers), len(ports))
        for port, number in zip(ports, numbers, strict=True):
            if port.value:
                self.same(f"`{port.name}` of the {what} is value", number, names.index(port.value))

    def _buffers(self, plans: Sequence[MethodPlan]) -> None:
        expected = buffers(plans, self.plan)
        self.same("buffer sizes", list(self.table.bufferSizes or ()), [nbytes for nbytes, _ in expected])
        devices = {
            entry.buffer: _device(entry.deviceType, entry.deviceIndex)
            for entry in self.table.bufferDevices or ()
        }
        wanted = {index: device for index, (_, device) in enumerate(expected) if device != CPU}
        self.same("buffer devices", devices, wanted)

    def _calls(self, forms: PortableForms) -> None:
        """Call by call: the operator, the delegate, or the jump's destination."""
        chains = self.table.chains or []
        self.same("number of chains", len(chains), 1)
        cut = steps(self.method)
        instructions = chains[0].instructions or []
        self.same("number of instructions", len(instructions), len(cut))
        starts = {step.first: index for index, step in enumerate(cut)} | {
            len(self.method.instructions): len(cut)
        }
        delegates = 0
        for index, (entry, step) in enumerate(zip(instructions, cut, strict=True)):
            item = self.method.instructions[step.first]
            expected: tuple[object, ...] = (KERNEL_CALL,)
            if step.device is not None:
                expected = (DELEGATE_CALL, delegates)
                delegates += 1
            elif isinstance(item, Jump):
                expected = (JUMP_FALSE, starts[item.target])
            elif isinstance(item, HostCall | Copy):
                # The form may be the operator's own or the portable one, whatever the writer knew of.
                own = item.target if isinstance(item, HostCall) else COPIES[item.kind]
                found = self._operator(entry)
                expected = (KERNEL_CALL, own if found == own else forms.form(item).operator)
            self.same(f"call {index} is", self._call(entry), expected)
        self.same("number of delegates", len(self.table.delegates or ()), delegates)

    def _call(self, entry: fb.InstructionT) -> tuple[object, ...]:
        if entry.callType == DELEGATE_CALL:
            return (DELEGATE_CALL, getattr(entry.call, "delegate", None))
        if entry.callType == JUMP_FALSE:
            return (JUMP_FALSE, getattr(entry.call, "destination", None))
        return (entry.callType, self._operator(entry))

    def _operator(self, entry: fb.InstructionT) -> str:
        number = getattr(entry.call, "operator", -1)
        operators = self.table.operators or []
        if not 0 <= number < len(operators):
            return ""
        name, overload = operators[number].name, operators[number].overload
        return f"{name}.{overload}" if overload else f"{name}"


def _view(tensor: fb.TensorT | None) -> TensorView | None:
    """What the program table says of a tensor."""
    if tensor is None:
        return None
    place = tensor.allocation
    extra = tensor.extra
    return TensorView(
        tensor.scalarType,
        tuple(tensor.sizes or ()),
        tuple(tensor.dimOrder or ()),
        tensor.dynamism == 1,
        (place.memoryId, place.offsetLow | place.offsetHigh << 32) if place else None,
        tensor.dataIndex,
        _device(extra.deviceType, extra.deviceIndex) if extra else CPU,
        (extra.name or "") if extra and extra.location == EXTERNAL else "",
    )


def _device(kind: int, index: int) -> Device:
    return Device(DEVICE_KINDS[kind] if 0 <= kind < len(DEVICE_KINDS) else f"unknown {kind}", index)


def _verify_regions(method: Method, plan: MethodPlan | None, regions: Regions) -> None:
    """The places that the delegates' blobs repeat are the plan's."""
    places = {item.storage: (item.memory_id, item.offset) for item in plan.allocations} if plan else {}
    runs = [step for step in steps(method) if step.device is not None]
    for number, step in enumerate(runs):
        blob = regions.get((method.name, number))
        if blob is None or not _is_same_region(blob, method, step, places):
            raise ArtifactError(
                f"delegate {number} of method `{method.name}` does not match the manifest",
                why="its device or the places of its values differ",
            )


def _is_same_region(
    blob: blobs_fb.RegionT, method: Method, step: Step, places: Mapping[str, tuple[int, int]]
) -> bool:
    device = blob.device
    if step.device is None or device is None or _device(device.kind, device.index) != step.device:
        return False
    return len(blob.instructions or ()) == step.count and all(
        (operand.memoryId, operand.offset) == places.get(method.values[operand.value].storage, (0, 0))
        for operand in blob.operands or ()
    )

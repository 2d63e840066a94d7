"""The values of an execution plan: the method's own tensors first, then literals as they turn up."""

from __future__ import annotations

from collections.abc import Mapping

from ..dtypes import DType
from ..expr import Expr
from ..program import CPU, Argument, Device, Method, Ref
from .generated import program_generated as fb
from .portable import InMemoryOrder, in_memory_order
from .views import TensorView, upper_bound

DEVICE_TYPES = {"cpu": fb.DeviceType.CPU, "cuda": fb.DeviceType.CUDA}

ENUM_WORDS = {
    "torch.contiguous_format": 0, "torch.preserve_format": 1, "torch.channels_last": 2,
    "torch.channels_last_3d": 3, "torch.strided": 0,
}  # fmt: skip
"""Enums of torch, as the exporter spells them, with ET12's numbers."""


class Values:
    """The list under construction, literals shared. Sizes that depend on symbols stand at their bounds."""

    def __init__(self, method: Method, views: Mapping[str, TensorView]) -> None:
        self.method, self.views = method, views
        self.tables = [evalue(fb.Content.Tensor, _tensor(views[value.name])) for value in method.values]
        self.numbers = {value.name: index for index, value in enumerate(method.values)}
        self.literals: dict[tuple[str, str], int] = {}

    def argument(self, value: Argument | InMemoryOrder) -> int:
        """The index of an argument's value; literals and other windows onto values are added."""
        if isinstance(value, InMemoryOrder):
            view = _tensor(in_memory_order(self.views[value.name]))
            return self.add("window", value.name, evalue(fb.Content.Tensor, view))
        return self.numbers[value.name] if isinstance(value, Ref) else self.literal(value)

    def literal(self, value: Argument) -> int:
        """The index of a literal, equal ones shared."""
        match value:
            case Expr():
                return self.literal(upper_bound(value, self.method))
            case DType():
                return self.literal(value.scalar_type)
            case tuple():
                return self._list(value)
            case None | Device() | Ref():
                return self.add("none", "", evalue(fb.Content.Null, fb.NullT()))
            case str() if value not in ENUM_WORDS:
                text = fb.StringT()
                text.value = value
                return self.add("str", value, evalue(fb.Content.String, text))
            case bool():
                flag = fb.BoolT()
                flag.value = value
                return self.add("bool", repr(value), evalue(fb.Content.Bool, flag))
            case float():
                number = fb.DoubleT()
                number.value = value
                return self.add("float", repr(value), evalue(fb.Content.Double, number))
            case int() | str():
                integer = fb.IntT()
                integer.value = ENUM_WORDS[value] if isinstance(value, str) else value
                return self.add("int", repr(integer.value), evalue(fb.Content.Int, integer))

    def _list(self, items: tuple[Argument, ...]) -> int:
        """Lists: integers as indices of values, floats and bools inline, tensors with -1 for none."""
        if items and all(isinstance(item, float) for item in items):
            doubles = fb.DoubleListT()
            doubles.items = [item for item in items if isinstance(item, float)]
            return self.add("floats", repr(items), evalue(fb.Content.DoubleList, doubles))
        if items and all(isinstance(item, bool) for item in items):
            flags = fb.BoolListT()
            flags.items = [item for item in items if isinstance(item, bool)]
            return self.add("bools", repr(items), evalue(fb.Content.BoolList, flags))
        if any(isinstance(item, Ref) for item in items):
            return self._tensor_list(items)
        integers = fb.IntListT()
        integers.items = [self.literal(item) for item in items]
        return self.add("ints", repr(integers.items), evalue(fb.Content.IntList, integers))

    def _tensor_list(self, items: tuple[Argument, ...]) -> int:
        numbers = [self.numbers[item.name] if isinstance(item, Ref) else -1 for item in items]
        if -1 not in numbers:
            tensors = fb.TensorListT()
            tensors.items = numbers
            return self.add("tensors", repr(numbers), evalue(fb.Content.TensorList, tensors))
        some = fb.OptionalTensorListT()
        some.items = numbers
        return self.add("tensors?", repr(numbers), evalue(fb.Content.OptionalTensorList, some))

    def add(self, kind: str, key: str, value: fb.EValueT) -> int:
        """The index of the value of that kind and key, which is added the first time."""
        if (kind, key) not in self.literals:
            self.literals[kind, key] = len(self.tables)
            self.tables.append(value)
        return self.literals[kind, key]


def evalue(tag: int, content: object) -> fb.EValueT:
    """A value with its tag."""
    table = fb.EValueT()
    table.contentType, table.content = tag, content  # type: ignore[assignment]  # the tag's own type
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

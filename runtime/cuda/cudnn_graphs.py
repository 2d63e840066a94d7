"""Convolution and attention as cuDNN graphs: operands become tensors with their own strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backend import Operand
from ..dtypes import DType
from ..errors import DeviceError, ExecutionError
from ..program import LibraryCall

TYPES = {DType.FLOAT16: "HALF", DType.BFLOAT16: "BFLOAT16", DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}


@dataclass(frozen=True, slots=True)
class Described:
    """A graph that is not built yet, its tensors' addresses, and what a person calls it."""

    graph: Any
    pointers: Mapping[Any, int]
    title: str
    exact_float32: bool
    """Whether engines that round float32 operands must be left out."""


def convolution(cudnn: Any, handle: Any, call: LibraryCall, operands: Mapping[str, Operand]) -> Described:
    """Describe a `convolution` call. DeviceError for types and activations that it does not have."""
    names = list(call.reads)
    x, weight, out = operands[names[0]], operands[names[1]], operands[call.writes[0]]
    bias = operands[names[2]] if call.attribute("has_bias", False) else None
    activation = call.attribute("activation", "none")
    if x.dtype not in TYPES or len({x.dtype, weight.dtype, out.dtype}) != 1:
        why = f"got {x.dtype}, {weight.dtype}, {out.dtype}"
        raise DeviceError("cuDNN convolves one floating type", why=why)
    if activation not in ("none", "relu", "relu6"):
        raise DeviceError(f"a convolution has no activation `{activation}`")
    # A spatial dimension is added to one-dimensional convolutions: cuDNN starts at two.
    pad = len(x.shape) == 3
    made = _Builder(cudnn, handle, x.dtype)
    image, kernel = made.tensor(_widened(x, pad), "x"), made.tensor(_widened(weight, pad), "weight")
    sizes = {
        "padding": _numbers(call, "padding", pad, 0),
        "stride": _numbers(call, "stride", pad, 1),
        "dilation": _numbers(call, "dilation", pad, 1),
    }
    wide_out = _widened(out, pad)
    if call.attribute("transposed", False):
        # A transposed convolution is a plain one's gradient by its input; the shape settles output_padding.
        result = made.graph.conv_dgrad(loss=image, filter=kernel, **sizes)
        result.set_dim(list(wide_out.shape))
    else:
        result = made.graph.conv_fprop(image=image, weight=kernel, **sizes)
    # First what is added, then the bias: cuDNN has kernels for this order, and compiles one for any other.
    if call.attribute("has_added", False):
        added = operands[names[-1]]
        result = made.graph.add(a=result, b=made.tensor(_widened(added, pad), "added"))
    if bias is not None:
        row = _reshaped(bias, (1, bias.numel, *(1,) * (len(wide_out.shape) - 2)))
        result = made.graph.bias(input=result, bias=made.tensor(row, "bias"))
    if activation == "relu":
        result = made.graph.relu(input=result)
    elif activation == "relu6":
        result = made.graph.relu(input=result, lower_clip=0.0, upper_clip=6.0)
    made.output(result, wide_out)
    exact = x.dtype is DType.FLOAT32 and not call.attribute("allow_tf32", False)
    shapes = f"x {list(x.shape)} by {list(x.strides)}, weight {list(weight.shape)}"
    return Described(made.graph, made.pointers, f"{x.dtype} convolution of {shapes}", exact)


def attention(cudnn: Any, handle: Any, call: LibraryCall, operands: Mapping[str, Operand]) -> Described:
    """Describe an `attention` call. DeviceError for what cuDNN's fused attention does not have."""
    names = list(call.reads)
    query, key, value = (operands[name] for name in names[:3])
    out = operands[call.writes[0]]
    if query.dtype not in (DType.FLOAT16, DType.BFLOAT16):
        raise DeviceError(
            f"cuDNN has no fused attention of {query.dtype}", hint="lower it as separate products"
        )
    made = _Builder(cudnn, handle, query.dtype)
    given: dict[str, Any] = {
        name: made.tensor(x, name) for name, x in zip("qkv", (query, key, value), strict=True)
    }
    if call.attribute("has_mask", False):
        mask = operands[names[3]]
        if mask.dtype is DType.BOOL:
            raise DeviceError("cuDNN's attention takes no boolean mask", hint="make it additive")
        missing = 4 - len(mask.shape)
        shape, strides = (1,) * missing + mask.shape, (mask.numel,) * missing + mask.strides
        wide = Operand(mask.address, mask.dtype, shape, strides, mask.device)
        given["bias"] = made.tensor(wide, "mask", getattr(cudnn.data_type, TYPES[mask.dtype]))
    scale = call.attribute("scale")
    depth = query.shape[-1]
    result, _ = made.graph.sdpa(
        **given,
        attn_scale=float(scale) if isinstance(scale, int | float) else depth**-0.5,
        use_causal_mask=bool(call.attribute("is_causal", False)),
        generate_stats=False,
    )
    made.output(result, out)
    title = f"{query.dtype} attention of q {list(query.shape)}, k {list(key.shape)}"
    return Described(made.graph, made.pointers, title, False)


class _Builder:
    """A graph in the making; ``pointers`` collects its tensors' addresses."""

    def __init__(self, cudnn: Any, handle: Any, dtype: DType) -> None:
        self._type = getattr(cudnn.data_type, TYPES[dtype])
        compute = cudnn.data_type.DOUBLE if dtype is DType.FLOAT64 else cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self._type,
            intermediate_data_type=compute,
            compute_data_type=compute,
            handle=handle,
        )
        self.pointers: dict[Any, int] = {}

    def tensor(self, operand: Operand, name: str, data_type: Any = None) -> Any:
        """An input of the graph."""
        made = self.graph.tensor(
            name=name,
            dim=list(operand.shape),
            stride=list(operand.strides),
            data_type=data_type or self._type,
        )
        self.pointers[made] = operand.address
        return made

    def output(self, result: Any, operand: Operand) -> None:
        """Let a result be the graph's output."""
        result.set_output(True).set_data_type(self._type)
        result.set_dim(list(operand.shape)).set_stride(list(operand.strides))
        self.pointers[result] = operand.address


def _widened(operand: Operand, pad: bool) -> Operand:
    """With a spatial dimension of 1 put in where ``pad`` asks for it."""
    if not pad:
        return operand
    (n, c, length), (n_stride, c_stride, stride) = operand.shape, operand.strides
    strides = (n_stride, c_stride, length * stride, stride)
    return Operand(operand.address, operand.dtype, (n, c, 1, length), strides, operand.device)


def _reshaped(operand: Operand, shape: tuple[int, ...]) -> Operand:
    """A dense row as a tensor of the same elements, of which only dimension 1 is larger than one."""
    strides = (operand.numel, *(1,) * (len(shape) - 1))
    return Operand(operand.address, operand.dtype, shape, strides, operand.device)


def _numbers(call: LibraryCall, name: str, pad: bool, neutral: int) -> list[int]:
    value = call.attribute(name)
    if not isinstance(value, tuple) or not all(isinstance(number, int) for number in value):
        raise ExecutionError(f"a convolution's `{name}` must be a tuple of integers, not {value!r}")
    numbers = [number for number in value if isinstance(number, int)]
    return [neutral, *numbers] if pad else numbers

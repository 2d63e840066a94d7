"""Library calls of the emulator in NumPy: products, attention and fills, accumulated in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backend import Operand, Step
from ..dtypes import DType
from ..errors import ArtifactError, DevplanError, ExecutionError
from ..program import Device, LibraryCall
from ..tensors.host import Array, array_at
from . import special, types
from .convolution import convolve


class Access:
    """An operand as values, read and written with the conversions of its element type."""

    def __init__(self, operand: Operand) -> None:
        self.operand, self._type = operand, types.of_dtype(operand.dtype)
        self._raw = array_at(operand.address, operand.dtype, operand.shape, operand.strides)

    def read(self) -> Array:
        """The values as float32, float64, or integers."""
        if not self.operand.dtype.is_floating:
            return self._raw
        values = types.unpack(self._raw, self._type)
        return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)

    def write(self, values: Array) -> None:
        """Round and store."""
        rounded = types.pack(values.astype(self._type.held, copy=False), self._type)
        self._raw[...] = rounded.view(self._raw.dtype) if rounded.dtype.itemsize == 1 else rounded


def bind_library_call(call: LibraryCall, operands: Mapping[str, Operand], device: Device) -> Step:
    """A step that runs the call; ArtifactError for an unknown function or operands that do not fit."""
    if call.function not in _FUNCTIONS:
        raise ArtifactError(f"there is no library function `{call.function}`")
    for name in (*call.reads, *call.writes):
        if operands[name].device != device:
            raise ExecutionError(
                f"`{call.function}` on `{device}` is given `{name}` of `{operands[name].device}`"
            )
    reads = [Access(operands[name]) for name in call.reads]
    written = Access(operands[call.writes[0]])  # a workspace may follow
    run = _FUNCTIONS[call.function]
    attributes = dict(call.attributes)

    def step() -> None:
        try:
            with np.errstate(all="ignore"):
                made = run(reads, written.operand, attributes)
            if made.shape != written.operand.shape:
                made = np.broadcast_to(made, written.operand.shape)
            written.write(made)
        except DevplanError:
            raise
        except (ValueError, IndexError, TypeError) as error:
            raise ExecutionError(
                f"`{call.function}` fails on the emulator", why=f"{error} ({call.origin})"
            ) from error

    return step


def product(left: Array, right: Array) -> Array:
    """A batched matrix product, one BLAS call per matrix: NumPy's own loop over strided batches is slow."""
    if left.ndim == 2 and right.ndim == 2:
        return np.asarray(left @ right)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    made = np.empty((*batch, left.shape[-2], right.shape[-1]), np.result_type(left, right))
    left = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    right = np.broadcast_to(right, (*batch, *right.shape[-2:]))
    for index in np.ndindex(*batch):
        np.matmul(np.ascontiguousarray(left[index]), np.ascontiguousarray(right[index]), out=made[index])
    return made


def matmul(reads: list[Access], out: Operand, attributes: Mapping[str, Any]) -> Array:
    """``epilogue(alpha * a @ b + beta * c + bias)``."""
    values = [access.read() for access in reads]
    made = product(values[0], values[1])
    alpha, beta = float(attributes.get("alpha", 1.0)), float(attributes.get("beta", 1.0))
    if alpha != 1.0:
        made = made * made.dtype.type(alpha)
    rest = values[2:]
    bias = rest.pop(0) if attributes.get("has_bias") else None
    if attributes.get("has_c"):
        made = made + made.dtype.type(beta) * rest.pop(0)
    if bias is not None:
        made = made + bias
    return epilogue(made, str(attributes.get("epilogue", "none")))


def epilogue(values: Array, name: str) -> Array:
    """The activation that a product or convolution ends with."""
    if name == "none":
        return values
    if name == "relu":
        return np.maximum(values, 0)
    if name == "relu6":
        return np.clip(values, 0, 6)
    kind = values.dtype.type
    if name == "gelu_erf":
        return np.asarray(values * kind(0.5) * (1 + special.erf(values * kind(math.sqrt(0.5)))), values.dtype)
    if name == "gelu_tanh":
        inner = kind(math.sqrt(2 / math.pi)) * (values + kind(0.044715) * values**3)
        return np.asarray(values * kind(0.5) * (1 + np.tanh(inner)), values.dtype)
    raise ArtifactError(f"there is no epilogue `{name}`")


def convolution(reads: list[Access], out: Operand, attributes: Mapping[str, Any]) -> Array:
    """See `convolution.py`."""
    x, weight = reads[0].read(), reads[1].read()
    bias = reads[2].read() if attributes.get("has_bias") else None
    made = convolve(x, weight, bias, attributes)
    if attributes.get("has_added"):
        made = made + reads[-1].read()
    return epilogue(made, str(attributes.get("activation", "none")))


def attention(reads: list[Access], out: Operand, attributes: Mapping[str, Any]) -> Array:
    """``softmax(scale * q @ k.T + mask) @ v``, heads of keys and values repeated to those of the query."""
    query, key, value = (access.read() for access in reads[:3])
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = np.repeat(key, repeat, axis=1), np.repeat(value, repeat, axis=1)
    given = attributes.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if given is None else float(given)
    scores = product(query, np.swapaxes(key, -1, -2)) * query.dtype.type(scale)
    if attributes.get("is_causal"):
        rows, columns = scores.shape[-2:]
        scores = np.where(np.tri(rows, columns, dtype=bool), scores, -np.inf)
    if attributes.get("has_mask"):
        mask = reads[3].read()
        is_bool = reads[3].operand.dtype is DType.BOOL
        scores = np.where(mask, scores, -np.inf) if is_bool else scores + mask
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return product(weights / np.where(total == 0, 1, total), value)


def fill(reads: list[Access], out: Operand, attributes: Mapping[str, Any]) -> Array:
    """One value everywhere."""
    return np.full(out.shape, attributes.get("value", 0), types.of_dtype(out.dtype).held)


_FUNCTIONS = {"matmul": matmul, "convolution": convolution, "attention": attention, "fill": fill}

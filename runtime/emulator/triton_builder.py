"""What Triton's interpreter builds operations with, mended: addresses are checked, gaps filled.

It works on raw addresses and checks none, truncates what becomes bfloat16 (GPUs round to nearest even),
multiplies matrices of bfloat16 as the integers that hold their bits, and knows no assembly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import DType
from ..errors import ExecutionError
from ..tensors.host import Array, HostTensor
from . import assembly, types
from .tensor import Tensor

if TYPE_CHECKING:
    from .triton_copy import Interpreter

_blocks: list[tuple[int, int]] = []
"""First and one past the last address of the blocks that the running launch may touch."""


@contextmanager
def allowed(blocks: Sequence[tuple[int, int]]) -> Generator[None]:
    """Let kernels touch these blocks and nothing else. Under the interpreter's lock."""
    before = list(_blocks)
    _blocks[:] = blocks
    try:
        yield
    finally:
        _blocks[:] = before


def install(made: Interpreter) -> None:
    """Mend the interpreter's builder."""
    module = made.module
    builder = module.InterpreterBuilder
    options = module.InterpreterOptions(debug=True, sanitize_overflow=False)
    module.interpreter_builder.options = options  # assertions count, integers wrap
    for name, mask_at in (
        ("create_masked_load", 1),
        ("create_masked_store", 2),
        ("create_atomic_rmw", 3),
        ("create_atomic_cas", -1),
    ):
        setattr(builder, name, _checked(getattr(builder, name), mask_at, int(name == "create_atomic_rmw")))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _rounding(getattr(builder, name), made))
    builder.create_dot = _widening(builder.create_dot, made)
    builder.create_inline_asm = _assembly(made)
    module._patch_lang_tensor = _with_index(module._patch_lang_tensor)


def _with_index(patch: Callable[..., None]) -> Callable[..., None]:
    """Scalars as loop bounds: triton 3.6 converts an array of one element, which NumPy no longer does."""

    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", _one)

    return call


def _one(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _checked(method: Callable[..., Any], mask_at: int, pointer_at: int) -> Callable[..., Any]:
    """The builder's method, once every address that its mask lets through lies in an allowed block."""

    def call(self: Any, *arguments: Any) -> Any:
        mask = arguments[mask_at] if mask_at >= 0 else None
        pointers = arguments[pointer_at]
        element = pointers.get_element_ty()
        _check(pointers.data, None if mask is None else mask.data, max(1, element.primitive_bitwidth // 8))
        return method(self, *arguments)

    return call


def _check(addresses: Array, mask: Array | None, nbytes: int) -> None:
    used = addresses if mask is None else np.broadcast_to(addresses, mask.shape)[mask]
    if not used.size:
        return
    inside = np.zeros(used.shape, bool)
    for begin, end in _blocks:
        inside |= (used >= begin) & (used + np.uint64(nbytes) <= end)
    if not inside.all():
        bad = int(np.ravel(used[~inside])[0])
        raise ExecutionError(
            f"a kernel accesses {nbytes} bytes at address {bad:#x}",
            why="it is outside of the blocks of device memory that the launch is given",
        )


def _rounding(method: Callable[..., Any], made: Interpreter) -> Callable[..., Any]:
    """Conversions, those from float32 to bfloat16 to the nearest even."""
    wide, narrow = made.tl.float32, made.tl.bfloat16

    def call(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        if source.dtype.scalar != wide or target.scalar != narrow:
            return method(self, source, target, *rest)
        raw = HostTensor.from_float32(source.data, DType.BFLOAT16).raw
        return made.module.TensorHandle(raw, narrow)

    return call


def _widening(method: Callable[..., Any], made: Interpreter) -> Callable[..., Any]:
    """Matrix products, those of bfloat16 in float32."""

    def widen(self: Any, handle: Any) -> Any:
        return self.cast_impl(handle, made.tl.float32) if handle.dtype.scalar == made.tl.bfloat16 else handle

    def call(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return method(self, widen(self, a), widen(self, b), *rest)

    return call


def _assembly(made: Interpreter) -> Callable[..., Any]:
    """The few instructions of `assembly.py`."""

    def call(
        self: Any, asm: str, constraints: str, values: Sequence[Any], kinds: Any, is_pure: bool, pack: int
    ) -> Any:
        given = [Tensor(value.data[None], types.BY_NAME[value.dtype.scalar.name]) for value in values]
        result = assembly.inline_asm_elementwise(asm, constraints, given, types.FLOAT32, is_pure, pack)
        handle = made.module.TensorHandle(result.data[0], made.tl.float32)

        def get_result(at: int) -> Any:
            return handle

        return SimpleNamespace(get_result=get_result)

    return call

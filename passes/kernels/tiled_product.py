"""Matrix products as kernels of ours, for programs that shall need no library (`--no-library-calls`).

The operands may be strided in any way and the sizes be known at run time only; bias, the sum with a third
matrix and an activation are applied to the sums before they are rounded. Products of integers, which cuBLASLt
does not make, and of operands that lie as it does not take them, are always made here.
"""

from __future__ import annotations

from ...runtime.dtypes import DType
from ...runtime.expr import Size
from ..lowered.library_calls import Call
from ..size_arithmetic import product as product_of
from ..tape import OwnLaunch, Window
from ..targets import Target
from .own_launch import TYPES, own_launch
from .row_product import ACTIVATIONS
from .tiles import choose_tile

GRID = ("-(M // -BLOCK_M) * -(N // -BLOCK_N) * ITEMS", "1", "1")
_TALL = 8
"""Rows of tiles that are computed together, column by column, so that they find their operands in the L2."""

_SOURCE = """\
@triton.jit
def product(a, b, bias, c, output{runtime}{constants}):
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    item = (tl.program_id(0) // (rows * columns)).to(tl.int64)
    tile = tl.program_id(0) % (rows * columns)
    first = tile // (TALL * columns) * TALL
    height = tl.minimum(rows - first, TALL)
    m = (first + tile % (TALL * columns) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % (TALL * columns) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = m < M
    is_column = n < N
    m = m.to(tl.int64)
    n = n.to(tl.int64)
    a_at = a + item * a_item + m[:, None] * a_m + k[None, :] * a_k
    b_at = b + item * b_item + k[:, None] * b_k + n[None, :] * b_n
    sums = tl.zeros([BLOCK_M, BLOCK_N], {sums})
    for start in range(0, K, BLOCK_K):
        is_inside = start + k < K
        left = tl.load(a_at, mask=is_row[:, None] & is_inside[None, :], other=0)
        right = tl.load(b_at, mask=is_inside[:, None] & is_column[None, :], other=0)
        {multiply}
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if HAS_ALPHA:
        sums = sums * ALPHA
    is_mine = is_row[:, None] & is_column[None, :]
    if HAS_C:
        others = tl.load(
            c + item * c_item + m[:, None] * c_m + n[None, :] * c_n, mask=is_mine, other=0
        ).to({sums})
        if BETA == 1:
            sums += others
        else:
            sums += others * BETA
    if HAS_BIAS:
        sums += tl.load(bias + n * bias_n, mask=is_column, other=0).to({sums})[None, :]
    sums = {activated}
    at = output + item * output_item + m[:, None] * output_m + n[None, :] * output_n
    tl.store(at, sums.to(output.dtype.element_ty), mask=is_mine)
"""

_DOT = 'sums = tl.dot(left, right, sums, input_precision="{precision}")'
_SUM = "sums += tl.sum(left.to({sums})[:, :, None] * right.to({sums})[None, :, :], 1)"
_HALVES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


def arithmetic(source: str, dtype: DType, activation: str, *, allow_tf32: bool) -> str:
    """A kernel's text with the sums, the multiplication and the activation of a type written out."""
    sums = "tl.float32" if dtype in _HALVES else "tl.float64" if dtype.is_floating else "tl.int64"
    multiply = _DOT if dtype in _HALVES else _SUM
    multiply = multiply.replace("{precision}", "tf32" if allow_tf32 else "ieee")
    text = source.replace("{multiply}", multiply).replace("{sums}", sums)
    return text.replace("{activated}", activated(activation, "sums"))


def activated(activation: str, name: str) -> str:
    """An activation in Triton's words."""
    if activation == "relu6":
        return f"tl.minimum(tl.maximum({name}, 0.0), 6.0)"
    return ACTIVATIONS[{"gelu_erf": "gelu"}.get(activation, activation)].format(name)


def must_be_tiled(call: Call) -> bool:
    """Whether no library makes the product: of integers, or of what does not lie as cuBLASLt wants it."""
    return call.function == "matmul" and not (call.out.dtype.is_floating and _lies_well(call))


def _lies_well(call: Call) -> bool:
    """Whether rows or columns are dense, those of what is added as those of the result; see `cuda.matrix`."""
    given = dict(call.attributes)
    a, b, *rest = call.reads
    order = _is_row_major(call.out)
    if None in (order, _is_row_major(a), _is_row_major(b)):
        return False
    if given["has_bias"]:
        bias = rest.pop(0)
        if not order or bias.sizes != call.out.sizes[-1:] or bias.strides != (1,):
            return False
    return not given["has_c"] or (rest[0].sizes == call.out.sizes and _is_row_major(rest[0]) == order)


def _is_row_major(window: Window) -> bool | None:
    """None where neither rows nor columns are dense; a dynamic distance between them is taken for enough."""
    (rows, columns), (row, column) = window.sizes[-2:], window.strides[-2:]
    if (column == 1 or columns == 1) and (rows == 1 or _is_distance(row, columns)):
        return True
    if (row == 1 or rows == 1) and (columns == 1 or _is_distance(column, rows)):
        return False
    return None


def _is_distance(stride: Size, extent: Size) -> bool:
    return stride >= extent if isinstance(stride, int) and isinstance(extent, int) else stride != 0


def is_possible(call: Call) -> bool:
    """Whether the kernels have the types of a call's operands."""
    return all(window.dtype in TYPES for window in (*call.reads, call.out)) and call.out.dtype != DType.BOOL


def to_steps(call: Call, target: Target) -> tuple[OwnLaunch, ...]:
    """The kernel for one library call ``matmul``; see `runtime.library` for its operands."""
    given = dict(call.attributes)
    a, b, *rest = call.reads
    bias = rest.pop(0) if given["has_bias"] else None
    c = rest.pop(0) if given["has_c"] else None
    out = call.out
    m, n, k = out.sizes[-2], out.sizes[-1], a.sizes[-1]
    items = product_of(out.sizes[:-2])
    if 0 in (m, n, items):
        return ()
    tile = choose_tile(m, n, k, a.dtype, target, items)
    alpha, beta = float(str(given["alpha"])), float(str(given["beta"]))
    is_whole = not out.dtype.is_floating and alpha.is_integer() and beta.is_integer()
    constants = {
        **tile.constants,
        "TALL": _TALL,
        "HAS_ALPHA": alpha != 1.0,
        "ALPHA": int(alpha) if is_whole else alpha,
        "BETA": int(beta) if is_whole else beta,
        "HAS_BIAS": bias is not None,
        "HAS_C": c is not None,
    }
    sizes: dict[str, Size] = {"M": m, "N": n, "K": k, "ITEMS": items}
    for name, window, axes in (("a", a, "mk"), ("b", b, "kn"), ("c", c, "mn"), ("output", out, "mn")):
        sizes |= _strides(name, window, axes)
    sizes["bias_n"] = 0 if bias is None else bias.strides[-1]
    windows = {"a": a, "b": b, "bias": bias or a, "c": c or a, "output": out}
    source = arithmetic(_SOURCE, a.dtype, str(given["epilogue"]), allow_tf32=bool(given["allow_tf32"]))
    launch = own_launch(
        source,
        windows,
        sizes,
        constants,
        GRID,
        (out,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return (launch,)


def _strides(name: str, window: Window | None, axes: str) -> dict[str, Size]:
    """Strides of the item and the two axes; an operand without items, or none at all, stays where it is."""
    if window is None:
        return {f"{name}_item": 0, **{f"{name}_{axis}": 0 for axis in axes}}
    item = window.strides[0] if len(window.sizes) == 3 and window.sizes[0] != 1 else 0
    pairs = zip(axes, window.strides[-2:], window.sizes[-2:], strict=True)
    return {
        f"{name}_item": item,
        **{f"{name}_{axis}": 0 if size == 1 else step for axis, step, size in pairs},
    }

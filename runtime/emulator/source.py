"""Kernel source from an artifact, checked and turned into a Python function over emulated tensors.

The text is untrusted. It may hold jit-decorated functions only, made of arithmetic, calls and assignments
over the names that this module provides; no imports, classes, underscored attributes or builtins.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ..errors import ArtifactError
from . import access, assembly, functions, grids, helpers, language, philox, reductions, types
from .tensor import Tensor, as_tensor

_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign,
    ast.Expr, ast.If, ast.For, ast.While, ast.Pass, ast.Break, ast.Continue, ast.Assert,
    ast.Name, ast.Load, ast.Store, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Tuple, ast.List,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_ATTRIBUTES = frozenset((
    "T", "abs", "broadcast_to", "cast", "dtype", "element_ty", "expand_dims", "flip", "is_bf16", "is_bool",
    "is_floating", "is_fp16", "is_fp32", "is_fp64", "is_int", "is_int_signed", "is_int_unsigned", "is_ptr",
    "itemsize", "logical_and", "logical_or", "max", "min", "numel", "permute", "primitive_bitwidth", "ravel",
    "reshape", "scalar", "shape", "sum", "to", "trans", "type", "value", "view",
))  # fmt: skip
"""What kernels may ask of a value; arrays beneath tensors have methods that reach files."""
_ROOTS = ("triton", "tl", "libdevice", "tl_math", "math", "triton_helpers")


def _plain_or(plain: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
    """Python's function for compile-time values, ours as soon as a tensor is among them."""

    def choose(*values: Any) -> Any:
        return (tensors if any(isinstance(value, Tensor) for value in values) else plain)(*values)

    return choose


_BUILTINS = {
    "range": language.static_range, "float": float, "int": int, "bool": bool, "len": len,
    "min": _plain_or(min, language.minimum), "max": _plain_or(max, language.maximum),
    "abs": _plain_or(abs, functions.absolute), "tuple": tuple, "list": list,
    "True": True, "False": False, "None": None,
}  # fmt: skip


def _lazy_not(value: Any) -> Any:
    return value == 0 if isinstance(value, Tensor) else not value


def _both(*values: Any) -> Any:
    """``and``: of compile-time values as in Python, of tensors element by element."""
    return _joined(values, lambda a, b: a.logical_and(b), lambda a, b: a and b)


def _either(*values: Any) -> Any:
    """``or``, likewise."""
    return _joined(values, lambda a, b: a.logical_or(b), lambda a, b: a or b)


def _joined(
    values: tuple[Any, ...], tensors: Callable[[Any, Any], Any], plain: Callable[[Any, Any], Any]
) -> Any:
    made = values[0]
    for value in values[1:]:
        if isinstance(made, Tensor) or isinstance(value, Tensor):
            made = tensors(as_tensor(made), value)
        else:
            made = plain(made, value)
    return made


class _Logic(ast.NodeTransformer):
    """``not``, ``and`` and ``or`` as calls, since Python's own want one truth value."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("__not", [node.operand], node) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("__and" if isinstance(node.op, ast.And) else "__or", node.values, node)

    @staticmethod
    def _call(name: str, operands: list[ast.expr], node: ast.expr) -> ast.AST:
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), operands, []), node)


class Compiled:
    """A kernel's function, whether its programs may go different ways, whether they wait for each other."""

    def __init__(
        self, function: Callable[..., Any], names: tuple[str, ...], may_diverge: bool, whole_grid: bool
    ) -> None:
        self.function, self.names = function, names
        self.may_diverge, self.whole_grid = may_diverge, whole_grid


@dataclass(frozen=True)
class Checked:
    """A source text that is acceptable: without decorators and annotations, its logic as calls."""

    tree: ast.Module
    functions: dict[str, ast.FunctionDef]
    may_diverge: bool


def check_kernel(source: str, name: str) -> Checked:
    """Parse and check a source text; ArtifactError unless it is acceptable and defines ``name``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"the source of kernel `{name}` is not Python", why=str(error)) from error
    found = _checked_functions(tree, name)
    if name not in found:
        raise ArtifactError(
            f"the source of kernel `{name}` does not define it", why=f"it has {sorted(found)}"
        )
    diverges = grids.IN_ORDER in source or any(
        isinstance(node, ast.If | ast.While | ast.For | ast.IfExp) for node in ast.walk(tree)
    )
    for function in found.values():
        function.decorator_list = []
    _strip_annotations(tree)
    return Checked(ast.fix_missing_locations(_Logic().visit(tree)), found, diverges)


@lru_cache(maxsize=1024)
def compile_kernel(source: str, name: str) -> Compiled:
    """The function ``name`` of a checked source text; ArtifactError when it is not acceptable."""
    checked = check_kernel(source, name)
    names = tuple(argument.arg for argument in checked.functions[name].args.args)
    scope: dict[str, Any] = {**names_for_kernels(), "__builtins__": {}}
    exec(compile(checked.tree, f"<kernel {name}>", "exec"), scope)
    return Compiled(scope[name], names, checked.may_diverge, grids.WHOLE_GRID in source)


def _checked_functions(tree: ast.Module, kernel: str) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if not isinstance(statement, ast.FunctionDef) or not _is_jit(statement):
            _refuse(kernel, statement, "only functions decorated with `triton.jit` are allowed")
        assert isinstance(statement, ast.FunctionDef)
        found[statement.name] = statement
    for function in found.values():
        _check_function(kernel, function, set(found))
    return found


def _is_jit(function: ast.FunctionDef) -> bool:
    return len(function.decorator_list) == 1 and ast.unparse(function.decorator_list[0]) in (
        "triton.jit",
        "triton.jit()",
    )


def _check_function(kernel: str, function: ast.FunctionDef, siblings: set[str]) -> None:
    local = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    allowed = local | siblings | set(_ROOTS) | set(_BUILTINS)
    for node in (child for part in function.body for child in ast.walk(part)):
        if not isinstance(node, _NODES):
            _refuse(kernel, node, f"`{type(node).__name__}` is not allowed")
        if isinstance(node, ast.FunctionDef):
            _refuse(kernel, node, "a function inside a function is not allowed")
        if isinstance(node, ast.Attribute) and not _is_allowed(node, local):
            _refuse(kernel, node, f"attribute `{node.attr}` is not allowed")
        if isinstance(node, ast.Name) and (node.id.startswith("__") or node.id not in allowed):
            _refuse(kernel, node, f"name `{node.id}` is not known")
        if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str | None):
            _refuse(kernel, node, f"{node.value!r} is not allowed")
    if function.args.vararg or function.args.kwarg or function.args.posonlyargs or function.args.kwonlyargs:
        _refuse(kernel, function, "only plain parameters are allowed")
    for default in function.args.defaults:
        if not isinstance(default, ast.Constant):
            _refuse(kernel, default, "a default must be a constant")
    if local & (set(_ROOTS) - {"math"}):
        _refuse(kernel, function, "a parameter or variable hides a name of Triton")


def _is_allowed(node: ast.Attribute, local: set[str]) -> bool:
    """Public names of Triton's namespaces; of anything else only what tensors and types offer to kernels."""
    if node.attr.startswith("_") or not isinstance(node.ctx, ast.Load):
        return False
    path: list[str] = []
    owner = node.value
    while isinstance(owner, ast.Attribute):
        path.insert(0, owner.attr)
        owner = owner.value
    if not isinstance(owner, ast.Name) or owner.id in local or owner.id not in _ROOTS:
        return node.attr in _ATTRIBUTES
    found: Any = names_for_kernels()[owner.id]
    for part in path:
        found = getattr(found, part, None)
    return node.attr in _ATTRIBUTES or isinstance(found, SimpleNamespace)


def _refuse(kernel: str, node: ast.AST, why: str) -> None:
    line = getattr(node, "lineno", 0)
    raise ArtifactError(f"the source of kernel `{kernel}` is refused at line {line}", why=why)


def _strip_annotations(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)


_LANGUAGE = (
    "program_id", "num_programs", "constexpr", "arange", "full", "zeros", "zeros_like", "broadcast_to",
    "broadcast", "reshape", "ravel", "expand_dims", "trans", "cat", "join", "interleave", "split", "flip",
    "where", "cdiv", "clamp", "maximum", "minimum", "sort", "gather", "histogram", "dot", "static_assert",
    "device_assert", "static_range",
)  # fmt: skip
_REDUCTIONS = (
    "argmax", "argmin", "xor_sum", "reduce_or", "reduce", "associative_scan", "cumsum", "cumprod", "softmax",
)  # fmt: skip
_MEMORY = (
    "load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_and", "atomic_or", "atomic_xor",
    "atomic_xchg", "atomic_cas",
)  # fmt: skip


@lru_cache(maxsize=1)
def names_for_kernels() -> dict[str, Any]:
    """The global names of interpreted kernels."""
    tl: dict[str, Any] = {name: getattr(language, name) for name in _LANGUAGE}
    tl |= {name: getattr(access, name) for name in _MEMORY}
    tl |= {name: getattr(reductions, name) for name in _REDUCTIONS}
    tl |= {each.name: each for each in types.ALL}
    tl |= {
        "sum": reductions.total, "max": reductions.largest, "min": reductions.smallest,
        "float16": types.FLOAT16, "float32": types.FLOAT32, "float64": types.FLOAT64,
        "bfloat16": types.BFLOAT16, "float8e5": types.FLOAT8E5, "float8e4nv": types.FLOAT8E4NV,
        "range": language.static_range, "view": language.reshape, "permute": language.trans,
        "pointer_type": types.pointer_to, "philox": helpers.unsupported("tl.philox"),
        "rand": philox.rand, "randn": philox.randn, "randint": philox.randint, "rand4x": philox.uniform4,
        "randn4x": philox.normal4, "randint4x": philox.philox,
        "inline_asm_elementwise": assembly.inline_asm_elementwise,
        "debug_barrier": language.nothing, "device_print": language.nothing, "static_print": language.nothing,
        "assume": language.nothing, "multiple_of": language.same, "max_contiguous": language.same,
        "max_constancy": language.same, "PropagateNan": SimpleNamespace(NONE=0, ALL=1),
    }  # fmt: skip
    mathematics = functions.math_functions()
    tl |= {name: function for name, function in mathematics.items() if name not in tl}
    tl["math"] = SimpleNamespace(**mathematics)
    tl["core"] = SimpleNamespace(get_int_dtype=language.get_int_dtype)
    tl["extra"] = SimpleNamespace(libdevice=functions.libdevice())
    return {
        "tl": SimpleNamespace(**tl),
        "triton": SimpleNamespace(cdiv=language.cdiv, language=SimpleNamespace(**tl)),
        "libdevice": functions.libdevice(), "tl_math": SimpleNamespace(**mathematics),
        "math": SimpleNamespace(**mathematics), "triton_helpers": helpers.namespace(),
        "__not": _lazy_not, "__and": _both, "__or": _either, **_BUILTINS,
    }  # fmt: skip

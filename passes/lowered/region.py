"""One region's tape as instructions of the method under construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...runtime.dtypes import DType
from ...runtime.expr import Expr, Size
from ...runtime.program import (
    Argument,
    Copy,
    CopyKind,
    Device,
    Launch,
    LibraryCall,
    Ref,
    Role,
    SourceLocation,
    Value,
)
from ..kernels import (
    attention,
    boxes,
    cached_attention,
    depthwise,
    embedding_bag,
    grouped_product,
    recurrent_step,
    roi_align,
    row_product,
    small_matrices,
    split_attention,
    tiled_convolution,
    tiled_product,
)
from ..quantized import embedding as quantized_embedding
from ..quantized import experts as quantized_experts
from ..quantized import linear as quantized_linear
from ..quantized import matrix as quantized_matrix
from ..quantized import row as quantized_row
from ..size_arithmetic import contiguous_strides, plus, product, scaled, substitute
from ..tape import READY, Alias, Allocate, ExternCall, KernelCall, KernelSpec, OwnLaunch, Tape, Window
from ..targets import Target
from .builder import MethodBuilder
from .compile_kernels import canonical
from .library_calls import Call, to_library_calls, unsupported
from .workspaces import workspace_of

_OWN_KERNELS: dict[str, Callable[[ExternCall], Sequence[Allocate | OwnLaunch]]] = {
    attention.OPERATOR: split_attention.to_steps,
    boxes.OPERATOR: boxes.to_steps,
    cached_attention.OPERATOR: split_attention.to_cached_steps,
    depthwise.OPERATOR: depthwise.to_steps,
    embedding_bag.OPERATOR: embedding_bag.to_steps,
    grouped_product.OPERATOR: grouped_product.to_steps,
    row_product.OPERATOR: row_product.to_steps,
    quantized_embedding.OPERATOR: quantized_embedding.to_steps,
    quantized_experts.OPERATOR: quantized_experts.to_steps,
    quantized_linear.OPERATOR: quantized_linear.to_steps,
    quantized_matrix.OPERATOR: quantized_matrix.to_steps,
    quantized_row.OPERATOR: quantized_row.to_steps,
    recurrent_step.OPERATOR: recurrent_step.to_steps,
    roi_align.OPERATOR: roi_align.to_steps,
    small_matrices.ELIMINATED: small_matrices.to_elimination,
    small_matrices.CHOLESKY: small_matrices.to_cholesky,
}
"""Operators that become kernels written here, and the temporaries between them."""

_TILED: dict[str, Callable[[Call, Target], Sequence[OwnLaunch]]] = {
    "matmul": tiled_product.to_steps,
    "convolution": tiled_convolution.to_steps,
}
"""What becomes of library calls where there shall be none."""


@dataclass(frozen=True)
class Lowering:
    """How regions are lowered: the GPU that choices are made for, and what the user allows."""

    target: Target
    allow_tf32: bool = False
    library_calls: bool = True
    """Whether products and convolutions go to cuBLASLt and cuDNN."""
    rename: Callable[[KernelSpec], KernelSpec] = canonical
    """Gives a kernel its final form and name."""
    library_workspace: int | None = None
    """Most bytes reserved for one library call; None takes the limits of `workspaces`."""


@dataclass
class _Buffer:
    """Where a tape's buffer lives: a storage, and the byte at which the buffer begins."""

    storage: str
    begin: Size


class TapeLowering:
    """Appends a tape to a method. Afterwards ``outputs`` names a value for each of the tape's outputs."""

    def __init__(
        self,
        builder: MethodBuilder,
        tape: Tape,
        inputs: Sequence[Value],
        device: Device,
        region: int,
        how: Lowering,
    ) -> None:
        self._builder, self._tape, self._device, self._region = builder, tape, device, region
        self._how = how
        self.kernels = {name: how.rename(spec) for name, spec in tape.kernels.items()}
        self._buffers: dict[str, _Buffer] = {}
        self._bases: dict[str, str] = {}
        self._windows: dict[Window, str] = {}
        self._declared: dict[str, Window] = {}
        """The window that a buffer was allocated or aliased with."""
        for step in tape.steps:
            if isinstance(step, Allocate | Alias):
                self._declared.setdefault(step.window.buffer, step.window)
        for name, value in zip(tape.inputs, inputs, strict=False):  # symbols follow
            self._buffers[name] = _Buffer(value.storage, value.offset)
            self._bases[name] = value.name

    def run(self, names: Sequence[str]) -> list[str]:
        """Emit all steps; give the outputs' values the given names and return what they became."""
        for step in self._tape.steps:
            if isinstance(step, Allocate):
                self._allocate(step)
            elif isinstance(step, Alias):
                of = self._buffers[step.of]
                begin = plus(of.begin, scaled(step.window.offset, step.window.dtype.itemsize))
                self._buffers[step.window.buffer] = _Buffer(of.storage, begin)
            elif isinstance(step, KernelCall):
                self._launch(step)
            else:
                self._extern(step)
        return [self._output(w, name) for w, name in zip(self._tape.outputs, names, strict=True)]

    def _allocate(self, step: Allocate) -> None:
        role = Role.WORKSPACE if step.is_workspace else Role.TEMPORARY
        name = f"r{self._region}_{step.window.buffer}"
        storage = self._builder.add_storage(name, self._device, step.nbytes, role)
        self._buffers[step.window.buffer] = _Buffer(storage.name, 0)
        if step.fill_zero:
            value = self._base(step.window.buffer)
            call = LibraryCall("fill", (), (value,), (("value", 0),), region=self._region)
            self._builder.instructions.append(call)

    def _base(self, buffer: str) -> str:
        """The value that a kernel gets as the buffer's pointer: it covers the whole buffer."""
        if buffer not in self._bases:
            home, window = self._buffers[buffer], self._declared[buffer]
            made = self._builder.add_value(
                f"r{self._region}_{buffer}",
                home.storage,
                window.dtype,
                window.sizes,
                window.strides,
                home.begin,
            )
            self._bases[buffer] = made.name
        return self._bases[buffer]

    def _value(self, window: Window) -> str:
        """A value for a window, shared by equal windows."""
        if window not in self._windows:
            home = self._buffers[window.buffer]
            offset = plus(home.begin, scaled(window.offset, window.dtype.itemsize))
            name = f"r{self._region}_{window.buffer}"
            made = self._builder.add_value(
                name, home.storage, window.dtype, window.sizes, window.strides, offset
            )
            self._windows[window] = made.name
        return self._windows[window]

    def _output(self, window: Window, name: str) -> str:
        home = self._buffers[window.buffer]
        offset = plus(home.begin, scaled(window.offset, window.dtype.itemsize))
        return self._builder.add_value(
            name, home.storage, window.dtype, window.sizes, window.strides, offset
        ).name

    def _launch(self, step: KernelCall) -> None:
        spec = self.kernels[step.kernel]
        parameters = [name for name, _ in spec.parameters]
        given = dict(zip(spec.call_names, step.arguments, strict=True))
        sizes = {k: v for k, v in given.items() if not isinstance(v, str | float)}
        blocks = {k: v for k, v in spec.constants if isinstance(v, int)}
        grid = tuple(substitute(text, {**blocks, **sizes}) for text in spec.grid)
        reads, writes = list[str](), list[str]()
        arguments: list[Argument] = []
        for name in parameters:
            value = given[name]
            if not isinstance(value, str):
                arguments.append(value)
                continue
            base = self._base(value)
            arguments.append(Ref(base))
            is_output = name.startswith(("out_ptr", "in_out_ptr", "ws_ptr", "sem_ptr"))
            if not is_output or _reads(spec, name):
                reads.append(base)
            if is_output or name in spec.mutated:
                writes.append(base)
        launch = Launch(
            spec.name,
            tuple(arguments),
            (grid[0], grid[1], grid[2]),
            tuple(dict.fromkeys(reads)),
            tuple(dict.fromkeys(writes)),
            self._region,
            step.origin,
        )
        self._builder.instructions.append(launch)
        self._note_origin(writes, step.origin)

    def _extern(self, step: ExternCall) -> None:
        if step.operator in _OWN_KERNELS:
            for own in _OWN_KERNELS[step.operator](step):
                if isinstance(own, Allocate):
                    self._allocate(own)
                else:
                    self._own_kernel(own, step.origin)
            return
        for call in to_library_calls(step, allow_tf32=self._how.allow_tf32):
            if self._how.library_calls and not tiled_product.must_be_tiled(call):
                self._library_call(call, step.origin)
                continue
            if not tiled_product.is_possible(call):
                raise unsupported(f"{step.operator} of {call.out.dtype}", step.origin)
            for own in _TILED[call.function](call, self._how.target):
                self._own_kernel(own, step.origin)

    def _own_kernel(self, step: OwnLaunch, origin: SourceLocation) -> None:
        """Launch a kernel that was written here rather than generated."""
        spec = self._how.rename(self._ready(step))
        self.kernels[spec.name] = spec
        writes = tuple(self._value(w) for w in step.writes)
        named = [Ref(self._value(a)) if isinstance(a, Window) else a for a in step.arguments]
        given = zip(spec.call_names, step.arguments, strict=True)
        sizes = {name: a for name, a in given if isinstance(a, int | Expr)}
        blocks = {k: v for k, v in spec.constants if isinstance(v, int)}
        x, y, z = (substitute(text, {**blocks, **sizes}) for text in spec.grid)
        names = [a.name for a in named if isinstance(a, Ref)]
        updated = {self._value(w) for w in step.updates}
        updated |= {name for name in names if names.count(name) > 1}  # named twice: read before it is written
        reads = dict.fromkeys(name for name in names if name not in writes or name in updated)
        self._builder.instructions.append(
            Launch(spec.name, tuple(named), (x, y, z), tuple(reads), writes, self._region, origin)
        )
        self._note_origin(writes, origin)

    def _ready(self, step: OwnLaunch) -> KernelSpec:
        """The kernel, which reads early only what no launch writes."""
        spec = step.kernel
        early = (
            a for name, a in zip(spec.call_names, step.arguments, strict=True) if name in spec.read_early
        )
        roles = {
            self._builder.storages[self._buffers[a.buffer].storage].role
            for a in early
            if isinstance(a, Window)
        }
        if roles <= {Role.CONSTANT}:
            return spec
        return replace(spec, source=spec.source.replace(f"{READY}\n", ""))

    def _library_call(self, call: Call, origin: SourceLocation) -> None:
        workspace, nbytes = "", workspace_of(call, self._how.library_workspace)
        if nbytes:
            storage = self._builder.add_storage(
                f"r{self._region}_workspace", self._device, nbytes, Role.WORKSPACE, origin=origin
            )
            shape = (storage.nbytes,)
            workspace = self._builder.add_value(storage.name, storage.name, DType.UINT8, shape, (1,)).name
        reads = tuple(self._value(w) for w in call.reads)
        out = self._value(call.out)
        self._builder.instructions.append(
            LibraryCall(call.function, reads, (out,), call.attributes, workspace, self._region, origin)
        )
        self._note_origin([out], origin)

    def _note_origin(self, writes: Sequence[str], origin: SourceLocation) -> None:
        for name in writes:
            storage = self._builder.storage_of(name)
            if not str(storage.origin):
                self._builder.update_storage(storage.name, origin=origin)


def _reads(spec: KernelSpec, name: str) -> bool:
    """Whether a kernel needs what is in the memory that it writes.

    An in-place pointer can be one in name only: what would be read was fused away or is written first.
    """
    if name in spec.mutated or name.startswith(("ws_ptr", "sem_ptr")):
        return True
    load, store = (spec.source.find(f"tl.{verb}({name} ") for verb in ("load", "store"))
    return load >= 0 and (store < 0 or load < store)


def local_copy(
    builder: MethodBuilder, source: str, name: str, device: Device, region: int, reason: str
) -> Value:
    """A dense row-major copy of a value on its own device."""
    value = builder.values[source]
    nbytes = scaled(product(value.shape), value.dtype.itemsize)
    storage = builder.add_storage(name, device, nbytes)
    made = builder.add_value(name, storage.name, value.dtype, value.shape, contiguous_strides(value.shape))
    builder.instructions.append(Copy(CopyKind.LOCAL, source, made.name, reason, region))
    return made

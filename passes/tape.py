"""What lowering a graph leaves: kernels and the steps that use them, as data without torch.

`inductor.py` writes a tape from PyTorch's private structures; `lowered/method.py` turns it into instructions.
Sizes, strides and offsets count elements; buffer names are the lowering's own (``buf3``, ``arg0_1``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..runtime.dtypes import DType
from ..runtime.expr import Size
from ..runtime.program import NOWHERE, SourceLocation


@dataclass(frozen=True)
class Window:
    """A strided view of a buffer."""

    buffer: str
    dtype: DType
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0

    @property
    def is_aligned(self) -> bool:
        """Whether the first element is at a multiple of 16 bytes from the buffer's begin."""
        return isinstance(self.offset, int) and self.offset * self.dtype.itemsize % 16 == 0


READY = "    # what follows reads results of the launches before"
"""A line of a kernel's source up to which it reads constants only: the parameters of `read_early`."""

SETTLED = "        # here the tensor cores have read their operands"
"""A line at the end of a loop whose products take an operand from registers that the loop computes.

On Hopper such products run while the code goes on. Triton leaves the last of an iteration in flight and its
assembler gives the operand's registers to the next iteration before they are read, so that results were
wrong now and then; the line becomes a wait there, and nothing elsewhere."""

LaunchArgument = Window | Size | float
"""What a kernel written here is launched with."""


@dataclass(frozen=True)
class KernelSpec:
    """A generated Triton kernel before compilation.

    ``source`` is the ``@triton.jit`` function alone; it uses the names ``tl``, ``triton_helpers``,
    ``libdevice`` and ``tl_math``. ``grid`` are Python expressions over parameter names and launch extras.
    """

    name: str
    source: str
    parameters: tuple[tuple[str, str], ...]
    """(name, type) of run-time parameters in order."""
    constants: tuple[tuple[str, Any], ...]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int
    grid: tuple[str, str, str]
    call_names: tuple[str, ...]
    """What a call gives, in order: parameters, some that were burnt in, and what only the grid reads."""
    mutated: tuple[str, ...] = ()
    """Parameters whose buffer is read as well as written."""
    read_early: tuple[str, ...] = ()
    """Parameters that are read before the line `READY`, if the source has it."""
    hints: str = ""
    """Lines for the code that waits by itself, ahead of the wait: they tell the memory system what will be
    needed, and change no result."""


@dataclass(frozen=True)
class OwnLaunch:
    """A launch of a kernel written here; ``arguments`` follow its ``call_names``, ``writes`` are among them.

    Of what it writes it reads ``updates`` as well. An operator of ours becomes one or more launches, with an
    `Allocate` for what they hand on.
    """

    kernel: KernelSpec
    arguments: tuple[LaunchArgument, ...]
    writes: tuple[Window, ...]
    updates: tuple[Window, ...] = ()


@dataclass(frozen=True)
class Allocate:
    """A fresh buffer of ``nbytes``. ``fill_zero``: it must read as zeros (semaphores)."""

    window: Window
    nbytes: Size
    fill_zero: bool = False
    is_workspace: bool = False


@dataclass(frozen=True)
class Alias:
    """A new name for (a part of) an older buffer: an in-place result or a view."""

    window: Window
    of: str


@dataclass(frozen=True)
class KernelCall:
    """Launch ``kernel``; ``arguments`` follow its ``call_names``."""

    kernel: str
    arguments: tuple[str | Size | float, ...]
    origin: SourceLocation = NOWHERE


@dataclass(frozen=True)
class ExternCall:
    """An operator that is not generated. ``operands`` hold a `Window` for every tensor, literals else."""

    operator: str
    operands: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict[str, Any])
    outs: tuple[Window, ...] = ()
    """Where the results go."""
    origin: SourceLocation = NOWHERE


Step = Allocate | Alias | KernelCall | ExternCall


@dataclass(frozen=True)
class Tape:
    """A lowered graph. ``outputs`` are windows onto buffers of the steps or of the inputs."""

    kernels: dict[str, KernelSpec]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Window, ...]

"""What must hold of names, constants, state and kernels, apart from any method."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ArtifactError
from ..library import FUNCTIONS
from ..program import Constant, Kernel, Program

DIGEST = re.compile(r"[0-9a-f]{64}")


def verify_unique(what: str, names: Iterable[str]) -> None:
    """Every name is there, and there once."""
    seen: set[str] = set()
    for name in names:
        if not name:
            raise ArtifactError(f"a {what} has no name")
        if name in seen:
            raise ArtifactError(f"there are two {what}s named `{name}`")
        seen.add(name)


def verify_contents(program: Program) -> None:
    """Every digest is one, and stands for one number of bytes, which holds what is said to be in it."""
    sizes: dict[str, int] = {}
    initial = [(state.name, state.initial, state.nbytes) for state in program.state if state.initial]
    for name, digest, nbytes in [
        *((item.name, item.digest, item.nbytes) for item in program.constants),
        *initial,
    ]:
        if not DIGEST.fullmatch(digest):
            raise ArtifactError(f"`{name}` has no SHA-256 but `{digest[:80]}`")
        if sizes.setdefault(digest, nbytes) != nbytes:
            raise ArtifactError(
                f"`{name}` has {nbytes} bytes, and {sizes[digest]} elsewhere with the same digest"
            )
    for constant in program.constants:
        _verify_constant(constant)
    for state in program.state:
        needed = span(state.shape, row_major(state.shape), state.dtype.itemsize)
        if min(state.shape, default=0) < 0 or needed > state.nbytes:
            raise ArtifactError(
                f"state `{state.name}` has {state.nbytes} bytes", why=f"its shape needs {needed}"
            )


def _verify_constant(item: Constant) -> None:
    if len(item.shape) != len(item.strides) or min((*item.shape, *item.strides), default=0) < 0:
        raise ArtifactError(
            f"constant `{item.name}` has an impossible shape {item.shape} or strides {item.strides}"
        )
    needed = span(item.shape, item.strides, item.dtype.itemsize)
    if needed > item.nbytes:
        raise ArtifactError(
            f"constant `{item.name}` has {item.nbytes} bytes", why=f"its shape needs {needed}"
        )


def verify_kernel(kernel: Kernel, architectures: Iterable[str]) -> None:
    """There is code for every architecture of the program."""
    present = {code.architecture for code in kernel.codes}
    for architecture in architectures:
        if architecture not in present:
            raise ArtifactError(f"kernel `{kernel.name}` has no code for `{architecture}`")
    for code in kernel.codes:
        if not code.data or not code.symbol or code.form not in ("cubin", "ptx"):
            raise ArtifactError(f"kernel `{kernel.name}` has unusable code for `{code.architecture}`")


def verify_tunings(program: Program) -> None:
    """Each is for one GPU, for libraries that there are, and tells one algorithm for each of their calls."""
    verify_unique("tuning", (f"{item.gpu} {item.architecture}".strip() for item in program.tunings))
    for item in program.tunings:
        what = f"the tuning for `{item.gpu}`"
        try:
            verify_unique("library version", (name for name, _ in item.versions))
            verify_unique("call", (key for key, _ in item.algorithms))
        except ArtifactError as error:
            raise ArtifactError(f"{what} is impossible", why=error.what) from None
        if not item.gpu or not item.versions or min(version for _, version in item.versions) < 1:
            raise ArtifactError(f"{what} does not say what it is for")
        for key, number in item.algorithms:
            if key.partition(" ")[0] not in FUNCTIONS or number < 0:
                raise ArtifactError(f"{what} has algorithm {number} for `{key[:80]}`", why="there is none")


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; 0 when there is none."""
    if 0 in shape:
        return 0
    return (sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1) * itemsize

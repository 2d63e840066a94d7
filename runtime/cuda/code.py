"""Which of a kernel's compiled forms a GPU can run, and loading it."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ArtifactError, DeviceError
from ..program import Kernel, KernelCode
from .driver import check, failure

_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")
_STATIC_SHARED_NBYTES = 48 << 10
"""Shared memory that a launch may ask for without the function attribute."""

_ELF_HEADER, _EM_CUDA = 64, 190


def choose_code(kernel: Kernel, capability: tuple[int, int], shared_nbytes: int) -> KernelCode:
    """The best code of a kernel for a GPU of this compute capability.

    In this order: a cubin for exactly this architecture; a cubin of the same major version and the highest
    minor version below (binary compatibility, CUDA C++ Programming Guide); PTX of the highest architecture
    not above the GPU's, which the driver compiles. Suffix ``a`` is for one architecture only. Code that asks
    for more shared memory than a block of this GPU may have is left out: an A100 has more than other GPUs of
    its major version.

    Raises:
        DeviceError: nothing fits; the message names what the kernel has and what the GPU needs.
    """
    runs = [(rank, code) for code in kernel.codes if (rank := _rank(code, capability)) is not None]
    fitting = [(rank, code) for rank, code in runs if code.shared_nbytes <= shared_nbytes]
    if fitting:
        return max(fitting, key=lambda pair: pair[0])[1]
    here = f"sm_{capability[0]}{capability[1]}"
    has = ", ".join(f"{code.architecture} ({code.form})" for code in kernel.codes) or "none"
    if runs:
        least = min(code.shared_nbytes for _, code in runs)
        raise DeviceError(
            f"kernel `{kernel.name}` does not fit this GPU",
            why=f"it needs {least} bytes of shared memory, a block of {here} has {shared_nbytes}",
            hint=f"export again with `--arch {here}`",
        )
    raise DeviceError(
        f"kernel `{kernel.name}` has no code for this GPU",
        why=f"the artifact has {has}; the GPU runs sm_{capability[0]}0 to {here} and PTX up to {here}",
        hint=f"export again with `--arch {here}`",
    )


def _rank(code: KernelCode, capability: tuple[int, int]) -> tuple[int, int, int] | None:
    """How good a code is for the GPU (larger is better), or None when it cannot run there."""
    match = _ARCHITECTURE.fullmatch(code.architecture)
    if match is None:
        return None
    major, minor, suffix = int(match[1]), int(match[2]), match[3]
    if suffix == "a" and (major, minor) != capability:
        return None
    if code.form == "cubin":
        fits = major == capability[0] and minor <= capability[1]
        return (1, minor, len(suffix)) if fits else None
    if code.form == "ptx":
        fits = (major, minor) <= capability and (suffix != "f" or major == capability[0])
        return (0, major * 10 + minor, len(suffix)) if fits else None
    return None


def verify_image(code: KernelCode, name: str) -> None:
    """ArtifactError when code is not what it says: the driver alone would tell, at the first launch.

    A cubin is an ELF file of 64 bits for NVIDIA's machine; PTX names its version and its target in text.
    """
    data = bytes(code.data[:4096])
    if code.form == "cubin":
        is_elf = data[:5] == b"\x7fELF\x02" and len(data) >= _ELF_HEADER
        good = is_elf and int.from_bytes(data[18:20], "little") == _EM_CUDA
    else:
        good = b".version" in data and b".target" in data
    if not good:
        raise ArtifactError(
            f"the code of kernel `{name}` for {code.architecture} is no {code.form}",
            why="it is damaged, or was made by something else",
            hint="export again",
        )


def load_function(cu: Any, code: KernelCode, name: str) -> tuple[Any, Any]:
    """Give (module, function) of a code in the current context; DeviceError when the driver refuses it."""
    # PTX is text and must end in a null byte; the driver reads a cubin's length from its ELF header.
    image = code.data if code.form == "cubin" else code.data.rstrip(b"\0") + b"\0"
    status, module = cu.cuModuleLoadData(image)
    if status:
        error = failure(status, f"load kernel `{name}` ({code.architecture}, {code.form})")
        raise DeviceError(
            error.what, why=error.why, hint=error.hint or "the artifact's code is damaged; export again"
        )
    function = check(
        cu.cuModuleGetFunction(module, code.symbol.encode()), f"find `{code.symbol}` in kernel `{name}`"
    )
    if code.shared_nbytes > _STATIC_SHARED_NBYTES:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"give kernel `{name}` {code.shared_nbytes} bytes of shared memory"
        check(cu.cuFuncSetAttribute(function, attribute, code.shared_nbytes), doing)
    return module, function

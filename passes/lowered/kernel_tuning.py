"""What was measured of kernels and library calls, looked up while a model is exported.

`devplan tune` finds them in an artifact, an export finds the same kernels again by a key over everything that
a kernel computes: its text, types and sizes, but for the blocks, warps and stages that are chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...runtime.measure.tune import Tuning, for_program
from ...runtime.program import Kernel, LibraryTuning, Program
from ..tape import KernelSpec
from .compile_kernels import canonical

BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
"""The constants of products and convolutions that are chosen rather than given."""
TILED = ("product", "convolution")
"""Kernels whose blocks may change: their grids follow from them."""
_SHOWN = ("M", "N", "K", "ITEMS", "PIXELS", "OUTPUTS", "CHANNELS", "TAPS", "GROUPS")


def stem_of(name: str) -> str:
    """The kernel's name without the digest that `canonical` puts behind it."""
    return name.rpartition("_")[0] or name


def key_of(kernel: Kernel) -> str:
    """What a compiled kernel is found by."""
    types = tuple(parameter.type for parameter in kernel.parameters)
    return _key(stem_of(kernel.name), kernel.name, kernel.source, types, dict(kernel.constants))


def key_of_spec(spec: KernelSpec) -> str:
    """The same of a kernel that is not compiled yet, before or after it got its name."""
    named = canonical(spec)
    types = tuple(kind for _, kind in spec.parameters)
    return _key(stem_of(named.name), named.name, named.source, types, dict(spec.constants))


def _key(stem: str, name: str, source: str, types: tuple[str, ...], constants: Mapping[str, Any]) -> str:
    chosen = BLOCKS if stem in TILED else ()
    given = {key: value for key, value in constants.items() if key not in chosen}
    body = json.dumps(
        [source.replace(f"def {name}(", "def kernel("), types, sorted(given.items())], default=str
    )
    digest = hashlib.sha256(body.encode()).hexdigest()[:12]
    sizes = "".join(f" {key}={given[key]}" for key in _SHOWN if key in given and given[key] != 1)
    return f"{stem} {types[0].lstrip('*') if types else ''}{sizes} {digest}"


def reconfigured(spec: KernelSpec, choice: Mapping[str, int]) -> KernelSpec:
    """The kernel with other blocks, warps or stages."""
    constants = tuple((name, choice.get(name, value)) for name, value in spec.constants)
    return replace(
        spec,
        constants=constants,
        num_warps=choice.get("num_warps", spec.num_warps),
        num_stages=choice.get("num_stages", spec.num_stages),
    )


@dataclass
class KernelTuning:
    """A tuning file for an export; ``reason`` says why its kernels' part is not used, where it is not."""

    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    label: str = ""
    reason: str = ""
    used: set[str] = field(default_factory=set[str])
    """Keys that were found."""
    libraries: LibraryTuning | None = None
    """What may be embedded of it, where it has any."""

    @classmethod
    def read(cls, path: Path | None, architectures: tuple[str, ...]) -> KernelTuning:
        """For an export; UsageError when the file is no tuning file."""
        if path is None:
            return cls()
        tuning = Tuning.read(path)
        reason = _mismatch(tuning, architectures) if tuning.kernels else ""
        libraries = tuning.libraries if tuning.algorithms else None
        return cls({} if reason else tuning.kernels, str(path), reason, libraries=libraries)

    def final(self, spec: KernelSpec) -> KernelSpec:
        """The kernel as it shall be compiled, under its name."""
        if self.kernels:
            key = key_of_spec(spec)
            if key in self.kernels:
                self.used.add(key)
                spec = reconfigured(spec, self.kernels[key])
        return canonical(spec)

    def embedded(self, program: Program) -> tuple[Program, tuple[str, ...]]:
        """The program with the algorithms that are for its library calls, and what a person should know."""
        if not self.label:
            return program, ()
        notes: list[str] = []
        if self.reason:
            notes.append(f"configurations of `{self.label}` are not used: {self.reason}")
        elif self.kernels:
            used = f"{len(self.used)} of {len(self.kernels)} configurations"
            notes.append(f"{used} of `{self.label}` are used")
        if self.libraries is not None:
            mine = for_program(self.libraries, program)
            if mine.algorithms:
                program = replace(program, tunings=(mine,))
            total = len(self.libraries.algorithms)
            whom = f", for {mine.gpu} with {_versions(mine)}" if mine.algorithms else ""
            notes.append(f"{len(mine.algorithms)} of {total} algorithms of `{self.label}` are embedded{whom}")
        if not notes:
            notes.append(f"`{self.label}` is not used: it says that all was best as it was")
        return program, tuple(notes)


def _mismatch(tuning: Tuning, architectures: tuple[str, ...]) -> str:
    """Why kernels must not be compiled as a file says, or an empty text."""
    if tuning.architecture not in architectures:
        wanted = ", ".join(architectures)
        return f"it was measured on {tuning.gpu} ({tuning.architecture}), the export is for {wanted}"
    import triton

    if tuning.triton != triton.__version__:
        return f"it was measured with triton {tuning.triton}, this is {triton.__version__}"
    return ""


def _versions(tuning: LibraryTuning) -> str:
    return " and ".join(f"{name} {version}" for name, version in tuning.versions)

"""GPU architectures as data: what the compiler asks of a device, without asking a device.

Figures per streaming multiprocessor (SM) are those of NVIDIA's CUDA C++ Programming Guide, appendix
"Compute Capabilities"; SM counts and L2 sizes are those of a typical part of the generation. They steer
heuristics only: a program runs on any GPU its code fits.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..runtime.errors import UsageError


@dataclass(frozen=True)
class Target:
    """One architecture: ``capability`` is 80 for ``sm_80``; sizes in bytes."""

    capability: int
    part: str
    multiprocessors: int
    threads_per_multiprocessor: int
    shared_per_multiprocessor: int
    shared_per_block: int
    l2_nbytes: int
    memory_nbytes: int

    @property
    def name(self) -> str:
        """``sm_80``."""
        return f"sm_{self.capability}"


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(75, "T4", 40, 1024, 64 * _KIB, 64 * _KIB, 4 * _MIB, 16 * _GIB),
        Target(80, "A100", 108, 2048, 164 * _KIB, 163 * _KIB, 40 * _MIB, 40 * _GIB),
        Target(86, "A10", 72, 1536, 100 * _KIB, 99 * _KIB, 6 * _MIB, 24 * _GIB),
        Target(87, "Orin", 16, 1536, 164 * _KIB, 163 * _KIB, 4 * _MIB, 32 * _GIB),
        Target(89, "L4", 58, 1536, 100 * _KIB, 99 * _KIB, 48 * _MIB, 24 * _GIB),
        Target(90, "H100", 132, 2048, 228 * _KIB, 227 * _KIB, 50 * _MIB, 80 * _GIB),
        Target(100, "B200", 148, 2048, 228 * _KIB, 227 * _KIB, 126 * _MIB, 180 * _GIB),
        Target(103, "B300", 148, 2048, 228 * _KIB, 227 * _KIB, 126 * _MIB, 270 * _GIB),
        Target(120, "RTX 5090", 170, 1536, 100 * _KIB, 99 * _KIB, 96 * _MIB, 32 * _GIB),
        Target(121, "GB10", 48, 1536, 100 * _KIB, 99 * _KIB, 24 * _MIB, 120 * _GIB),
    )
}

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90")
"""What an export is for where nobody says so and no GPU is present."""


def target_of(name: str) -> Target:
    """The architecture of that name; UsageError lists the known ones."""
    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name, list(TARGETS), n=1)
    suggestion = f"did you mean `{near[0]}`? " if near else ""
    raise UsageError(
        f"unknown architecture `{name}`", hint=f"{suggestion}known ones: {', '.join(TARGETS)}, native"
    )


def lowest(names: tuple[str, ...]) -> Target:
    """The oldest of the given architectures: what all of them can run is chosen for it."""
    return min((target_of(name) for name in names), key=lambda target: target.capability)

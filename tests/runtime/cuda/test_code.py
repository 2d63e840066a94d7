"""Which of a kernel's compiled forms a GPU gets."""

from __future__ import annotations

import pytest

from devplan.runtime.cuda.code import choose_code
from devplan.runtime.errors import DeviceError
from devplan.runtime.program import Kernel, KernelCode

SHARED = 99 << 10
"""Bytes of shared memory that a block may have on most GPUs."""


def kernel(*forms: str) -> Kernel:
    """A kernel with codes written as ``sm_90`` (a cubin), ``sm_80 ptx``, or ``sm_80 cubin 163``: KiB it needs."""
    codes = []
    for text in forms:
        architecture, form, shared = (*text.split(), *("", "cubin", "0")[len(text.split()) :])
        codes.append(KernelCode(architecture, form, "k", b"", 4, int(shared) << 10))
    return Kernel("k", (), tuple(codes))


@pytest.mark.parametrize(
    ("forms", "capability", "expected"),
    [
        (["sm_80", "sm_90"], (9, 0), "sm_90"),
        (["sm_80", "sm_90"], (8, 0), "sm_80"),
        (["sm_80", "sm_86", "sm_90"], (8, 9), "sm_86"),  # highest minor version below
        (["sm_86", "sm_80"], (8, 0), "sm_80"),  # a cubin never runs on a lower minor version
        (["sm_80", "sm_80 ptx"], (8, 6), "sm_80"),  # a cubin before PTX
        (["sm_80", "sm_80 ptx", "sm_90 ptx"], (10, 0), "sm_90 ptx"),  # the newest PTX that is not too new
        (["sm_80 ptx", "sm_100 ptx"], (9, 0), "sm_80 ptx"),
        (["sm_90", "sm_90a"], (9, 0), "sm_90a"),
        (["sm_90a", "sm_80 ptx"], (10, 0), "sm_80 ptx"),  # suffix a: that architecture only
        (["sm_100f"], (10, 3), "sm_100f"),
        (["sm_120", "sm_75 ptx"], (12, 1), "sm_120"),
        (["sm_80", "compute_80 ptx"], (9, 0), "compute_80 ptx"),
    ],
)
def test_the_best_runnable_form_is_chosen(
    forms: list[str], capability: tuple[int, int], expected: str
) -> None:
    code = choose_code(kernel(*forms), capability, SHARED)
    assert f"{code.architecture} ptx" == expected or (code.architecture, code.form) == (expected, "cubin")


@pytest.mark.parametrize(
    ("forms", "capability"),
    [
        (["sm_90"], (8, 0)),
        (["sm_80"], (9, 0)),
        (["sm_90 ptx"], (8, 9)),
        (["sm_90a", "sm_90a ptx"], (10, 0)),
        (["gfx942"], (9, 0)),
        (["sm_90 spirv"], (9, 0)),
        ([], (9, 0)),
    ],
)
def test_nothing_runnable_is_a_device_error_with_both_lists(
    forms: list[str], capability: tuple[int, int]
) -> None:
    with pytest.raises(DeviceError) as error:
        choose_code(kernel(*forms), capability, SHARED)
    line = error.value.line()
    assert error.value.code == 6
    assert f"sm_{capability[0]}{capability[1]}" in line
    assert all(form.split()[0] in line for form in forms)


def test_code_for_more_shared_memory_than_there_is_gives_way() -> None:
    """An A100's blocks have 163 KiB, those of other GPUs of version 8 have 99."""
    made = kernel("sm_80 cubin 120", "sm_80 ptx 90")
    assert choose_code(made, (8, 0), 163 << 10).form == "cubin"
    assert choose_code(made, (8, 9), SHARED).form == "ptx"
    with pytest.raises(DeviceError, match="needs 122880 bytes of shared memory, a block of sm_89 has 101376"):
        choose_code(kernel("sm_80 cubin 120"), (8, 9), SHARED)
